"""Norm and RoPE of queries and keys, and the write of keys and values to the KV cache, in a kernel of its own.

For attention that reads all keys from the cache, and for positions that have keys and values but no queries.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.attention import QKNormRope
from paceline.model.cuda.pdl import pdl_options, pdl_wait
from paceline.model.kv import BLOCK, PagedKV

HEADS = 4  # that one program computes


def rotate_and_store(
    qkv: Tensor, q_out: Tensor | None, kv: PagedKV, layer: int, norm_rope: QKNormRope, positions_T: Tensor,
    slots_T: Tensor, block_tables: Tensor,
) -> None:  # fmt: skip
    """`qkv`: the output of the projection for T tokens, queries first; it is read by its address and `stride(0)` only.
    `q_out` [T, H, E]: the queries with norm and RoPE; None: the projection has keys and values alone. `slots_T`: each
    token's index in the block tables, -1: it is not stored."""
    k_cache, v_cache = kv.k[layer], kv.v[layer]
    num_q, num_kv, dim = 0 if q_out is None else q_out.shape[1], k_cache.shape[1], k_cache.shape[-1]
    q_norm, k_norm, has_norm = norm_rope.q_norm, norm_rope.k_norm, norm_rope.q_norm is not None
    _rotate_and_store[(len(positions_T), triton.cdiv(num_q + 2 * num_kv, HEADS))](
        qkv, qkv if q_out is None else q_out, k_cache, v_cache, q_norm if has_norm else qkv,
        k_norm if has_norm else qkv, norm_rope.cos, norm_rope.sin, positions_T, slots_T, block_tables, norm_rope.eps,
        qkv.stride(0), block_tables.stride(0), NUM_Q=num_q, NUM_KV=num_kv, DIM=dim, HEADS=HEADS, BLOCK=BLOCK,
        HAS_NORM=has_norm, num_warps=2, enable_fp_fusion=False, **pdl_options(qkv.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_stride"])
def _rotate_and_store(
    qkv, q_out, k_cache, v_cache, q_norm, k_norm, cos, sin, positions, slots, block_tables, eps, stride, table_stride,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: applies norm and RoPE to queries and keys, writes the queries to `q_out`, and keys and
    values to the KV cache."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = (head < NUM_Q + 2 * NUM_KV)[:, None]
    e = tl.arange(0, DIM // 2)[None, :]
    slot, position = tl.load(slots + token).to(tl.int64), tl.load(positions + token).to(tl.int32)
    num_stored = tl.where(slot >= 0, NUM_KV, 0)  # heads
    is_q, is_k = head < NUM_Q, (head >= NUM_Q) & (head < NUM_Q + num_stored)
    is_v = (head >= NUM_Q + NUM_KV) & (head < NUM_Q + NUM_KV + num_stored)
    block = tl.load(block_tables + slot * table_stride + position // BLOCK, mask=slot >= 0, other=0).to(tl.int64)
    c, s = tl.load(cos + position * (DIM // 2) + e), tl.load(sin + position * (DIM // 2) + e)
    pdl_wait(PDL)
    at = qkv + token * stride + head[:, None] * DIM + e
    low, high = tl.load(at, mask=inside, other=0.0), tl.load(at + DIM // 2, mask=inside, other=0.0)
    x, y = low.to(tl.float32), high.to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
        scale_x = tl.where(is_q[:, None], tl.load(q_norm + e), tl.load(k_norm + e)).to(tl.float32)
        scale_y = tl.where(is_q[:, None], tl.load(q_norm + DIM // 2 + e), tl.load(k_norm + DIM // 2 + e))
        x, y = x * factor * scale_x, y * factor * scale_y.to(tl.float32)
    rotated_x, rotated_y = (x * c - y * s).to(low.dtype), (y * c + x * s).to(low.dtype)
    q_at = q_out + (token * NUM_Q + head[:, None]) * DIM + e
    tl.store(q_at, rotated_x, mask=is_q[:, None])
    tl.store(q_at + DIM // 2, rotated_y, mask=is_q[:, None])
    k_at = k_cache + ((block * NUM_KV + head[:, None] - NUM_Q) * BLOCK + position % BLOCK) * DIM + e
    tl.store(k_at, rotated_x, mask=is_k[:, None])
    tl.store(k_at + DIM // 2, rotated_y, mask=is_k[:, None])
    v_at = v_cache + ((block * NUM_KV + head[:, None] - NUM_Q - NUM_KV) * BLOCK + position % BLOCK) * DIM + e
    tl.store(v_at, low, mask=is_v[:, None])
    tl.store(v_at + DIM // 2, high, mask=is_v[:, None])
