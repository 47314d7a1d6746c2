"""Measures how long each stage of a step takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class StageTimer:
    """Seconds by stage. Stages nest: the time of an inner stage does not count for the outer one."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        """`seconds`: measured before, in another process."""
        self.seconds: dict[str, float] = defaultdict(float, seconds or {})
        self._total = 0.0  # over all stages

    def add(self, other: StageTimer) -> None:
        """The times of another one, which measured none of the same time."""
        for name, seconds in other.seconds.items():
            self.seconds[name] += seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started, before = time.perf_counter(), self._total
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] += spent - (self._total - before)
            self._total = before + spent
