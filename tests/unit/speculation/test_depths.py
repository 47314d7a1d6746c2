"""How deep drafts hold: what is seen counts, and what is not follows the position before it."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.speculation.depths import Depths


def test_a_prior_for_all_before_anything_is_seen():
    assert Depths(4, 0.6)(6).tolist() == [0.6] * 6


def test_positions_that_were_never_tried_follow_the_one_before():
    depths = Depths(8, 0.6)
    for _ in range(400):
        depths.observe(np.array([1, 1, 1, 0]), np.ones(4, int))
    first, *deeper = depths(4)
    assert first == pytest.approx(0.75, abs=0.02) and deeper == [first] * 3


def test_each_position_given_those_before():
    depths, dice, chances = Depths(8, 0.6), np.random.default_rng(0), [0.9, 0.7, 0.2]
    for _ in range(2000):
        stood = int(np.cumprod(dice.random(3) < chances).sum())
        depths.observe(np.array([stood]), np.array([min(3, stood + 1)]))
    assert depths(3) == pytest.approx(chances, abs=0.08)
    assert depths(3)[2] > depths(3)[1] * 0.2  # of the third little is known, and some of the second's good name is its


def test_what_was_not_tried_counts_as_what_was_thought_of_it():
    depths = Depths(4, 0.6)
    for _ in range(300):
        depths.estimate(np.array([[0.1, 0.9], [0.3, 0.9]]), np.zeros(2, int))
    assert depths(1) == pytest.approx([0.2], abs=0.03)
    assert 0.75 < depths(2)[1] < 0.9  # reached a fifth as often, so some of the first's bad name is its


def test_what_was_never_drafted_was_not_wrong_but_for_a_head_of_which_nothing_came():
    depths = Depths(4, 0.6)
    depths.estimate(np.array([[0.8, 0.5, 0.0], [0.8, 0.0, 0.0], [0.0, 0.0, 0.0]]), np.array([1, 1, 0]))
    assert depths.counts.tolist() == [[0, 0.5, 0, 0], [1, 1, 0, 0]]
    depths.estimate(np.ones((1, 9)), np.zeros(1, int))  # deeper than is counted
    assert depths.counts[1, -1] == 1


@pytest.mark.parametrize("estimates", [True, False])
def test_depths_are_those_of_all_drafts_though_only_the_likeliest_are_tried(estimates: bool):
    """And the twin that counts outcomes alone is flattered."""
    depths, dice = Depths(8, 0.6), np.random.default_rng(0)
    for _ in range(400):
        chances = np.repeat(dice.choice([0.5, 0.9], (8, 1)), 3, axis=1)
        num_tried = (chances.cumprod(1) > 0.4).sum(1)
        num_held = np.minimum((dice.random((8, 3)) < chances).cumprod(1).sum(1), num_tried)
        depths.observe(num_held, np.minimum(num_held + 1, num_tried))
        if estimates:
            is_open = num_held == num_tried
            depths.estimate(chances[is_open], num_tried[is_open])
    truth = (0.5**3 + 0.9**3) / (0.5**2 + 0.9**2)
    assert (abs(depths(3)[2] - truth) < 0.05) == estimates


def test_a_new_policy_leaves_half():
    depths = Depths(4, 0.6)
    depths.observe(np.zeros(100, int), np.ones(100, int))
    before = depths(1)[0]
    depths.fade()
    assert before < depths(1)[0] < 0.6
