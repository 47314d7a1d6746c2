"""Linear layers of a small model for at most four tokens, with the norm before and the SwiGLU after in one kernel.

At this size reading the weights takes less time than starting and ending a kernel, so the time of a step depends on the
number of kernels. A program holds a few rows of the weight, which it loads while the previous kernel still runs
(`pdl.py`), and multiplies them with one token after the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.pdl import pdl_launch_dependents, pdl_options, pdl_wait
from paceline.model.layer import Linear

MAX_TOKENS = 4  # measured on an H200
MAX_WEIGHTS = 2048 * 2048  # of a linear layer; larger ones are limited by memory bandwidth
WEIGHTS_PER_PROGRAM = 8192  # at most


@dataclass(slots=True)
class InputNorm:
    """Applied to x before the linear layer: add `addend` if there is one, then RMSNorm."""

    weight: Tensor
    eps: float
    addend: Tensor | None


def should_use(x_TK: Tensor, linear: Linear) -> bool:
    """Whether the kernel supports this layer and is faster than torch's."""
    weight = linear.weight
    return (
        weight is not None
        and linear.bias is None
        and len(x_TK) <= MAX_TOKENS
        and weight.numel() <= MAX_WEIGHTS
        and weight.itemsize == 2
        and weight.is_contiguous()
        and x_TK.is_contiguous()
    )


def should_fuse(x_TK: Tensor, linear: Linear) -> bool:
    """Whether also what is before and after the layer can be in the kernel. Adapters read the output of the norm, and
    their terms come before SwiGLU."""
    return linear.lora is None and should_use(x_TK, linear)


def fused_linear(
    x_TK: Tensor, linear: Linear, norm: InputNorm | None = None, swiglu: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns x plus the addend, and the output of the layer without adapters [T, N]; with `swiglu`, silu(gate) · up of
    the output's two halves [T, N / 2]."""
    weight = linear.weight
    assert weight is not None and linear.bias is None
    assert linear.lora is None or (norm is None and not swiglu)
    num_tokens, num_in = x_TK.shape
    num_out = len(weight) // 2 if swiglu else len(weight)
    addend = None if norm is None else norm.addend
    x_sum = x_TK if addend is None else torch.empty_like(x_TK)
    out = torch.empty(num_tokens, num_out, dtype=weight.dtype, device=x_TK.device)
    width = triton.next_power_of_2(num_in)
    size = max(1, WEIGHTS_PER_PROGRAM // width)
    _fused_linear[(triton.cdiv(num_out, size),)](
        x_TK, x_TK if addend is None else addend, weight if norm is None else norm.weight, weight, x_sum, out,
        0.0 if norm is None else norm.eps, num_tokens, num_out, D=num_in, WIDTH=width, SIZE=size,
        HAS_NORM=norm is not None, HAS_ADDEND=addend is not None, SWIGLU=swiglu, num_warps=4, **pdl_options(out.device),
    )  # fmt: skip
    return x_sum, out


@triton.jit(do_not_specialize=["num_tokens"])
def _fused_linear(
    x, addend, norm, weight, x_sum, out, eps, num_tokens, num_out, D: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, HAS_NORM: tl.constexpr, HAS_ADDEND: tl.constexpr, SWIGLU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(PDL)
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    at = tl.arange(0, WIDTH)
    valid, inside = column < num_out, at < D
    rows = weight + column[:, None] * D + at[None, :]
    mask = valid[:, None] & inside[None, :]
    weights = tl.load(rows, mask=mask, other=0.0)
    if SWIGLU:
        up_weights = tl.load(rows + num_out * D, mask=mask, other=0.0)
    if HAS_NORM:
        scale = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    for t in range(num_tokens):
        value = tl.load(x + t * D + at, mask=inside, other=0.0)
        if HAS_ADDEND:
            value = value + tl.load(addend + t * D + at, mask=inside, other=0.0).to(value.dtype)
            tl.store(x_sum + t * D + at, value, mask=inside & (tl.program_id(0) == 0))
        if HAS_NORM:
            wide = value.to(tl.float32)
            value = wide * tl.rsqrt(tl.sum(wide * wide) / D + eps) * scale
        value = value.to(weight.dtype.element_ty).to(tl.float32)[None, :]
        result = tl.sum(weights.to(tl.float32) * value, 1)
        if SWIGLU:
            gate = result.to(out.dtype.element_ty).to(tl.float32)
            up = tl.sum(up_weights.to(tl.float32) * value, 1).to(out.dtype.element_ty).to(tl.float32)
            result = gate / (1 + tl.exp(-gate)) * up
        tl.store(out + t * num_out + column, result.to(out.dtype.element_ty), mask=valid)
