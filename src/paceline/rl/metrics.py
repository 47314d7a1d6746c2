"""Computes the metrics of a step: the numbers of metrics.jsonl."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.rl.alarms import MIN_DRAFTS
from paceline.rl.batch import TokenBatch
from paceline.rl.corrections import sum_by
from paceline.rl.learner import UpdateReport
from paceline.rl.produce import Batch
from paceline.rl.stage_timer import StageTimer
from paceline.speculation.metrics import summarise
from paceline.types import Rollout, StepTrace, first_branches

SOLVED = 1.0  # a problem is solved by a reward of at least this
STAGES = ("data", "sync", "generation", "reward", "logprob", "training", "head_training", "draft")
ROLLOUT_STAGES = ("data", "sync", "generation", "reward")  # hidden behind training if the two overlap
LEARNER_STAGES = ("logprob", "training", "head_training")


def update_metrics(tokens: TokenBatch, report: UpdateReport, version: int, keeps_kv: bool = False) -> dict[str, Any]:
    """`version`: the learner's before the update. `keeps_kv`: tokens may follow KV that older weights computed."""
    learner_logprobs_T = tokens.old_logprobs_T if tokens.old_logprobs_T is not None else report.logprobs_T
    lag_T = version - tokens.version_T
    lag_N, log_ratio_N = lag_T[tokens.mask_T], (learner_logprobs_T - tokens.engine_logprobs_T)[tokens.mask_T]
    is_current_T = lag_T == 0
    if keeps_kv:
        num_older_S = sum_by((~is_current_T).long(), tokens.sequence_T, tokens.num_sequences)
        is_current_T &= (num_older_S == 0)[tokens.sequence_T]
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "entropy": report.entropy,
        **report.stats,
        "num_optimizer_steps": report.num_optimizer_steps,
        "num_skipped_optimizer_steps": len(report.skipped),
        **mismatch_metrics(log_ratio_N[is_current_T[tokens.mask_T]]),
        "token_lags": {str(lag): int((lag_N == lag).sum()) for lag in lag_N.unique().tolist()},
        "effective_sample_size": effective_sample_size(log_ratio_N),
    }


def mismatch_metrics(log_ratio_N: Tensor) -> dict[str, float | None]:
    """How much engine and learner differ, over the tokens that the engine sampled with the learner's weights: of others
    the difference is no error. None without such tokens."""
    if not len(log_ratio_N):
        return {"mismatch_mean": None, "mismatch_k3": None, "mismatch_max": None}
    return {
        "mismatch_mean": float(log_ratio_N.abs().mean()),
        # k3 of KL(engine || learner): mean of r - 1 - log r with r = learner / engine
        "mismatch_k3": float((torch.expm1(log_ratio_N) - log_ratio_N).mean()),
        "mismatch_max": float(log_ratio_N.abs().max()),
    }


def effective_sample_size(log_ratio_N: Tensor) -> float | None:
    """(Σ w)² / (N Σ w²) of the ratios w = learner / engine, without a cap: 1 if all tokens are on-policy."""
    if not len(log_ratio_N):
        return None
    weight_N = (log_ratio_N - log_ratio_N.max()).exp()
    return float(weight_N.sum() ** 2 / (len(weight_N) * (weight_N**2).sum()))


def memory_gib(device: torch.device) -> float:
    """Peak memory so far: reserved on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / 2**30
    import resource  # does not exist on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**30 if sys.platform == "darwin" else peak / 2**20  # bytes on macOS, kilobytes elsewhere


def has_advantages(tokens: TokenBatch) -> bool:
    """Whether any is larger than the rounding of a mean of equal rewards."""
    assert tokens.advantages_T is not None
    return not bool((tokens.advantages_T.abs() <= 1e-6).all())  # NaN is no zero


def mean_advantages(tokens: TokenBatch) -> list[float]:
    """By sequence, over its trained tokens. For the records."""
    assert tokens.advantages_T is not None
    mask_T = tokens.mask_T.double()
    sum_S = sum_by(tokens.advantages_T.double() * mask_T, tokens.sequence_T, tokens.num_sequences)
    return (sum_S / sum_by(mask_T, tokens.sequence_T, tokens.num_sequences).clamp_min(1)).tolist()


def acceptance_length(batch: Batch) -> tuple[float | None, int | None]:
    """The mean acceptance length of a batch, None for too few drafts; and the policy version of its last step."""
    drafts = summarise([], batch.traces)
    enough = drafts["num_drafts"] >= MIN_DRAFTS
    return (drafts["mean_acceptance_length"] if enough else None), _last_trace(batch, "version")


def _last_trace(batch: Batch, name: str) -> int | None:
    return getattr(batch.traces[-1], name) if batch.traces else None


def sample_lengths(rollouts: Sequence[Rollout]) -> list[int]:
    """By sample, the tokens that the policy sampled in all its branches. `rollouts`: in order, of whole samples."""
    lengths: list[int] = []
    for rollout in rollouts:
        num = int(rollout.mask.sum())
        if rollout.branch:
            lengths[-1] += num
        else:
            lengths.append(num)
    return lengths


def reward_and_length(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Of the samples of these rollouts."""
    samples, lengths = first_branches(rollouts), np.array(sample_lengths(rollouts))
    rewards = np.array([r.reward for r in samples if r.is_scored])
    names = dict.fromkeys(name for r in samples for name in r.rewards)
    return {
        "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "rewards": {name: float(np.mean([r.rewards[name] for r in samples if name in r.rewards])) for name in names},
        "length_mean": float(lengths.mean()) if len(lengths) else 0.0,
        "length_max": int(lengths.max(initial=0)),
        "truncated_ratio": float(np.mean([r.is_truncated for r in samples])) if samples else 0.0,
    }


def task_metrics(batch: Batch, epochs: Mapping[str, int]) -> dict[str, Any]:
    """By label of the task: of all rollouts that were generated for the step, trained on or not. `epochs`: by label. A
    task without a group in the step is left out."""
    found: dict[str, Any] = {}
    for label, epoch in epochs.items():
        groups = [group for group in batch.all_groups if group.task == label]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        samples = first_branches(rollouts)
        rewards = [r.reward for r in samples if r.is_scored]
        num_drafts = sum(r.num_drafts for r in rollouts)
        if not groups:
            continue
        found[label] = {
            "epoch": epoch,
            "share": len(groups) / len(batch.all_groups),
            **reward_and_length(rollouts),
            "solved_ratio": float(np.mean([reward >= SOLVED for reward in rewards])) if rewards else 0.0,
            "num_groups": sum(group.task == label for group in batch.groups),
            "num_groups_filtered": sum(group.task == label for group in batch.dropped),
            "num_failures": sum(not r.is_scored for r in samples),
            "num_zero_scored": sum(r.is_scored and r.failure is not None for r in samples),
            "num_tokens": sum(int(r.mask.sum()) for r in rollouts),
            "num_samples": len(samples),
            "num_drafts": num_drafts,
            "mean_acceptance_length": 1 + sum(r.num_accepted_tokens for r in rollouts) / max(num_drafts, 1),
        }
    return found


def rollout_metrics(batch: Batch) -> dict[str, Any]:
    """Of all rollouts that were generated for the step, trained on or not."""
    rollouts = [r for group in batch.all_groups for r in group.rollouts]
    samples = first_branches(rollouts)
    staleness = [batch.step - group.oldest_version for group in batch.groups]
    drafts = summarise([], batch.traces)
    return {
        **reward_and_length(rollouts),
        "num_groups": len(batch.groups),
        "num_groups_filtered": len(batch.dropped),
        "num_groups_stale": batch.num_stale,
        "num_failures": sum(not r.is_scored for r in samples),
        "num_zero_scored": sum(r.is_scored and r.failure is not None for r in samples),
        "staleness_mean": float(np.mean(staleness)) if staleness else 0.0,
        "staleness_max": max(staleness, default=0),
        "num_tokens": sum(int(r.mask.sum()) for r in rollouts),
        "num_samples": len(samples),
        "num_branches": len(rollouts) - len(samples),
        **{
            key: drafts[key]
            for key in (
                "mean_acceptance_length",
                "draft_acceptance_rate",
                "acceptance_rate_per_position",
                "num_drafts",
                "num_draft_tokens",
                "num_accepted_tokens",
                "draft_s",
            )
        },
        **plain_estimate(batch.traces),
        "drafter_version": _last_trace(batch, "drafter_version"),
        "num_history_bytes": _last_trace(batch, "num_history_bytes"),
    }


def plain_estimate(traces: Iterable[StepTrace]) -> dict[str, float]:
    """Sums for `estimated_speedup`, over the steps without prompt tokens for which the policy has estimated a plain
    step's time. A step that emits m tokens per row replaces m plain steps."""
    steps = [
        t for t in traces if t.plain_s and t.num_query_tokens == t.num_rows + t.num_draft_tokens and not t.num_captured
    ]
    plain = [t for t in steps if not t.num_planned]
    return {
        "decoding_s": sum(t.total_s for t in steps),
        "estimated_plain_s": sum(t.plain_s * t.num_emitted / t.num_rows for t in steps),
        "plain_steps_s": sum(t.total_s for t in plain),
        "estimated_plain_steps_s": sum(t.plain_s for t in plain),
    }


def estimated_speedup(sums: Mapping[str, float]) -> float | None:
    """Of decoding with drafts over plain decoding. The estimates are corrected by what the plain steps took: a machine
    may have become slower since its step times were measured."""
    if not sums["decoding_s"] or not sums["estimated_plain_steps_s"]:
        return None
    slower = sums["plain_steps_s"] / sums["estimated_plain_steps_s"]
    return slower * sums["estimated_plain_s"] / sums["decoding_s"]


def engine_metrics(batch: Batch, num_engines: int) -> dict[str, Any]:
    """`engine_busy`: by engine, the share of the generation time that it computed. `engine_idle`: the idle share of all
    engines."""
    generation_s = batch.timer.seconds["generation"]
    if not generation_s:  # all groups are the surplus of earlier steps
        return {}
    busy_s = [0.0] * num_engines
    for trace in batch.traces:
        busy_s[trace.engine] += trace.total_s
    busy = [seconds / generation_s for seconds in busy_s]
    return {"engine_busy": busy, "engine_idle": 1 - sum(busy) / num_engines}


def stage_times(
    batch: Batch, timer: StageTimer, waited_s: float, publishing_s: float, total_s: float, overlaps: bool
) -> dict[str, float]:
    """Seconds by stage. `exposed_generation`: how long training waited for rollouts; without overlap, all of their
    generation. `idle`: how long the engine had nothing to do. `total`: the step without evaluation and audits."""
    stages = {name: batch.timer.seconds[name] + timer.seconds[name] for name in STAGES}
    stages["sync"] += publishing_s
    stages["draft"] = sum(trace.draft_s for trace in batch.traces if trace.drafter != "none")
    stages["generation"] -= stages["draft"]
    exposed = waited_s if overlaps else stages["generation"] + stages["draft"]
    exposed_stages = LEARNER_STAGES if overlaps else (*ROLLOUT_STAGES, "draft", *LEARNER_STAGES)
    accounted = sum(stages[name] for name in exposed_stages) + (waited_s + publishing_s if overlaps else 0.0)
    if overlaps:
        stages["idle"] = batch.timer.seconds["idle"]
    return {**stages, "exposed_generation": exposed, "other": max(0.0, total_s - accounted), "total": total_s}
