"""A decoder's operations for training on a CUDA device: fused Triton kernels with gradients.

Matrix products and attention are torch's. Each kernel rounds where `ops.TorchOps` rounds. Kernels are deterministic:
no atomics, no tuning at run time. A gradient that is a sum over tokens is summed in two stages: each program writes
the sum over its TOKENS tokens, and torch adds those of all programs.

Kept for the backward pass are the residual stream, the outputs of norms, of the qkv and gate_up products and of
attention. Queries, keys, values, norms' factors and silu(gate) · up are computed again, which takes little time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import Attention, VarlenAttention
from paceline.model.config import ModelConfig
from paceline.model.cuda.train_kernels import (
    add_norm_backward_kernel,
    add_norm_kernel,
    qkv_backward_kernel,
    qkv_forward_kernel,
    silu_mul_backward_kernel,
    silu_mul_kernel,
)
from paceline.model.flash import flash_backward, flash_forward
from paceline.model.layer import Layer, Linear, Lora, LoraPart
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
        qkv = self.linear(h_TD, layer.qkv)
        transform = _QKVTransform(positions_T, rope, attention, layer.config)
        out: Tensor = _Attention.apply(qkv, layer.q_norm, layer.k_norm, transform)
        return out


def _linear(x: Tensor, linear: Linear, gated: bool = False) -> Tensor:
    weight, lora = linear.weight, linear.lora
    assert weight is not None
    adapters = (None, None, None) if lora is None or not lora.enabled else (lora.down, lora.up, lora)
    y: Tensor = _Linear.apply(x, weight, linear.bias, *adapters, gated)
    return y


class _Linear(torch.autograd.Function):
    """a W^T + b, and with adapters + scale · (a A^T) B^T of each part, for a = x or, if `gated`, a = silu(gate) · up
    with x = [gate, up]. The adapters' terms are added inside matrix products, in both passes. If gated, x is kept for
    the backward pass and a is computed again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, down_RK: Tensor | None, up_NR: Tensor | None,
        lora: Lora | None, gated: bool,
    ) -> Tensor:  # fmt: skip
        a_TK = _silu_mul_forward(x) if gated else x
        y, inner_TR = F.linear(a_TK, weight_NK, bias_N), None
        if lora is not None and down_RK is not None and up_NR is not None:
            inner_TR = a_TK @ down_RK.T
            for part, own_TR, own_NR in _adapters(lora, inner_TR, up_NR):
                y[:, part.first : part.end].addmm_(own_TR, own_NR.T, alpha=lora.scale)
        ctx.save_for_backward(x, weight_NK, down_RK, up_NR, inner_TR)
        ctx.lora, ctx.gated = lora, gated
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_NK, down_RK, up_NR, inner_TR = ctx.saved_tensors
        grad_TN = grads[0]
        _, wants_weight, wants_bias, wants_down, wants_up = ctx.needs_input_grad[:5]
        x_grad, inner_grad, up_grad = grad_TN @ weight_NK, None, None
        if ctx.lora is not None:
            inner_grads, up_grads = [], []
            for part, own_TR, own_NR in _adapters(ctx.lora, inner_TR, up_NR):
                own_grad_TN = grad_TN[:, part.first : part.end]
                inner_grads.append(own_grad_TN @ own_NR)
                if wants_up:
                    up_grads.append(own_grad_TN.T @ own_TR)
            inner_grad = torch.cat(inner_grads, 1) * ctx.lora.scale
            up_grad = torch.cat(up_grads) * ctx.lora.scale if wants_up else None
            x_grad.addmm_(inner_grad, down_RK)
        x_grad, a_TK = _silu_mul_backward(x, x_grad) if ctx.gated else (x_grad, x)
        return (
            x_grad,
            grad_TN.T @ a_TK if wants_weight else None,
            grad_TN.sum(0) if wants_bias else None,
            inner_grad.T @ a_TK if wants_down and inner_grad is not None else None,
            up_grad,
            None,
            None,
        )


def _adapters(lora: Lora, inner_TR: Tensor, up_NR: Tensor) -> Iterator[tuple[LoraPart, Tensor, Tensor]]:
    """Each part, with its columns of a A^T and its B."""
    return zip(lora.parts, inner_TR.split(lora.rank, 1), lora.ups(up_NR), strict=True)


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
        qkv_forward_kernel[(len(qkv_TN),)](
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
        qkv_backward_kernel[(num_programs,)](
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
    silu_mul_kernel[grid](gate_up, out, size, ACC=_acc(out), BLOCK=SILU_BLOCK)
    return out


def _silu_mul_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up, and silu(gate) · up again."""
    gate_up_grad, out, size = torch.empty_like(gate_up), torch.empty_like(grad), grad.shape[1]
    grid = len(gate_up), triton.cdiv(size, SILU_BLOCK)
    silu_mul_backward_kernel[grid](gate_up, grad, gate_up_grad, out, size, ACC=_acc(grad), BLOCK=SILU_BLOCK)
    return gate_up_grad, out


def _norm_forward(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + y and its norm."""
    x_TD = x_TD.contiguous()
    h = torch.empty(x_TD.shape, dtype=weight_D.dtype, device=x_TD.device)
    total = x_TD if y_TD is None else torch.empty_like(x_TD)
    addend = x_TD if y_TD is None else y_TD.contiguous()
    add_norm_kernel[(len(h),)](x_TD, addend, weight_D, total, h, eps, **_row_options(x_TD), HAS_Y=y_TD is not None)
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
    add_norm_backward_kernel[(num_programs,)](
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
