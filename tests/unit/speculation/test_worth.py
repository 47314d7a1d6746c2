"""What the best slots of deeper drafts would bring: as much as an auction of such drafts does."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.speculation.depths import Depths
from paceline.speculation.worth import SAMPLE, SELDOM, Worth

NUM = 4
DEPTHS = (0.9, 0.7, 0.8, 0.6)


def known(chances: tuple[float, ...] = DEPTHS) -> Depths:
    depths = Depths(8, 0.6)
    depths.counts[:, : len(chances)] = 1e9 * np.array([chances, np.ones(len(chances))])
    return depths


def at(worth: Worth, curves: np.ndarray, k: int, slots_per_row: float) -> float:
    return float(curves[k - 1, worth.slots(100).tolist().index(round(100 * slots_per_row))])


def auctioned(chances: np.ndarray, num_slots: int) -> float:
    """Tokens of a row, one slot after another."""
    survival = chances.cumprod(1)
    return 1 + float(np.sort(survival, axis=None)[::-1][:num_slots].sum()) / len(chances)


def test_before_anything_is_heard_all_rows_are_alike() -> None:
    worth = Worth(NUM)
    curves, survival = worth(known()), np.cumprod(DEPTHS)
    for k in range(1, NUM + 1):
        for num in range(1, NUM + 1):
            assert at(worth, curves, k, num) == pytest.approx(1 + survival[: min(k, num)].sum())
    assert at(worth, curves, 2, 1.5) == pytest.approx(1 + survival[0] + survival[1] / 2)


def test_so_are_rows_of_which_the_same_is_said() -> None:
    worth = Worth(NUM)
    worth.hear(np.tile([0.5, 0.5, 0.5, 0.5], (9, 1)))
    assert worth(known()) == pytest.approx(Worth(NUM)(known()))


def test_what_is_said_of_drafts_is_put_to_auction() -> None:
    said = np.random.default_rng(0).beta(3, 1, (SAMPLE, NUM))
    means = said.cumprod(1).mean(0) / np.append(1, said.cumprod(1).mean(0)[:-1])
    worth = Worth(NUM)
    worth.hear(said)
    curves = worth(known(tuple(means)))
    for k in range(1, NUM + 1):
        for num in (0.5, 1, 1.5, 2, 3, 4):
            expected = auctioned(said[:, :k], int(num * SAMPLE))
            assert at(worth, curves, k, num) == pytest.approx(expected, rel=1e-6)
    assert at(worth, curves, 4, 2) > at(worth, curves, 2, 2) + 0.02  # there is more to choose from


@pytest.mark.parametrize("chances", [(0.95, 0.97, 0.99, 0.9), (0.3, 0.2, 0.4, 0.05)])
def test_outcomes_count_for_more_than_what_is_said(chances: tuple[float, ...]) -> None:
    worth = Worth(NUM)
    worth.hear(np.random.default_rng(0).beta(2, 1, (SAMPLE, NUM)))
    curves = worth(known(chances))
    for k in range(1, NUM + 1):
        assert at(worth, curves, k, k) == pytest.approx(1 + np.cumprod(chances)[:k].sum())
    assert (curves <= 1 + np.arange(1, NUM + 1)[:, None]).all() and (np.diff(curves, axis=1) >= -1e-12).all()


def test_positions_that_were_never_drafted_differ_like_the_last_that_was() -> None:
    dice = np.random.default_rng(0)
    said = dice.choice([0.5, 0.95], (SAMPLE, NUM))
    short, whole = Worth(NUM), Worth(NUM)
    short.hear(said[:, :2])
    whole.hear(said)
    depths = known((0.725, 0.725, 0.725, 0.725))
    assert short(depths) == pytest.approx(whole(depths), rel=0.01)
    assert at(short, short(depths), 4, 2) > at(short, short(depths), 2, 2) + 0.05


def test_a_draft_cut_short_says_nothing_of_what_it_had_not() -> None:
    said = np.random.default_rng(0).beta(3, 1, (SAMPLE, NUM))
    said[::2, 2:] = 0
    worth = Worth(NUM)
    worth.hear(said)
    curves = worth(known())
    assert at(worth, curves, NUM, NUM) == pytest.approx(1 + np.cumprod(DEPTHS).sum())


def test_curves_serve_for_a_while_and_follow_then() -> None:
    worth, depths = Worth(NUM), known()
    for _ in range(SELDOM * SELDOM):
        worth.hear(np.full((1, NUM), 0.5))
        worth(depths)
        worth.grow_older()
    before, other = worth(depths), known((0.1, 0.1, 0.1, 0.1))
    worth.hear(np.full((1, NUM), 0.5))
    num_served = 0
    while worth(other) is before:
        worth.grow_older()
        num_served += 1
    assert 1 <= num_served <= SELDOM
    assert worth(depths) is worth(depths)  # nothing new was heard
    again = worth(other)
    worth.renew()
    assert worth(other) is not again


def test_of_many_rows_some_are_heard_and_then_it_is_enough() -> None:
    worth = Worth(NUM)
    assert worth.is_curious
    worth.hear(np.random.default_rng(0).random((10 * SAMPLE + 1, NUM + 3)))
    while worth.is_curious:
        worth.hear(np.full((1, 1), 0.5))
    worth(known())
    assert worth.is_curious


def test_slots_end_with_all_of_each_depth() -> None:
    for num, num_rows in ((1, 1), (3, 7), (7, 128), (40, 3)):
        slots = Worth(num).slots(num_rows)
        assert set(num_rows * np.arange(1, num + 1)) <= set(slots.tolist()) and slots[-1] == num * num_rows
