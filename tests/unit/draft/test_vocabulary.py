"""The choice of a head's draft vocabulary."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.draft.head_batch import Example
from paceline.draft.vocabulary import choose_draft_ids, coverage


def example(prompt: list[int], completion: list[int]) -> Example:
    loss_mask = np.array([False] * len(prompt) + [True] * len(completion))
    return Example(np.array(prompt + completion, np.int32), loss_mask)


# The completions have 9 four times, 2 twice, 7 once.
EXAMPLES = [example([4, 4, 4, 4, 4], [9, 9, 9, 2]), example([4], [2, 9, 7])]


@pytest.mark.parametrize(
    ("size", "eos_ids", "chosen"),
    [
        (1, [], [9]),
        (2, [], [2, 9]),
        (2, [11], [9, 11]),  # end-of-sequence tokens are always included
        (3, [11, 0], [0, 9, 11]),
        (3, [], [2, 7, 9]),
        (4, [], [2, 4, 7, 9]),  # then tokens of the prompts
        (6, [], [0, 1, 2, 4, 7, 9]),  # then the lowest ids
        (12, [11], list(range(12))),
        (2, [11, 11], [9, 11]),
    ],
)
def test_choice(size: int, eos_ids: list[int], chosen: list[int]) -> None:
    assert choose_draft_ids(EXAMPLES, size, 12, eos_ids).tolist() == chosen


def test_ties_are_broken_by_id() -> None:
    assert choose_draft_ids([example([], [5, 3, 8, 1])], 2, 12, []).tolist() == [1, 3]


@pytest.mark.parametrize(("size", "eos_ids"), [(13, []), (1, [10, 11])])
def test_invalid_sizes(size: int, eos_ids: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"draft.draft_vocab_size = {size}: the model has 12 tokens"):
        choose_draft_ids(EXAMPLES, size, 12, eos_ids)


def test_coverage() -> None:
    """Of completions, not of prompts."""
    assert coverage(np.array([9]), EXAMPLES) == pytest.approx(4 / 7)
    assert coverage(np.array([2, 7, 9]), EXAMPLES) == 1.0
    assert coverage(np.array([4]), EXAMPLES) == 0.0
    assert coverage(np.array([4]), []) == 0.0
