"""The terms of LoRA adapters, added to the output of a product that has the base weights alone.

So the base product keeps its kernel. Two kernels follow: x A^T, in partial sums over the input dimension, because A has
few rows; then one kernel sums and rounds these, multiplies with B, and adds the term. That kernel also takes the place
of the one that follows a product without adapters: it sums the partial products of a split linear layer (`split_k.py`),
or applies SwiGLU.

Results are batch-invariant: the parts of x A^T depend only on the matrix, and every sum has one order. Rounding is that
of `layer.Lora`. For 16 bits.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.pdl import pdl_options, pdl_wait
from paceline.model.cuda.product_kernel import product_kernel
from paceline.model.layer import Lora

PART_SIZE = 512  # inputs of a part of x A^T, at least
PART_STEP = 16  # its size is a multiple of this: a step of the tensor cores
BLOCK_N = 64  # outputs per program
MAX_PARTS = 3  # adapters of a fused map: q, k, v


def add_adapters(x_TK: Tensor, lora: Lora, y: Tensor, fp_fusion: bool) -> Tensor:
    """y + the terms, [T, N]: y [T, N] is overwritten; float32 [P, T, N] are partial products, which are summed and
    rounded first."""
    inner = _inner(x_TK, lora)
    num_parts, num_tokens, num_out = (1, *y.shape) if y.dim() == 2 else y.shape
    out = y if y.dim() == 2 else torch.empty(num_tokens, num_out, dtype=x_TK.dtype, device=x_TK.device)
    assert num_parts == 1 or lora.parts[0].size == num_out, "partial products of a map that is not fused"
    where = [(part.first, part.size) for part in lora.parts] + [(0, 0)] * (MAX_PARTS - len(lora.parts))
    num_tiles = sum(triton.cdiv(size, BLOCK_N) for _, size in where)
    options = _tuning(num_tokens, lora.rank)
    _add[num_tiles, triton.cdiv(num_tokens, options["BLOCK_T"])](
        inner, lora.up, y, out, lora.scale, num_tokens, num_out, lora.rank, inner.shape[2],
        *(number for pair in where for number in pair), num_tokens * inner.shape[2], num_tokens * num_out,
        INNER_PARTS=len(inner), Y_PARTS=num_parts, enable_fp_fusion=fp_fusion, **options, **pdl_options(x_TK.device),
    )  # fmt: skip
    return out


def gated_adapters(x_TK: Tensor, lora: Lora, gate_up: Tensor, fp_fusion: bool) -> Tensor:
    """silu(gate) · up of [gate, up] = gate_up + the terms: [T, I]."""
    inner = _inner(x_TK, lora)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_tokens, size)
    firsts = {part.first for part in lora.parts}
    options = _tuning(num_tokens, lora.rank)
    _gated[triton.cdiv(size, BLOCK_N), triton.cdiv(num_tokens, options["BLOCK_T"])](
        inner, lora.up, gate_up, out, lora.scale, num_tokens, size, lora.rank, inner.shape[2],
        num_tokens * inner.shape[2], INNER_PARTS=len(inner), HAS_GATE=0 in firsts, HAS_UP=size in firsts,
        enable_fp_fusion=fp_fusion, **options, **pdl_options(x_TK.device),
    )  # fmt: skip
    return out


def _inner(x_TK: Tensor, lora: Lora) -> Tensor:
    """x A^T of all parts, in partial sums: float32 [P, T, parts * rank]."""
    num_tokens, (num_inner, num_in) = len(x_TK), lora.down.shape
    num_parts = inner_parts(num_in)
    inner = torch.empty(num_parts, num_tokens, num_inner, dtype=torch.float32, device=x_TK.device)
    block = _block_tokens(num_tokens)
    product_kernel[triton.cdiv(num_inner, BLOCK_N), triton.cdiv(num_tokens, block), num_parts](
        x_TK, lora.down, inner, inner, num_tokens, num_inner, num_tokens * num_inner, x_TK.stride(0), num_in,
        num_in // num_parts, HAS_BIAS=False, SWIGLU=False, BLOCK_N=BLOCK_N, BLOCK_T=block, BLOCK_K=128, num_warps=4,
        num_stages=4, **pdl_options(x_TK.device),
    )  # fmt: skip
    return inner


@cache
def inner_parts(num_in: int) -> int:
    """Equal parts of the inputs: as many as have the least size. They do not depend on the number of tokens."""
    counts = range(max(1, num_in // PART_SIZE), 0, -1)
    return next(count for count in counts if count == 1 or num_in % (count * PART_STEP) == 0)


def _tuning(num_tokens: int, rank: int) -> dict[str, int]:
    """Launch options. The tile of tokens does not change results; BLOCK_R depends on the rank alone."""
    block_r = min(64, max(16, triton.next_power_of_2(rank)))
    return {"BLOCK_N": BLOCK_N, "BLOCK_T": _block_tokens(num_tokens), "BLOCK_R": block_r, "num_warps": 4}


def _block_tokens(num_tokens: int) -> int:
    return min(64, max(16, triton.next_power_of_2(num_tokens)))


@triton.jit
def _term(
    inner, up, n, t, valid_n, valid_t, rank, num_inner, inner_stride, INNER_PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(x A^T) B^T of one tile, [BLOCK_N, BLOCK_T]. `inner` and `up` point to the first column and row of an adapter."""
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for start in range(0, rank, BLOCK_R):
        r = start + tl.arange(0, BLOCK_R)
        valid_r = r < rank
        at = inner + t.to(tl.int64)[None, :] * num_inner + r[:, None]
        inside = valid_r[:, None] & valid_t[None, :]
        total = tl.load(at, mask=inside, other=0.0)
        for i in range(1, INNER_PARTS):
            total += tl.load(at + i * inner_stride, mask=inside, other=0.0)
        own = tl.load(
            up + n.to(tl.int64)[:, None] * rank + r[None, :], mask=valid_n[:, None] & valid_r[None, :], other=0.0
        )
        acc = tl.dot(own, total.to(own.dtype), acc)
    return acc


@triton.jit(do_not_specialize=["num_tokens", "inner_stride", "y_stride"])
def _add(
    inner, up, y, out, scale, num_tokens, num_out, rank, num_inner, first0, size0, first1, size1, first2, size2,
    inner_stride, y_stride, INNER_PARTS: tl.constexpr, Y_PARTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs of the first dimension are the tiles of the first adapter's outputs, then those of the others."""
    pid = tl.program_id(0)
    end0 = tl.cdiv(size0, BLOCK_N)
    end1 = end0 + tl.cdiv(size1, BLOCK_N)
    index = (pid >= end0).to(tl.int32) + (pid >= end1).to(tl.int32)
    tile = pid - tl.where(index == 2, end1, tl.where(index == 1, end0, 0))
    first = tl.where(index == 2, first2, tl.where(index == 1, first1, first0))
    size = tl.where(index == 2, size2, tl.where(index == 1, size1, size0))
    row = tl.where(index == 2, size0 + size1, tl.where(index == 1, size0, 0))
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid_n, valid_t = n < size, t < num_tokens
    pdl_wait(PDL)
    term = _term(
        inner + index * rank, up, row + n, t, valid_n, valid_t, rank, num_inner, inner_stride, INNER_PARTS, BLOCK_N,
        BLOCK_T, BLOCK_R,
    )  # fmt: skip
    at, inside = t.to(tl.int64)[None, :] * num_out + (first + n)[:, None], valid_n[:, None] & valid_t[None, :]
    total = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, Y_PARTS):
        total += tl.load(y + at + i * y_stride, mask=inside, other=0.0)
    total = total.to(out.dtype.element_ty).to(tl.float32) + scale * term
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "inner_stride"])
def _gated(
    inner, up, gate_up, out, scale, num_tokens, size, rank, num_inner, inner_stride, INNER_PARTS: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_UP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    valid_n, valid_t = n < size, t < num_tokens
    at, inside = t.to(tl.int64)[None, :] * 2 * size + n[:, None], valid_n[:, None] & valid_t[None, :]
    dtype = out.dtype.element_ty
    pdl_wait(PDL)
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate_up + at + size, mask=inside, other=0.0).to(tl.float32)
    if HAS_GATE:
        term = _term(
            inner, up, n, t, valid_n, valid_t, rank, num_inner, inner_stride, INNER_PARTS, BLOCK_N, BLOCK_T, BLOCK_R
        )
        gate = (gate + scale * term).to(dtype).to(tl.float32)
    if HAS_UP:
        if HAS_GATE:  # the second adapter
            inner += rank
            up += size.to(tl.int64) * rank
        term = _term(
            inner, up, n, t, valid_n, valid_t, rank, num_inner, inner_stride, INNER_PARTS, BLOCK_N, BLOCK_T, BLOCK_R
        )
        value = (value + scale * term).to(dtype).to(tl.float32)
    activated = gate / (1 + tl.exp(-gate)) * value
    tl.store(out + t.to(tl.int64)[None, :] * size + n[:, None], activated.to(dtype), mask=inside)
