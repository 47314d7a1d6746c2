"""A decoder's arithmetic on a CUDA device: matrix products by the framework, the rest fused. No gradients.

Each kernel rounds where `ops.TorchOps` rounds, so that the two differ by the order of a sum at most.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.model.layer import Layer
from paceline.model.ops import TorchOps


class CudaOps(TorchOps):
    is_cuda = True

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x_TD)
        _norm[(len(x_TD),)](x_TD, x_TD, weight_D, out, eps, **_sizes(x_TD), ADDS=False)
        return out

    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x grows by y in place; the norm takes y's memory."""
        _norm[(len(x_TD),)](x_TD, y_TD, weight_D, y_TD, eps, **_sizes(x_TD), ADDS=True)
        return x_TD, y_TD

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor:
        num_tokens, size = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
        out = gate_up_TI.new_empty(num_tokens, size)
        _silu_mul[(num_tokens, triton.cdiv(size, 1024))](gate_up_TI, out, size, BLOCK=1024, num_warps=4)
        return out

    def qkv(
        self, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_q, num_kv, dim = config.num_heads, config.num_kv_heads, config.head_dim
        heads = self.linear(h_TD, layer.qkv).view(-1, num_q + 2 * num_kv, dim)
        has_norm = layer.q_norm is not None
        block = 4 if dim <= 128 else 2
        _rotate[(len(heads), triton.cdiv(num_q + num_kv, block))](
            heads, layer.q_norm if has_norm else heads, layer.k_norm if has_norm else heads, *rope, positions_T,
            config.norm_eps, heads.stride(0), num_q, num_q + num_kv,
            HALF=dim // 2, WIDTH=triton.next_power_of_2(dim // 2), HEADS=block, NORMS=has_norm, num_warps=2,
        )  # fmt: skip
        return tuple(heads.split([num_q, num_kv, num_kv], 1))


def _sizes(x_TD: Tensor) -> dict[str, Any]:
    width = triton.next_power_of_2(x_TD.shape[1])
    return {"D": x_TD.shape[1], "WIDTH": width, "num_warps": 8 if width >= 4096 else 4}


@triton.jit
def _norm(x, y, weight, out, eps, D: tl.constexpr, WIDTH: tl.constexpr, ADDS: tl.constexpr):
    """out = norm(x) · weight, a row per program; with ADDS, x += y before that."""
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, WIDTH)
    inside = at < D
    scale = tl.load(weight + at, mask=inside, other=0.0)
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(y + row + at, mask=inside, other=0.0)
        value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
        tl.store(x + row + at, value, mask=inside)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide) / D + eps)
    normed = (wide * factor).to(value.dtype)
    tl.store(out + row + at, (normed.to(tl.float32) * scale.to(tl.float32)).to(value.dtype), mask=inside)


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = (wide / (1 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * size + at, (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _rotate(
    heads, q_norm, k_norm, cos, sin, positions, eps, stride, num_q, num_qk,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """Norm (where the model has it) and rotate queries and keys in place: a token and a few heads per program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, WIDTH)[None, :]
    inside = (head < num_qk) & (at < HALF)
    low = heads + token * stride + head * (2 * HALF) + at
    a, b = tl.load(low, mask=inside, other=0.0), tl.load(low + HALF, mask=inside, other=0.0)
    kind = a.dtype
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    if NORMS:
        factor = tl.rsqrt((tl.sum(wide_a * wide_a, 1) + tl.sum(wide_b * wide_b, 1)) / (2 * HALF) + eps)[:, None]
        is_q = head < num_q
        known = at < HALF
        scale_a = tl.where(is_q, tl.load(q_norm + at, mask=known), tl.load(k_norm + at, mask=known))
        scale_b = tl.where(is_q, tl.load(q_norm + HALF + at, mask=known), tl.load(k_norm + HALF + at, mask=known))
        wide_a = ((wide_a * factor).to(kind).to(tl.float32) * scale_a.to(tl.float32)).to(kind).to(tl.float32)
        wide_b = ((wide_b * factor).to(kind).to(tl.float32) * scale_b.to(tl.float32)).to(kind).to(tl.float32)
    turn = tl.load(positions + token) * HALF + at
    c, s = tl.load(cos + turn, mask=at < HALF, other=0.0), tl.load(sin + turn, mask=at < HALF, other=0.0)
    tl.store(low, (wide_a * c - wide_b * s).to(kind), mask=inside)
    tl.store(low + HALF, (wide_b * c + wide_a * s).to(kind), mask=inside)
