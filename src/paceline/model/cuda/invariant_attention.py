"""Paged attention with batch-invariant results: a query's bits depend on its own sequence alone, not on the batch.

The order of summation depends on positions only:

- Keys are read in chunks of CHUNK tokens, which begin at multiples of CHUNK. A chunk's products are tensor core
  instructions, which sum over the tokens in a fixed order.
- Chunks are grouped into sections, which begin at fixed positions. Each section starts from zero.
- The results of the sections are combined one after another, from the first on.

So prefill, decode and verification have the same bits, whatever the number of queries in a tile and wherever a prompt
is cut into chunks. One program may compute all sections, or several programs may share them. Chunks past a query's
position change nothing: their weights are exactly zero.

Multiplications and additions are fused only where `tl.fma` says so (`enable_fp_fusion=False`): otherwise the compiler
could decide differently for each variant of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.attention import AttentionRows, QKNormRope
from paceline.model.cuda.pdl import pdl_options, pdl_wait
from paceline.model.cuda.rotate_and_store import rotate_and_store
from paceline.model.device import to_device
from paceline.model.kv import BLOCK, BatchPlan, PagedKV

CHUNK = tl.constexpr(64)  # tokens
TARGET_PROGRAMS = 256  # of attention: two per multiprocessor of a large device
MAX_SPLITS = 32  # programs that share the sections of a tile
# Queries of a tile times heads of a group, for prompts. More would not fit the registers.
PREFILL_SIZE = 128
WIDE_PREFILL_SIZE = 64  # with heads of more than 128 numbers
NO_SCORE = tl.constexpr(-1e30)  # initial maximum: finite, so that differences are defined


@dataclass(slots=True)
class Tiles:
    """Which queries each tile has, if rows have more queries than fit one tile."""

    rows: Tensor  # int32 [N], the row
    first: Tensor  # int32 [N], the first query of the row


class InvariantPagedAttention:
    """Created for one forward pass, called once per layer with the queries, keys and values of T tokens, straight from
    the projection. `slots_T` is each token's index in the block tables, -1: padding."""

    def __init__(
        self, kv: PagedKV, rows: AttentionRows, positions_T: Tensor, slots_T: Tensor, max_queries: int
    ) -> None:
        self.kv, self.rows, self.positions_T, self.slots_T = kv, rows, positions_T, slots_T
        self.max_queries = max_queries
        self.tiles: Tiles | None = None
        num_kv, num_rows = kv.k.shape[2], rows.num_rows
        self.group = kv.config.num_heads // num_kv
        self.size = max(16, triton.next_power_of_2(max_queries * self.group))
        self._set_tiles(num_rows)
        self.max_sections = num_sections(rows.block_tables.shape[1] * BLOCK)

    @classmethod
    def of_plan(cls, kv: PagedKV, plan: BatchPlan, num_padding: int = 0) -> InvariantPagedAttention:
        """For rows with any number of queries. `num_padding`: tokens after those of the plan."""
        send = partial(to_device, device=kv.k.device, dtype=torch.int32)

        sizes = np.diff(plan.query_start)
        rows = AttentionRows(
            send(plan.query_start), send(plan.context), send(np.arange(plan.num_rows)),
            send(plan.block_tables),
        )  # fmt: skip
        padding = np.full(num_padding, -1)
        slots = np.concatenate([np.repeat(np.arange(plan.num_rows), sizes), padding])
        positions = np.concatenate([plan.positions, padding * 0])
        self = cls(kv, rows, send(positions), send(slots), int(sizes.max()))
        self.size = min(self.size, PREFILL_SIZE if kv.k.shape[-1] <= 128 else WIDE_PREFILL_SIZE)
        per_tile = self.size // self.group
        if self.max_queries > per_tile:
            num = -(-sizes // per_tile)
            tile_rows = np.repeat(np.arange(plan.num_rows), num)
            first = (np.arange(len(tile_rows)) - np.repeat(np.cumsum(num) - num, num)) * per_tile
            # The longest contexts first, so that no long tile begins when the others end.
            longest_first = np.argsort(-(plan.context - sizes)[tile_rows] - first, kind="stable")
            self.tiles = Tiles(send(tile_rows[longest_first]), send(first[longest_first]))
            self._set_tiles(len(tile_rows))
        return self

    def _set_tiles(self, num: int, splits: int | None = None) -> None:
        """`splits`: None for a number that fills the device."""
        num_kv = self.kv.k.shape[2]
        self.num_tiles, self.splits = num, splits or num_splits(num * num_kv)
        num_counters = num * num_kv if self.splits > 1 else 0
        self.num_done = torch.zeros(num_counters, dtype=torch.int32, device=self.kv.k.device)  # finished splits

    def __call__(
        self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor, norm_rope: QKNormRope | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:  # fmt: skip
        """[T, H * E]. q, k and v are parts of one tensor [T, (H + 2 G) * E]."""
        assert norm_rope is not None and dtype is None
        num_tokens, num_heads, dim = q_THE.shape
        num_kv, rows = k_TGE.shape[1], self.rows
        assert k_TGE.data_ptr() == q_THE.data_ptr() + num_heads * dim * q_THE.itemsize
        k_cache, v_cache, tables = self.kv.k[layer], self.kv.v[layer], rows.block_tables
        q = q_THE.new_empty(num_tokens, num_heads, dim)
        rotate_and_store(q_THE, q, self.kv, layer, norm_rope, self.positions_T, self.slots_T, tables)
        out = q.new_empty(num_tokens, num_heads * dim)
        section_outs = section_stats = out
        if self.splits > 1:
            num = self.num_tiles * num_kv * self.max_sections
            section_outs = q.new_empty(num, self.size, dim, dtype=torch.float32)
            section_stats = q.new_empty(num, 2, self.size, dtype=torch.float32)
        tiles = self.tiles or Tiles(rows.slots, rows.slots)
        _attend[(self.num_tiles, num_kv, self.splits)](
            q, out, section_outs, section_stats, self.num_done, k_cache, v_cache, tables, rows.slots, rows.query_start,
            rows.context, tiles.rows, tiles.first, dim**-0.5 * 1.4426950408889634, q.stride(0), out.stride(0),
            tables.stride(0), self.max_queries, self.max_sections, NUM_KV=num_kv, GROUP=self.group, DIM=dim,
            SIZE=self.size, HAS_SPLITS=self.splits > 1, HAS_TILES=self.tiles is not None, BLOCK=BLOCK,
            **tuning(self.size, self.splits), enable_fp_fusion=False, **pdl_options(q.device),
        )  # fmt: skip
        return out


def tuning(size: int, splits: int) -> dict[str, Any]:
    """Launch parameters, which do not change results."""
    # So many that all warps get columns: a tile with few rows can't be shared out by rows.
    columns = {16: 32, 32: 64}.get(size, 16)
    stages = 3 if splits > 1 and size < 64 else 2  # with one split there are many programs, which share the registers
    return {"TOTAL_COLUMNS": columns, "num_warps": 8 if size >= 128 else 4, "num_stages": stages}


def num_splits(num_programs: int) -> int:
    return min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(TARGET_PROGRAMS, num_programs)))


def num_sections(context: int) -> int:
    """Sections of a context with so many tokens: they are longer at higher positions, so that there are few."""
    for start, size, first in ((32768, 8192, 32), (8192, 2048, 20), (2048, 512, 8)):
        if context > start:
            return first + -(-(context - start) // size)
    return -(-context // 256)


@triton.jit
def _num_sections(context):
    """As `num_sections`."""
    num = tl.where(context > 8192, 20 + tl.cdiv(context - 8192, 2048), 8 + tl.cdiv(context - 2048, 512))
    num = tl.where(context > 32768, 32 + tl.cdiv(context - 32768, 8192), num)
    return tl.where(context > 2048, num, tl.cdiv(context, 256))


@triton.jit
def _section_start(i):
    start = tl.where(i > 20, 8192 + (i - 20) * 2048, 2048 + (i - 8) * 512)
    start = tl.where(i > 32, 32768 + (i - 32) * 8192, start)
    return tl.where(i > 8, start, i * 256)


@triton.jit(do_not_specialize=["table_stride", "max_queries", "max_sections"])
def _attend(
    q, out, section_outs, section_stats, num_done, k_cache, v_cache, block_tables, slots, query_start, context,
    tile_rows, tile_first, scale, q_stride, out_stride, table_stride, max_queries, max_sections,
    NUM_KV: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, TOTAL_COLUMNS: tl.constexpr,
    HAS_SPLITS: tl.constexpr, HAS_TILES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of queries and one key/value head; with splits, a part of the sections."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, first_query = tile, 0
    if HAS_TILES:
        row, first_query = tl.load(tile_rows + tile), tl.load(tile_first + tile)
    row_start, row_end = tl.load(query_start + row), tl.load(query_start + row + 1)
    first = row_start + first_query
    num = tl.minimum(row_end - first, SIZE // GROUP)
    start_position = tl.load(context + row) - (row_end - first)  # of the first query
    end = start_position + num
    table = block_tables + tl.load(slots + row).to(tl.int64) * table_stride
    sections = _num_sections(end)
    pdl_wait(PDL)
    if (row_end - row_start <= 0) | (row_end - row_start > max_queries) | (split >= sections):
        return
    m = tl.arange(0, SIZE)  # (query, head of the group), queries first
    query = m // GROUP
    valid = query < num
    e = tl.arange(0, DIM)
    column = (head * GROUP + m % GROUP)[:, None] * DIM + e[None, :]
    qs = tl.load(q + (first + query).to(tl.int64)[:, None] * q_stride + column, mask=valid[:, None], other=0.0)
    position = start_position + query
    kv = head.to(tl.int64) * (BLOCK * DIM)
    acc, total, peak = _empty_section(SIZE, DIM, TOTAL_COLUMNS)
    out_at = out + (first + query).to(tl.int64)[:, None] * out_stride + column
    if not HAS_SPLITS:
        all_acc, all_total, all_peak = acc, tl.zeros([SIZE], tl.float32), peak
        section, section_end = 0, _section_start(1)
        blocks = _load_blocks(table, 0, end, BLOCK)
        for start in range(0, end, CHUNK):
            if start == section_end:
                all_acc, all_total, all_peak = _combine(all_acc, all_total, all_peak, acc, tl.max(total, 1), peak)
                acc, total, peak = _empty_section(SIZE, DIM, TOTAL_COLUMNS)
                section += 1
                section_end = _section_start(section + 1)
            acc, total, peak, blocks = _attend_chunk(
                qs, k_cache + kv, v_cache + kv, table, blocks, start, end, position, acc, total, peak, scale, NUM_KV,
                DIM, TOTAL_COLUMNS, BLOCK,
            )  # fmt: skip
        all_acc, all_total, all_peak = _combine(all_acc, all_total, all_peak, acc, tl.max(total, 1), peak)
        tl.store(out_at, (all_acc / all_total[:, None]).to(out.dtype.element_ty), mask=valid[:, None])
    else:
        first_section = (tile * NUM_KV + head).to(tl.int64) * max_sections
        inner = m[:, None] * DIM + e[None, :]
        for section in range(split, sections, tl.num_programs(2)):
            acc, total, peak = _empty_section(SIZE, DIM, TOTAL_COLUMNS)
            first_token = _section_start(section)
            blocks = _load_blocks(table, first_token, end, BLOCK)
            for start in range(first_token, tl.minimum(end, _section_start(section + 1)), CHUNK):
                acc, total, peak, blocks = _attend_chunk(
                    qs, k_cache + kv, v_cache + kv, table, blocks, start, end, position, acc, total, peak, scale,
                    NUM_KV, DIM, TOTAL_COLUMNS, BLOCK,
                )  # fmt: skip
            stats = section_stats + (first_section + section) * 2 * SIZE + m
            tl.store(section_outs + (first_section + section) * SIZE * DIM + inner, acc)
            tl.store(stats, peak)
            tl.store(stats + SIZE, tl.max(total, 1))
        tl.debug_barrier()  # all threads have written before the split is counted as done
        num_active = tl.minimum(sections, tl.num_programs(2))
        if tl.atomic_add(num_done + tile * NUM_KV + head, 1, sem="acq_rel") == num_active - 1:
            tl.store(num_done + tile * NUM_KV + head, 0)  # for the next layer
            all_acc, all_total = tl.zeros([SIZE, DIM], tl.float32), tl.zeros([SIZE], tl.float32)
            all_peak = tl.full([SIZE], NO_SCORE, tl.float32)
            for section in range(sections):
                stats = section_stats + (first_section + section) * 2 * SIZE + m
                section_peak = tl.load(stats, cache_modifier=".cg")
                section_total = tl.load(stats + SIZE, cache_modifier=".cg")
                section_out = section_outs + (first_section + section) * SIZE * DIM + inner
                section_acc = tl.load(section_out, cache_modifier=".cg")
                all_acc, all_total, all_peak = _combine(
                    all_acc, all_total, all_peak, section_acc, section_total, section_peak
                )  # fmt: skip
            tl.store(out_at, (all_acc / all_total[:, None]).to(out.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _empty_section(SIZE: tl.constexpr, DIM: tl.constexpr, TOTAL_COLUMNS: tl.constexpr):
    """Of no tokens: weighted sum of values, sum of the weights (in all columns), and maximum of the scores."""
    acc = tl.zeros([SIZE, DIM], tl.float32)
    return acc, tl.zeros([SIZE, TOTAL_COLUMNS], tl.float32), tl.full([SIZE], NO_SCORE, tl.float32)


@triton.jit
def _load_blocks(table, start, end, BLOCK: tl.constexpr):
    """The KV block of each token of the chunk at `start`."""
    t = tl.arange(0, CHUNK)
    return tl.load(table + start // BLOCK + t // BLOCK, mask=start + t < end, other=0)


@triton.jit
def _attend_chunk(
    qs, k_cache, v_cache, table, blocks, start, end, position, acc, total, peak, scale, NUM_KV: tl.constexpr,
    DIM: tl.constexpr, TOTAL_COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds the tokens start … start + CHUNK - 1, and loads the next chunk's block numbers, so that loads of keys and
    values do not wait for these. Weights are summed as they are multiplied with the values: rounded, by the tensor
    cores. A sum over the tokens by other instructions would depend on the layout of the tile."""
    t = tl.arange(0, CHUNK)
    in_block = (t % BLOCK * DIM)[:, None] + tl.arange(0, DIM)[None, :]
    in_cache = (blocks.to(tl.int64) * (NUM_KV * BLOCK * DIM))[:, None] + in_block
    inside = (start + t < end)[:, None]
    blocks = _load_blocks(table, start + CHUNK, end, BLOCK)
    k = tl.load(k_cache + in_cache)  # scores past the end are masked below
    v = tl.load(v_cache + in_cache, mask=inside, other=0.0)
    scores = tl.dot(qs, tl.trans(k))
    scores = tl.where((start + t)[None, :] <= position[:, None], scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    rescale = tl.exp2(peak - new_peak)
    weights = tl.exp2(tl.fma(scores, scale, -new_peak[:, None])).to(v.dtype)
    acc = tl.dot(weights, v, acc * rescale[:, None])
    total = tl.dot(weights, tl.full([CHUNK, TOTAL_COLUMNS], 1.0, v.dtype), total * rescale[:, None])
    return acc, total, new_peak, blocks


@triton.jit
def _combine(all_acc, all_total, all_peak, acc, total, peak):
    """Adds a section to the ones before it."""
    new_peak = tl.maximum(all_peak, peak)
    old, new = tl.exp2(all_peak - new_peak), tl.exp2(peak - new_peak)
    all_acc = tl.fma(all_acc, old[:, None], acc * new[:, None])
    return all_acc, tl.fma(all_total, old, total * new), new_peak
