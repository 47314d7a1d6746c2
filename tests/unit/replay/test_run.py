"""Replays in several processes give the same results as in one."""

from __future__ import annotations

import functools

import numpy as np

from paceline.build.replay import build_replay, frozen_costs
from paceline.replay.rounds import Record, Round, RoundSplitter
from paceline.replay.run import Cell, replay


def recorded() -> list[Round]:
    """Three epochs of two problems with nearly identical samples."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 9, (2, 60)).astype(np.int32)
    records = [
        Record(
            f"p{problem}", np.array([1, 2, problem], np.int32), np.append(tokens[problem], np.int32(sample)), step=step
        )
        for step in range(3)
        for problem in range(2)
        for sample in range(3)
    ]
    return list(RoundSplitter(80).split(records))


def test_processes_give_the_same_results() -> None:
    rounds, make = recorded(), functools.partial(build_replay, costs=frozen_costs(None, None))
    cells = [Cell("suffix", "static:3", 2), Cell("suffix", "auto", 4), Cell("ngram", "static:1", 2)]
    done: dict[int, list[Cell]] = {1: [], 2: []}
    one, two = (
        replay(rounds, False, cells, make, lambda cell, num_bytes, n=n: done[n].append(cell), num_processes=n)
        for n in (1, 2)
    )
    assert [r.summary() for r in one] == [r.summary() for r in two]
    assert [r.cell for r in two] == cells and one[0].speedup > 1 and one[0].summary() != one[2].summary()
    assert set(done[1]) == set(done[2]) and len(done[2]) == 5  # including two baselines
