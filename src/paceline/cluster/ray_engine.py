"""Several engines behind one: requests are distributed over Ray actors, each with a replica of the engine.

Invariants: Every request finishes exactly once, even if a replica dies. Only this class knows which replica has which
request. A restarted replica gets the current weights, its last speculation state and its unfinished requests again.
Their noise keys stay the same, so under rule `coupled` their tokens do too. Every weight update returns a receipt from
each replica, and all receipts agree.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import ray
import torch

from paceline.cluster.channel import Bucket, Channel, ChannelError, open_rendezvous, pack
from paceline.cluster.ray_calls import ACTOR_LOST, get_result, get_when_started, with_retries
from paceline.cluster.ray_engine_actor import EngineInfo
from paceline.config import ClusterSection
from paceline.engine.interface import Handle, SpeculationState, Weights
from paceline.engine.trace_log import MAX_TRACES, TraceLog
from paceline.types import Completion, Receipt, Request, StepTrace, with_noise_key

MAX_RUN_S = 0.1  # a replica returns after this time if no request finishes earlier
MAX_LOAD = 1.25  # times the mean number of requests: a replica with more gets no further problem
MAX_ATTEMPTS = 3  # at sending weights, not counting attempts in which a replica died


@dataclass(slots=True)
class _Replica:
    """The learner's view of one engine."""

    index: int
    actor: Any
    info: EngineInfo
    requests: dict[int, Request] = field(default_factory=dict)  # unfinished, in order of submission
    unsent: list[Request] = field(default_factory=list)  # requests that the actor does not have yet
    pending: ray.ObjectRef | None = None  # its `run_steps` call in progress
    state_dict: SpeculationState = field(default_factory=dict)  # as last read or loaded


@dataclass(frozen=True, slots=True)
class _WeightUpdate:
    kind: str  # "policy" or "drafter"
    version: int
    args: tuple[Any, ...]  # further arguments of the engine's update method
    buckets: list[Bucket]


class RayEngine:
    """`note` receives messages about replicas that died."""

    def __init__(
        self, actors: Sequence[Any], tokenizer: Any, section: ClusterSection, backend: str, note: Callable[[str], None]
    ) -> None:
        self.tokenizer, self.version = tokenizer, 0
        self.num_restarts = 0
        self._section, self._backend, self._note = section, backend, note
        self._session = uuid.uuid4().hex
        starting = [self._start_session(actor) for actor in actors]  # in parallel: they load their models
        self._replicas = [_Replica(i, actor, self._wait_for_info(i, starting[i])) for i, actor in enumerate(actors)]
        self._handles: dict[int, Handle] = {}
        self._validated: set[tuple[object, ...]] = set()  # prompt and sampling of requests that an engine took
        self._finished: list[Completion] = []
        self._traces = TraceLog(MAX_TRACES * len(actors))
        self._weight_updates: dict[str, _WeightUpdate] = {}  # the latest of each kind
        self._channel: Channel | None = None  # to all replicas
        self._asleep = False
        self._num_submitted = 0

    def _start_session(self, actor: Any) -> ray.ObjectRef:
        return with_retries(actor.start_session).remote(self._session)

    def _wait_for_info(self, index: int, reference: ray.ObjectRef) -> EngineInfo:
        return get_when_started(reference, f"rollout engine {index}", self._section.max_restarts)

    @property
    def dtype(self) -> torch.dtype:
        return self._replicas[0].info.dtype

    @property
    def max_model_len(self) -> int:
        return min(replica.info.max_model_len for replica in self._replicas)

    @property
    def wants_sleep(self) -> bool:
        return self._section.layout == "colocated" and any(replica.info.wants_sleep for replica in self._replicas)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """The first request with a given prompt and sampling goes to its replica at once, which may reject it. Others
        are sent with the next `run_steps`."""
        if request.request_id in self._handles:
            raise ValueError(f"request {request.request_id}: a request with this id is still running")
        request = with_noise_key(request, 0, self._num_submitted)  # here, where the order of submission is known
        self._num_submitted += 1
        replica = self._route(request)
        key = request.prompt_ids, request.sampling
        if key not in self._validated:
            error = self._call(replica, "submit", request)
            if error is not None:
                raise ValueError(error)
            self._validated.add(key)
        else:
            replica.unsent.append(request)
        replica.requests[request.request_id] = request
        handle = self._handles[request.request_id] = Handle(request)
        return handle

    def _route(self, request: Request) -> _Replica:
        """Requests of one problem go to one replica: they share the prompt and the history. A hash of the problem's
        name chooses it, so that later epochs and a restarted learner choose the same. If that replica has too many
        requests, the one with the fewest gets the problem."""
        least_loaded = min(self._replicas, key=lambda replica: len(replica.requests))
        if request.problem is None:
            return least_loaded
        for replica in self._replicas:
            if any(other.problem == request.problem for other in reversed(replica.requests.values())):
                return replica
        preferred = self._replicas[zlib.crc32(request.problem.encode()) % len(self._replicas)]
        mean = len(self._handles) / len(self._replicas)
        return preferred if len(preferred.requests) <= MAX_LOAD * mean else least_loaded

    def step(self) -> list[Completion]:
        """Let every replica with requests run; return when one of them has output."""
        for replica in self._replicas:
            if replica.requests and replica.pending is None:
                replica.pending = replica.actor.run_steps.remote(self._session, replica.unsent, MAX_RUN_S)
                replica.unsent = []
        pending = {replica.pending: replica for replica in self._replicas if replica.pending is not None}
        if pending and not self._finished:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
            if ready:  # and all others that are ready by now
                ready, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
            for reference in ready:
                self._collect(pending[reference])
        finished, self._finished = self._finished, []
        return finished

    def _collect(self, replica: _Replica) -> None:
        """Wait for the replica's pending call and take its output."""
        pending, replica.pending = replica.pending, None
        if pending is None:
            return
        try:
            completions, traces = get_result(pending)
        except ACTOR_LOST:
            self._recover(replica)
            return
        self._traces.add(traces)
        for completion in completions:
            request_id = completion.request.request_id
            if replica.requests.pop(request_id, None) is not None:
                self._handles.pop(request_id).completion = completion
                self._finished.append(completion)
        if not self._handles:
            self._validated.clear()

    def abort(self, request_id: int) -> None:
        """End a request now. Its completion has the tokens emitted so far: possibly all of them, or none if its replica
        died recently. `step` no longer returns it, even if it has finished."""
        replica = next((replica for replica in self._replicas if request_id in replica.requests), None)
        if replica is not None:
            self._collect(replica)
        others = [completion for completion in self._finished if completion.request.request_id != request_id]
        if len(others) < len(self._finished):
            self._finished = others
            return
        if replica is None:
            raise ValueError(f"request {request_id} is not running")
        request, handle = replica.requests.pop(request_id), self._handles.pop(request_id)
        if request in replica.unsent:
            replica.unsent.remove(request)
            handle.completion = _empty_completion(request)
        else:
            handle.completion = self._call(replica, "abort", request_id) or _empty_completion(request)

    # -- actor calls and recovery -------------------------------------------------------------------------------------

    def _call(self, replica: _Replica, method: str, *args: Any) -> Any:
        while True:
            try:
                return get_result(getattr(replica.actor, method).remote(self._session, *args))
            except ACTOR_LOST:
                self._recover(replica)

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """In parallel on all replicas."""
        references = [getattr(replica.actor, method).remote(self._session, *args) for replica in self._replicas]
        results = []
        for replica, reference in zip(self._replicas, references, strict=True):
            try:
                results.append(get_result(reference))
            except ACTOR_LOST:
                self._recover(replica)
                results.append(self._call(replica, method, *args))
        return results

    def _recover(self, replica: _Replica) -> None:
        """Ray restarts the process; this restores its state."""
        self.num_restarts += 1
        self._channel, replica.pending = None, None
        self._note(f"rollout engine {replica.index} died; restarting it with {len(replica.requests)} requests to redo")
        failures = 0
        while True:
            replica.info = self._wait_for_info(replica.index, self._start_session(replica.actor))
            try:
                if replica.state_dict:
                    get_result(replica.actor.call_engine.remote(self._session, "load_state_dict", replica.state_dict))
                for update in self._weight_updates.values():
                    self._transfer([replica], update)
                if self._asleep:
                    get_result(replica.actor.call_engine.remote(self._session, "sleep"))
                break
            except ACTOR_LOST:
                continue  # until Ray gives up restarting it
            except ChannelError as error:
                failures += 1
                self._check_attempts(failures, error)
        replica.unsent = list(replica.requests.values())

    # -- weights ------------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt:
        receipt = self._publish(_WeightUpdate("policy", version, (inflight,), self._pack(weights)))
        self.version = version
        return receipt

    def update_drafter(self, weights: Weights, version: int) -> Receipt:
        return self._publish(_WeightUpdate("drafter", version, (), self._pack(weights)))

    def _pack(self, weights: Weights) -> list[Bucket]:
        """Copy to host memory, where the weights stay for replicas that restart."""
        return list(pack(weights, self._section.bucket_mb << 20))

    def _publish(self, update: _WeightUpdate) -> Receipt:
        started = time.perf_counter()
        for replica in self._replicas:
            self._collect(replica)
        self._weight_updates[update.kind] = update
        failures = 0  # attempts that failed although no replica died
        while True:
            num_restarts = self.num_restarts
            try:
                receipts = self._transfer(self._replicas, update)
                break
            except (*ACTOR_LOST, ChannelError) as error:
                self._channel = None
                self._call_all("ping")  # recovers the replicas that died
                failures += self.num_restarts == num_restarts
                self._check_attempts(failures, error)
        if len({receipt.checksum for receipt in receipts}) > 1:
            checksums = ", ".join(f"engine {i} {receipt.checksum[:12]}" for i, receipt in enumerate(receipts))
            raise ValueError(
                f"weights of version {update.version}: the rollout engines hold different ones ({checksums}); the "
                "transfer failed, so training stops"
            )
        return replace(receipts[0], seconds=time.perf_counter() - started)

    def _check_attempts(self, failures: int, error: Exception) -> None:
        if failures >= MAX_ATTEMPTS:
            raise ValueError(
                f"weights can't be sent to the rollout engines, within cluster.sync_timeout_s = "
                f"{self._section.sync_timeout_s:g} s or at all: {error}"
            )

    def _transfer(self, replicas: Sequence[_Replica], update: _WeightUpdate) -> list[Receipt]:
        """Broadcast weights to these replicas. Raises if one of them dies during it."""
        is_to_all = len(replicas) == len(self._replicas)
        channel = self._channel if is_to_all else None
        self._channel = None  # kept for the next transfer only if this one succeeds
        channel = channel or self._connect(replicas)
        arguments = self._session, update.kind, update.version, *update.args
        pending = [replica.actor.receive.remote(*arguments) for replica in replicas]

        def check() -> None:
            ended, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            for reference in ended:
                get_result(reference)  # raises if it failed; a replica may also finish before the others

        channel.send(update.buckets, check)
        receipts = [get_result(reference) for reference in pending]
        if is_to_all:
            self._channel = channel
        return receipts

    def _connect(self, replicas: Sequence[_Replica]) -> Channel:
        host = ray.util.get_node_ip_address()
        timeout_s = self._section.sync_timeout_s
        rendezvous, store = open_rendezvous(host, 1 + len(replicas), self._backend, timeout_s)
        pending = [
            replica.actor.connect.remote(self._session, rendezvous, rank) for rank, replica in enumerate(replicas, 1)
        ]
        channel = Channel(rendezvous, 0, host, store)
        for reference in pending:
            get_result(reference)
        return channel

    # -- between steps ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self._call_all("call_engine", "sleep")
        self._asleep = True

    def wake(self) -> None:
        self._call_all("call_engine", "wake")
        self._asleep = False

    def reset_prefix_cache(self) -> None:
        self._call_all("call_engine", "reset_prefix_cache")

    def state_dict(self) -> SpeculationState:
        """Replica 0's parts have the names that a single engine uses; the other replicas' end with their index."""
        parts: dict[str, Any] = {}
        for replica, state_dict in zip(self._replicas, self._call_all("call_engine", "state_dict"), strict=True):
            replica.state_dict = state_dict
            suffix = f"-{replica.index}" if replica.index else ""
            parts |= {part + suffix: state for part, state in state_dict.items()}
        return parts

    def load_state_dict(self, state_dict: SpeculationState) -> None:
        """A replica without parts in `state_dict` starts without state."""
        parts = {tuple(name.partition("-")[::2]): state for name, state in state_dict.items()}
        for replica in self._replicas:
            replica.state_dict = {part: state for (part, i), state in parts.items() if int(i or 0) == replica.index}
            self._call(replica, "call_engine", "load_state_dict", replica.state_dict)

    def drain_trace(self) -> list[StepTrace]:
        return self._traces.drain()

    def close(self) -> None:
        """End the session. The actors stay alive for the next learner."""
        for replica in self._replicas:
            try:
                get_result(replica.actor.end_session.remote(self._session))
            except ACTOR_LOST:
                continue
        self._channel = None


def _empty_completion(request: Request) -> Completion:
    """Of a request that was aborted before it emitted a token."""
    integers, numbers, bytes_ = np.zeros(0, np.int32), np.zeros(0), np.zeros(0, np.uint8)
    return Completion(request, integers, numbers, numbers, integers, bytes_, bytes_, (), "abort")
