"""Weights through a channel. Its members are threads here; tests/cluster has processes, and kills them."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from paceline.cluster.channel import Broken, Channel, Place, open_place, pack

HOST = "127.0.0.1"


def weights() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("matrix", torch.randn(7, 5, generator=generator, dtype=torch.float64)),
        ("half", torch.randn(3, generator=generator).bfloat16()),
        ("scalar", torch.tensor(3.5)),
        ("transposed", torch.randn(4, 6, generator=generator).T),
        ("ids", torch.arange(11)),
        ("nothing", torch.zeros(0, 3)),
    ]


def same(one: list[tuple[str, Tensor]], other: list[tuple[str, Tensor]]) -> bool:
    return [name for name, _ in one] == [name for name, _ in other] and all(
        a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True)
    )


class Members:
    """A sender here, the others in threads."""

    def __init__(self, num_receivers: int, timeout_s: float = 20.0) -> None:
        self.pool = ThreadPoolExecutor(num_receivers)
        self.place, store = open_place(HOST, 1 + num_receivers, "gloo", timeout_s)
        joined = [self.pool.submit(Channel, self.place, i, HOST) for i in range(1, 1 + num_receivers)]
        self.sender = Channel(self.place, 0, HOST, store)
        self.receivers = [future.result() for future in joined]

    def receive(self) -> list[Future[list[tuple[str, Tensor]]]]:
        return [self.pool.submit(lambda channel=channel: list(channel.receive())) for channel in self.receivers]


@pytest.mark.parametrize("max_bytes", [1, 200, 1 << 20])
def test_buckets_are_what_went_in(max_bytes: int) -> None:
    buckets = list(pack(weights(), max_bytes))
    assert same([pair for bucket in buckets for pair in bucket.tensors()], weights())
    assert len(buckets) == {1: 6, 200: 3, 1 << 20: 1}[max_bytes]


def test_a_bucket_is_a_copy() -> None:
    sent = weights()
    (bucket,) = pack(sent, 1 << 20)
    sent[0][1].zero_()
    assert same(list(bucket.tensors()), weights())


def test_everybody_gets_everything_twice() -> None:
    members = Members(3)
    for _ in range(2):
        received = members.receive()
        members.sender.send(pack(weights(), 200), lambda: None)
        assert all(same(future.result(10), weights()) for future in received)


def test_the_place_is_at_this_address_alone() -> None:
    members = Members(1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", members.place.port), timeout=2).close()
    socket.create_connection((HOST, members.place.port), timeout=2).close()


def test_who_waits_is_told_when_the_sender_gives_up() -> None:
    """Long before the timeout."""
    members, started = Members(2, timeout_s=60.0), time.monotonic()
    received = members.receive()

    def check() -> None:
        raise Broken("somebody died")

    def slowly() -> object:
        yield from pack(weights()[:1], 1)
        check()

    with pytest.raises(Broken, match="somebody died"):
        members.sender.send(slowly(), lambda: None)
    for future in received:
        with pytest.raises(Broken):
            future.result(10)
    assert time.monotonic() - started < 10


def test_the_sender_looks_around_while_it_waits() -> None:
    """Nobody receives; what the check raises is what ends the sending."""
    members = Members(1, timeout_s=60.0)

    def check() -> None:
        raise Broken("it died")

    with pytest.raises(Broken, match="it died"):
        members.sender.send(pack([("large", torch.zeros(1 << 24))], 1 << 30), check)
    members.receivers.clear()


def test_who_does_not_come_is_not_waited_for_long() -> None:
    place, store = open_place(HOST, 2, "gloo", 1.0)
    with pytest.raises(Broken, match="did not meet"):
        Channel(place, 0, HOST, store)
    with pytest.raises(Broken, match="did not meet"):
        Channel(Place(HOST, 1, 2, "gloo", 1.0), 1, HOST)
