from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.speculation.batch import DraftBatch, Rows
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
def test_nonsense_is_refused(buckets: dict[int, int]) -> None:
    with pytest.raises(ValueError, match="num_speculative_tokens"):
        StaticPolicy(buckets)


# ---- min_confidence ----


def slow_select(drafts: DraftBatch, min_confidence: float) -> list[int]:
    cuts = []
    for num, confidence in zip(drafts.num.tolist(), drafts.confidence.tolist(), strict=True):
        survival, cut = 1.0, 0
        for chance in confidence[:num]:
            survival *= chance
            if survival < min_confidence:
                break
            cut += 1
        cuts.append(cut)
    return cuts


def drafted(confidence: np.ndarray, num: list[int]) -> DraftBatch:
    return DraftBatch(np.zeros(confidence.shape, np.int32), np.array(num, np.int32), confidence.astype(np.float32))


def test_a_draft_ends_where_it_is_unlikely_to_get() -> None:
    chances = np.array([[0.5, 0.5, 0.5], [1, 0.2, 1], [0.1, 1, 1], [1, 1, 1], [1, 1, 1]])
    found = StaticPolicy(3, min_confidence=0.25).select(drafted(chances, [3, 3, 3, 3, 2]))
    assert found.tolist() == [2, 1, 0, 3, 2]
    assert found.dtype == np.int32


@given(st.integers(0, 5), st.integers(0, 6), st.floats(0.001, 1), st.integers(0, 2**32 - 1))
def test_select_equals_the_slow_one(num_rows: int, k: int, min_confidence: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    chances = rng.choice([0, 0.3, 0.9, 1.0, rng.random()], (num_rows, k))
    drafts = drafted(chances, rng.integers(0, k + 1, num_rows).tolist())
    assert StaticPolicy(k, min_confidence).select(drafts).tolist() == slow_select(drafts, min_confidence)


def test_it_reads_drafts_only_where_it_must() -> None:
    assert not StaticPolicy(3).reads_drafts and StaticPolicy(3, 0.01).reads_drafts
    unlikely = drafted(np.zeros((2, 3)), [3, 1])
    assert StaticPolicy(3).select(unlikely).tolist() == [3, 1]
    assert StaticPolicy(3, 0.01).select(unlikely).tolist() == [0, 0]


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_a_min_confidence_that_is_no_chance_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"speculation\.min_confidence"):
        StaticPolicy(3, value)
