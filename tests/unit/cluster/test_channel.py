"""Weights through a channel. The ranks are threads; tests/cluster uses processes, and kills some."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from paceline.cluster.channel import Channel, ChannelError, Rendezvous, open_rendezvous, pack

HOST = "127.0.0.1"


def weights() -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        ("matrix", torch.randn(7, 5, generator=generator, dtype=torch.float64)),
        ("half", torch.randn(3, generator=generator).bfloat16()),
        ("scalar", torch.tensor(3.5)),
        ("transposed", torch.randn(4, 6, generator=generator).T),
        ("ids", torch.arange(11)),
        ("empty", torch.zeros(0, 3)),
    ]


def equal(one: list[tuple[str, Tensor]], other: list[tuple[str, Tensor]]) -> bool:
    return [name for name, _ in one] == [name for name, _ in other] and all(
        a.dtype == b.dtype and torch.equal(a, b) for (_, a), (_, b) in zip(one, other, strict=True)
    )


class Ranks:
    """The sender in this thread, the receivers in others."""

    def __init__(self, num_receivers: int, timeout_s: float = 20.0) -> None:
        self.pool = ThreadPoolExecutor(num_receivers)
        self.rendezvous, store = open_rendezvous(HOST, 1 + num_receivers, "gloo", timeout_s)
        receivers = [self.pool.submit(Channel, self.rendezvous, i, HOST) for i in range(1, 1 + num_receivers)]
        self.sender = Channel(self.rendezvous, 0, HOST, store)
        self.receivers = [future.result() for future in receivers]

    def receive(self) -> list[Future[list[tuple[str, Tensor]]]]:
        return [self.pool.submit(lambda channel=channel: list(channel.receive())) for channel in self.receivers]


@pytest.mark.parametrize("max_bytes", [1, 200, 1 << 20])
def test_buckets_contain_the_packed_tensors(max_bytes: int) -> None:
    buckets = list(pack(weights(), max_bytes))
    assert equal([pair for bucket in buckets for pair in bucket.tensors()], weights())
    assert len(buckets) == {1: 6, 200: 3, 1 << 20: 1}[max_bytes]


def test_bucket_is_a_copy() -> None:
    sent = weights()
    (bucket,) = pack(sent, 1 << 20)
    sent[0][1].zero_()
    assert equal(list(bucket.tensors()), weights())


def test_all_ranks_receive_all_tensors_twice() -> None:
    ranks = Ranks(3)
    for _ in range(2):
        received = ranks.receive()
        ranks.sender.send(pack(weights(), 200), lambda: None)
        assert all(equal(future.result(10), weights()) for future in received)


def test_store_listens_on_one_address() -> None:
    ranks = Ranks(1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", ranks.rendezvous.port), timeout=2).close()
    socket.create_connection((HOST, ranks.rendezvous.port), timeout=2).close()


def test_receivers_stop_waiting_when_the_sender_fails() -> None:
    """They do not wait for the timeout."""
    ranks, started = Ranks(2, timeout_s=60.0), time.monotonic()
    received = ranks.receive()

    def check() -> None:
        raise ChannelError("a rank died")

    def failing_buckets() -> object:
        yield from pack(weights()[:1], 1)
        check()

    with pytest.raises(ChannelError, match="a rank died"):
        ranks.sender.send(failing_buckets(), lambda: None)
    for future in received:
        with pytest.raises(ChannelError):
            future.result(10)
    assert time.monotonic() - started < 10


def test_sender_calls_check_while_it_waits() -> None:
    """No rank receives; an exception from the check ends the send."""
    ranks = Ranks(1, timeout_s=60.0)

    def check() -> None:
        raise ChannelError("it died")

    with pytest.raises(ChannelError, match="it died"):
        ranks.sender.send(pack([("large", torch.zeros(1 << 24))], 1 << 30), check)
    ranks.receivers.clear()


def test_connecting_times_out() -> None:
    rendezvous, store = open_rendezvous(HOST, 2, "gloo", 1.0)
    with pytest.raises(ChannelError, match="did not connect"):
        Channel(rendezvous, 0, HOST, store)
    with pytest.raises(ChannelError, match="did not connect"):
        Channel(Rendezvous(HOST, 1, 2, "gloo", 1.0), 1, HOST)
