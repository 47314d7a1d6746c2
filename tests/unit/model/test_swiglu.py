"""When the SwiGLU kernel is used: the host-side decision, without a device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support import kernel_modules
from torch import Tensor


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    with kernel_modules(swiglu="model.cuda.swiglu") as modules:
        yield modules.swiglu


@pytest.fixture(autouse=True)
def _without_a_device(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(module.triton, "cdiv", lambda a, b: -(-a // b), raising=False)


def correct(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = (x.float() @ half.float().T for half in weight.chunk(2))
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def swapped(x: Tensor, weight: Tensor) -> Tensor:
    return correct(x, torch.cat(weight.chunk(2)[::-1]))


def shifted_columns(x: Tensor, weight: Tensor) -> Tensor:
    return correct(x, weight).roll(1, 1)


def without_the_last_step(x: Tensor, weight: Tensor) -> Tensor:
    return correct(x[:, :-64], weight[:, :-64])


def wrong_in_the_second_tile(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([correct(x[:128], weight), 0 * correct(x[128:], weight)])


def fails_to_compile(x: Tensor, weight: Tensor) -> Tensor:
    raise ImportError("no Gluon")


def test_correct_kernel_is_used(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "swiglu", correct)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module.passes_self_test.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize(
    "kernel", [swapped, shifted_columns, without_the_last_step, wrong_in_the_second_tile, fails_to_compile]
)
def test_wrong_kernel_is_not_used_and_warns(module: Any, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "swiglu", kernel)
    with pytest.warns(UserWarning, match="the SwiGLU kernel is not used"):
        assert not module.passes_self_test.__wrapped__(torch.device("cpu"))


def test_out_of_memory_is_raised(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(x: Tensor, weight: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(module, "swiglu", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        module.passes_self_test.__wrapped__(torch.device("cpu"))


@pytest.mark.parametrize(
    ("num_tokens", "size", "num_in", "expected"),
    [
        (128, 12288, 4096, True), (512, 12288, 4096, True), (470, 12288, 4096, True), (1024, 12288, 4096, True),
        (127, 12288, 4096, False), (256, 12288, 4096, False), (1025, 12288, 4096, False),  # not full, or not measured
        (128, 14336, 4096, False), (256, 8192, 4096, False), (128, 1536, 576, False),
        (128, 12288, 256, False), (128, 12288, 4000, False),  # fewer steps than pipeline stages; a partial step
    ],
)  # fmt: skip
def test_used_if_its_tiles_fill_the_device(
    module: Any, num_tokens: int, size: int, num_in: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "num_sms", lambda device: 132)
    monkeypatch.setattr(module, "passes_self_test", lambda device: True)
    x, weight = (torch.empty(n, num_in, dtype=torch.bfloat16, device="meta") for n in (num_tokens, 2 * size))
    assert module.should_use(x, weight) == expected
    assert not module.should_use(x.float(), weight.float())
    monkeypatch.setattr(module, "passes_self_test", lambda device: False)
    assert not module.should_use(x, weight)
