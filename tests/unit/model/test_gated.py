"""When gates go by a kernel of their own: the host's part of it, without a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import kernel_rooms
from torch import Tensor


@pytest.fixture(scope="module")
def room() -> Iterator[Any]:
    with kernel_rooms(gated="model.cuda.gated") as rooms:
        yield rooms.gated


@pytest.fixture(autouse=True)
def _without_a_device(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(room.triton, "cdiv", lambda a, b: -(-a // b), raising=False)


def right(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x.float() @ half.float().T for half in weight.chunk(2))
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def swapped(x: Tensor, weight: Tensor) -> Tensor:
    return right(x, torch.cat(weight.chunk(2)[::-1]))


def of_other_columns(x: Tensor, weight: Tensor) -> Tensor:
    return right(x, weight).roll(1, 1)


def without_the_last_turn(x: Tensor, weight: Tensor) -> Tensor:
    return right(x[:, :-64], weight[:, :-64])


def wrong_in_the_second_tile(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([right(x[:128], weight), 0 * right(x[128:], weight)])


def not_compiled(x: Tensor, weight: Tensor) -> Tensor:
    raise ImportError("no Gluon")


def test_what_is_right_is_used(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "gated", right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert room.works.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize(
    "kernel", [swapped, of_other_columns, without_the_last_turn, wrong_in_the_second_tile, not_compiled]
)
def test_what_is_not_is_told_and_left_alone(room: Any, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "gated", kernel)
    with pytest.warns(UserWarning, match="gates go by the framework's product"):
        assert not room.works.__wrapped__(torch.device("cpu"))


def test_want_of_memory_is_nothing_of_the_kernels(room: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def hungry(x: Tensor, weight: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(room, "gated", hungry)
    with pytest.raises(torch.OutOfMemoryError):
        room.works.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize(
    ("num_tokens", "size", "depth", "wanted"),
    [
        (128, 12288, 4096, True), (512, 12288, 4096, True), (470, 12288, 4096, True), (1024, 12288, 4096, True),
        (127, 12288, 4096, False), (256, 12288, 4096, False), (1025, 12288, 4096, False),  # not full, or not measured
        (128, 14336, 4096, False), (256, 8192, 4096, False), (128, 1536, 576, False),
        (128, 12288, 256, False), (128, 12288, 4000, False),  # fewer turns than are on their way at once, and a part
    ],
)  # fmt: skip
def test_it_pays_where_tiles_fill_the_device(
    room: Any, num_tokens: int, size: int, depth: int, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "num_processors", lambda device: 132)
    monkeypatch.setattr(room, "works", lambda device: True)
    x, weight = (torch.empty(n, depth, dtype=torch.bfloat16, device="meta") for n in (num_tokens, 2 * size))
    assert room.pays(x, weight) == wanted
    assert not room.pays(x.float(), weight.float())
    monkeypatch.setattr(room, "works", lambda device: False)
    assert not room.pays(x, weight)
