"""The scripts in benchmarks/history: joined rounds have all requests, and the check of `auto` can fail."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from paceline.replay.rounds import Record, RoundSplitter


@pytest.fixture
def makespan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks" / "history"))
    import makespan as script

    for name in ("makespan", "acceptance"):
        monkeypatch.delitem(sys.modules, name)
    return script


def test_joined_rounds_hold_the_same_requests(makespan: ModuleType) -> None:
    rng = np.random.default_rng(0)
    records = []
    for step in range(3):
        for problem in "abc":
            tokens = rng.integers(0, 99, 9).astype(np.int32)
            mask = np.array([1, 1, 0, 1, 1, 1, 0, 0, 1], bool)  # three turns
            head_accepted = rng.integers(0, 8, 9).astype(np.uint8)
            records.append(Record(f"{problem}{step}", tokens[:4], tokens, mask, head_accepted, step=step))
    parts = list(RoundSplitter().split(records))
    whole = makespan.join_rounds(parts)
    assert len(whole) == sum(map(len, parts)) == 27

    def requests(rounds: list) -> list:
        return [
            (problem, r.tokens[start:end].tolist(), r.head_accepted[start:end].tolist(), prompt, limit)
            for r in rounds
            for problem, start, end, prompt, limit in zip(
                r.problems, r.start, r.start + r.num_total, r.num_prompt, r.limit, strict=True
            )
        ]

    assert requests([whole]) == requests(parts)
    turns = [(whole.problems[i], whole.problems[before]) for i, before in enumerate(whole.previous_turn) if before >= 0]
    assert len(turns) == 18 and all(problem == before for problem, before in turns)


@pytest.mark.parametrize(
    ("auto_s", "message"),
    [(5.0, "HOLDS at 3 of 3"), (5.2, "MISSED at 0 of 3"), (5.05, "HOLDS at 3 of 3")],  # the best static takes 5
)
def test_the_check_depends_on_the_time_of_auto(makespan: ModuleType, auto_s: float, message: str) -> None:
    seconds = {policy: 6.0 for policy in makespan.POLICIES} | {"static:3": 5.0, "auto": auto_s}
    cells = [
        {"run": "r", "batch": 4, "num_problems": None, "order": "arrival", "policy": policy}
        | {span: {"makespan_s": time} for span in makespan.SPANS}
        for policy, time in seconds.items()
    ]
    grid = makespan.Grid(cells)
    rows = grid.auto_against_others()
    assert [row["best_static"] for row in rows] == ["static:3"] * 3
    assert message in makespan.check_auto(rows)[0]
    assert grid.tables()[0][1][0]["static:3 arrival"] == "-16.7%"


def test_auto_slower_than_no_speculation_is_a_miss(makespan: ModuleType) -> None:
    row = {"run": "r", "batch": 1, "span": "cold", "best_static": "static:1", "of_best_static": 2.0, "of_plain": 0.998}
    assert "MISSED at 0 of 1" in makespan.check_auto([row])[0]
    assert "HOLDS" in makespan.check_auto([row | {"of_plain": 1.0}])[0]
