"""What a step is summed up in: the numbers of metrics.jsonl."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from paceline.rl.alarms import MIN_DRAFTS, FirstPositions
from paceline.rl.batch import TokenBatch
from paceline.rl.learner import UpdateReport
from paceline.rl.produce import Batch
from paceline.rl.stopwatch import Stopwatch
from paceline.speculation.metrics import summarise

STAGES = ("data", "sync", "generation", "reward", "logprob", "training", "adaptation", "draft")
HIDDEN = ("data", "sync", "generation", "reward")  # behind training, where the two overlap


def of_update(tokens: TokenBatch, report: UpdateReport) -> dict[str, Any]:
    chosen = tokens.mask_T
    learner = tokens.old_logprobs_T if tokens.old_logprobs_T is not None else report.logprobs_T
    gap = (tokens.engine_logprobs_T - learner)[chosen]
    mismatch = float(gap.abs().mean()) if len(gap) else 0.0
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "entropy": report.entropy,
        **report.stats,
        "mismatch_mean": mismatch,
        # k3 of KL(engine || learner): mean of r - 1 - log r with r = learner / engine
        "mismatch_k3": float((torch.expm1(-gap) + gap).mean()) if len(gap) else 0.0,
        "mismatch_max": float(gap.abs().max()) if len(gap) else 0.0,
    }


def memory_gib(device: torch.device) -> float:
    """The most that was taken so far: of a GPU's memory, or of the machine's by this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    import resource  # not on Windows, where nothing else here runs either

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / 2**30 if sys.platform == "darwin" else most / 2**20  # bytes there, kilobytes elsewhere


def mean_advantages(tokens: TokenBatch) -> list[float]:
    """A number per sequence, for the records."""
    assert tokens.advantages_T is not None
    sums = torch.zeros(tokens.num_sequences, dtype=torch.float64)
    counts = torch.zeros_like(sums)
    chosen = tokens.mask_T.double()
    sums.index_add_(0, tokens.sequence_T, tokens.advantages_T.double() * chosen)
    counts.index_add_(0, tokens.sequence_T, chosen)
    return (sums / counts.clamp_min(1)).tolist()


def acceptance(batch: Batch) -> tuple[float | None, int | None]:
    """A batch's mean acceptance length, None where it has too few drafts to tell; and the policy it was drafted for."""
    drafts = summarise([], batch.traces)
    enough = drafts["num_drafts"] >= MIN_DRAFTS
    return (drafts["mean_acceptance_length"] if enough else None), _last_trace(batch, "version")


def first_positions(batch: Batch) -> FirstPositions:
    return FirstPositions.of(r for group in [*batch.groups, *batch.dropped] for r in group.rollouts)


def _last_trace(batch: Batch, name: str) -> int | None:
    return getattr(batch.traces[-1], name) if batch.traces else None


def of_rollouts(batch: Batch) -> dict[str, Any]:
    """What the rollouts were like: of all that were generated for the step, trained on or not."""
    groups = sorted([*batch.groups, *batch.dropped], key=lambda group: group.index)
    rollouts = [r for group in groups for r in group.rollouts]
    rewards = np.array([r.reward for r in rollouts if r.failure is None])
    names = dict.fromkeys(name for r in rollouts for name in r.rewards)
    lengths = np.array([int(r.mask.sum()) for r in rollouts])
    lags = [batch.step - group.oldest_version for group in batch.groups]
    drafts = summarise([], batch.traces)
    return {
        "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "rewards": {name: float(np.mean([r.rewards[name] for r in rollouts if name in r.rewards])) for name in names},
        "length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "length_max": int(lengths.max(initial=0)),
        "truncated": float(np.mean([r.is_truncated for r in rollouts])) if rollouts else 0.0,
        "num_groups": len(batch.groups),
        "groups_filtered": len(batch.dropped),
        "groups_stale": batch.num_stale,
        "failures": sum(r.failure is not None for r in rollouts),
        "lag_mean": float(np.mean(lags)) if lags else 0.0,
        "lag_max": max(lags, default=0),
        "tokens": int(lengths.sum()),
        "num_samples": len(rollouts),
        **{
            key: drafts[key]
            for key in (
                "mean_acceptance_length",
                "draft_acceptance_rate",
                "acceptance_rate_per_position",
                "num_drafts",
                "num_draft_tokens",
                "num_accepted_tokens",
            )
        },
        "draft_s": drafts["draft_s"],
        "drafter_version": _last_trace(batch, "drafter_version"),
        "history_bytes": _last_trace(batch, "num_history_bytes"),
    }


def of_engines(batch: Batch, num_engines: int) -> dict[str, Any]:
    """How busy each engine was while the step's rollouts were generated, and the share of all their time that was
    idle."""
    generation_s = batch.watch.seconds["generation"]
    if not generation_s:  # all of its groups were left over from earlier steps
        return {}
    busy_s = [0.0] * num_engines
    for trace in batch.traces:
        busy_s[trace.engine] += trace.total_s
    busy = [seconds / generation_s for seconds in busy_s]
    return {"busy": busy, "bubble": 1 - sum(busy) / num_engines}


def stage_times(
    batch: Batch, watch: Stopwatch, waited_s: float, publishing_s: float, total_s: float, overlaps: bool
) -> dict[str, float]:
    """Seconds by stage. `exposed` is what training waited for rollouts, all of their making where nothing
    overlaps; `total` is the step, validation and audits apart."""
    stages = {name: batch.watch.seconds[name] + watch.seconds[name] for name in STAGES}
    stages["sync"] += publishing_s
    stages["draft"] = sum(trace.draft_s for trace in batch.traces if trace.drafter != "none")
    stages["generation"] -= stages["draft"]
    exposed = waited_s if overlaps else stages["generation"] + stages["draft"]
    learning = ("logprob", "training", "adaptation")
    seen = learning if overlaps else (*HIDDEN, "draft", *learning)
    accounted = sum(stages[name] for name in seen) + (waited_s + publishing_s if overlaps else 0.0)
    return {**stages, "exposed": exposed, "other": max(0.0, total_s - accounted), "total": total_s}
