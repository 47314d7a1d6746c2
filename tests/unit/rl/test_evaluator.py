"""Mean reward, avg@n and pass@k on held-out problems."""

from __future__ import annotations

from itertools import combinations

import pytest
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.rl.collect import Collector
from paceline.rl.evaluator import evaluate, pass_at
from paceline.tasks.rewards import Score
from paceline.tasks.task import Problem
from paceline.types import SamplingParams


def test_pass_at_is_the_mean_over_all_choices() -> None:
    """The reference implementation enumerates every k of the n samples."""
    rewards = [[1.0, 0, 0, 0.9, 1.0], [0, 0, 0, 0, 0.0], [1.0, 1, 1, 1, 1], [0, 0, 2.0, 0, 0]]
    for k in range(1, 6):
        expected = [
            sum(any(r >= 1 for r in some) for some in combinations(g, k)) / len(list(combinations(g, k)))
            for g in rewards
        ]
        assert pass_at(k, rewards) == pytest.approx(sum(expected) / len(expected))
    assert pass_at(3, [[1.0, 1.0]]) == 0.0, "fewer than k samples are ignored"


def test_evaluate() -> None:
    """Samples 0 … n-1 of problem n solve it. One sample can't be scored and does not count; one scores 0 because its
    reward failed."""

    def reward_of(sample: object) -> float | str | Score:
        n, number = sample.columns["n"], int(sample.name[-1])
        if (n, number) == (1, 3):
            return Score(0.0, {}, "p1, sample 3: hung: scored 0")
        return "broke" if (n, number) == (0, 0) else float(number < n)

    engine = ScriptedEngine()
    collector = Collector(engine, Bytes(), ScriptedRewarder(reward_of), sampling=SamplingParams(max_tokens=8))
    progress = []
    held_out = [Problem(f"p{n}", "x", {"n": n}) for n in range(4)]
    result = evaluate(collector, held_out, 4, 0.5, 7, lambda done, total: progress.append((done, total)))
    assert result["reward"] == pytest.approx((0 + 1 + 2 + 3) / 15)
    assert result["avg_at_n"] == pytest.approx((0 + 0.25 + 0.5 + 0.75) / 4)
    assert (
        result["n"] == result["k"] == 4
        and result["num_failures"] == result["num_zero_scored"] == 1
        and result["num_problems"] == 4
    )
    assert set(result["pass_at"]) == {"1", "2", "4"} and result["pass_at"]["4"] == 1.0  # of the three with 4 samples
    assert result["length_mean"] == 2 and progress[-1] == (15, 16)
    assert {request.sampling.temperature for request in engine.submitted} == {0.5}
    keys = [request.noise_key for request in engine.submitted]
    evaluate(collector, held_out, 4, 0.5, 7)
    assert [request.noise_key for request in engine.submitted[16:]] == keys, "the same noise every time"
