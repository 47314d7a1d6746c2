"""The traces of an engine's steps, kept until `drain`. Their number is bounded, for an engine that runs for days
without `drain`."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable

from paceline.types import StepTrace

MAX_TRACES = 2**17  # about 100 MB; more steps than a rollout of 32k tokens takes with three waves of sequences


class TraceLog:
    def __init__(self, max_traces: int = MAX_TRACES) -> None:
        self._traces: deque[StepTrace] = deque(maxlen=max_traces)
        self._has_warned = False

    def add(self, traces: Iterable[StepTrace]) -> None:
        for trace in traces:
            if len(self._traces) == self._traces.maxlen and not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"the engine keeps the traces of its last {self._traces.maxlen} steps and drops older ones from "
                    "here on; call drain_trace() more often if you need them all",
                    stacklevel=3,
                )
            self._traces.append(trace)

    def drain(self) -> list[StepTrace]:
        traces = list(self._traces)
        self._traces.clear()
        return traces
