"""Which tokens a head can say."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.draft.lesson import Example
from paceline.draft.vocabulary import choose_draft_ids, coverage


def example(prompt: list[int], said: list[int]) -> Example:
    return Example(np.array(prompt + said, np.int32), np.array([False] * len(prompt) + [True] * len(said)))


SEEN = [example([4, 4, 4, 4, 4], [9, 9, 9, 2]), example([4], [2, 9, 7])]  # said: 9 four times, 2 twice, 7 once


@pytest.mark.parametrize(
    ("size", "ends", "chosen"),
    [
        (1, [], [9]),
        (2, [], [2, 9]),
        (2, [11], [9, 11]),  # an end token, though never said, before a common one
        (3, [11, 0], [0, 9, 11]),
        (3, [], [2, 7, 9]),
        (4, [], [2, 4, 7, 9]),  # what the prompts say before what nobody says
        (6, [], [0, 1, 2, 4, 7, 9]),  # then the lowest ids
        (12, [11], list(range(12))),
        (2, [11, 11], [9, 11]),
    ],
)
def test_choice(size: int, ends: list[int], chosen: list[int]) -> None:
    assert choose_draft_ids(SEEN, size, 12, ends).tolist() == chosen


def test_equal_counts_go_by_id() -> None:
    assert choose_draft_ids([example([], [5, 3, 8, 1])], 2, 12, []).tolist() == [1, 3]


@pytest.mark.parametrize(("size", "ends"), [(13, []), (1, [10, 11])])
def test_sizes_that_can_not_be(size: int, ends: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"draft.draft_vocab_size = {size}: the model has 12 tokens"):
        choose_draft_ids(SEEN, size, 12, ends)


def test_coverage() -> None:
    """Of what was said, not of the prompts."""
    assert coverage(np.array([9]), SEEN) == pytest.approx(4 / 7)
    assert coverage(np.array([2, 7, 9]), SEEN) == 1.0
    assert coverage(np.array([4]), SEEN) == 0.0
    assert coverage(np.array([4]), []) == 0.0
