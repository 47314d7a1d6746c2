"""Paged attention for rows with few queries (decode and draft verification), as a Triton kernel.

One program computes one row, one key/value head and one split of the context. All queries of the row and all query
heads of the group share one read of the keys and values, which takes most of the time. The kernel also reads the new
tokens' keys and values from the QKV projection, applies norm and RoPE to queries and keys, and writes the new keys and
values to the KV cache. With several splits, the program that finishes last combines them, in order (split-KV, as in
flash-decoding). If the rows alone fill the device, there is one split.

Queries attend to the row's tokens up to their own. In blocks that a head drafts at once, they attend to the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.pdl import pdl_options, pdl_wait
from paceline.model.kv import BLOCK, PagedKV

MAX_QUERIES = 16  # of a row; rows with more queries are prefill
TARGET_PROGRAMS = 128  # one per multiprocessor of a large device, which is enough to use its memory bandwidth
MAX_SPLITS = 16
FEW_QUERIES = 4  # of a row
MANY_PROGRAMS = 512  # from here on several programs share a multiprocessor


@dataclass(slots=True)
class AttentionRows:
    """The R rows of a forward pass, as int32 tensors on the device. A row without queries is skipped. A row with a
    context of 0 has an output of zeros and writes nothing to the KV cache."""

    query_start: Tensor  # [R + 1]
    context: Tensor  # [R], includes the row's queries
    slots: Tensor  # [R], the row's index in `block_tables`
    block_tables: Tensor  # [slots, blocks]

    @property
    def num_rows(self) -> int:
        return len(self.context)


@dataclass(slots=True)
class QKNormRope:
    """Norm (if the model has one) and RoPE, for queries and keys that come straight from the projection."""

    cos: Tensor  # [positions, E / 2]
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def num_splits(num_rows: int, num_kv_heads: int, max_queries: int) -> int:
    """The maximum number of splits of a row: a power of two, so that few kernels are compiled. Programs with few
    queries can share a multiprocessor, so the number of programs is rounded up to TARGET_PROGRAMS or more. Otherwise it
    is rounded down."""
    num_programs = num_rows * num_kv_heads
    if max_queries > FEW_QUERIES:
        return min(MAX_SPLITS, 1 << max(1, TARGET_PROGRAMS // num_programs).bit_length() - 1)
    return min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(TARGET_PROGRAMS, num_programs)))


class CudaPagedAttention:
    """For rows with at most `max_queries` queries. Created for one forward pass, called once per layer.

    With `limits` (int32 [slots]) the rows are blocks: each query attends to all queries of its row. From a slot's limit
    on, positions have no KV blocks: their keys and values are not stored, and not attended to."""

    def __init__(self, kv: PagedKV, rows: AttentionRows, max_queries: int, limits: Tensor | None = None) -> None:
        assert 1 <= max_queries <= MAX_QUERIES
        self.kv, self.rows, self.max_queries, self.limits = kv, rows, max_queries, limits
        num_kv = kv.k.shape[2]
        self.splits = num_splits(rows.num_rows, num_kv, max_queries)
        # Finished splits of each row and head.
        num_counters = rows.num_rows * num_kv if self.splits > 1 else 0
        self.num_done = torch.zeros(num_counters, dtype=torch.int32, device=kv.k.device)

    def __call__(
        self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, norm_rope: QKNormRope | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, H * E]. `norm_rope`: what is still to be applied to queries and keys. `dtype`: of the output; default:
        the dtype of the queries."""
        num_tokens, num_heads, dim = q_THE.shape
        num_kv = k_TGE.shape[1]
        group = num_heads // num_kv
        splits, num_programs = self.splits, self.rows.num_rows * num_kv
        size = max(16, triton.next_power_of_2(self.max_queries * group))  # tl.dot needs at least 16 rows
        if size == 32 and dim == 128 and q_THE.itemsize == 2 and splits == 1 and num_programs < MANY_PROGRAMS:
            size = 64  # the smallest tile for Hopper's warp-group matrix instructions
        out = q_THE.new_empty(num_tokens, num_heads * dim, dtype=dtype)
        split_outs = split_stats = out
        if splits > 1:
            split_outs = q_THE.new_empty(self.rows.num_rows, num_kv, splits, size, dim, dtype=torch.float32)
            split_stats = q_THE.new_empty(self.rows.num_rows, num_kv, splits, 2, size, dtype=torch.float32)
        rows = self.rows
        apply = norm_rope or QKNormRope(out, out, None, None, 0.0)
        has_norm = apply.q_norm is not None
        _attend[(rows.num_rows, num_kv, splits)](
            q_THE, k_TGE, v_TGE, out, split_outs, split_stats, self.num_done, self.kv.k[layer], self.kv.v[layer],
            apply.cos, apply.sin, apply.q_norm if has_norm else out, apply.k_norm if has_norm else out, apply.eps,
            rows.block_tables, rows.slots, rows.query_start, rows.context,
            rows.context if self.limits is None else self.limits, dim**-0.5 * 1.4426950408889634,
            q_THE.stride(0), k_TGE.stride(0), v_TGE.stride(0), out.stride(0), rows.block_tables.stride(0),
            self.max_queries,
            NUM_KV=num_kv, GROUP=group, DIM=dim, SIZE=size, HAS_SPLITS=splits > 1, BLOCK=BLOCK, MAX_NEW=MAX_QUERIES,
            HAS_ROPE=norm_rope is not None, HAS_NORM=has_norm, IS_BLOCK=self.limits is not None,
            **tuning(q_THE.dtype, num_programs, size, splits), **pdl_options(out.device),
        )  # fmt: skip
        return out


def tuning(dtype: torch.dtype, num_programs: int, size: int, splits: int) -> dict[str, int]:
    """Launch parameters, measured on an H200 with 640 tokens of context (benchmarks/gpu/tune.py). With many programs,
    four of up to 32 rows share a multiprocessor: fewer pipeline stages, and at size 32 fewer registers, make them fit.
    The row's new tokens come first if that saves registers, or if their product would otherwise be waited for last."""
    if dtype == torch.float32:
        return {"TOKENS": 32, "num_warps": 4, "num_stages": 2, "NEW_FIRST": False}
    if num_programs < MANY_PROGRAMS:
        return {"TOKENS": 64, "num_warps": 4, "num_stages": 3, "NEW_FIRST": splits == 1 and size == 64}
    if size <= 16:
        return {"TOKENS": 64, "num_warps": 4, "num_stages": 2, "NEW_FIRST": True}
    if size <= 32:
        return {"TOKENS": 64, "num_warps": 4, "num_stages": 2, "NEW_FIRST": True, "maxnreg": 128}
    return {"TOKENS": 32, "num_warps": 4, "num_stages": 3, "NEW_FIRST": False}


@triton.jit
def apply_norm_rope(heads, offsets, valid, norm, cos, sin, positions, eps, DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Norm and RoPE of the heads at heads + offsets [N]. Returns their two halves, [N, DIM / 2] each."""
    e = tl.arange(0, DIM // 2)[None, :]
    mask = valid[:, None]
    x = tl.load(heads + offsets[:, None] + e, mask=mask, other=0.0)
    y = tl.load(heads + offsets[:, None] + DIM // 2 + e, mask=mask, other=0.0)
    c = tl.load(cos + positions[:, None] * (DIM // 2) + e, mask=mask, other=0.0)
    s = tl.load(sin + positions[:, None] * (DIM // 2) + e, mask=mask, other=0.0)
    dtype = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
        scale_x, scale_y = tl.load(norm + e).to(tl.float32), tl.load(norm + DIM // 2 + e).to(tl.float32)
        x, y = x * factor * scale_x, y * factor * scale_y
    return (x * c - y * s).to(dtype), (y * c + x * s).to(dtype)


@triton.jit
def _load_heads(
    heads, offsets, valid, norm, cos, sin, positions, eps, NUM: tl.constexpr, DIM: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """[NUM, DIM], with norm and RoPE applied if HAS_ROPE."""
    if HAS_ROPE:
        x, y = apply_norm_rope(heads, offsets, valid, norm, cos, sin, positions, eps, DIM, HAS_NORM)
        return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), [NUM, DIM])
    return tl.load(heads + offsets[:, None] + tl.arange(0, DIM)[None, :], mask=valid[:, None], other=0.0)


@triton.jit(do_not_specialize=["max_queries"])
def _attend(
    q, k_new, v_new, out, split_outs, split_stats, num_done, k_cache, v_cache, cos, sin, q_norm, k_norm, eps,
    block_tables, slots, query_start, context, limits, scale,
    q_stride, k_stride, v_stride, out_stride, table_stride, max_queries,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, HAS_SPLITS: tl.constexpr,
    BLOCK: tl.constexpr, MAX_NEW: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_NORM: tl.constexpr, IS_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, NEW_FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The number of splits and `max_queries` are not compile-time constants: they vary with the size of small batches,
    and compiling a kernel takes seconds."""
    row, head, split, splits = tl.program_id(0), tl.program_id(1), tl.program_id(2), 1
    first = tl.load(query_start + row)
    num = tl.load(query_start + row + 1) - first
    num_cached = tl.where(num > 0, tl.load(context + row) - num, 0)
    slot = tl.load(slots + row)
    table = block_tables + slot.to(tl.int64) * table_stride
    if IS_BLOCK:
        limit = tl.load(limits + slot, mask=slot >= 0, other=1)
    num_chunks = tl.cdiv(num_cached, TOKENS)
    if HAS_SPLITS:
        # The last split waits for its own chunks and then reads each other split, which takes as long as a chunk. Their
        # sum is smallest at the square root.
        splits = tl.ceil(tl.sqrt_rn(tl.maximum(num_chunks, 1).to(tl.float32))).to(tl.int32)
        splits = tl.minimum(splits, tl.num_programs(2))
    split_size = tl.cdiv(num_chunks, splits) * TOKENS
    begin = split * split_size
    end = tl.minimum(num_cached, begin + split_size)
    # Chunks begin at a block boundary, so a token's block and offset within its chunk are constant.
    t = tl.arange(0, TOKENS)
    blocks = tl.load(table + begin // BLOCK + t // BLOCK, mask=begin + t < end, other=0)
    pdl_wait(PDL)
    if (num == 0) | (num > max_queries) | (split >= splits):
        return
    m = tl.arange(0, SIZE)  # rows of the scores: (query, head of the group), queries first
    query = m // GROUP
    valid = query < num
    e = tl.arange(0, DIM)
    if num_cached < 0:
        out_at = (first + query).to(tl.int64)[:, None] * out_stride + (head * GROUP + m % GROUP)[:, None] * DIM
        tl.store(out + out_at + e[None, :], tl.zeros([SIZE, DIM], out.dtype.element_ty), mask=valid[:, None])
        return
    q_at = (first + query).to(tl.int64) * q_stride + (head * GROUP + m % GROUP) * DIM
    q_position = num_cached + query
    if IS_BLOCK:
        q_position = tl.minimum(q_position, limit - 1)
    qs = tl.zeros([SIZE, DIM], q.dtype.element_ty)
    if num > 0:  # always true; without the branch Triton loads the joined halves piecemeal
        qs = _load_heads(q, q_at, valid, q_norm, cos, sin, q_position, eps, SIZE, DIM, HAS_ROPE, HAS_NORM)
    max_score = tl.full([SIZE], -float("inf"), tl.float32)
    # Summed after the loop: a sum across warps in each iteration would stall it.
    weight_sums = tl.zeros([SIZE, TOKENS], tl.float32)
    acc = tl.zeros([SIZE, DIM], tl.float32)
    in_block = ((head * BLOCK + t % BLOCK) * DIM)[:, None] + e[None, :]
    total = tl.zeros([SIZE], tl.float32)
    for phase in tl.static_range(2):  # the row's new tokens and the cached tokens, in either order
        if (phase == 0) == NEW_FIRST:
            if split == splits - 1:
                j = tl.arange(0, MAX_NEW)
                is_new = j < num
                token = (first + j).to(tl.int64)
                at = num_cached + j
                if IS_BLOCK:
                    is_new = is_new & (at < limit)
                k = _load_heads(
                    k_new, token * k_stride + head * DIM, is_new, k_norm, cos, sin, at, eps, MAX_NEW, DIM, HAS_ROPE,
                    HAS_NORM,
                )  # fmt: skip
                v = tl.load(
                    v_new + token[:, None] * v_stride + head * DIM + e[None, :], mask=is_new[:, None], other=0.0
                )
                block = tl.load(table + at // BLOCK, mask=is_new, other=0).to(tl.int64)
                base = ((block * NUM_KV + head) * BLOCK + at % BLOCK) * DIM
                tl.store(k_cache + base[:, None] + e[None, :], k, mask=is_new[:, None])
                tl.store(v_cache + base[:, None] + e[None, :], v, mask=is_new[:, None])
                scores = tl.dot(qs, tl.trans(k), input_precision="ieee")
                seen = is_new[None, :]
                if not IS_BLOCK:
                    seen = seen & (j[None, :] <= query[:, None])
                scores = tl.where(seen, scores, -float("inf"))
                new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
                rescale = tl.exp2(max_score - new_max)
                weights = tl.exp2(scores * scale - new_max[:, None])
                total = total * rescale + tl.sum(weights, 1)
                acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                max_score = new_max
        else:
            for start in range(begin, end, TOKENS):
                inside = start + t < end
                at = (blocks.to(tl.int64) * (NUM_KV * BLOCK * DIM))[:, None] + in_block
                # One iteration ahead, so that loads of keys and values do not wait for block numbers and can be
                # pipelined.
                blocks = tl.load(table + (start + TOKENS) // BLOCK + t // BLOCK, mask=start + TOKENS + t < end, other=0)
                k = tl.load(k_cache + at, mask=inside[:, None], other=0.0)
                v = tl.load(v_cache + at, mask=inside[:, None], other=0.0)
                scores = tl.dot(qs, tl.trans(k), input_precision="ieee")
                scores = tl.where(inside[None, :], scores, -float("inf"))
                new_max = tl.maximum(max_score, tl.max(scores, 1) * scale)
                rescale = tl.exp2(max_score - new_max)
                weights = tl.exp2(scores * scale - new_max[:, None])
                weight_sums = weight_sums * rescale[:, None] + weights
                if NEW_FIRST:
                    total = total * rescale
                acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
                max_score = new_max
            total += tl.sum(weight_sums, 1)
    if not HAS_SPLITS:
        out_at = (first + query).to(tl.int64)[:, None] * out_stride + (head * GROUP + m % GROUP)[:, None] * DIM
        tl.store(out + out_at + e[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
    else:
        first_split = (row * NUM_KV + head).to(tl.int64) * tl.num_programs(2)
        tl.store(split_outs + (first_split + split) * SIZE * DIM + m[:, None] * DIM + e[None, :], acc)
        tl.store(split_stats + (first_split + split) * 2 * SIZE + m, max_score)
        tl.store(split_stats + (first_split + split) * 2 * SIZE + SIZE + m, total)
        tl.debug_barrier()  # all threads have written before the split is counted as done
        if tl.atomic_add(num_done + row * NUM_KV + head, 1, sem="acq_rel") == splits - 1:
            tl.store(num_done + row * NUM_KV + head, 0)  # for the next layer
            max_score = tl.full([SIZE], -float("inf"), tl.float32)
            for i in range(splits):
                max_score = tl.maximum(
                    max_score, tl.load(split_stats + (first_split + i) * 2 * SIZE + m, cache_modifier=".cg")
                )
            total = tl.zeros([SIZE], tl.float32)
            acc = tl.zeros([SIZE, DIM], tl.float32)
            for i in range(splits):
                stats = split_stats + (first_split + i) * 2 * SIZE + m
                rescale = tl.exp2(tl.load(stats, cache_modifier=".cg") - max_score)
                total += rescale * tl.load(stats + SIZE, cache_modifier=".cg")
                split_acc = split_outs + (first_split + i) * SIZE * DIM + m[:, None] * DIM + e[None, :]
                acc += rescale[:, None] * tl.load(split_acc, cache_modifier=".cg")
            out_at = (first + query).to(tl.int64)[:, None] * out_stride + (head * GROUP + m % GROUP)[:, None] * DIM
            tl.store(out + out_at + e[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
