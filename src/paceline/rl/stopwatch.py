"""Where a step's time goes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """Seconds by stage. Within another stage, a stage's seconds are its own alone."""

    def __init__(self, seconds: Mapping[str, float] | None = None) -> None:
        """`seconds`: that were counted before, in another process."""
        self.seconds: dict[str, float] = defaultdict(float, seconds or {})
        self._counted = 0.0  # in all stages so far

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started, before = time.perf_counter(), self._counted
        try:
            yield
        finally:
            spent = time.perf_counter() - started
            self.seconds[name] += spent - (self._counted - before)
            self._counted = before + spent
