"""Repeats measurements in which CUDA graphs are captured. A capture takes as long as dozens of steps and
occurs once per step size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.engine.runner import Runner

MAX_TRIES = 4

Result = TypeVar("Result")


def without_captures(runner: Runner, measure: Callable[[], Result]) -> tuple[Result, int]:
    """The first result of `measure` without a capture, or the last of MAX_TRIES; and how many graphs it captured."""
    for _ in range(MAX_TRIES):
        before = runner.num_captured
        result = measure()
        num_captured = runner.num_captured - before
        if not num_captured:
            break
    return result, num_captured
