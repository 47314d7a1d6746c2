"""Evaluates the policy on held-out problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.config import TrainSection
from paceline.rl.callback import ProgressCallback
from paceline.rl.collect import Collector
from paceline.rl.metrics import SOLVED, sample_lengths
from paceline.rl.produce import Producer, Stopped
from paceline.tasks.task import Problem
from paceline.types import Group, first_branches


class Evaluator:
    """Evaluates during a run, and keeps the first, the last and the best result. It pauses generation."""

    def __init__(
        self,
        section: TrainSection,
        collector: Collector,
        problems: Sequence[Problem],
        task_weights: Mapping[str, float],
        producer: Producer,
        callback: ProgressCallback,
    ) -> None:
        """`task_weights`: by label, if there are several tasks. The best result has the highest weighted mean."""
        self.section, self.collector, self.problems = section, collector, problems
        self.task_weights, self.producer, self.callback = task_weights, producer, callback
        self.best: dict[str, Any] | None = None  # {"step", "reward"}
        self.first_eval: dict[str, Any] | None = None  # before the first step
        self.last_eval: dict[str, Any] | None = None
        self.last_step: int | None = None  # how many steps came before `last_eval`

    def evaluate_first(self) -> None:
        """Before the first step. Raises Stopped if the producer is stopped."""
        self.first_eval = self.last_eval = self._evaluate(0, may_stop=True)
        self.last_step = 0

    def evaluate(self, step: int) -> bool:
        """After `step` steps, to the end: the step's metrics need the result. Returns whether it is the best so far."""
        self.last_eval, self.last_step = self._evaluate(step), step
        reward = self.last_eval["reward"]
        if reward is None or (self.best is not None and reward <= self.best["reward"]):
            return False
        self.best = {"step": step, "reward": reward}
        return True

    def _evaluate(self, step: int, may_stop: bool = False) -> dict[str, Any]:
        def on_progress(done: int, total: int) -> None:
            if may_stop and self.producer.stopping:
                raise Stopped
            self.callback.progress("validation", done, total)

        section = self.section
        with self.producer.paused():
            result = evaluate(
                self.collector,
                self.problems,
                section.eval_samples,
                section.eval_temperature,
                section.seed,
                on_progress,
                f"evaluation after step {step}" if step else "evaluation before training",
                self.task_weights,
            )
            self.collector.engine.drain_trace()
        if result["first_failure"] is not None:
            self.callback.note(
                f"validation: {result['num_failures']} samples could not be scored, and {result['num_zero_scored']} "
                f"scored 0 because a reward failed; the first: {result['first_failure']}"
            )
        return result

    def state_dict(self) -> dict[str, Any]:
        return {
            "best": self.best,
            "first_eval": self.first_eval,
            "last_eval": self.last_eval,
            "last_eval_step": self.last_step,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.best, self.first_eval, self.last_eval = (state_dict[key] for key in ("best", "first_eval", "last_eval"))
        self.last_step = state_dict.get("last_eval_step")  # checkpoints of earlier versions do not have it


def evaluate(
    collector: Collector,
    problems: Sequence[Problem],
    num_samples: int,
    temperature: float,
    seed: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    when: str = "evaluation",
    task_weights: Mapping[str, float] = {},
) -> dict[str, Any]:
    """Mean reward, avg@n and pass@k of the scored samples (None without any). The same seed gives the same noise in
    every evaluation. `task_weights`, by label: then `tasks` has the results of each task with held-out problems, and
    the others are their weighted means, and sums of counts."""
    sampling = replace(collector.sampling, temperature=temperature)
    collected = collector.collect(
        when, list(enumerate(problems)), num_samples, f"{seed} held out", sampling=sampling, on_progress=on_progress
    )
    if not task_weights:
        return _results(collected.groups, num_samples)
    by_task = {
        label: _results(groups, num_samples)
        for label in task_weights
        if (groups := [group for group in collected.groups if group.task == label])
    }
    return _weighted(by_task, task_weights) | {"tasks": by_task}


def _weighted(results: Mapping[str, Mapping[str, Any]], weights: Mapping[str, float]) -> dict[str, Any]:
    """The results of several tasks as one. A mean is None if it is None for one of the tasks: without it, the mean of
    the others could not be compared with other evaluations."""

    def mean(values: Mapping[str, float | None]) -> float | None:
        terms = [weights[label] * value for label, value in values.items() if value is not None]
        return math.fsum(terms) / math.fsum(weights[label] for label in values) if len(terms) == len(values) else None

    def of_tasks(key: str) -> dict[str, Any]:
        return {label: result[key] for label, result in results.items()}

    pass_at = of_tasks("pass_at")
    first, *_ = results.values()
    return {
        **{key: mean(of_tasks(key)) for key in ("reward", "avg_at_n", "pass_at_k")},
        "n": first["n"],
        "k": first["k"],
        "pass_at": {k: mean({label: of_task[k] for label, of_task in pass_at.items()}) for k in first["pass_at"]},
        "length_mean": mean(of_tasks("length_mean")),
        **{key: sum(of_tasks(key).values()) for key in ("num_problems", "num_failures", "num_zero_scored")},
        "first_failure": next(filter(None, of_tasks("first_failure").values()), None),
    }


def _results(groups: Sequence[Group], num_samples: int) -> dict[str, Any]:
    rewards = [group.rewards for group in groups]
    scored = [reward for group in rewards for reward in group]
    rollouts = [r for group in groups for r in group.rollouts]
    samples = first_branches(rollouts)
    failures = [r.failure for r in samples if r.failure is not None]
    ks = [k for k in (2**i for i in range(20)) if k <= num_samples]
    return {
        "reward": float(np.mean(scored)) if scored else None,
        # Every problem has the same weight, for any number of scored samples.
        "avg_at_n": float(np.mean([sum(group) / len(group) for group in rewards if group])) if scored else None,
        "pass_at_k": pass_at(ks[-1], rewards),
        "n": num_samples,
        "k": ks[-1],
        "pass_at": {str(k): pass_at(k, rewards) for k in ks},
        "length_mean": float(np.mean(sample_lengths(rollouts))),
        "num_problems": len(groups),
        "num_failures": sum(not r.is_scored for r in samples),
        "num_zero_scored": sum(r.is_scored for r in samples if r.failure is not None),
        "first_failure": failures[0] if failures else None,
    }


def pass_at(k: int, rewards: Sequence[Sequence[float]]) -> float:
    """The probability that one of k samples solves a problem. Unbiased estimate from n >= k samples, c of which solve
    it: 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374)."""
    estimates = []
    for group in rewards:
        n, c = len(group), sum(reward >= SOLVED for reward in group)
        if n >= k:
            estimates.append(1 - math.comb(n - c, k) / math.comb(n, k))
    return float(np.mean(estimates)) if estimates else 0.0
