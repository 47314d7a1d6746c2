"""What the host knows of drafts that a device has made: for whom there are any, and how likely they were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.drafters.ahead import Eagle3Ahead
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.speculation.calibration import of_draws
from paceline.types import SamplingParams

K = 3


def ahead() -> Eagle3Ahead:
    head: Any = SimpleNamespace(config=SimpleNamespace(taps=(0,)))
    return Eagle3Ahead(head)


def ids(*request_ids: int) -> np.ndarray:
    return np.array(request_ids, np.int64)


def rows_of(request_ids: np.ndarray, version: int = 0) -> Rows:
    num = len(request_ids)
    return Rows(request_ids, [np.zeros(4, np.int32)] * num, np.zeros(num, np.uint64), [SamplingParams()] * num, version)


def proposed(drafter: Eagle3Ahead, request_ids: np.ndarray, version: int = 0) -> DraftBatch:
    return drafter.propose(rows_of(request_ids, version), np.full(len(request_ids), K, np.int32))


def test_there_are_pages_for_as_many_tokens_as_were_ever_asked_for() -> None:
    """A graph that once drafted three may do for a step that wants one; none at all has one of its own."""
    drafter, rows = ahead(), rows_of(ids(1, 2))
    for caps, pages in (([1, 0], 1), ([1, 3], 3), ([0, 2], 3), ([0, 0], 0), ([1, 1], 3)):
        assert drafter.ask(rows, np.array(caps, np.int32)) == pages
        assert drafter.num_asked == max(caps)


def test_who_leaves_has_no_drafts_until_they_are_made_again() -> None:
    drafter, mine = ahead(), ids(4, 7, 9)
    for _ in range(2):
        drafter.made(mine, K)
        assert proposed(drafter, mine).num.tolist() == [K, K, K]
        drafter.forget(7)
        assert proposed(drafter, mine).num.tolist() == [K, 0, K]
    drafter.made(mine.copy(), K)
    drafter.made(mine, K - 1)
    assert proposed(drafter, ids(9, 5, 4)).num.tolist() == [K - 1, 0, K - 1]


@pytest.mark.parametrize("wanted", [ids(4, 7, 9), ids(9, 4), ids(5, 9, 4, 8), ids(1)])
@pytest.mark.parametrize("width", [1, K])
def test_drafts_are_judged_by_what_was_said_of_them_whoever_came_or_went(wanted: np.ndarray, width: int) -> None:
    """A twin that is told all row by row, in the words themselves."""
    dice, drafter, twin = np.random.default_rng(0), ahead(), of_draws()
    for version in range(3):
        chances = dice.uniform(0.01, 1, (3, width)).astype(np.float32)
        said = dict(zip((4, 7, 9), chances, strict=True))
        drafter.made(ids(4, 7, 9), width)
        drafter.told(ids(4, 7, 9), chances)
        if version:
            twin.fade()
        words = np.array([said.get(i, np.zeros(width)) for i in wanted.tolist()])
        offered = proposed(drafter, wanted, version)
        assert offered.num.tolist() == [width if i in said else 0 for i in wanted.tolist()]
        most = offered.confidence.shape[1]
        assert offered.confidence.tolist() == twin(words).astype(np.float32)[:, :most].tolist()
        drafter.told(ids(2), np.ones((1, 2)))  # the next step lands: it has verified these
        verified = drafter.verified(wanted)
        assert verified.num.tolist() == offered.num.tolist()
        assert verified.confidence.tolist() == twin(words).astype(np.float32).tolist()
        stood = np.minimum(dice.integers(0, width + 1, len(wanted)), verified.num).astype(np.int32)
        none = np.zeros((len(wanted), width + 1), np.int32)
        drafter.observe(Commits(wanted, none, stood + 1, verified.num, stood, verified))
        known = np.minimum(stood + 1, verified.num)
        twin.observe_many(words, stood, known)
        assert drafter.calibration.counts.tolist() == twin.counts.tolist()
