"""The order of the data: every problem once per epoch, determined by the seed and the position."""

from __future__ import annotations

from paceline.rl.order import DataOrder


def test_every_problem_once_per_epoch() -> None:
    order = DataOrder(7, seed=3)
    epochs = [[order[position] for position in range(7 * e, 7 * e + 7)] for e in range(4)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 4, "every epoch has its own shuffle"
    assert [order.epoch(position) for position in (0, 6, 7, 20, 21)] == [0, 0, 1, 2, 3]


def test_the_order_depends_on_seed_and_position_only() -> None:
    order, other = DataOrder(5, 0), DataOrder(5, 0)
    forward = [order[position] for position in range(15)]
    assert [other[position] for position in reversed(range(15))] == forward[::-1]
    assert [DataOrder(5, 1)[position] for position in range(15)] != forward
