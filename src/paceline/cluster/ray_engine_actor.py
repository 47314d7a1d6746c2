"""An engine in a Ray actor. A `RayEngine` in the learner's process sends it requests, weights and speculation state.

An actor serves one session at a time: that of the learner that called `start_session` last. A restarted actor has no
session and none of the session's weights or requests, so it answers every other call with UnknownSession.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
import torch

from paceline.cluster.channel import Channel, Rendezvous
from paceline.engine.interface import Engine, Handle, SpeculationState
from paceline.types import Completion, Receipt, Request, StepTrace


class UnknownSession(Exception):
    """The call belongs to a session that this actor does not serve."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a learner needs to know about an engine."""

    dtype: torch.dtype
    wants_sleep: bool
    max_model_len: int
    pid: int


class EngineActor:
    """`make` builds the engine in the first `start_session`, so that its errors are raised to the caller."""

    def __init__(self, make: Callable[[], Engine], index: int) -> None:
        self._make, self._index = make, index
        self._engine: Engine | None = None
        self._initial_state: SpeculationState = {}
        self._session: str | None = None
        self._handles: dict[int, Handle] = {}
        self._channel: Channel | None = None

    def start_session(self, session: str) -> EngineInfo:
        """Serve this session and no other from now on. All state of an earlier session is reset."""
        if self._engine is None:
            self._engine = self._make()
            self._initial_state = self._engine.state_dict()
        self._reset()
        self._engine.load_state_dict(self._initial_state)
        self._session = session
        return EngineInfo(self._engine.dtype, self._engine.wants_sleep, self._engine.max_model_len, os.getpid())

    def end_session(self, session: str) -> None:
        self._engine_for(session)
        self._reset()
        self._session = None

    def ping(self, session: str) -> None:
        self._engine_for(session)

    def submit(self, session: str, request: Request) -> str | None:
        """None if the engine takes the request, else the reason why not."""
        engine = self._engine_for(session)
        try:
            self._handles[request.request_id] = engine.submit(request)
        except ValueError as error:
            return str(error)
        return None

    def run_steps(
        self, session: str, requests: Sequence[Request], max_s: float
    ) -> tuple[list[Completion], list[StepTrace]]:
        """Submit these requests, then run steps until a request finishes or max_s have passed."""
        engine = self._engine_for(session)
        for request in requests:
            self._handles[request.request_id] = engine.submit(request)
        deadline = time.monotonic() + max_s
        completions: list[Completion] = []
        while self._handles and not completions and time.monotonic() < deadline:
            completions = [completion for completion in engine.step() if self._finish(completion)]
        return completions, [replace(trace, engine=self._index) for trace in engine.drain_trace()]

    def abort(self, session: str, request_id: int) -> Completion | None:
        """The completion so far; None if the request is not running."""
        engine = self._engine_for(session)
        handle = self._handles.pop(request_id, None)
        if handle is None:
            return None
        if not handle.done:
            engine.abort(request_id)
        return handle.completion

    def call_engine(self, session: str, method: str, *args: Any) -> Any:
        return getattr(self._engine_for(session), method)(*args)

    def connect(self, session: str, rendezvous: Rendezvous, rank: int) -> None:
        self._engine_for(session)
        self._channel = None  # closes the old channel's connections first
        self._channel = Channel(rendezvous, rank, ray.util.get_node_ip_address())

    def receive(self, session: str, kind: str, version: int, *args: Any) -> Receipt:
        """Receive and load new weights of the "policy" or the "drafter"."""
        engine = self._engine_for(session)
        assert self._channel is not None, "receive before connect"
        try:
            update = engine.update_weights if kind == "policy" else engine.update_drafter
            return update(self._channel.receive(), version, *args)
        except BaseException:  # the next transfer must not read the remaining buckets of this one
            self._channel.close()
            self._channel = None
            raise

    def _engine_for(self, session: str) -> Engine:
        if self._engine is None or session != self._session:
            raise UnknownSession
        return self._engine

    def _finish(self, completion: Completion) -> bool:
        """Whether the completion is of a request of this session. The engine may still return an aborted request, even
        after a later session has used its request id again."""
        handle = self._handles.get(completion.request.request_id)
        if handle is None or handle.completion is not completion:
            return False
        del self._handles[completion.request.request_id]
        return True

    def _reset(self) -> None:
        assert self._engine is not None
        for request_id, handle in self._handles.items():
            if not handle.done:
                self._engine.abort(request_id)
        self._handles.clear()
        self._channel = None
        self._engine.wake()
        self._engine.reset_prefix_cache()
        self._engine.drain_trace()
