"""A decoder's operations for training on a CUDA device: fused Triton kernels with gradients.

Matrix products and attention are torch's. Each kernel rounds where `ops.TorchOps` rounds. Kernels are deterministic:
no atomics, no tuning at run time. A gradient that is a sum over tokens is summed in two stages: each program writes
the sum over its TOKENS tokens, and torch adds those of all programs.

Kept for the backward pass are the residual stream, the outputs of norms, of the qkv and gate_up products and of
attention. Queries, keys, values, norms' factors and silu(gate) · up are computed again, which takes little time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import Attention, VarlenAttention
from paceline.model.config import ModelConfig
from paceline.model.flash import flash_backward, flash_forward
from paceline.model.layer import Layer, Linear
from paceline.model.ops import TorchOps
from paceline.model.rope import Tables

TOKENS = 8  # tokens per program of a kernel that sums over tokens
SILU_BLOCK = 1024


class TrainOps(TorchOps):
    is_cuda = True

    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        lora = linear.lora
        return super().linear(x_TK, linear) if lora is None or not lora.enabled else _linear(x_TK, linear)

    def mlp(self, h_TD: Tensor, layer: Layer) -> Tensor:
        return _linear(self.linear(h_TD, layer.gate_up), layer.down, gated=True)

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        h: Tensor = _Norm.apply(x_TD, weight_D, eps)
        return h

    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, h = _AddNorm.apply(x_TD, y_TD, weight_D, eps)
        return x, h

    def attend(
        self, h_TD: Tensor, layer: Layer, positions_T: Tensor, rope: Tables, attention: Attention, i: int
    ) -> Tensor:
        if not isinstance(attention, VarlenAttention):
            return super().attend(h_TD, layer, positions_T, rope, attention, i)
        heads = self.linear(h_TD, layer.qkv)
        transform = _QKVTransform(positions_T, rope, attention, layer.config)
        out: Tensor = _Attention.apply(heads, layer.q_norm, layer.k_norm, transform)
        return out


def _linear(x: Tensor, linear: Linear, gated: bool = False) -> Tensor:
    weight, lora = linear.weight, linear.lora
    assert weight is not None
    adapter = (None, None, 0.0) if lora is None or not lora.enabled else (lora.down, lora.up, lora.scale)
    y: Tensor = _Linear.apply(x, weight, linear.bias, *adapter, gated)
    return y


class _Linear(torch.autograd.Function):
    """a W^T + b, and with an adapter + scale · (a A^T) B^T, for a = x or, if `gated`, a = silu(gate) · up with x =
    [gate, up]. The adapter's term is added inside a matrix product, in both passes. If gated, x is kept for the
    backward pass and a is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, down_RK: Tensor | None, up_NR: Tensor | None,
        scale: float, gated: bool,
    ) -> Tensor:  # fmt: skip
        a_TK = _silu_mul_forward(x) if gated else x
        y, inner_TR = F.linear(a_TK, weight_NK, bias_N), None
        if down_RK is not None and up_NR is not None:
            inner_TR = a_TK @ down_RK.T
            y.addmm_(inner_TR, up_NR.T, alpha=scale)
        ctx.save_for_backward(x, weight_NK, down_RK, up_NR, inner_TR)
        ctx.scale, ctx.gated = scale, gated
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NK, down_RK, up_NR, inner_TR = ctx.saved_tensors
        grad_TN = grads[0]
        _, wants_weight, wants_bias, wants_down, wants_up = ctx.needs_input_grad[:5]
        x_grad, inner_grad = grad_TN @ weight_NK, None
        if down_RK is not None:
            inner_grad = (grad_TN @ up_NR) * ctx.scale
            x_grad.addmm_(inner_grad, down_RK)
        x_grad, a_TK = _silu_mul_backward(x, x_grad) if ctx.gated else (x_grad, x)
        return (
            x_grad,
            grad_TN.T @ a_TK if wants_weight else None,
            grad_TN.sum(0) if wants_bias else None,
            inner_grad.T @ a_TK if wants_down and inner_grad is not None else None,
            (grad_TN.T @ inner_TR) * ctx.scale if wants_up else None,
            None,
            None,
        )


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        x, h = _norm_forward(x_TD, None, weight_D, eps)
        ctx.save_for_backward(x, weight_D)
        ctx.eps = eps
        return h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, weight_D = ctx.saved_tensors
        x_grad, _, weight_grad = _norm_backward(None, grads[0], x_TD, weight_D, ctx.eps, ctx.needs_input_grad[1])
        return x_grad, weight_grad, None


class _AddNorm(torch.autograd.Function):
    """x + y, and its norm."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, h = _norm_forward(x_TD, y_TD, weight_D, eps)
        ctx.save_for_backward(x, weight_D)
        ctx.eps, ctx.y_dtype = eps, y_TD.dtype
        ctx.set_materialize_grads(False)
        return x, h

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x_grad, h_grad = grads
        if h_grad is None:
            return x_grad, None if x_grad is None else x_grad.to(ctx.y_dtype), None, None
        x_TD, weight_D = ctx.saved_tensors
        wants_weight = ctx.needs_input_grad[2]
        return *_norm_backward(x_grad, h_grad, x_TD, weight_D, ctx.eps, wants_weight, ctx.y_dtype), None


class _Attention(torch.autograd.Function):
    """From the output of the qkv product to attention's output [T, H * E]: q and k norms, RoPE, attention."""

    @staticmethod
    def forward(
        ctx: Any, qkv_TN: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, transform: _QKVTransform
    ) -> Tensor:  # fmt: skip
        out, logsumexp = flash_forward(*transform.forward(qkv_TN, q_norm, k_norm), transform.attention.segments)
        ctx.save_for_backward(qkv_TN, q_norm, k_norm, out, logsumexp)
        ctx.transform = transform
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv_TN, q_norm, k_norm, out, logsumexp = ctx.saved_tensors
        transform, wants_norms = ctx.transform, ctx.needs_input_grad[1]
        q, k, v = transform.forward(qkv_TN, q_norm, k_norm)
        qkv_grads = flash_backward(grads[0].view_as(out), q, k, v, out, logsumexp, transform.attention.segments)
        return *transform.backward(qkv_TN, q_norm, k_norm, qkv_grads, wants_norms), None


@dataclass(slots=True, frozen=True)
class _QKVTransform:
    """From the output of the qkv product to q [T, H, E], and k and v [K, G, E]: q and k norms, RoPE, and copies of
    shared prefixes."""

    positions_T: Tensor
    rope: Tables
    attention: VarlenAttention
    config: ModelConfig

    def forward(
        self, qkv_TN: Tensor, q_norm: Tensor | None, k_norm: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        config, attention = self.config, self.attention
        num_kv = config.num_kv_heads
        q = qkv_TN.new_empty(len(qkv_TN), config.num_heads, config.head_dim)
        kv = qkv_TN.new_empty(len(attention.token_K), 2 * num_kv, config.head_dim)
        _qkv_forward[(len(qkv_TN),)](
            qkv_TN, q, kv, _or(q_norm, q), _or(k_norm, q), *self.rope, self.positions_T, attention.copies_start,
            attention.copies_K, config.norm_eps, **self._options(qkv_TN),
        )  # fmt: skip
        return q, kv[:, :num_kv], kv[:, num_kv:]

    def backward(
        self, qkv_TN: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, grads: tuple[Tensor, Tensor, Tensor],
        wants_norms: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """The gradients of the qkv product's output and of the norms' weights."""
        config, attention = self.config, self.attention
        num_programs = triton.cdiv(len(qkv_TN), TOKENS)
        qkv_grad = torch.empty_like(qkv_TN)
        size = (num_programs, 2, config.head_dim) if wants_norms else (0,)
        norm_grads = qkv_TN.new_empty(size, dtype=_acc_dtype(qkv_TN))
        _qkv_backward[(num_programs,)](
            qkv_TN, *(grad.contiguous() for grad in grads), qkv_grad, norm_grads,
            _or(q_norm, qkv_TN), _or(k_norm, qkv_TN), *self.rope, self.positions_T, attention.copies_start,
            attention.copies_K, config.norm_eps, len(qkv_TN), **self._options(qkv_TN), WANTS_NORMS=wants_norms,
            TOKENS=TOKENS,
        )  # fmt: skip
        if not wants_norms:
            return qkv_grad, None, None
        q_norm_grad, k_norm_grad = norm_grads.sum(0).to(qkv_TN.dtype)
        return qkv_grad, q_norm_grad, k_norm_grad

    def _options(self, qkv_TN: Tensor) -> dict[str, Any]:
        config = self.config
        num_heads = triton.next_power_of_2(config.num_heads + 2 * config.num_kv_heads)
        return {
            "NUM_Q": config.num_heads, "NUM_KV": config.num_kv_heads, "DIM": config.head_dim, "HEADS": num_heads,
            "HAS_NORM": config.qk_norm, "ACC": _acc(qkv_TN),
            "num_warps": 8 if num_heads * config.head_dim > 4096 else 4,
        }  # fmt: skip


def _or(norm: Tensor | None, other: Tensor) -> Tensor:
    """A pointer for a kernel; without norms it is not read."""
    return other if norm is None else norm


def _silu_mul_forward(gate_up: Tensor) -> Tensor:
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    grid = num_tokens, triton.cdiv(size, SILU_BLOCK)
    _silu_mul[grid](gate_up, out, size, ACC=_acc(out), BLOCK=SILU_BLOCK)
    return out


def _silu_mul_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up, and silu(gate) · up again."""
    gate_up_grad, out, size = torch.empty_like(gate_up), torch.empty_like(grad), grad.shape[1]
    grid = len(gate_up), triton.cdiv(size, SILU_BLOCK)
    _silu_mul_grad[grid](gate_up, grad, gate_up_grad, out, size, ACC=_acc(grad), BLOCK=SILU_BLOCK)
    return gate_up_grad, out


def _norm_forward(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its norm."""
    x_TD = x_TD.contiguous()
    h = torch.empty(x_TD.shape, dtype=weight_D.dtype, device=x_TD.device)
    total = x_TD if y_TD is None else torch.empty_like(x_TD)
    addend = x_TD if y_TD is None else y_TD.contiguous()
    _add_norm[(len(h),)](x_TD, addend, weight_D, total, h, eps, **_row_options(x_TD), HAS_Y=y_TD is not None)
    return total, h


def _norm_backward(
    x_grad: Tensor | None, h_grad: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float, wants_weight: bool,
    y_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of the norm's input x, which includes `x_grad`; the same in `y_dtype`, the dtype of the term that
    was added; the gradient of the weight."""
    num_programs = triton.cdiv(len(x_TD), TOKENS)
    out = torch.empty_like(x_TD)
    y_grad = out if y_dtype is None or y_dtype == out.dtype else torch.empty_like(out, dtype=y_dtype)
    partial = x_TD.new_empty((num_programs, x_TD.shape[1]) if wants_weight else (0,), dtype=_acc_dtype(x_TD))
    _add_norm_backward[(num_programs,)](
        out if x_grad is None else x_grad.contiguous(), h_grad.contiguous(), x_TD, weight_D, out, y_grad, partial,
        eps, len(x_TD), **_row_options(x_TD), HAS_X_GRAD=x_grad is not None, HAS_Y=y_grad is not out,
        WANTS_WEIGHT=wants_weight, TOKENS=TOKENS,
    )  # fmt: skip
    weight_grad = partial.sum(0).to(weight_D.dtype) if wants_weight else None
    return out, None if y_dtype is None else y_grad, weight_grad


def _row_options(x_TD: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that computes with whole rows of x."""
    width = triton.next_power_of_2(x_TD.shape[1])
    return {"D": x_TD.shape[1], "WIDTH": width, "ACC": _acc(x_TD), "num_warps": 8 if width >= 4096 else 4}


def _acc(x: Tensor) -> Any:
    """Triton's dtype to compute in."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def _acc_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@triton.jit
def _add_norm(
    x, y, weight, total, h, eps, D: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, HAS_Y: tl.constexpr
):  # fmt: skip
    """One row per program: total = x + y, h = norm(total) · weight."""
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, WIDTH)
    inside = at < D
    value = tl.load(x + row + at, mask=inside, other=0.0).to(ACC)
    if HAS_Y:
        value += tl.load(y + row + at, mask=inside, other=0.0).to(ACC)
        tl.store(total + row + at, value, mask=inside)
    factor = 1 / tl.sqrt(tl.sum(value * value) / D + eps)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(ACC)
    tl.store(h + row + at, (value * factor * scale).to(h.dtype.element_ty), mask=inside)


@triton.jit
def _add_norm_backward(
    x_grad, h_grad, x, weight, out, y_grad, partial, eps, num_rows,
    D: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr, HAS_X_GRAD: tl.constexpr, HAS_Y: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS rows per program. With n = x · factor and g = h_grad · weight:
    out = x_grad + factor · (g - n · mean(g n)). `partial` gets the sum over the rows of h_grad · n."""
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    inside = at < D
    scale = tl.load(weight + at, mask=inside, other=0.0).to(ACC)
    total = tl.zeros([WIDTH], ACC)
    for i in range(TOKENS):
        row = program * TOKENS + i
        valid = inside & (row < num_rows)
        value = tl.load(x + row * D + at, mask=valid, other=0.0).to(ACC)
        grad = tl.load(h_grad + row * D + at, mask=valid, other=0.0).to(ACC)
        factor = 1 / tl.sqrt(tl.sum(value * value) / D + eps)
        normed = value * factor
        if WANTS_WEIGHT:
            total += grad * normed
        grad *= scale
        result = factor * (grad - normed * (tl.sum(grad * normed) / D))
        if HAS_X_GRAD:
            result += tl.load(x_grad + row * D + at, mask=valid, other=0.0).to(ACC)
        tl.store(out + row * D + at, result.to(out.dtype.element_ty), mask=valid)
        if HAS_Y:
            tl.store(y_grad + row * D + at, result.to(y_grad.dtype.element_ty), mask=valid)
    if WANTS_WEIGHT:
        tl.store(partial + program * D + at, total, mask=inside)


@triton.jit
def _silu_mul(gate_up, out, size, ACC: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0).to(ACC)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0).to(ACC)
    tl.store(out + row * size + at, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_grad(gate_up, grad, gate_up_grad, out, size, ACC: tl.constexpr, BLOCK: tl.constexpr):
    """With s = sigmoid(gate): d silu(gate) / d gate = s · (1 + gate · (1 - s))."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    start = row * 2 * size + at
    gate = tl.load(gate_up + start, mask=inside, other=0.0).to(ACC)
    up = tl.load(gate_up + start + size, mask=inside, other=0.0).to(ACC)
    out_grad = tl.load(grad + row * size + at, mask=inside, other=0.0).to(ACC)
    sigmoid = 1 / (1 + tl.exp(-gate))
    gate_grad = out_grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    silu = gate * sigmoid
    up_grad = out_grad * silu
    tl.store(out + row * size + at, (silu * up).to(out.dtype.element_ty), mask=inside)
    tl.store(gate_up_grad + start, gate_grad.to(gate_up_grad.dtype.element_ty), mask=inside)
    tl.store(gate_up_grad + start + size, up_grad.to(gate_up_grad.dtype.element_ty), mask=inside)


@triton.jit
def _load_factors(
    x, y, head, q_norm, k_norm, cos, sin, position, eps,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HAS_NORM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """For the heads' halves x and y [HEADS, DIM / 2]: the norm's factor [HEADS, 1] and weights [HEADS, DIM / 2], cos
    and sin. Values have no norm and are not rotated: factor, weights and cos are 1, sin is 0."""
    e = tl.arange(0, DIM // 2)[None, :]
    is_q, is_v = (head < NUM_Q)[:, None], (head >= NUM_Q + NUM_KV)[:, None]
    c = tl.where(is_v, 1.0, tl.load(cos + position * (DIM // 2) + e).to(ACC))
    s = tl.where(is_v, 0.0, tl.load(sin + position * (DIM // 2) + e).to(ACC))
    if HAS_NORM:
        factor = 1 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
        factor = tl.where(is_v, 1.0, factor)
        q_x, k_x = tl.load(q_norm + e).to(ACC), tl.load(k_norm + e).to(ACC)
        q_y, k_y = tl.load(q_norm + DIM // 2 + e).to(ACC), tl.load(k_norm + DIM // 2 + e).to(ACC)
        scale_x = tl.where(is_v, 1.0, tl.where(is_q, q_x, k_x))
        scale_y = tl.where(is_v, 1.0, tl.where(is_q, q_y, k_y))
    else:
        factor = tl.full(is_v.shape, 1.0, ACC)
        scale_x = tl.full(x.shape, 1.0, ACC)
        scale_y = scale_x
    return factor, scale_x, scale_y, c, s


@triton.jit
def _qkv_forward(
    heads, q, kv, q_norm, k_norm, cos, sin, positions, copies_start, copies, eps,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """One token per program. Its keys and values are written to all their copies."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    e = tl.arange(0, DIM // 2)[None, :]
    at = token * (NUM_Q + 2 * NUM_KV) * DIM + head[:, None] * DIM + e
    inside = (head < NUM_Q + 2 * NUM_KV)[:, None]
    x = tl.load(heads + at, mask=inside, other=0.0).to(ACC)
    y = tl.load(heads + at + DIM // 2, mask=inside, other=0.0).to(ACC)
    position = tl.load(positions + token)
    factor, scale_x, scale_y, c, s = _load_factors(
        x, y, head, q_norm, k_norm, cos, sin, position, eps, NUM_Q, NUM_KV, DIM, HAS_NORM, ACC
    )
    x, y = x * factor * scale_x, y * factor * scale_y
    dtype = q.dtype.element_ty
    x, y = (x * c - y * s).to(dtype), (y * c + x * s).to(dtype)
    to_q = q + (token * NUM_Q + head[:, None]) * DIM + e
    is_q = (head < NUM_Q)[:, None]
    tl.store(to_q, x, mask=is_q)
    tl.store(to_q + DIM // 2, y, mask=is_q)
    for i in range(tl.load(copies_start + token), tl.load(copies_start + token + 1)):
        row = tl.load(copies + i).to(tl.int64)
        to_kv = kv + (row * 2 * NUM_KV + head[:, None] - NUM_Q) * DIM + e
        tl.store(to_kv, x, mask=inside & (head >= NUM_Q)[:, None])
        tl.store(to_kv + DIM // 2, y, mask=inside & (head >= NUM_Q)[:, None])


@triton.jit
def _qkv_backward(
    heads, q_grad, k_grad, v_grad, qkv_grad, norm_grads, q_norm, k_norm, cos, sin, positions, copies_start, copies,
    eps, num_tokens,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
    ACC: tl.constexpr, WANTS_NORMS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens per program. The gradients of a key's or value's copies are added in order."""
    program = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    e = tl.arange(0, DIM // 2)[None, :]
    is_q, is_v = (head < NUM_Q)[:, None], (head >= NUM_Q + NUM_KV)[:, None]
    inside = (head < NUM_Q + 2 * NUM_KV)[:, None]
    is_k = (head >= NUM_Q)[:, None] & (head < NUM_Q + NUM_KV)[:, None]
    total_x, total_y = tl.zeros([HEADS, DIM // 2], ACC), tl.zeros([HEADS, DIM // 2], ACC)
    for i in range(TOKENS):
        token = program * TOKENS + i
        if token < num_tokens:
            at = token * (NUM_Q + 2 * NUM_KV) * DIM + head[:, None] * DIM + e
            x = tl.load(heads + at, mask=inside, other=0.0).to(ACC)
            y = tl.load(heads + at + DIM // 2, mask=inside, other=0.0).to(ACC)
            position = tl.load(positions + token)
            factor, scale_x, scale_y, c, s = _load_factors(
                x, y, head, q_norm, k_norm, cos, sin, position, eps, NUM_Q, NUM_KV, DIM, HAS_NORM, ACC
            )
            from_q = q_grad + (token * NUM_Q + head[:, None]) * DIM + e
            x_grad = tl.load(from_q, mask=is_q, other=0.0).to(ACC)
            y_grad = tl.load(from_q + DIM // 2, mask=is_q, other=0.0).to(ACC)
            for j in range(tl.load(copies_start + token), tl.load(copies_start + token + 1)):
                row = tl.load(copies + j).to(tl.int64)
                from_k = k_grad + (row * NUM_KV + head[:, None] - NUM_Q) * DIM + e
                from_v = v_grad + (row * NUM_KV + head[:, None] - NUM_Q - NUM_KV) * DIM + e
                x_grad += tl.load(from_k, mask=is_k, other=0.0).to(ACC)
                y_grad += tl.load(from_k + DIM // 2, mask=is_k, other=0.0).to(ACC)
                x_grad += tl.load(from_v, mask=is_v & inside, other=0.0).to(ACC)
                y_grad += tl.load(from_v + DIM // 2, mask=is_v & inside, other=0.0).to(ACC)
            x_grad, y_grad = x_grad * c + y_grad * s, y_grad * c - x_grad * s  # the inverse rotation
            if HAS_NORM:
                x, y = x * factor, y * factor
                if WANTS_NORMS:
                    total_x += x_grad * x
                    total_y += y_grad * y
                x_grad, y_grad = x_grad * scale_x, y_grad * scale_y
                mean = ((tl.sum(x_grad * x, 1) + tl.sum(y_grad * y, 1)) / DIM)[:, None]
                mean = tl.where(is_v, 0.0, mean)
                x_grad, y_grad = factor * (x_grad - x * mean), factor * (y_grad - y * mean)
            tl.store(qkv_grad + at, x_grad.to(qkv_grad.dtype.element_ty), mask=inside)
            tl.store(qkv_grad + at + DIM // 2, y_grad.to(qkv_grad.dtype.element_ty), mask=inside)
    if WANTS_NORMS:
        to = norm_grads + program * 2 * DIM + tl.arange(0, DIM // 2)
        tl.store(to, tl.sum(tl.where(is_q, total_x, 0.0), 0))
        tl.store(to + DIM // 2, tl.sum(tl.where(is_q, total_y, 0.0), 0))
        tl.store(to + DIM, tl.sum(tl.where(is_k, total_x, 0.0), 0))
        tl.store(to + DIM + DIM // 2, tl.sum(tl.where(is_k, total_y, 0.0), 0))
