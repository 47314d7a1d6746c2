"""The kernel of matrix products with one order of summation, for `invariant_product.py` and `adapters.py`."""

from __future__ import annotations

import triton
import triton.language as tl

from paceline.model.cuda.pdl import pdl_wait


@triton.jit(do_not_specialize=["num_tokens", "part_stride"])
def product_kernel(
    x, weight, bias, out, num_tokens, num_out, part_stride, x_stride, num_in, part_size, HAS_BIAS: tl.constexpr,
    SWIGLU: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The weight is the first operand of the tensor cores, whose tile has at least 64 rows: there may be few tokens.
    Rows past the end are masked; they are zero and change nothing. With SWIGLU, the weight has num_out rows of the gate
    and as many of `up`."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    valid_n, valid_t = n < num_out, t < num_tokens
    weights = weight + n.to(tl.int64)[:, None] * num_in + part * part_size + k[None, :]
    xs = x + t.to(tl.int64)[None, :] * x_stride + part * part_size + k[:, None]
    up_weights = weights + num_out.to(tl.int64) * num_in
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up_acc = acc
    pdl_wait(PDL)
    for start in range(0, part_size, BLOCK_K):
        inside = start + k < part_size
        w = tl.load(weights + start, mask=valid_n[:, None] & inside[None, :], other=0.0)
        values = tl.load(xs + start, mask=valid_t[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(w, values, acc)
        if SWIGLU:
            w = tl.load(up_weights + start, mask=valid_n[:, None] & inside[None, :], other=0.0)
            up_acc = tl.dot(w, values, up_acc)
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=valid_n, other=0.0).to(tl.float32)[:, None]
    if SWIGLU:  # rounded as by the separate kernels
        gate, up = acc.to(out.dtype.element_ty).to(tl.float32), up_acc.to(out.dtype.element_ty).to(tl.float32)
        acc = gate / (1 + tl.exp(-gate)) * up
    to = out + part.to(tl.int64) * part_stride + t.to(tl.int64)[None, :] * num_out + n[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=valid_n[:, None] & valid_t[None, :])
