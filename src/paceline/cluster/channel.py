"""Broadcast weights from one process to many with torch.distributed: gloo through host memory, NCCL between GPUs.

A channel is a process group of its own; torch.distributed's default group is not touched. The ranks connect through a
TCP store that the sender (rank 0) hosts on one address. Invariant: a rank that fails sets a key in the store, so that
no other rank keeps waiting for it. If the store is unreachable, because the sender or the network is down, a timeout
ends the wait.
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
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from paceline.cluster import buckets

STORE_POLL_S = 0.05  # how often a waiting rank reads the store
BROKEN_KEY = "broken"


class ChannelError(Exception):
    """A rank is lost or too slow. This channel is unusable; a new one may work."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks of a channel connect, and with which backend."""

    host: str
    port: int
    world_size: int  # the sender is rank 0
    backend: str  # "gloo" or "nccl"
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Bucket:
    """Several tensors, packed into one buffer."""

    metadata: bytes  # JSON: [name, dtype, shape] of each tensor
    payload: Tensor  # uint8

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return buckets.views(json.loads(self.metadata), self.payload)


def pack(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Copy weights into buckets in host memory."""
    for tensors in buckets.split(weights, max_bytes):
        entries, payload = buckets.write(tensors, lambda size: torch.empty(size, dtype=torch.uint8))
        yield Bucket(json.dumps(entries).encode(), payload)


def open_rendezvous(host: str, world_size: int, backend: str, timeout_s: float) -> tuple[Rendezvous, TCPStore]:
    """Host a store at this address only. TCPStore would listen on all addresses, so it gets a socket that is already
    bound."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port, timeout = listener.getsockname()[1], timedelta(seconds=timeout_s)
    store = TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return Rendezvous(host, port, world_size, backend, timeout_s), store


class Channel:
    """One rank of a channel. The constructor returns once all ranks are connected, or raises ChannelError."""

    def __init__(self, rendezvous: Rendezvous, rank: int, address: str, store: TCPStore | None = None) -> None:
        """`address` is this rank's own address. Only the sender passes `store`."""
        timeout = timedelta(seconds=rendezvous.timeout_s)
        self._device = torch.device("cuda" if rendezvous.backend == "nccl" else "cpu")
        self._timeout_s = rendezvous.timeout_s
        # The pending broadcast. Never keep it in a local variable: an error's traceback would keep it alive.
        self._work: Any = None
        self._group: Any = None
        try:
            self._store = store or TCPStore(rendezvous.host, rendezvous.port, is_master=False, timeout=timeout)
            group_class: Any = ProcessGroupGloo
            if rendezvous.backend == "nccl":
                from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build of torch

                group_class, options = ProcessGroupNCCL, ProcessGroupNCCL.Options()
            else:
                options = group_class._Options()
                options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = timeout
            self._group = group_class(PrefixStore("members", self._store), rank, rendezvous.world_size, options)
        except RuntimeError as error:  # torch raises all its network errors as RuntimeError
            raise ChannelError(f"the ranks of a channel did not connect: {error}") from None

    def send(self, packed: Iterable[Bucket], check: Callable[[], None]) -> None:
        """Send to all other ranks. `check` is called regularly while sending; an exception from it ends the send."""
        try:
            for bucket in packed:
                sizes = torch.tensor([len(bucket.metadata), len(bucket.payload)], device=self._device)
                metadata = torch.frombuffer(bytearray(bucket.metadata), dtype=torch.uint8).to(self._device)
                for part in (sizes, metadata, bucket.payload.to(self._device)):
                    self._broadcast(part, check)
            self._broadcast(torch.zeros(2, dtype=torch.int64, device=self._device), check)
        except BaseException:
            self.close()
            raise

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """The sender's tensors, in order. Each bucket has a new buffer."""
        while True:
            sizes = torch.zeros(2, dtype=torch.int64, device=self._device)
            self._broadcast(sizes, self._check_store)
            metadata_bytes, payload_bytes = sizes.tolist()
            if not metadata_bytes:
                return
            metadata = torch.empty(metadata_bytes, dtype=torch.uint8, device=self._device)
            payload = torch.empty(payload_bytes, dtype=torch.uint8, device=self._device)
            for part in (metadata, payload):
                self._broadcast(part, self._check_store)
            yield from Bucket(metadata.cpu().numpy().tobytes(), payload).tensors()

    def close(self) -> None:
        """Notify waiting ranks and release the process group. Releasing blocks until the pending broadcast ends, so a
        thread does it."""
        with contextlib.suppress(RuntimeError):  # without the sender there is no store, which the others notice
            self._store.set(BROKEN_KEY, "")
        held = [self._work, self._group]
        self._work = self._group = None
        threading.Thread(target=held.clear, daemon=True).start()

    def _check_store(self) -> None:
        try:
            is_broken = self._store.check([BROKEN_KEY])
        except RuntimeError:
            raise ChannelError("the sender of a channel is lost") from None
        if is_broken:
            raise ChannelError("another rank of a channel closed it")

    def _broadcast(self, tensor: Tensor, check: Callable[[], None]) -> None:
        """Poll instead of blocking. A rank may receive through another rank, which may itself wait for a lost one; its
        own connections do not show that."""
        assert self._group is not None, "closed"
        try:
            self._work = self._group.broadcast(tensor, 0)
            self._wait(check)
            self._work.wait()
        except RuntimeError as error:
            raise ChannelError(f"a rank of a channel is lost: {error}") from None

    def _wait(self, check: Callable[[], None]) -> None:
        started = checked = time.monotonic()
        pause_s = 1e-4
        while not self._work.is_completed():
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 5e-3)
            if (now := time.monotonic()) - checked > STORE_POLL_S:
                check()
                checked = now
                if now - started > self._timeout_s:
                    raise ChannelError(f"a broadcast took more than {self._timeout_s:g} s")
