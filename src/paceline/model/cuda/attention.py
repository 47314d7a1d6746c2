"""Attention of rows with a few queries each (a decoded token, a verified draft) over the paged KV of a CUDA device.

One program per row, key/value head and part of the context: all queries of a row and all heads of a group share one
reading of its keys and values, which is what such a step's time goes into. The keys and values of the queries' own
tokens come straight from the projection, are normed and rotated like the queries, and written to the pages by the way.
Whichever part of a row is done last puts the parts together, in their order; where rows alone fill the device there is
one part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.early import early, wait
from paceline.model.kv import BLOCK, PagedKV

MAX_QUERIES = 16  # of a row; longer spans are a prefill's
PROGRAMS = 128  # one per multiprocessor of a large device: enough to keep its memory busy
MAX_PARTS = 16
FEW_QUERIES = 4  # of a row
CROWDED = 512  # programs, from which on several share a multiprocessor


@dataclass(slots=True)
class Rows:
    """R rows as the kernels read them: int32 on the device. A row without queries is skipped; one without a context
    does not look, and finds nothing (zeros) and leaves nothing behind."""

    query_start: Tensor  # [R + 1]
    context: Tensor  # [R], the row's queries included
    places: Tensor  # [R], the row's line in `tables`
    tables: Tensor  # [lines, pages]

    @property
    def num(self) -> int:
        return len(self.context)


@dataclass(slots=True)
class Turn:
    """What is still to be done to queries and keys: a norm, where the model has one, and the rotation by position."""

    cos: Tensor  # [positions, E / 2]
    sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float


def num_parts(num_rows: int, num_kv_heads: int, max_queries: int) -> int:
    """That a row may have: a power of two, so that few kernels exist. Programs of few queries get along on one
    multiprocessor, so there are rather more than PROGRAMS; of many they do not: rather fewer."""
    num_programs = num_rows * num_kv_heads
    if max_queries > FEW_QUERIES:
        return min(MAX_PARTS, 1 << max(1, PROGRAMS // num_programs).bit_length() - 1)
    return min(MAX_PARTS, triton.next_power_of_2(triton.cdiv(PROGRAMS, num_programs)))


class CudaPagedAttention:
    """For rows of at most max_queries queries. Made for one forward, called once per layer."""

    def __init__(self, kv: PagedKV, rows: Rows, max_queries: int) -> None:
        assert 1 <= max_queries <= MAX_QUERIES
        self.kv, self.rows, self.max_queries = kv, rows, max_queries
        num_kv = kv.k.shape[2]
        self.parts = num_parts(rows.num, num_kv, max_queries)
        self.done = torch.zeros(rows.num * num_kv if self.parts > 1 else 0, dtype=torch.int32, device=kv.k.device)

    def __call__(
        self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, turn: Turn | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """`dtype`: of what is found, if that is not the queries'."""
        num_tokens, num_heads, dim = q_THE.shape
        num_kv = k_TGE.shape[1]
        group = num_heads // num_kv
        parts, num_programs = self.parts, self.rows.num * num_kv
        size = max(16, triton.next_power_of_2(self.max_queries * group))  # 16: the least of a product
        if size == 32 and dim == 128 and q_THE.itemsize == 2 and parts == 1 and num_programs < CROWDED:
            size = 64  # lines for which Hopper has products of its own
        out = q_THE.new_empty(num_tokens, num_heads * dim, dtype=dtype)
        sums = stats = out
        if parts > 1:
            sums = q_THE.new_empty(self.rows.num, num_kv, parts, size, dim, dtype=torch.float32)
            stats = q_THE.new_empty(self.rows.num, num_kv, parts, 2, size, dtype=torch.float32)
        rows = self.rows
        to = turn or Turn(out, out, None, None, 0.0)
        has_norm = to.q_norm is not None
        _attend[(rows.num, num_kv, parts)](
            q_THE, k_TGE, v_TGE, out, sums, stats, self.done, self.kv.k[layer], self.kv.v[layer],
            to.cos, to.sin, to.q_norm if has_norm else out, to.k_norm if has_norm else out, to.eps,
            rows.tables, rows.places, rows.query_start, rows.context, dim**-0.5 * 1.4426950408889634,
            q_THE.stride(0), k_TGE.stride(0), v_TGE.stride(0), out.stride(0), rows.tables.stride(0), self.max_queries,
            NUM_KV=num_kv, GROUP=group, DIM=dim, SIZE=size, SPLITS=parts > 1, PAGE=BLOCK, NEW=MAX_QUERIES,
            TURNS=turn is not None, NORMS=has_norm, **tuning(q_THE.dtype, num_programs, size, parts),
            **early(out.device),
        )  # fmt: skip
        return out


def tuning(dtype: torch.dtype, num_programs: int, size: int, parts: int) -> dict[str, int]:
    """As measured on an H200, 640 tokens of context (benchmarks/gpu/tune.py). Where programs are many, four of up to 32
    lines share a multiprocessor: what is on its way, and with 32 lines registers, are bounded so that they fit. A row's
    own tokens come first where that saves registers, or where their product would be the last to be waited for."""
    if dtype == torch.float32:
        return {"TOKENS": 32, "num_warps": 4, "num_stages": 2, "OWN_FIRST": False}
    if num_programs < CROWDED:
        return {"TOKENS": 64, "num_warps": 4, "num_stages": 3, "OWN_FIRST": parts == 1 and size == 64}
    if size <= 16:
        return {"TOKENS": 64, "num_warps": 4, "num_stages": 2, "OWN_FIRST": True}
    if size <= 32:
        return {"TOKENS": 64, "num_warps": 4, "num_stages": 2, "OWN_FIRST": True, "maxnreg": 128}
    return {"TOKENS": 32, "num_warps": 4, "num_stages": 3, "OWN_FIRST": False}


@triton.jit
def turned(heads, at, real, norm, cos, sin, positions, eps, DIM: tl.constexpr, NORMS: tl.constexpr):
    """The heads that lie at heads + at [N], normed and rotated: their two halves, [N, DIM / 2] each."""
    e = tl.arange(0, DIM // 2)[None, :]
    inside = real[:, None]
    x = tl.load(heads + at[:, None] + e, mask=inside, other=0.0)
    y = tl.load(heads + at[:, None] + DIM // 2 + e, mask=inside, other=0.0)
    c = tl.load(cos + positions[:, None] * (DIM // 2) + e, mask=inside, other=0.0)
    s = tl.load(sin + positions[:, None] * (DIM // 2) + e, mask=inside, other=0.0)
    kind = x.dtype
    x, y = x.to(tl.float32), y.to(tl.float32)
    if NORMS:
        factor = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / DIM + eps)[:, None]
        scale_x, scale_y = tl.load(norm + e).to(tl.float32), tl.load(norm + DIM // 2 + e).to(tl.float32)
        x, y = x * factor * scale_x, y * factor * scale_y
    return (x * c - y * s).to(kind), (y * c + x * s).to(kind)


@triton.jit
def _heads(
    heads, at, real, norm, cos, sin, positions, eps, NUM: tl.constexpr, DIM: tl.constexpr,
    TURNS: tl.constexpr, NORMS: tl.constexpr,
):  # fmt: skip
    """[NUM, DIM], turned if that is still to be done."""
    if TURNS:
        x, y = turned(heads, at, real, norm, cos, sin, positions, eps, DIM, NORMS)
        return tl.reshape(tl.permute(tl.join(x, y), (0, 2, 1)), [NUM, DIM])
    return tl.load(heads + at[:, None] + tl.arange(0, DIM)[None, :], mask=real[:, None], other=0.0)


@triton.jit(do_not_specialize=["max_queries"])
def _attend(
    q, k_new, v_new, out, sums, stats, done, k_pages, v_pages, cos, sin, q_norm, k_norm, eps,
    tables, places, query_start, context, scale,
    q_stride, k_stride, v_stride, out_stride, table_stride, max_queries,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
    PAGE: tl.constexpr, NEW: tl.constexpr, TURNS: tl.constexpr, NORMS: tl.constexpr, TOKENS: tl.constexpr,
    OWN_FIRST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """How many parts there may be is not compiled in, nor how many queries a row has at most but for the lines they
    take: for small batches these are other numbers with each of their sizes, and a kernel takes seconds to compile."""
    row, head, part, parts = tl.program_id(0), tl.program_id(1), tl.program_id(2), 1
    first = tl.load(query_start + row)
    num = tl.load(query_start + row + 1) - first
    old = tl.where(num > 0, tl.load(context + row) - num, 0)  # tokens that are in the pages already
    table = tables + tl.load(places + row).to(tl.int64) * table_stride
    strides = tl.cdiv(old, TOKENS)
    if SPLITS:
        # The last part waits for its strides and for each other part, which takes as long as a stride: so their sum is
        # to be small.
        parts = tl.ceil(tl.sqrt_rn(tl.maximum(strides, 1).to(tl.float32))).to(tl.int32)
        parts = tl.minimum(parts, tl.num_programs(2))
    share = tl.cdiv(strides, parts) * TOKENS
    begin = part * share
    end = tl.minimum(old, begin + share)
    # Strides begin where a page does: which page of a stride a token is in, and where in it, never changes.
    t = tl.arange(0, TOKENS)
    pages = tl.load(table + begin // PAGE + t // PAGE, mask=begin + t < end, other=0)
    wait(EARLY)
    if (num == 0) | (num > max_queries) | (part >= parts):
        return
    of = tl.arange(0, SIZE)  # (query, head of the group), queries first
    query = of // GROUP
    real = query < num
    e = tl.arange(0, DIM)
    if old < 0:
        out_at = (first + query).to(tl.int64)[:, None] * out_stride + (head * GROUP + of % GROUP)[:, None] * DIM
        tl.store(out + out_at + e[None, :], tl.zeros([SIZE, DIM], out.dtype.element_ty), mask=real[:, None])
        return
    q_at = (first + query).to(tl.int64) * q_stride + (head * GROUP + of % GROUP) * DIM
    qs = tl.zeros([SIZE, DIM], q.dtype.element_ty)
    if num > 0:  # always; but Triton does not see that what a branch gives was joined, and loads what was piecemeal
        qs = _heads(q, q_at, real, q_norm, cos, sin, old + query, eps, SIZE, DIM, TURNS, NORMS)
    greatest = tl.full([SIZE], -float("inf"), tl.float32)
    totals = tl.zeros([SIZE, TOKENS], tl.float32)  # summed at the end: a sum over warps is what a turn waits for
    acc = tl.zeros([SIZE, DIM], tl.float32)
    of_page = ((head * PAGE + t % PAGE) * DIM)[:, None] + e[None, :]
    total = tl.zeros([SIZE], tl.float32)
    for turn in tl.static_range(2):  # the row's own tokens and those of the pages, in either order
        if (turn == 0) == OWN_FIRST:
            if part == parts - 1:
                j = tl.arange(0, NEW)
                fresh = j < num
                new = (first + j).to(tl.int64)
                at = old + j
                k = _heads(k_new, new * k_stride + head * DIM, fresh, k_norm, cos, sin, at, eps, NEW, DIM, TURNS, NORMS)
                v = tl.load(v_new + new[:, None] * v_stride + head * DIM + e[None, :], mask=fresh[:, None], other=0.0)
                page = tl.load(table + at // PAGE, mask=fresh, other=0).to(tl.int64)
                base = ((page * NUM_KV + head) * PAGE + at % PAGE) * DIM
                tl.store(k_pages + base[:, None] + e[None, :], k, mask=fresh[:, None])
                tl.store(v_pages + base[:, None] + e[None, :], v, mask=fresh[:, None])
                scores = tl.dot(qs, tl.trans(k), input_precision="ieee")
                scores = tl.where(fresh[None, :] & (j[None, :] <= query[:, None]), scores, -float("inf"))
                now = tl.maximum(greatest, tl.max(scores, 1) * scale)
                fade = tl.exp2(greatest - now)
                chance = tl.exp2(scores * scale - now[:, None])
                total = total * fade + tl.sum(chance, 1)
                acc = acc * fade[:, None] + tl.dot(chance.to(v.dtype), v, input_precision="ieee")
                greatest = now
        else:
            for start in range(begin, end, TOKENS):
                inside = start + t < end
                at = (pages.to(tl.int64) * (NUM_KV * PAGE * DIM))[:, None] + of_page
                # A turn ahead: then loads of keys and values wait for nothing, and several turns' are on their way.
                pages = tl.load(table + (start + TOKENS) // PAGE + t // PAGE, mask=start + TOKENS + t < end, other=0)
                k = tl.load(k_pages + at, mask=inside[:, None], other=0.0)
                v = tl.load(v_pages + at, mask=inside[:, None], other=0.0)
                scores = tl.dot(qs, tl.trans(k), input_precision="ieee")
                scores = tl.where(inside[None, :], scores, -float("inf"))
                now = tl.maximum(greatest, tl.max(scores, 1) * scale)
                fade = tl.exp2(greatest - now)
                chance = tl.exp2(scores * scale - now[:, None])
                totals = totals * fade[:, None] + chance
                if OWN_FIRST:
                    total = total * fade
                acc = acc * fade[:, None] + tl.dot(chance.to(v.dtype), v, input_precision="ieee")
                greatest = now
            total += tl.sum(totals, 1)
    if not SPLITS:
        out_at = (first + query).to(tl.int64)[:, None] * out_stride + (head * GROUP + of % GROUP)[:, None] * DIM
        tl.store(out + out_at + e[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
    else:
        mine = (row * NUM_KV + head).to(tl.int64) * tl.num_programs(2)
        tl.store(sums + (mine + part) * SIZE * DIM + of[:, None] * DIM + e[None, :], acc)
        tl.store(stats + (mine + part) * 2 * SIZE + of, greatest)
        tl.store(stats + (mine + part) * 2 * SIZE + SIZE + of, total)
        tl.debug_barrier()  # all of it is written before it is counted
        if tl.atomic_add(done + row * NUM_KV + head, 1, sem="acq_rel") == parts - 1:
            tl.store(done + row * NUM_KV + head, 0)  # for the next layer
            greatest = tl.full([SIZE], -float("inf"), tl.float32)
            for i in range(parts):
                greatest = tl.maximum(greatest, tl.load(stats + (mine + i) * 2 * SIZE + of, cache_modifier=".cg"))
            total = tl.zeros([SIZE], tl.float32)
            acc = tl.zeros([SIZE, DIM], tl.float32)
            for i in range(parts):
                theirs = stats + (mine + i) * 2 * SIZE + of
                fade = tl.exp2(tl.load(theirs, cache_modifier=".cg") - greatest)
                total += fade * tl.load(theirs + SIZE, cache_modifier=".cg")
                part_acc = sums + (mine + i) * SIZE * DIM + of[:, None] * DIM + e[None, :]
                acc += fade[:, None] * tl.load(part_acc, cache_modifier=".cg")
            out_at = (first + query).to(tl.int64)[:, None] * out_stride + (head * GROUP + of % GROUP)[:, None] * DIM
            tl.store(out + out_at + e[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
