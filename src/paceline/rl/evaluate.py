"""How good is the policy on problems it was never trained on?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.rl.collect import Collector
from paceline.tasks.task import Problem

SOLVED = 1.0  # a reward of this or more counts as solved


def evaluate(
    collector: Collector,
    problems: Sequence[Problem],
    num_samples: int,
    temperature: float,
    seed: int,
    between: Callable[[int, int], None] = lambda done, total: None,
    step: int = 0,
) -> dict[str, Any]:
    """Mean reward, avg@n and pass@k of what could be scored (None: nothing could). The same seed draws the same noise
    at every evaluation."""
    sampling = replace(collector.sampling, temperature=temperature)
    collected = collector.collect(
        step, list(enumerate(problems)), num_samples, f"{seed} held out", sampling=sampling, between=between
    )
    rewards = [[r.reward for r in group.scored] for group in collected.groups]
    scored = [reward for group in rewards for reward in group]
    rollouts = [r for group in collected.groups for r in group.rollouts]
    failures = [r.failure for r in rollouts if r.failure is not None]
    ks = [k for k in (2**i for i in range(20)) if k <= num_samples]
    return {
        "reward": float(np.mean(scored)) if scored else None,
        # Every problem alike, however many of its samples could be scored.
        "avg_at_n": float(np.mean([sum(group) / len(group) for group in rewards if group])) if scored else None,
        "pass_at_k": pass_at(ks[-1], rewards),
        "n": num_samples,
        "k": ks[-1],
        "pass_at": {str(k): pass_at(k, rewards) for k in ks},
        "length_mean": float(np.mean([r.mask.sum() for r in rollouts])),
        "num_problems": len(problems),
        "failures": len(failures),
        "first_failure": failures[0] if failures else None,
    }


def pass_at(k: int, rewards: Sequence[Sequence[float]]) -> float:
    """The chance that one of k samples solves a problem, estimated without bias from n >= k of them:
    1 - C(n - c, k) / C(n, k) where c of n are solved (arXiv 2107.03374)."""
    chances = []
    for group in rewards:
        n, c = len(group), sum(reward >= SOLVED for reward in group)
        if n >= k:
            chances.append(1 - math.comb(n - c, k) / math.comb(n, k))
    return float(np.mean(chances)) if chances else 0.0
