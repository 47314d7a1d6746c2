"""Several engines behind one: requests are spread over Ray's actors, completions come back from any of them.

What always holds: a request is finished once, whatever dies meanwhile. Who asks what of whom is known here alone: an
engine that was restarted gets the weights that the others have, what it had learned, and its unfinished requests again;
with the same noise, hence under rule `coupled` with the same tokens. Every transfer of weights ends with a receipt of
each engine, and they agree.
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

from paceline.cluster.channel import Broken, Bucket, Channel, open_place, pack
from paceline.cluster.ray_calls import LOST, answer, answer_at_last, patient
from paceline.cluster.ray_engine_actor import Greeting, Progress
from paceline.config import ClusterSection
from paceline.engine.interface import Handle, Learned, Weights
from paceline.engine.trace_log import MAX_TRACES, TraceLog
from paceline.types import Completion, Receipt, Request, StepTrace, with_noise_key

PATIENCE_S = 0.1  # an engine works so long before it looks up, if nothing is finished earlier
CROWDED = 1.25  # times the mean number of requests: an engine that has more takes no further problem, even one it knows
ATTEMPTS = 3  # at sending weights while nobody dies


@dataclass(slots=True)
class _Seat:
    """One engine as it is seen from here."""

    number: int
    actor: Any
    greeting: Greeting
    live: dict[int, Request] = field(default_factory=dict)  # unfinished, in the order of their coming
    untold: list[Request] = field(default_factory=list)  # those of them that it has not been told of
    working: ray.ObjectRef | None = None  # its `advance` under way
    learned: Learned = field(default_factory=dict)  # when it was last asked


@dataclass(frozen=True, slots=True)
class _Delivery:
    """Weights as all engines have them."""

    kind: str  # "policy" or "drafter"
    version: int
    args: tuple[Any, ...]  # further ones for the engine's update
    buckets: list[Bucket]


class RayEngine:
    """`note` is told of deaths and restarts."""

    def __init__(
        self, actors: Sequence[Any], tokenizer: Any, section: ClusterSection, backend: str, note: Callable[[str], None]
    ) -> None:
        self.tokenizer, self.version = tokenizer, 0
        self.num_restarts = 0
        self._section, self._backend, self._note = section, backend, note
        self._session = uuid.uuid4().hex
        greeted = [self._greet(actor) for actor in actors]  # they load their models side by side
        self._seats = [_Seat(i, actor, self._greeting(i, greeted[i])) for i, actor in enumerate(actors)]
        self._handles: dict[int, Handle] = {}
        self._welcome: set[tuple[object, ...]] = set()  # prompts and sampling that were taken; siblings' will be too
        self._finished: list[Completion] = []
        self._traces = TraceLog(MAX_TRACES * len(actors))
        self._deliveries: dict[str, _Delivery] = {}
        self._channel: Channel | None = None  # to all of them
        self._asleep = False
        self._num_submitted = 0

    def _greet(self, actor: Any) -> ray.ObjectRef:
        return patient(actor.greet).remote(self._session)

    def _greeting(self, number: int, reference: ray.ObjectRef) -> Greeting:
        return answer_at_last(reference, f"rollout engine {number}", self._section.max_restarts)

    @property
    def dtype(self) -> torch.dtype:
        return self._seats[0].greeting.dtype

    @property
    def crowds(self) -> bool:
        return self._section.layout == "colocated" and any(seat.greeting.crowds for seat in self._seats)

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        """The first of its kind is shown to its engine at once, which may refuse it; the others go along with the next
        call."""
        if request.request_id in self._handles:
            raise ValueError(f"request {request.request_id}: a request with this id is still running")
        request = with_noise_key(request, 0, self._num_submitted)  # here, where submissions have one order
        self._num_submitted += 1
        seat = self._choose(request)
        kind = request.prompt_ids, request.sampling
        if kind not in self._welcome:
            self._show(seat, request)
            self._welcome.add(kind)
        else:
            seat.untold.append(request)
        seat.live[request.request_id] = request
        handle = self._handles[request.request_id] = Handle(request)
        return handle

    def _choose(self, request: Request) -> _Seat:
        """Siblings go to one engine: they share a prompt and a history. A problem has an engine of its own, which knows
        it from earlier epochs, unless that has too much to do; it comes by it through its name, so that a learner
        which starts again finds it at the same."""
        least = min(self._seats, key=lambda seat: len(seat.live))
        if request.problem is None:
            return least
        for seat in self._seats:
            if any(other.problem == request.problem for other in reversed(seat.live.values())):
                return seat
        home = self._seats[zlib.crc32(request.problem.encode()) % len(self._seats)]
        mean = len(self._handles) / len(self._seats)
        return home if len(home.live) <= CROWDED * mean else least

    def _show(self, seat: _Seat, request: Request) -> None:
        refusal = self._ask(seat, "submit", request)
        if refusal is not None:
            raise ValueError(refusal)

    def step(self) -> list[Completion]:
        """Every engine that has something to do is at work; returns when one of them has something to tell."""
        for seat in self._seats:
            if seat.live and seat.working is None:
                seat.working = seat.actor.advance.remote(self._session, seat.untold, PATIENCE_S)
                seat.untold = []
        working = {seat.working: seat for seat in self._seats if seat.working is not None}
        if working and not self._finished:
            ready, _ = ray.wait(list(working), num_returns=1, timeout=1.0)
            if ready:  # and whoever else has come in meanwhile
                ready, _ = ray.wait(list(working), num_returns=len(working), timeout=0)
            for reference in ready:
                self._take(working[reference])
        finished, self._finished = self._finished, []
        return finished

    def _take(self, seat: _Seat) -> None:
        """What its work under way has brought; waits for it."""
        working, seat.working = seat.working, None
        if working is None:
            return
        try:
            progress: Progress = answer(working)
        except LOST:
            self._revive(seat)
            return
        self._traces.add(progress.traces)
        for completion in progress.completions:
            request_id = completion.request.request_id
            if seat.live.pop(request_id, None) is not None:
                self._handles.pop(request_id).completion = completion
                self._finished.append(completion)
        if not self._handles:
            self._welcome.clear()

    def abort(self, request_id: int) -> None:
        """End a request now; its completion has what it emitted so far, which may be all, or nothing if its engine died
        of late. One that is finished and was not returned yet is not returned any more."""
        seat = next((seat for seat in self._seats if request_id in seat.live), None)
        if seat is not None:
            self._take(seat)
        others = [completion for completion in self._finished if completion.request.request_id != request_id]
        if len(others) < len(self._finished):
            self._finished = others
            return
        if seat is None:
            raise ValueError(f"request {request_id} is not running")
        request, handle = seat.live.pop(request_id), self._handles.pop(request_id)
        if request in seat.untold:
            seat.untold.remove(request)
            handle.completion = _nothing(request)
        else:
            handle.completion = self._ask(seat, "abort", request_id) or _nothing(request)

    # -- calls, and engines that do not answer ------------------------------------------------------------------------

    def _ask(self, seat: _Seat, method: str, *args: Any) -> Any:
        while True:
            try:
                return answer(getattr(seat.actor, method).remote(self._session, *args))
            except LOST:
                self._revive(seat)

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        """All at once."""
        references = [getattr(seat.actor, method).remote(self._session, *args) for seat in self._seats]
        answers = []
        for seat, reference in zip(self._seats, references, strict=True):
            try:
                answers.append(answer(reference))
            except LOST:
                self._revive(seat)
                answers.append(self._ask(seat, method, *args))
        return answers

    def _revive(self, seat: _Seat) -> None:
        """Ray starts its process again; here it is told all that it must know."""
        self.num_restarts += 1
        self._channel, seat.working = None, None
        self._note(f"rollout engine {seat.number} died; it starts again, with {len(seat.live)} requests to do over")
        failures = 0
        while True:
            seat.greeting = self._greeting(seat.number, self._greet(seat.actor))
            try:
                if seat.learned:
                    answer(seat.actor.call.remote(self._session, "teach", seat.learned))
                for delivery in self._deliveries.values():
                    self._transfer([seat], delivery)
                if self._asleep:
                    answer(seat.actor.call.remote(self._session, "sleep"))
                break
            except LOST:
                continue  # once more, until Ray gives it up
            except Broken as error:
                failures += 1
                self._check_patience(failures, error)
        seat.untold = list(seat.live.values())

    # -- weights ------------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt:
        receipt = self._deliver(_Delivery("policy", version, (inflight,), self._pack(weights)))
        self.version = version
        return receipt

    def update_drafter(self, weights: Weights, version: int) -> Receipt:
        return self._deliver(_Delivery("drafter", version, (), self._pack(weights)))

    def _pack(self, weights: Weights) -> list[Bucket]:
        """In host memory, where they are kept for an engine that has to start again."""
        return list(pack(weights, self._section.bucket_mb << 20))

    def _deliver(self, delivery: _Delivery) -> Receipt:
        started = time.perf_counter()
        for seat in self._seats:
            self._take(seat)
        self._deliveries[delivery.kind] = delivery
        failures = 0  # without a death
        while True:
            deaths = self.num_restarts
            try:
                receipts = self._transfer(self._seats, delivery)
                break
            except (*LOST, Broken) as error:
                self._channel = None
                self._ask_all("ping")  # whoever is gone does not answer, and is revived
                failures += self.num_restarts == deaths
                self._check_patience(failures, error)
        if len({receipt.checksum for receipt in receipts}) > 1:
            held = ", ".join(f"engine {i} {receipt.checksum[:12]}" for i, receipt in enumerate(receipts))
            raise ValueError(
                f"weights of version {delivery.version}: the rollout engines hold different ones ({held}); the "
                "transfer went wrong, so training stops"
            )
        return replace(receipts[0], seconds=time.perf_counter() - started)

    def _check_patience(self, failures: int, error: Exception) -> None:
        if failures >= ATTEMPTS:
            raise ValueError(
                f"weights can't be sent to the rollout engines, within cluster.sync_timeout_s = "
                f"{self._section.sync_timeout_s:g} s or at all: {error}"
            )

    def _transfer(self, seats: Sequence[_Seat], delivery: _Delivery) -> list[Receipt]:
        """By broadcast; raises if any of them dies meanwhile."""
        to_all = len(seats) == len(self._seats)
        channel = self._channel if to_all else None
        self._channel = None  # until it has stood the test
        channel = channel or self._connect(seats)
        pending = [
            seat.actor.receive.remote(self._session, delivery.kind, delivery.version, *delivery.args) for seat in seats
        ]

        def check() -> None:
            ended, _ = ray.wait(pending, num_returns=len(pending), timeout=0)
            for reference in ended:
                answer(reference)  # raises for one that failed; it may also be done a little before the others

        channel.send(delivery.buckets, check)
        receipts = [answer(reference) for reference in pending]
        if to_all:
            self._channel = channel
        return receipts

    def _connect(self, seats: Sequence[_Seat]) -> Channel:
        host = ray.util.get_node_ip_address()
        place, store = open_place(host, 1 + len(seats), self._backend, self._section.sync_timeout_s)
        pending = [seat.actor.connect.remote(self._session, place, i) for i, seat in enumerate(seats, 1)]
        channel = Channel(place, 0, host, store)
        for reference in pending:
            answer(reference)
        return channel

    # -- between steps ------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        self._ask_all("call", "sleep")
        self._asleep = True

    def wake(self) -> None:
        self._ask_all("call", "wake")
        self._asleep = False

    def forget(self) -> None:
        self._ask_all("call", "forget")

    def learned(self) -> Learned:
        """What engine 0 has learned under the names that a single engine gives it, the others' with their number."""
        parts: dict[str, Any] = {}
        for seat, learned in zip(self._seats, self._ask_all("call", "learned"), strict=True):
            seat.learned = learned
            parts |= {_numbered(part, seat.number): state for part, state in learned.items()}
        return parts

    def teach(self, learned: Learned) -> None:
        """An engine of whom nothing is known begins without."""
        for seat in self._seats:
            names = [name for name in learned if _number(name) == seat.number]
            seat.learned = {name.partition("-")[0]: learned[name] for name in names}
            self._ask(seat, "call", "teach", seat.learned)

    def drain_trace(self) -> list[StepTrace]:
        return self._traces.drain()

    def close(self) -> None:
        """The engines stay, for the next learner."""
        for seat in self._seats:
            try:
                answer(seat.actor.leave.remote(self._session))
            except LOST:
                continue
        self._channel = None


def _numbered(part: str, number: int) -> str:
    return f"{part}-{number}" if number else part


def _number(name: str) -> int:
    return int(name.partition("-")[2] or 0)


def _nothing(request: Request) -> Completion:
    """Of a request that was ended before anything is known of it."""
    integers, numbers, bytes_ = np.zeros(0, np.int32), np.zeros(0), np.zeros(0, np.uint8)
    return Completion(request, integers, numbers, numbers, integers, bytes_, bytes_, (), "abort")
