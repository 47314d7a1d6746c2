from __future__ import annotations

import numpy as np
import pytest

from paceline.speculation.batch import Rows
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
