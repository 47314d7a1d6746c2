"""An engine in a process of its own, as Ray runs it: a `RayEngine` elsewhere gives it work, weights and memories.

It serves one session at a time, that of the learner that greeted it last. An engine that was restarted knows no
session, and says so to whoever goes on talking to it: it has neither their weights nor their requests.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from paceline.cluster.channel import Channel, Place
from paceline.engine.interface import Engine, Handle, Learned
from paceline.types import Completion, Receipt, Request, StepTrace


class Stranger(Exception):
    """This engine does not know the session that it was called in."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a learner must know of an engine."""

    dtype: torch.dtype
    crowds: bool
    process: int


@dataclass(frozen=True, slots=True)
class Progress:
    completions: list[Completion]
    traces: list[StepTrace]


class EngineActor:
    """`make` builds the engine, when it is first greeted: what is wrong with it is then told to who greets."""

    def __init__(self, make: Callable[[], Engine], number: int) -> None:
        self._make, self._number = make, number
        self._engine: Engine | None = None
        self._untaught: Learned = {}
        self._session: str | None = None
        self._handles: dict[int, Handle] = {}
        self._channel: Channel | None = None

    def greet(self, session: str) -> Greeting:
        """From here on it works for the caller's session, and for no other. Nothing of an earlier one is left."""
        if self._engine is None:
            self._engine = self._make()
            self._untaught = self._engine.learned()
        self._leave()
        self._engine.teach(self._untaught)
        self._session = session
        return Greeting(self._engine.dtype, self._engine.crowds, os.getpid())

    def ping(self, session: str) -> None:
        self._of(session)

    def submit(self, session: str, request: Request) -> str | None:
        """Why it can't be done, if it can't."""
        engine = self._of(session)
        try:
            self._handles[request.request_id] = engine.submit(request)
        except ValueError as error:
            return str(error)
        return None

    def advance(self, session: str, requests: Sequence[Request], patience_s: float) -> Progress:
        """Take these requests, then work until something is finished, or for so long."""
        engine = self._of(session)
        for request in requests:
            self._handles[request.request_id] = engine.submit(request)
        until = time.monotonic() + patience_s
        completions: list[Completion] = []
        while self._handles and not completions and time.monotonic() < until:
            completions = [completion for completion in engine.step() if self._ended(completion)]
        return Progress(completions, [replace(trace, engine=self._number) for trace in engine.drain_trace()])

    def abort(self, session: str, request_id: int) -> Completion | None:
        """What it has come to; None where it was not running."""
        engine = self._of(session)
        handle = self._handles.pop(request_id, None)
        if handle is None:
            return None
        if not handle.done:
            engine.abort(request_id)
        return handle.completion

    def call(self, session: str, name: str, *args: Any) -> Any:
        """One of the engine's own methods."""
        return getattr(self._of(session), name)(*args)

    def connect(self, session: str, place: Place, number: int) -> None:
        self._of(session)
        self._channel = None  # or the old one's connections would stay open meanwhile
        self._channel = Channel(place, number, ray.util.get_node_ip_address())

    def receive(self, session: str, kind: str, version: int, *args: Any) -> Receipt:
        """New weights, of the policy or the drafter."""
        engine = self._of(session)
        assert self._channel is not None, "receives before it is connected"
        try:
            update = engine.update_weights if kind == "policy" else engine.update_drafter
            return update(self._channel.receive(), version, *args)
        except BaseException:  # half of it has come, and the rest would be taken for the next
            self._channel.close()
            self._channel = None
            raise

    def leave(self, session: str) -> None:
        self._of(session)
        self._leave()
        self._session = None

    def _of(self, session: str) -> Engine:
        if self._engine is None or session != self._session:
            raise Stranger
        return self._engine

    def _ended(self, completion: Completion) -> bool:
        """Whether that is news: what was aborted may yet come out of the engine, even after another session has taken
        its number for a request of its own."""
        handle = self._handles.get(completion.request.request_id)
        if handle is None or handle.completion is not completion:
            return False
        del self._handles[completion.request.request_id]
        return True

    def _leave(self) -> None:
        assert self._engine is not None
        for request_id, handle in self._handles.items():
            if not handle.done:
                self._engine.abort(request_id)
        self._handles.clear()
        self._channel = None
        self._engine.wake()
        self._engine.forget()
        self._engine.drain_trace()
