"""An engine without `drain_trace` does not grow."""

from __future__ import annotations

import warnings

import pytest
from support import tiny_decoder

from paceline.engine.engine import LocalEngine
from paceline.engine.trace_log import MAX_TRACES, TraceLog
from paceline.model.paged import PagedDecoder
from paceline.types import Request, SamplingParams


def engine() -> LocalEngine:
    return LocalEngine(PagedDecoder(tiny_decoder(), 32))


def test_the_last_traces_are_kept_and_a_warning_is_given_once() -> None:
    running = engine()
    running._traces = TraceLog(10)
    wanted = [Request(i, (1, 2), SamplingParams(max_tokens=25, ignore_eos=True)) for i in range(2)]
    with pytest.warns(UserWarning, match=r"last 10 steps .* drain_trace") as warned:
        running.generate(wanted)
    assert len(warned) == 1
    assert [trace.step for trace in running.drain_trace()] == list(range(running._num_steps - 10, running._num_steps))
    assert running.drain_trace() == []


def test_traces_that_are_drained_are_complete() -> None:
    running = engine()
    running._traces = TraceLog(10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(5):
            running.generate([Request(i, (1, 2), SamplingParams(max_tokens=10, ignore_eos=True))])
            assert len(running.drain_trace()) == 10


def test_an_engine_keeps_a_bounded_number() -> None:
    assert engine()._traces._traces.maxlen == MAX_TRACES
