"""The terms of LoRA adapters in CUDA kernels: equal to torch's up to rounding, batch-invariant, and the same with a
split base product. Those without an engine also run in Triton's interpreter, without a GPU: TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")
from paceline.model.cuda.adapters import add_adapters, gated_adapters, inner_parts
from paceline.model.layer import Lora, LoraPart
from paceline.model.ops import TorchOps

pytestmark = pytest.mark.gpu
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16  # its products in bfloat16 are of the bits as integers
SHAPES = {
    "q, k, v": (576, 1024, [(0, 576), (576, 192), (768, 256)]),
    "q and v": (1280, 160, [(0, 80), (120, 40)]),
    "one of three": (64, 96, [(32, 32)]),
    "o": (2048, 100, [(0, 100)]),
}
NUMS = (1, 3, 16, 17, 64, 70)


def make(num_in: int, parts: list[tuple[int, int]], rank: int) -> Lora:
    lora = Lora(num_in, [LoraPart(*part) for part in parts], rank, 0.7).to(DEVICE, DTYPE).requires_grad_(False)
    lora.down.copy_(noise(*lora.down.shape, seed=1) * num_in**-0.5)
    lora.up.copy_(noise(*lora.up.shape, seed=2))
    return lora


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def plain(x: Tensor, lora: Lora, y: Tensor) -> Tensor:
    """In float64, rounded where `Lora` says."""
    y = y.double().sum(0).to(DTYPE) if y.dim() == 3 else y
    out = y.double().clone()
    inner = F.linear(x.double(), lora.down.double()).to(DTYPE).double().split(lora.rank, 1)
    for part, own, up in zip(lora.parts, inner, lora.ups(lora.up), strict=True):
        out[:, part.first : part.end] += lora.scale * own @ up.double().T
    return out


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Up to a rounding of the result, and a different rounding of few x A^T."""
    error = (found.double() - expected).abs()
    return bool(error.max() < 0.03 * expected.abs().max() and error.mean() < 3e-3 * expected.abs().mean())


@pytest.mark.parametrize("rank", [3, 16, 80])
@pytest.mark.parametrize("shape", SHAPES)
def test_terms_equal_torch(shape: str, rank: int) -> None:
    num_in, num_out, parts = SHAPES[shape]
    lora = make(num_in, parts, rank)
    for num in NUMS:
        x, y = noise(num, num_in), noise(num, num_out, seed=4)
        expected = plain(x, lora, y)
        assert is_close(lora(x, y), expected), "the reference is wrong"
        found = add_adapters(x, lora, y.clone(), False)
        assert is_close(found, expected)
        rest = [i for i in range(num_out) if not any(part.first <= i < part.end for part in lora.parts)]
        assert torch.equal(found[:, rest], y[:, rest])
    lora.scale *= 1.02
    assert not is_close(add_adapters(x, lora, y.clone(), False), expected), "the comparison finds nothing"


def test_partial_products_are_summed_and_rounded_first() -> None:
    lora = make(1024, [(0, 100)], 8)
    for num in NUMS:
        x, parts = noise(num, 1024), noise(2, num, 100, seed=5).float() * 1.001
        assert is_close(found := add_adapters(x, lora, parts, False), plain(x, lora, parts))
        assert torch.equal(found, add_adapters(x, lora, parts.sum(0).to(DTYPE), False))


@pytest.mark.parametrize("parts", [[(0, 80), (80, 80)], [(0, 80)], [(80, 80)]], ids=str)
def test_gated(parts: list[tuple[int, int]]) -> None:
    lora = make(1280, parts, 8)
    for num in NUMS:
        x, y = noise(num, 1280), noise(num, 160, seed=4)
        expected = TorchOps().silu_mul(plain(x, lora, y).to(DTYPE))
        assert is_close(gated_adapters(x, lora, y, False), expected.double())


@pytest.mark.parametrize("gated", [False, True])
def test_tokens_do_not_depend_on_the_batch(gated: bool) -> None:
    lora = make(1280, [(0, 80), (80, 80)], 16)
    x, y = noise(80, 1280), noise(80, 160, seed=4)
    add: Callable[..., Tensor] = gated_adapters if gated else add_adapters
    whole = add(x, lora, y.clone(), False)
    for num in NUMS:
        assert torch.equal(add(x[:num], lora, y[:num].clone(), False), whole[:num])
        assert torch.equal(add(x[-num:], lora, y[-num:].clone(), False), whole[-num:])


def test_parts_of_the_inputs() -> None:
    assert [inner_parts(num) for num in (37, 576, 1024, 4096, 8960, 12288)] == [1, 1, 2, 8, 16, 24]


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("model", ["smollm2-135m", "qwen3-8b"])
def test_layers_equal_torch(model: str, invariant: bool) -> None:
    """A decoder's operations with adapters, and the kernels of small batches, against plain torch in float32."""
    from dataclasses import replace

    from paceline.bench.random_weights import add_random_adapters, random_decoder
    from paceline.build.model import build_cuda_ops
    from paceline.model.shapes import SHAPES as MODELS

    decoder = random_decoder(replace(MODELS[model], num_layers=1, vocab_size=1024), DTYPE, torch.device(DEVICE))
    add_random_adapters(decoder, 16)
    ops, layer = build_cuda_ops(decoder, invariant), decoder.layers[0]
    for num in (1, 2, 4, 16, 32, 64, 128, 256):
        h, wide = (noise(num, size) for size in (layer.qkv.num_in, layer.down.num_in))
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            x = wide if linear is layer.down else noise(num, linear.num_in)
            assert linear.weight is not None and linear.lora is not None
            expected = plain(x, linear.lora, F.linear(x.double(), linear.weight.double()).to(DTYPE))
            assert is_close(ops.linear(x, linear), expected), num
            y = ops.residual_linear(x, linear) if linear in (layer.o, layer.down) else ops.linear(x, linear)
            assert is_close(y, expected), num
        gate_up = plain(h, layer.gate_up.lora, F.linear(h.double(), layer.gate_up.weight.double()).to(DTYPE))
        assert is_close(ops.gated(h, layer.gate_up), TorchOps().silu_mul(gate_up.to(DTYPE)).double()), num


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_graph_reads_new_adapters() -> None:
    """They are written in place."""
    lora = make(1024, [(0, 100)], 8)
    x, y = noise(4, 1024), noise(4, 100, seed=4)
    out = torch.empty_like(y)

    def step() -> None:
        out.copy_(add_adapters(x, lora, y.clone(), False))

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    lora.up.copy_(noise(*lora.up.shape, seed=9))
    graph.replay()
    assert torch.equal(out, add_adapters(x, lora, y.clone(), False))
