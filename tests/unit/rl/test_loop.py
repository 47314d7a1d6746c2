"""Who sleeps while the learner trains, and what a run spares itself."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from tiny_run import make

from paceline.model.weights import checksum


@pytest.mark.parametrize("sleep, staleness, num_sleeps", [("true", 0, 2), ("false", 0, 0), ("true", 1, 0)])
def test_the_engine_sleeps_where_it_is_told_to_and_nobody_needs_it(
    tmp_path: Path, sleep: str, staleness: int, num_sleeps: int
) -> None:
    loop = make(tmp_path, "run", "train.num_steps=2", f"engine.sleep={sleep}", f"train.max_staleness={staleness}")
    slept, lie_down = [], loop.engine.sleep
    loop.engine.sleep = lambda: slept.append(lie_down())  # type: ignore[method-assign]
    loop.run()
    assert len(slept) == num_sleeps and loop.step == 2


def test_sleep_changes_nothing(tmp_path: Path) -> None:
    found = []
    for sleep in ("true", "false"):
        loop = make(tmp_path, sleep, "train.num_steps=2", f"engine.sleep={sleep}")
        loop.run()
        found.append(checksum(loop.learner.weights()))
    assert found[0] == found[1]


def test_what_is_there_when_a_run_begins_is_not_looked_through_in_its_steps(tmp_path: Path) -> None:
    loop = make(tmp_path, "run", "train.num_steps=1")
    num_spared, one_step = [], loop._one_step
    loop._one_step = lambda: num_spared.append(gc.get_freeze_count()) or one_step()  # type: ignore[method-assign]
    loop.run()
    assert num_spared[0] > 10_000 and gc.get_freeze_count() == 0
