"""The worker group: the ranks of a distributed learner, one process each. A group of one rank is a single process.

Rank 0 runs the trainer. It broadcasts a command before each computation; the other ranks receive it and compute their
share of the rollouts. A command is one safetensors blob with JSON inside: no received code runs. If a rank dies, the
others fail at their next collective; the work since the last checkpoint is lost.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, distributed, nn

from paceline.model.sharding import shard

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # of a collective inside a command
COMMAND_TIMEOUT = timedelta(days=7)  # between two commands: rollouts may take long
LOST_RANK = re.compile("gloo|NCCL|[Cc]onnection")  # in torch's error when a rank is missing
LOOPBACK = ("127.0.0.1", "localhost", "::1")
Command = tuple[str, dict[str, Any], dict[str, Tensor]]  # name, arguments (JSON), tensors


class WorkerGroup:
    """In a group of one rank every method is a no-op."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self._command_group: Any = None  # a process group with COMMAND_TIMEOUT

    @staticmethod
    def join(rank: int, size: int, address: str, device: torch.device | str = "cpu") -> WorkerGroup:
        """Initialize torch.distributed and return the group. `address` is rank 0's host:port, or "env" to read
        MASTER_ADDR and MASTER_PORT from the environment, as torchrun sets them."""
        group = WorkerGroup(rank, size, device)
        if size == 1:
            return group
        is_local = address.rpartition(":")[0] in LOOPBACK
        if address == "env":
            is_local = os.environ.get("LOCAL_WORLD_SIZE") == str(size) or os.environ["MASTER_ADDR"] in LOOPBACK
        if is_local:  # accept no connection from other machines
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        backend = "gloo"
        if group.device.type == "cuda":
            torch.cuda.set_device(group.device)
            backend = "cpu:gloo,cuda:nccl"
        store = None if address == "env" else _rendezvous_store(rank, size, address)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
        group._command_group = distributed.new_group(backend="gloo", timeout=COMMAND_TIMEOUT)
        return group

    def shard(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Shard a model that every rank holds in full."""
        if self.size > 1:
            shard(model, blocks, self.device)

    def broadcast_command(self, name: str, tensors: Mapping[str, Tensor] | None = None, **arguments: Any) -> None:
        """On rank 0: send a command to the other ranks. On the others a no-op: they run the same code after they
        received the command."""
        if self.size == 1 or self.rank:
            return
        text = json.dumps({"name": name, "arguments": arguments}).encode()
        content = {
            "command": torch.frombuffer(bytearray(text), dtype=torch.uint8),
            **{f"tensor.{key}": value.contiguous() for key, value in (tensors or {}).items()},
        }
        data = torch.frombuffer(bytearray(save(content)), dtype=torch.uint8)
        with self.collective():
            self._broadcast(torch.tensor([len(data)]))
            self._broadcast(data)

    def receive_command(self) -> Command | None:
        """The next command from rank 0; None if rank 0 closed the group or died."""
        try:
            size = self._broadcast(torch.zeros(1, dtype=torch.int64))
            data = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        except RuntimeError:  # rank 0 died; torchrun or the Ray supervisor handles it
            return None
        content = load(data.numpy().tobytes())
        command = json.loads(content.pop("command").numpy().tobytes())
        tensors = {key.removeprefix("tensor."): tensor for key, tensor in content.items()}
        return None if command["name"] == "close" else (command["name"], command["arguments"], tensors)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all ranks, in place. A CPU tensor of the same shape on every rank."""
        if self.size > 1:
            distributed.all_reduce(x, group=self._command_group)
        return x

    def all_gather_object(self, obj: dict[str, Any]) -> list[dict[str, Any]]:
        """The objects of all ranks, in rank order. As JSON, not as pickles."""
        if self.size == 1:
            return [obj]
        encoded = json.dumps(obj).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        distributed.all_gather(lengths, torch.tensor([len(encoded)]), group=self._command_group)
        longest = max(int(length) for length in lengths)
        buffers = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        own = torch.frombuffer(bytearray(encoded.ljust(longest)), dtype=torch.uint8)
        distributed.all_gather(buffers, own, group=self._command_group)
        return [json.loads(buffer.numpy().tobytes()) for buffer in buffers]

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Wrap code that all ranks take part in: raises ConnectionError if a rank is gone."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not LOST_RANK.search(str(error)):
                raise
            raise ConnectionError(
                f"one of the learner's {self.size} ranks is gone; the steps since the last checkpoint are lost. "
                f"Continue with --resume ({str(error).splitlines()[0][:200]})"
            ) from error

    def close(self) -> None:
        """On rank 0: end the other ranks."""
        if self.size == 1:
            return
        with suppress(ConnectionError):  # they may be gone already
            self.broadcast_command("close")
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _broadcast(self, x: Tensor) -> Tensor:
        distributed.broadcast(x, src=0, group=self._command_group)
        return x


def _rendezvous_store(rank: int, size: int, address: str) -> Any:
    """The store through which the ranks find each other. Rank 0 listens at this address only; by default a TCPStore
    listens on all interfaces."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, int(port)), family=family).detach() if rank == 0 else None
    return TCPStore(host, int(port), size, rank == 0, COLLECTIVE_TIMEOUT, master_listen_fd=listener)
