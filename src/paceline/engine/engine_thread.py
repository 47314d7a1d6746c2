"""Runs an engine in a thread of its own, for callers in other threads.

Invariant: only this thread calls the engine. Calls of others wait in a queue and run between two steps. Listeners are
called on this thread, so they must return soon and not raise.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from paceline.engine.engine import LocalEngine
from paceline.engine.interface import Handle
from paceline.engine.sequence import Sequence as EngineSequence
from paceline.types import Completion, NewTokens, Request, StepTrace

Result = TypeVar("Result")


class EngineError(RuntimeError):
    """A step failed, which ends all requests."""


class EngineClosed(RuntimeError):
    """The thread ends or has ended: it takes no requests."""


Listener = Callable[[NewTokens | Exception], None]  # gets the tokens, or why there will be none


def new_tokens(sequence: EngineSequence, start: int, completion: Completion | None = None) -> NewTokens:
    """From emitted token `start` on."""
    record, new = sequence.record, slice(sequence.num_prompt + start, sequence.num_tokens)
    return NewTokens(
        token_ids=record.tokens[new].copy(),
        logprobs=record.logprobs[new].copy(),
        raw_logprobs=record.raw_logprobs[new].copy(),
        versions=record.versions[new].copy(),
        provenance=record.provenance[new].copy(),
        top_logprobs=sequence.emitted_top_logprobs(start),
        completion=completion,
    )


@dataclass(slots=True, eq=False)
class _Running:
    handle: Handle
    sequence: EngineSequence
    listener: Listener
    streams: bool  # tell the listener of every step, not only of the last
    num_told: int = 0  # tokens


class EngineThread:
    """`make_engine` is called on this thread: a thread that has loaded a model keeps OpenMP threads, and with more of
    them than cores each forward pass on a CPU takes 9% longer. `on_step` is called with the traces of every step."""

    def __init__(
        self, make_engine: Callable[[], LocalEngine], on_step: Callable[[list[StepTrace]], None] | None = None
    ) -> None:
        self._on_step = on_step
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[int, _Running] = {}
        self._is_closing = False  # set on this thread
        self._lock = threading.Lock()  # between `call` and the end of the thread
        self._has_ended = False
        made: Future[LocalEngine] = Future()
        self._thread = threading.Thread(target=self._run, args=(make_engine, made), name="paceline-engine", daemon=True)
        self._thread.start()
        made.result()

    # ---- from any thread ----

    def call(self, function: Callable[[LocalEngine], Result]) -> Future[Result]:
        """Call a function with the engine between two steps, for example to update weights."""
        future: Future[Result] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._engine))
                except BaseException as error:
                    future.set_exception(error)

        with self._lock:
            if self._has_ended:
                raise EngineClosed("the engine's thread has ended; make a new one")
            self._calls.put(run)
        return future

    def submit(self, requests: Sequence[Request], listeners: Sequence[Listener], streams: bool) -> Future[None]:
        """All of these requests or, if one can't run, none: then the future raises ValueError. A listener gets the
        tokens of each step (`streams`), or all tokens at the end."""
        return self.call(lambda engine: self._submit(engine, requests, listeners, streams))

    def abort(self, request_ids: Sequence[int]) -> Future[None]:
        """End these requests now. Those that have finished are ignored. Listeners get a completion with what was
        emitted."""
        return self.call(lambda engine: self._abort(engine, request_ids))

    @property
    def num_requests(self) -> int:
        return len(self._running)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def close(self, drain_s: float = 0.0) -> None:
        """Finish running requests within `drain_s` seconds, abort the rest, and end the thread. The engine stays open.
        Submitting meanwhile is an error."""
        with suppress(EngineClosed):
            self.call(self._begin_close).result()
            deadline = time.monotonic() + drain_s
            while self._running and time.monotonic() < deadline:
                time.sleep(0.01)
            self.call(self._end).result()
        self._thread.join()

    # ---- on this thread ----

    def _run(self, make_engine: Callable[[], LocalEngine], made: Future[LocalEngine]) -> None:
        try:
            self._engine = make_engine()
        except BaseException as error:
            made.set_exception(error)
            return
        made.set_result(self._engine)
        try:
            while not self._has_ended:
                try:
                    call = self._calls.get(block=not self._engine.has_work)
                except queue.Empty:
                    self._step()
                else:
                    call()
        finally:  # after an error that is not a step's, nobody may wait for an answer
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._has_ended = True
        running, self._running = self._running, {}
        for each in running.values():
            each.listener(EngineClosed("the engine's thread has ended"))
        while not self._calls.empty():  # calls that came before; they find no requests
            self._calls.get()()

    def _submit(
        self, engine: LocalEngine, requests: Sequence[Request], listeners: Sequence[Listener], streams: bool
    ) -> None:
        if self._is_closing:
            raise EngineClosed("the engine's thread is ending")
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(engine.submit(request))
        except BaseException:
            for handle in handles:
                engine.abort(handle.request.request_id)
            raise
        for handle, listener in zip(handles, listeners, strict=True):
            request_id = handle.request.request_id
            self._running[request_id] = _Running(handle, engine.sequence(request_id), listener, streams)

    def _abort(self, engine: LocalEngine, request_ids: Sequence[int]) -> None:
        try:
            for request_id in request_ids:
                if request_id in self._running and not self._running[request_id].handle.done:
                    engine.abort(request_id)
        except Exception as error:  # of a step in flight
            self._fail(error)
        self._tell()

    def _step(self) -> None:
        try:
            self._engine.step()
        except Exception as error:  # it ends all requests; the engine goes on
            self._fail(error)
        self._tell()
        traces = self._engine.drain_trace()
        if self._on_step is not None:
            self._on_step(traces)

    def _tell(self) -> None:
        for request_id, running in list(self._running.items()):
            completion, num = running.handle.completion, len(running.sequence.emitted)
            if completion is not None:
                del self._running[request_id]
                running.listener(new_tokens(running.sequence, running.num_told, completion))
            elif running.streams and num > running.num_told:
                new = new_tokens(running.sequence, running.num_told)
                running.num_told = num
                running.listener(new)

    def _fail(self, error: Exception) -> None:
        logging.getLogger("paceline").error("an engine step failed; all running requests end", exc_info=error)
        failed = EngineError(str(error) or type(error).__name__)
        failed.__cause__ = error
        running, self._running = self._running, {}
        for each in running.values():
            each.listener(failed)
        for each in running.values():
            if not each.handle.done:
                self._engine.abort(each.handle.request.request_id)

    def _begin_close(self, engine: Any) -> None:
        self._is_closing = True

    def _end(self, engine: LocalEngine) -> None:
        self._abort(engine, list(self._running))
        self._has_ended = True
