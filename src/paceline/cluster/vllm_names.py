"""Names that the engine and vLLM's workers share. This module does not import vLLM."""

from __future__ import annotations

HISTORY_PROPOSER = "paceline.cluster.vllm_history.HistoryProposer"  # the custom_class of speculative_config
EXTENSION = "paceline.cluster.vllm_extension.WorkerExtension"
BACKEND = "paceline"  # of weight_transfer_config
HISTORY_SETTINGS = "paceline_history"  # key in additional_config
PROBLEM, VERSION = "paceline_problem", "paceline_version"  # keys in a request's extra_args
