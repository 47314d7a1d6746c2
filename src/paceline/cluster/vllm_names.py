"""What is called how on both sides of vLLM. No vLLM is imported for it."""

from __future__ import annotations

HISTORY = "paceline.cluster.vllm_history.HistoryProposer"  # speculative_config's custom class
EXTENSION = "paceline.cluster.vllm_extension.WorkerExtension"
BACKEND = "paceline"  # of weight transfer
SETTINGS = "paceline_history"  # in additional_config: the history drafter's
PROBLEM, VERSION = "paceline_problem", "paceline_version"  # in a request's extra_args
