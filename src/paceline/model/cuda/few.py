"""Matrix products of a small model's few tokens, with the norm before them and the gate behind them in one kernel.

There a kernel's weights are read in less time than a kernel takes to begin and end, so that a step's time is their
number. A program has a few lines of the weight, which it loads while the kernel ahead still runs (`early.py`), and
takes one token after another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.early import begin_next, early, wait
from paceline.model.layer import Linear

MOST_TOKENS = 4  # as measured on an H200
MOST_WEIGHTS = 2048 * 2048  # of a linear map; larger ones have their time from memory
PROGRAM = 8192  # weights of a program, at most


@dataclass(slots=True)
class Norm:
    """What is to be done to x before a product: `more` is added, where there is any, then its norm is taken."""

    weight: Tensor
    eps: float
    more: Tensor | None


def pays(x_TK: Tensor, linear: Linear) -> bool:
    weight = linear.weight
    return (
        weight is not None
        and linear.bias is None
        and linear.lora is None
        and len(x_TK) <= MOST_TOKENS
        and weight.numel() <= MOST_WEIGHTS
        and weight.itemsize == 2
        and weight.is_contiguous()
        and x_TK.is_contiguous()
    )


def product(x_TK: Tensor, linear: Linear, norm: Norm | None = None, gated: bool = False) -> tuple[Tensor, Tensor]:
    """x, grown by what the norm adds, and the product [T, N]; or silu(gate) · up of its two halves, [T, N / 2]."""
    weight = linear.weight
    assert weight is not None and linear.bias is None and linear.lora is None
    num_tokens, depth = x_TK.shape
    num_out = len(weight) // 2 if gated else len(weight)
    more = None if norm is None else norm.more
    grown = x_TK if more is None else torch.empty_like(x_TK)
    out = torch.empty(num_tokens, num_out, dtype=weight.dtype, device=x_TK.device)
    width = triton.next_power_of_2(depth)
    size = max(1, PROGRAM // width)
    _product[(triton.cdiv(num_out, size),)](
        x_TK, x_TK if more is None else more, weight if norm is None else norm.weight, weight, grown, out,
        0.0 if norm is None else norm.eps, num_tokens, num_out, D=depth, WIDTH=width, SIZE=size,
        NORMS=norm is not None, ADDS=more is not None, GATED=gated, num_warps=4, **early(out.device),
    )  # fmt: skip
    return grown, out


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x, more, norm, weight, grown, out, eps, num_tokens, num_out, D: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, NORMS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_next(EARLY)
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    at = tl.arange(0, WIDTH)
    real, inside = column < num_out, at < D
    lines = weight + column[:, None] * D + at[None, :]
    given = real[:, None] & inside[None, :]
    weights = tl.load(lines, mask=given, other=0.0)
    if GATED:
        ups = tl.load(lines + num_out * D, mask=given, other=0.0)
    if NORMS:
        scale = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    for t in range(num_tokens):
        value = tl.load(x + t * D + at, mask=inside, other=0.0)
        if ADDS:
            value = value + tl.load(more + t * D + at, mask=inside, other=0.0).to(value.dtype)
            tl.store(grown + t * D + at, value, mask=inside & (tl.program_id(0) == 0))
        if NORMS:
            wide = value.to(tl.float32)
            value = wide * tl.rsqrt(tl.sum(wide * wide) / D + eps) * scale
        value = value.to(weight.dtype.element_ty).to(tl.float32)[None, :]
        made = tl.sum(weights.to(tl.float32) * value, 1)
        if GATED:
            gate = made.to(out.dtype.element_ty).to(tl.float32)
            up = tl.sum(ups.to(tl.float32) * value, 1).to(out.dtype.element_ty).to(tl.float32)
            made = gate / (1 + tl.exp(-gate)) * up
        tl.store(out + t * num_out + column, made.to(out.dtype.element_ty), mask=real)
