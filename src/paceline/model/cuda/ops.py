"""A decoder's arithmetic on a CUDA device: matrix products by the framework, but for large ones of gates
(`gated.py`) and small ones of few tokens (`few.py`), the rest fused. No gradients. What is to be added to the residual
stream may come in parts, float32 [P, T, D], as `halves.py` makes them: their sum is rounded where it is added.

Each kernel rounds where `ops.TorchOps` rounds, so that the two differ by the order of a sum at most.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.attention import Attention
from paceline.model.config import ModelConfig
from paceline.model.cuda import few, gated, halves
from paceline.model.cuda.attention import CudaPagedAttention, Turn, turned
from paceline.model.cuda.early import begin_next, early, wait
from paceline.model.layer import Layer, Linear
from paceline.model.ops import TorchOps

SILU = 1024, 4  # values of a program, warps


class CudaOps(TorchOps):
    is_cuda = True
    narrow: torch.dtype | None = None  # what goes into a head's large products, if that is not as precise as the model

    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        return few.product(x_TK, linear)[1] if few.pays(x_TK, linear) else super().linear(x_TK, linear)

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out = torch.empty(x_TD.shape, dtype=weight_D.dtype, device=x_TD.device)
        _norm[(len(x_TD),)](x_TD, x_TD, weight_D, out, eps, 0, **_sizes(x_TD), PARTS=0, NEXT=False)
        return out

    def summand(self, x_TK: Tensor, linear: Linear) -> Tensor:
        return halves.halves(x_TK, linear) if halves.pays(x_TK, linear) else self.linear(x_TK, linear)

    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x grows by y in place; the norm takes y's memory where it may."""
        dtype = self.narrow or weight_D.dtype
        out = y_TD if y_TD.shape == x_TD.shape and y_TD.dtype == dtype else torch.empty_like(x_TD, dtype=dtype)
        _norm[(len(x_TD),)](
            x_TD, y_TD, weight_D, out, eps, x_TD.numel(), **_sizes(x_TD), PARTS=_num_parts(y_TD),
            NEXT=len(x_TD) == gated.TOKENS,  # whose gates load weights meanwhile
        )  # fmt: skip
        return x_TD, out

    def beside(self, x_TD: Tensor, x_norm_D: Tensor, y_TD: Tensor, y_norm_D: Tensor, eps: float) -> Tensor:
        out = x_TD.new_empty(len(x_TD), 2 * x_TD.shape[1], dtype=self.narrow or x_TD.dtype)
        _beside[(len(x_TD), 2)](x_TD, y_TD, x_norm_D, y_norm_D, out, eps, **_sizes(x_TD))
        return out

    def rounded_sum(self, x_TD: Tensor, y_TD: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(x_TD, dtype=dtype)
        _rounded_sum[(len(x_TD),)](x_TD, y_TD, out, x_TD.numel(), **_sizes(x_TD), PARTS=_num_parts(y_TD))
        return out

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor:
        num_tokens, size = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
        out = gate_up_TI.new_empty(num_tokens, size, dtype=self.narrow or gate_up_TI.dtype)
        block, warps = SILU
        _silu_mul[(num_tokens, triton.cdiv(size, block))](
            gate_up_TI, out, size, BLOCK=block, num_warps=warps, **early(out.device)
        )
        return out

    def gated(self, h_TD: Tensor, gate_up: Linear) -> Tensor:
        if few.pays(h_TD, gate_up):
            return few.product(h_TD, gate_up, gated=True)[1]
        weight = gate_up.weight
        if weight is None or gate_up.bias is not None or gate_up.lora is not None or not gated.pays(h_TD, weight):
            return super().gated(h_TD, gate_up)
        return gated.gated(h_TD, weight)

    def qkv(
        self, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._project(h_TD, layer, config)
        turn = _turn(layer, config, rope)
        return _turned(q, positions_T, turn, turn.q_norm), _turned(k, positions_T, turn, turn.k_norm), v

    def attend(
        self, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor],
        attention: Attention, i: int,
    ) -> Tensor:  # fmt: skip
        if not isinstance(attention, CudaPagedAttention):
            return super().attend(h_TD, layer, config, positions_T, rope, attention, i)
        return attention(i, *self._project(h_TD, layer, config), _turn(layer, config, rope), self.narrow)

    def layer(
        self, layer: Layer, config: ModelConfig, x_TD: Tensor, y_TD: Tensor | None, positions_T: Tensor,
        rope: tuple[Tensor, Tensor], attention: Attention, i: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not isinstance(attention, CudaPagedAttention) or not (
            few.pays(x_TD, layer.qkv) and few.pays(x_TD, layer.gate_up)
        ):
            return super().layer(layer, config, x_TD, y_TD, positions_T, rope, attention, i)
        x, heads = few.product(x_TD, layer.qkv, few.Norm(layer.input_norm, config.norm_eps, y_TD))
        h = self.linear(attention(i, *_parts(heads, config), _turn(layer, config, rope)), layer.o)
        x, h = few.product(x, layer.gate_up, few.Norm(layer.post_norm, config.norm_eps, h), gated=True)
        return x, self.linear(h, layer.down)

    def _project(self, h_TD: Tensor, layer: Layer, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
        return _parts(self.linear(h_TD, layer.qkv), config)


def _parts(heads_TN: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, by heads."""
    num_q, num_kv = config.num_heads, config.num_kv_heads
    heads = heads_TN.view(-1, num_q + 2 * num_kv, config.head_dim)
    q, k, v = heads.split([num_q, num_kv, num_kv], 1)
    return q, k, v


def _turn(layer: Layer, config: ModelConfig, rope: tuple[Tensor, Tensor]) -> Turn:
    return Turn(*rope, layer.q_norm, layer.k_norm, config.norm_eps)


def _turned(x_THE: Tensor, positions_T: Tensor, turn: Turn, norm: Tensor | None) -> Tensor:
    num_tokens, num_heads, dim = x_THE.shape
    out = torch.empty(x_THE.shape, dtype=x_THE.dtype, device=x_THE.device)
    block = 4 if dim <= 128 else 2
    _rotate[(num_tokens, triton.cdiv(num_heads, block))](
        x_THE, out, out if norm is None else norm, turn.cos, turn.sin, positions_T, turn.eps, x_THE.stride(0),
        num_heads, DIM=dim, HEADS=block, NORMS=norm is not None, num_warps=2,
    )  # fmt: skip
    return out


def _num_parts(y: Tensor) -> int:
    return len(y) if y.dim() == 3 else 1


def _sizes(x_TD: Tensor) -> dict[str, Any]:
    width = triton.next_power_of_2(x_TD.shape[1])
    return {"D": x_TD.shape[1], "WIDTH": width, "num_warps": 8 if width >= 4096 else 4, **early(x_TD.device)}


@triton.jit
def _norm(
    x, y, weight, out, eps, part, D: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr,
    NEXT: tl.constexpr,
):  # fmt: skip
    """out = norm(x) · weight, a row per program; with PARTS, x += y before that."""
    if NEXT:
        begin_next(EARLY)
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, WIDTH)
    inside = at < D
    scale = tl.load(weight + at, mask=inside, other=0.0)
    wait(EARLY)
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if PARTS > 0:
        more = _summed(y + row + at, inside, part, scale.dtype, PARTS)
        value = (value.to(tl.float32) + more).to(value.dtype)
        tl.store(x + row + at, value, mask=inside)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide) / D + eps)
    normed = wide * factor * scale.to(tl.float32)
    tl.store(out + row + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _summed(at, inside, part, dtype: tl.constexpr, PARTS: tl.constexpr):
    """In float32, rounded as a product of the weights' dtype is."""
    found = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, PARTS):
        found += tl.load(at + i * part, mask=inside, other=0.0)
    if PARTS > 1:
        found = found.to(dtype).to(tl.float32)
    return found


@triton.jit
def _rounded_sum(
    x, y, out, part, D: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, WIDTH)
    inside = at < D
    wait(EARLY)
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    value += _summed(y + row + at, inside, part, out.dtype.element_ty, PARTS)
    tl.store(out + row + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _beside(x, y, x_weight, y_weight, out, eps, D: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """One of the two per program: of the other nothing is loaded."""
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    left, right = (at < D) & (side == 0), (at < D) & (side == 1)
    scale = tl.load(x_weight + at, mask=left, other=0.0) + tl.load(y_weight + at, mask=right, other=0.0)
    wait(EARLY)
    value = tl.load(x + row * D + at, mask=left, other=0.0) + tl.load(y + row * D + at, mask=right, other=0.0)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide) / D + eps)
    normed = wide * factor * scale.to(tl.float32)
    tl.store(out + (2 * row + side) * D + at, normed.to(out.dtype.element_ty), mask=at < D)


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    wait(EARLY)
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = wide / (1 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out + row * size + at, activated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    heads, out, norm, cos, sin, positions, eps, stride, num_heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """A token and a few of its heads per program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < num_heads
    at = tl.load(positions + token).to(tl.int32) + tl.zeros([HEADS], tl.int32)
    x, y = turned(heads + token * stride, head * DIM, inside, norm, cos, sin, at, eps, DIM, NORMS)
    to = out + (token * num_heads + head[:, None]) * DIM + tl.arange(0, DIM // 2)[None, :]
    tl.store(to, x, mask=inside[:, None])
    tl.store(to + DIM // 2, y, mask=inside[:, None])
