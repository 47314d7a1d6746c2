"""Measurements in which CUDA graphs are captured are repeated, and say if captures remained."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from paceline.engine.captures import MAX_TRIES, without_captures


@pytest.mark.parametrize(("captures", "expected"), [([0], (1, 0)), ([3, 1, 0, 5], (3, 0)), ([2] * 9, (MAX_TRIES, 2))])
def test_repeats_until_nothing_is_captured(captures: list[int], expected: tuple[int, int]) -> None:
    runner: Any = SimpleNamespace(num_captured=7)
    num_measured = 0

    def measure() -> int:
        nonlocal num_measured
        runner.num_captured += captures[num_measured]
        num_measured += 1
        return num_measured

    assert without_captures(runner, measure) == expected
