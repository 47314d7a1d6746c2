"""The ranks that share a learner: one process each, or one in all.

Rank 0 runs the loop. The others wait for its orders and do with their share of the rollouts what it does with its own.
An order is safetensors, the name and what else JSON can say among the tensors: nothing that arrives is run. A rank that
dies ends the others at their next order; what is lost is what came after the last checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from paceline.model.sharding import shard

TIMEOUT = timedelta(minutes=10)  # for one exchange in the middle of a call
PATIENCE = timedelta(days=7)  # between two orders: rollouts take their time
LOST = re.compile("gloo|NCCL|[Cc]onnection")  # in what torch says when somebody is missing
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True)
class Order:
    name: str
    labels: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)


class World:
    """A world of one has nobody to talk to, and all of this does nothing."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self._orders: Any = None  # a process group of its own: its patience is longer

    @staticmethod
    def join(rank: int, size: int, address: str, device: torch.device | str = "cpu") -> World:
        """Meet the other ranks. `address` is where rank 0 listens, host:port, or "env" where the environment says it
        (MASTER_ADDR, MASTER_PORT), as torchrun's does."""
        from torch import distributed

        world = World(rank, size, device)
        if size == 1:
            return world
        here = address.rpartition(":")[0] in LOOPBACK
        if address == "env":
            here = os.environ.get("LOCAL_WORLD_SIZE") == str(size) or os.environ["MASTER_ADDR"] in LOOPBACK
        if here:  # nobody outside of this machine is to talk to us
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        backend = "gloo"
        if world.device.type == "cuda":
            torch.cuda.set_device(world.device)
            backend = "cpu:gloo,cuda:nccl"
        store = None if address == "env" else _meet(rank, size, address)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
        world._orders = distributed.new_group(backend="gloo", timeout=PATIENCE)
        return world

    def shard(self, model: nn.Module, blocks: Iterable[nn.Module]) -> None:
        """Divide a model that every rank has whole."""
        if self.size > 1:
            shard(model, blocks, self.device)

    def tell(self, name: str, tensors: Mapping[str, Tensor] | None = None, **labels: Any) -> None:
        """Rank 0: what all are to do now, itself included. The others, when they come here, were told."""
        if self.size == 1 or self.rank:
            return
        text = torch.frombuffer(bytearray(json.dumps({"name": name, "labels": labels}).encode()), dtype=torch.uint8)
        content = {"order": text, **{f"tensor.{key}": value.contiguous() for key, value in (tensors or {}).items()}}
        data = torch.frombuffer(bytearray(save(content)), dtype=torch.uint8)
        with self.together():
            self._broadcast(torch.tensor([len(data)]))
            self._broadcast(data)

    def hear(self) -> Order | None:
        """The next order; None once rank 0 has closed, or is gone."""
        try:
            size = self._broadcast(torch.zeros(1, dtype=torch.int64))
            data = self._broadcast(torch.empty(int(size), dtype=torch.uint8))
        except RuntimeError:  # it is gone, and whoever looks after the ranks knows
            return None
        content = load(data.numpy().tobytes())
        order = json.loads(content.pop("order").numpy().tobytes())
        tensors = {key.removeprefix("tensor."): tensor for key, tensor in content.items()}
        return None if order["name"] == "close" else Order(order["name"], order["labels"], tensors)

    def sum(self, x: Tensor) -> Tensor:
        """Over all ranks, in place: a tensor on the CPU, of the same shape everywhere."""
        if self.size > 1:
            from torch import distributed

            distributed.all_reduce(x, group=self._orders)
        return x

    def gather(self, words: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank has to say, in their order; JSON."""
        if self.size == 1:
            return [words]
        from torch import distributed

        said = json.dumps(words).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        distributed.all_gather(lengths, torch.tensor([len(said)]), group=self._orders)
        longest = max(int(length) for length in lengths)
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        mine = torch.frombuffer(bytearray(said.ljust(longest)), dtype=torch.uint8)
        distributed.all_gather(texts, mine, group=self._orders)
        return [json.loads(text.numpy().tobytes()) for text in texts]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Whatever all ranks must take part in. ConnectionError where one is gone."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or not LOST.search(str(error)):
                raise
            raise ConnectionError(
                f"one of the {self.size} ranks that share the learner is gone; what came after the last checkpoint is "
                f"lost, the rest goes on with --resume ({str(error).splitlines()[0][:200]})"
            ) from error

    def close(self) -> None:
        """Rank 0 lets the others go."""
        if self.size == 1:
            return
        from torch import distributed

        with suppress(ConnectionError):  # they may be gone
            self.tell("close")
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _broadcast(self, x: Tensor) -> Tensor:
        from torch import distributed

        distributed.broadcast(x, src=0, group=self._orders)
        return x


def _meet(rank: int, size: int, address: str) -> Any:
    """The store through which ranks find each other, served by rank 0 at this address alone: left to itself it would
    listen on all that the machine has."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, int(port)), family=family).detach() if rank == 0 else None
    return TCPStore(host, int(port), size, rank == 0, TIMEOUT, master_listen_fd=listener)
