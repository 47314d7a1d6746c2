"""Requests found among others, as a dictionary would find them."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.speculation.batch import are_same, look_up, places_of


@pytest.mark.parametrize("seed", range(20))
def test_places_are_a_dictionarys(seed: int) -> None:
    dice = np.random.default_rng(seed)
    among = dice.permutation(40)[: dice.integers(1, 20)]
    where = {request_id: i for i, request_id in enumerate(among.tolist())}
    some = dice.permutation(among)[: dice.integers(0, len(among) + 1)]
    assert places_of(some, among).tolist() == [where[request_id] for request_id in some.tolist()]
    assert places_of(among, among).tolist() == list(range(len(among)))
    wanted = dice.permutation(40)[:15]
    places, are_there = look_up(wanted, among)
    found = [place if is_there else None for place, is_there in zip(places.tolist(), are_there.tolist(), strict=True)]
    assert found == [where.get(request_id) for request_id in wanted.tolist()]


def test_the_same_in_another_order_are_not_the_same() -> None:
    ids = np.array([3, 1, 2])
    assert are_same(ids, ids) and are_same(ids, ids.copy())
    assert not are_same(ids, ids[::-1]) and not are_same(ids, ids[:2])
