"""Titles, units and axes of the metrics that both a run's page and a comparison draw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

FROM_ZERO = MappingProxyType({"from_zero": True})
SHARE = MappingProxyType({"from_zero": True, "limits": (0.0, 1.0)})


@dataclass(frozen=True, slots=True)
class Curve:
    title: str
    unit: str
    options: Mapping[str, Any] = field(default_factory=dict)  # of the chart
    line: str = ""  # what this metric is, where a run's page draws others of the same unit beside it
    is_rare: bool = False  # not measured at every step


# By path in metrics.jsonl, with dots.
CURVES: dict[str, Curve] = {
    "reward_mean": Curve("Reward", "mean over a step's samples"),
    "eval.reward": Curve("Held-out reward", "mean over the held-out problems", is_rare=True),
    "length_mean": Curve("Completion length", "tokens", FROM_ZERO, line="mean"),
    "truncated_ratio": Curve("Truncated", "share of a step's samples", FROM_ZERO),
    "stages.total": Curve("Time per step", "seconds", FROM_ZERO),
    "stages.generation": Curve("Generation", "seconds per step", FROM_ZERO),
    "stages.training": Curve("Training", "seconds per step", FROM_ZERO),
    "tokens_per_s": Curve("Rate", "tokens per second of the whole step", FROM_ZERO),
    "mean_acceptance_length": Curve("Acceptance length", "tokens per verified draft"),
    "draft_acceptance_rate": Curve("Draft tokens accepted", "share of those verified", SHARE),
    "audit.speedup": Curve(
        "Audited speed-up", "plain time ÷ speculative time", {"reference": (1.0, "no gain")}, is_rare=True
    ),
    "loss": Curve("Loss", ""),
    "grad_norm": Curve("Gradient norm", "before clipping", FROM_ZERO),
    "kl": Curve("KL to the reference", "nats"),
    "entropy": Curve("Entropy", "nats per token", FROM_ZERO),
    "clip_ratio": Curve("Clipped", "share of tokens", FROM_ZERO),
    "learning_rate": Curve("Learning rate", "", FROM_ZERO),
    "staleness_mean": Curve("Staleness", "versions behind the learner", FROM_ZERO, line="mean"),
    "mismatch_mean": Curve("Mismatch", "mean |Δ logprob|, engine and learner", FROM_ZERO),
}
