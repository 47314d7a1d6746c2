"""Seconds by stage."""

from __future__ import annotations

import pytest

from paceline.rl.stage_timer import StageTimer


def test_nested_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 5.0, 10.0, 20.0, 21.0])
    monkeypatch.setattr("paceline.rl.stage_timer.time.perf_counter", lambda: next(clock))
    timer = StageTimer()
    with timer.stage("training"):  # 0 … 10
        for _ in range(2):  # 1 … 3, 4 … 5
            with timer.stage("head_training"):
                pass
    with timer.stage("training"):  # 20 … 21
        pass
    assert timer.seconds == {"training": 8.0, "head_training": 3.0}
