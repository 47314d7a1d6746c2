"""Weights from one process to many, by torch.distributed's broadcast: gloo through host memory, NCCL between GPUs.

A channel is a process group of its own; torch.distributed's global one is not touched. The members meet at a store that
the sender keeps, bound to one address. Always: whoever sees that something is wrong says so in the store, so that
nobody waits for a member that is gone; and where nobody can say so any more, because the sender is gone or the network
is, there is a timeout.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

ALIGNMENT = 16  # bytes: a tensor can be looked at in place wherever it begins
LOOK_S = 0.05  # how often a member that waits looks into the store
BROKEN = "broken"


class Broken(Exception):
    """A member is gone or too slow; this channel is of no use any more, another one may be."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where members meet, and how they talk."""

    host: str
    port: int
    num_members: int  # the sender is number 0
    backend: str  # "gloo" or "nccl"
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors end to end, as they travel."""

    labels: bytes  # JSON: [name, dtype, shape] of each
    payload: Tensor  # uint8

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        start = 0
        for name, dtype_name, shape in json.loads(self.labels):
            dtype = getattr(torch, dtype_name)
            end = start + prod(shape) * dtype.itemsize
            yield name, self.payload[start:end].view(dtype).view(shape)
            start = _aligned(end)


def pack(weights: Iterable[tuple[str, Tensor]], max_bytes: int, device: torch.device | str = "cpu") -> Iterator[Bucket]:
    """Copies in buckets of up to max_bytes; a tensor that is larger has one of its own."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > max_bytes:
            yield _bucket(held, device)
            held, size = [], 0
        held.append((name, tensor))
        size += _aligned(tensor.nbytes)
    if held:
        yield _bucket(held, device)


def _bucket(held: list[tuple[str, Tensor]], device: torch.device | str) -> Bucket:
    labels = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in held]
    payload = torch.empty(sum(_aligned(tensor.nbytes) for _, tensor in held), dtype=torch.uint8, device=device)
    bucket = Bucket(json.dumps(labels).encode(), payload)
    for (_, place), (_, tensor) in zip(bucket.tensors(), held, strict=True):
        place.copy_(tensor.detach())
    return bucket


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def open_place(host: str, num_members: int, backend: str, timeout_s: float) -> tuple[Place, TCPStore]:
    """A place to meet at this address and no other. torch would listen everywhere; here it gets a socket that is
    bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return Place(host, port, num_members, backend, timeout_s), store


class Channel:
    """One member of it. It is there once all members are, or not at all (Broken)."""

    def __init__(self, place: Place, number: int, address: str, store: TCPStore | None = None) -> None:
        """`address` is this member's own; `store` is the sender's."""
        timeout = timedelta(seconds=place.timeout_s)
        self._device = torch.device("cuda" if place.backend == "nccl" else "cpu")
        self._deadline_s = place.timeout_s
        self._work: Any = None  # under way; never in a local variable, where an error's traceback would keep it alive
        self._group: Any = None
        try:
            self._store = store or TCPStore(place.host, place.port, is_master=False, timeout=timeout)
            names = PrefixStore("members", self._store)
            if place.backend == "nccl":
                from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build of torch

                options: Any = ProcessGroupNCCL.Options()
                options._timeout = timeout
                self._group = ProcessGroupNCCL(names, number, place.num_members, options)
            else:
                options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
                options._devices = [ProcessGroupGloo.create_device(hostname=address)]
                options._timeout = timeout
                self._group = ProcessGroupGloo(names, number, place.num_members, options)
        except RuntimeError as error:  # torch's own errors of the network are all of this kind
            raise Broken(f"the members of a channel did not meet: {error}") from None

    @property
    def device(self) -> torch.device:
        """Where a payload must lie."""
        return self._device

    def send(self, buckets: Iterable[Bucket], check: Callable[[], None]) -> None:
        """To all members. `check` is called now and then; what it raises ends the sending."""
        try:
            for bucket in buckets:
                sizes = torch.tensor([len(bucket.labels), len(bucket.payload)], device=self._device)
                labels = torch.frombuffer(bytearray(bucket.labels), dtype=torch.uint8).to(self._device)
                for part in (sizes, labels, bucket.payload.to(self._device)):
                    self._broadcast(part, check)
            self._broadcast(torch.zeros(2, dtype=torch.int64, device=self._device), check)
        except BaseException:
            self.close()
            raise

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """What the sender sends, in order, each in memory of its own."""
        while True:
            sizes = torch.zeros(2, dtype=torch.int64, device=self._device)
            self._broadcast(sizes, self._look)
            num_labels, num_bytes = sizes.tolist()
            if not num_labels:
                return
            labels = torch.empty(num_labels, dtype=torch.uint8, device=self._device)
            payload = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            for part in (labels, payload):
                self._broadcast(part, self._look)
            yield from Bucket(labels.cpu().numpy().tobytes(), payload).tensors()

    def close(self) -> None:
        """Tell all who wait, and let go. That takes as long as what is under way, so nobody waits for it."""
        with contextlib.suppress(RuntimeError):  # where the sender is gone, its store is too, and that tells them
            self._store.set(BROKEN, "")
        held = [self._work, self._group]
        self._work = self._group = None
        threading.Thread(target=held.clear, daemon=True).start()

    def _look(self) -> None:
        try:
            broken = self._store.check([BROKEN])
        except RuntimeError:
            raise Broken("the sender of a channel is gone") from None
        if broken:
            raise Broken("the sender of a channel gave up")

    def _broadcast(self, tensor: Tensor, check: Callable[[], None]) -> None:
        """Waits in small pieces: a member that only looked at its own connections would not see that another one, who
        is to pass something on to it, is waiting for somebody who is gone."""
        assert self._group is not None, "closed"
        try:
            self._work = self._group.broadcast(tensor, 0)
            self._wait(check)
            self._work.wait()
        except RuntimeError as error:
            raise Broken(f"a member of a channel is gone: {error}") from None

    def _wait(self, check: Callable[[], None]) -> None:
        began = looked = time.monotonic()
        pause_s = 1e-4
        while not self._work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)
            if (now := time.monotonic()) - looked > LOOK_S:
                check()
                looked = now
                if now - began > self._deadline_s:
                    raise Broken(f"a broadcast took more than {self._deadline_s:g} s")
