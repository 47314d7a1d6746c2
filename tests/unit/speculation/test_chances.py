"""Chances that mean what they say."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.speculation.batch import DraftBatch
from paceline.speculation.chances import CELL_PRIOR, PER_SOURCE, Chances


def drafts(
    confidence: list[list[float]], match: list[int] | None = None, sources: list[int] | None = None
) -> DraftBatch:
    said = np.array(confidence, np.float32)
    found = DraftBatch(np.zeros(said.shape, np.int32), np.full(len(said), said.shape[1], np.int32), said)
    found.match = None if match is None else np.array(match, np.int32)
    if sources is not None:
        found.names, found.sources = ("suffix", "eagle3"), np.array(sources, np.uint8)
    return found


def test_before_anything_was_seen_a_drafter_is_taken_at_its_word() -> None:
    chances = Chances()
    cells = chances.cells(drafts([[0.12, 0.57, 0.99, 1.0]]))
    assert chances(cells)[0].tolist() == pytest.approx([0.15, 0.55, 0.95, 0.95])


def test_a_boaster_is_found_out_whatever_words_it_uses() -> None:
    chances, honest = Chances(), Chances()
    for said in np.linspace(0.05, 0.85, 8):
        for of, stood in ((chances, 0), (honest, round(said))):
            of.observe(of.cells(drafts([[said]])), np.array([stood]), np.array([1]))
    new = drafts([[0.95]])
    assert chances(chances.cells(new))[0, 0] < 0.3
    assert honest(honest.cells(new))[0, 0] > 0.6


def test_what_stood_outweighs_what_was_said() -> None:
    chances, said = Chances(), drafts([[0.9, 0.9]] * 50)
    for _ in range(20):
        cells = chances.cells(said)
        chances.observe(cells, np.zeros(50, np.int32), np.ones(50, np.int32))  # the first is always wrong
    now = chances(chances.cells(drafts([[0.9, 0.9, 0.5]])))[0]
    assert now[0] < 0.01
    assert now[1] < 0.02  # never seen itself, so that it follows what else was said with the same word
    assert now[2] < 0.05  # another word, but the same drafter
    chances.fade()
    assert chances(chances.cells(drafts([[0.9]])))[0, 0] > now[0]


def test_outcomes_are_counted_by_drafter_match_and_position() -> None:
    chances = Chances()
    said = drafts([[0.5, 0.5]] * 2, match=[1, 20], sources=[0, 1])
    for _ in range(200):  # the history's first token stands, its second does not; of the head nothing stands
        chances.observe(chances.cells(said), np.array([1, 0]), np.array([2, 1]))
    found = chances(chances.cells(said))
    assert found[0, 0] > 0.9 and found[0, 1] < 0.1 and found[1, 0] < 0.1
    elsewhere = chances(chances.cells(drafts([[0.5]], match=[20], sources=[0])))[0, 0]
    assert 0.3 < elsewhere < 0.7  # history with another match: between the two
    assert chances.num_seen(np.array([0, PER_SOURCE])).tolist() == pytest.approx([2 * 166, 166], rel=0.1)


def test_a_cell_follows_its_prior_by_weight() -> None:
    chances = Chances()
    cells = chances.cells(drafts([[0.5]]))
    chances.observe(cells, np.array([1]), np.array([1]))
    word = (1 + 4 * 0.55) / 5
    assert chances(cells)[0, 0] == pytest.approx((1 + CELL_PRIOR * word) / (1 + CELL_PRIOR))


def test_state_round_trip() -> None:
    chances, again = Chances(), Chances()
    cells = chances.cells(drafts([[0.3, 0.8]], match=[4], sources=[1]))
    chances.observe(cells, np.array([1]), np.array([2]))
    again.restore(chances.state())
    assert again(cells).tolist() == chances(cells).tolist()
