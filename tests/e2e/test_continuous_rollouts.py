"""Continuous rollouts against batches, with a real engine and trainer and a long tail of lengths. Time is counted in
engine steps. The measurement is benchmarks/async/idle.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from scripts import load_script

from paceline.rl.continuous_producer import ContinuousProducer

Measure = Callable[..., dict[str, Any]]


@pytest.fixture
def measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measure:
    monkeypatch.setattr(tiny_run, "SCALE", 1.0)
    tiny_run.write_model(tmp_path / "model", max_positions=8192)
    idle = load_script("async/idle.py")
    return lambda staleness, inflight: idle.measure(tmp_path, 10, staleness, inflight, 12)


@pytest.mark.slow
@pytest.mark.parametrize(("staleness", "share"), [(1, 0.75), (2, 0.5)])
def test_the_engine_is_idle_for_less_time(measure: Measure, staleness: int, share: float) -> None:
    """The bound decides how much: a batch's longest episode may last until the step that is `staleness` later."""
    drain, keep = measure(staleness, "drain"), measure(staleness, "keep")
    assert keep["idle"] < share * drain["idle"] and keep["wait"] < share * drain["wait"]
    for found in (drain, keep):
        assert found["max_lag"] == staleness
        assert (found["num_stale"], found["num_twice"], found["num_missing"]) == (0, 0, 0)


@pytest.mark.slow
def test_a_producer_that_does_not_wait_for_long_groups_is_caught(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ContinuousProducer, "_can_wait", lambda *_: True)
    found = measure(1, "keep")
    assert found["num_stale"] > 0 and found["num_missing"] > 0
