"""Metrics of engine and learner: the mismatch at equal versions, lags, and the effective sample size."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.rl.batch import TokenBatch
from paceline.rl.learner import UpdateReport
from paceline.rl.metrics import effective_sample_size, mismatch_metrics, update_metrics


def metrics(
    versions: list[int], engine: list[float], learner: list[float], mask: list[bool], keeps_kv: bool = False
) -> dict[str, object]:
    num = len(versions)
    tokens = TokenBatch(
        sequence_T=torch.zeros(num, dtype=torch.long),
        mask_T=torch.tensor(mask),
        group_S=torch.zeros(1, dtype=torch.long),
        reward_S=torch.zeros(1, dtype=torch.float64),
        length_S=torch.tensor([num]),
        truncated_S=torch.zeros(1, dtype=torch.bool),
        engine_logprobs_T=torch.tensor(engine, dtype=torch.float64),
        version_T=torch.tensor(versions),
    )
    report = UpdateReport(0.0, 0.0, 0.0, 0.0, {}, torch.tensor(learner, dtype=torch.float64), 1, [])
    return update_metrics(tokens, report, version=3, keeps_kv=keeps_kv)


def test_only_tokens_of_the_learners_version_are_a_mismatch() -> None:
    found = metrics([3, 3, 2, 1], [-1.0, -1.0, -1.0, -9.0], [-1.0, -1.5, -3.0, 0.0], [True, True, True, False])
    assert found["mismatch_mean"] == 0.25 and found["mismatch_max"] == 0.5
    assert found["mismatch_k3"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)
    assert found["token_lags"] == {"0": 2, "1": 1}, "tokens of the environment do not count"
    ratios = [1.0, math.exp(-0.5), math.exp(-2.0)]
    assert found["effective_sample_size"] == pytest.approx(sum(ratios) ** 2 / (3 * sum(r * r for r in ratios)))


def test_without_such_tokens_there_is_no_mismatch() -> None:
    found = metrics([2, 2], [-1.0, -1.0], [-5.0, -5.0], [True, True])
    assert {found[f"mismatch_{end}"] for end in ("mean", "k3", "max")} == {None}
    assert found["token_lags"] == {"1": 2} and found["effective_sample_size"] == 1.0
    nothing = metrics([3], [-1.0], [-1.0], [False])
    assert nothing["token_lags"] == {} and nothing["effective_sample_size"] is None


def test_tokens_that_follow_older_kv_are_no_mismatch() -> None:
    """All tokens here are of one sequence."""
    arguments = [2, 3], [-1.0, -1.0], [-1.0, -1.5], [True, True]
    assert metrics(*arguments)["mismatch_mean"] == 0.5
    assert metrics(*arguments, keeps_kv=True)["mismatch_mean"] is None
    assert metrics([3, 3], *arguments[1:], keeps_kv=True)["mismatch_mean"] == 0.25


def test_large_ratios_do_not_overflow() -> None:
    log_ratios = torch.tensor([800.0, 0.0], dtype=torch.float64)
    assert effective_sample_size(log_ratios) == 0.5
    assert mismatch_metrics(log_ratios)["mismatch_max"] == 800.0
