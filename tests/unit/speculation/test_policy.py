from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.speculation.batch import Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.policy import StaticPolicy
from paceline.types import SamplingParams


def rows(num: int) -> Rows:
    return Rows(np.arange(num), [np.zeros(1, np.int32)] * num, np.zeros(num, np.uint64), [SamplingParams()] * num)


def test_buckets() -> None:
    policy = StaticPolicy({8: 3, 1: 6})
    assert policy.plan(rows(1)).tolist() == [6]
    assert policy.plan(rows(2)).tolist() == [3, 3]
    assert policy.plan(rows(9)).tolist() == [0] * 9
    assert StaticPolicy(4).plan(rows(100)).tolist() == [4] * 100


@pytest.mark.parametrize("buckets", [{0: 3}, {4: -1}])
def test_impossible_buckets_are_refused(buckets: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        StaticPolicy(buckets)


def test_a_budget_shortens_the_longest_drafts() -> None:
    policy, batch = StaticPolicy(4), rows(3)
    batch.draft_budget, batch.draft_limits = 7, np.array([9, 1, 9], np.int32)
    assert policy.plan(batch).tolist() == [3, 1, 3]
    batch.draft_budget = 6
    assert policy.plan(batch).tolist() == [3, 1, 2] and "max_num_batched_tokens" in policy.decision.reason


# ---- min_confidence ----


def cut(drafts: DraftBatch, min_confidence: float) -> list[int]:
    """`select`, token by token."""
    cuts = []
    assert drafts.probabilities is not None
    for num, probabilities in zip(drafts.num.tolist(), drafts.probabilities.tolist(), strict=True):
        survival, length = 1.0, 0
        for probability in probabilities[:num]:
            survival *= probability
            if survival < min_confidence:
                break
            length += 1
        cuts.append(length)
    return cuts


def drafted(probabilities: np.ndarray, num: list[int]) -> DraftBatch:
    made = DraftBatch(np.zeros(probabilities.shape, np.int32), np.array(num, np.int32), np.zeros_like(probabilities))
    made.probabilities = probabilities * (np.arange(probabilities.shape[1]) < made.num[:, None])
    return made


def test_a_draft_is_cut_before_its_first_improbable_token() -> None:
    probabilities = np.array([[0.5, 0.5, 0.5], [1, 0.2, 1], [0.1, 1, 1], [1, 1, 1], [1, 1, 1]])
    found = StaticPolicy(3, min_confidence=0.25).select(drafted(probabilities, [3, 3, 3, 3, 2]))
    assert found.tolist() == [2, 1, 0, 3, 2]
    assert found.dtype == np.int32


@given(st.integers(0, 5), st.integers(0, 6), st.floats(0.001, 1), st.integers(0, 2**32 - 1))
def test_select_is_the_same_token_by_token(num_rows: int, k: int, min_confidence: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    probabilities = rng.choice([0, 0.3, 0.9, 1.0, rng.random()], (num_rows, k))
    drafts = drafted(probabilities, rng.integers(0, k + 1, num_rows).tolist())
    assert StaticPolicy(k, min_confidence).select(drafts).tolist() == cut(drafts, min_confidence)


def test_it_reads_drafts_only_with_a_min_confidence() -> None:
    assert not StaticPolicy(3).reads_drafts and StaticPolicy(3, 0.01).reads_drafts
    assert not StaticPolicy(3).reads_acceptance and StaticPolicy(3, 0.01).reads_acceptance
    improbable = drafted(np.zeros((2, 3)), [3, 1])
    assert StaticPolicy(3).select(improbable).tolist() == [3, 1]
    assert StaticPolicy(3, 0.01).select(improbable).tolist() == [0, 0]


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_min_confidence_that_is_no_probability_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"speculation\.min_confidence"):
        StaticPolicy(3, value)
