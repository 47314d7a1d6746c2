"""Requests are found among others as in a dictionary; and which draft tokens have a known outcome."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.speculation.batch import Commits, are_same, look_up, places_of


@pytest.mark.parametrize("seed", range(20))
def test_places_are_those_of_a_dictionary(seed: int) -> None:
    rng = np.random.default_rng(seed)
    among = rng.permutation(40)[: rng.integers(1, 20)]
    where = {request_id: i for i, request_id in enumerate(among.tolist())}
    some = rng.permutation(among)[: rng.integers(0, len(among) + 1)]
    assert places_of(some, among).tolist() == [where[request_id] for request_id in some.tolist()]
    assert places_of(among, among).tolist() == list(range(len(among)))
    wanted = rng.permutation(40)[:15]
    places, are_there = look_up(wanted, among)
    found = [place if is_there else None for place, is_there in zip(places.tolist(), are_there.tolist(), strict=True)]
    assert found == [where.get(request_id) for request_id in wanted.tolist()]


def test_the_same_requests_in_another_order_are_not_the_same() -> None:
    ids = np.array([3, 1, 2])
    assert are_same(ids, ids) and are_same(ids, ids.copy())
    assert not are_same(ids, ids[::-1]) and not are_same(ids, ids[:2])


def test_a_draft_that_ended_with_its_sequence_was_not_rejected() -> None:
    """All accepted; the second rejected; the sequence ended with the second; none accepted; no draft."""
    drafted, accepted = np.array([3, 3, 3, 3, 0], np.int32), np.array([3, 1, 2, 0, 0], np.int32)
    num = np.array([4, 2, 2, 1, 1], np.int32)
    commits = Commits(np.arange(5), np.zeros((5, 4), np.int32), num, drafted, accepted)
    assert commits.num_known.tolist() == [3, 2, 2, 1, 0]
