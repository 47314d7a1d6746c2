"""What a device knows of the sequences that it decodes, so that one step can follow another without the host.

A sequence has a slot: its last token, its length and the most it may become, its noise key, how it samples, its pages,
and what a head on the device drafted for it. A step is given orders: which slots, and what was drafted for them.
`auction` chooses among what the slots have drafted, `lay_out` turns orders into a forward's inputs, `settle` draws the
conclusions: which drafted tokens stand (rule `coupled`), the new last token and length; and what the host is to know.

R rows, T tokens, at most Q queries a row (its last token and Q - 1 drafted ones).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.attention import MAX_QUERIES, Rows
from paceline.model.cuda.sample import Draws

MAX_DRAFT = MAX_QUERIES - 1
HEADER = 4  # of an order: slot (-1: none), number of drafted tokens, last token (-1: as the slot knows it), length
MAX_AUCTION = 1024  # rows that may bid
PADDING = 256  # tokens that are none, at a time
ORDER = HEADER + MAX_DRAFT  # int32 words, the drafted tokens behind the header (-1: as the slot knows them)


@dataclass(slots=True)
class Inputs:
    """Of one forward. Tokens past the last row's are padding."""

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    keys: Tensor  # int64 [T]
    temperature: Tensor  # float64 [T]
    emitted_at: Tensor  # int64 [T], position of the token that is drawn there
    places: Tensor  # int32 [T], whose slot it is; -1: padding
    rows: Rows


class Slots:
    def __init__(self, num_slots: int, num_pages: int, device: torch.device) -> None:
        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.last, self.length, self.limit = zeros(num_slots), zeros(num_slots), zeros(num_slots)
        self.drafts = zeros(num_slots, MAX_DRAFT)
        self.worth = zeros(num_slots, MAX_DRAFT, dtype=torch.float32)  # of each, by the head: that all up to it stand
        self.least = zeros(1, dtype=torch.float32)  # worth that the last auction kept; 0 if nobody lost
        self.key, self.temperature = zeros(num_slots, dtype=torch.int64), zeros(num_slots, dtype=torch.float64)
        self.top_k, self.top_p = zeros(num_slots), zeros(num_slots, dtype=torch.float64)
        self.min_p = zeros(num_slots, dtype=torch.float64)
        self.tables = zeros(num_slots, num_pages)

    def auction(self, orders: Tensor, num_slots: Tensor, num_queries: int) -> None:
        """Of all drafted tokens that the orders speak of, which are the slots' own, keep num_slots int32 [1], those
        that are worth most: the orders' numbers of drafted tokens become those that are left. What is worth nothing is
        not kept. num_queries: a power of two, of which every row has fewer."""
        num_rows = len(orders)
        assert num_rows <= MAX_AUCTION
        # A warp alone adds up without waiting for others; but it has only so many registers.
        warps = min(8, triton.cdiv(triton.next_power_of_2(num_rows) * num_queries, 1024))
        _auction[(1,)](
            orders, num_slots, self.worth, self.least, num_rows, ORDER=ORDER, MAX_DRAFT=MAX_DRAFT, QUERIES=num_queries,
            ROWS=triton.next_power_of_2(num_rows), num_warps=warps,
        )  # fmt: skip

    def lay_out(self, orders: Tensor, pages: Tensor, num_tokens: int, num_queries: int) -> Inputs:
        """orders int32 [R, ORDER]; pages int32 [U, 3]: (slot, index, page) to be entered first, slot -1: nothing.
        num_queries: of a row, at most."""
        device, num_rows = orders.device, len(orders)

        def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        rows = Rows(empty(num_rows + 1), empty(num_rows), empty(num_rows), self.tables)
        inputs = Inputs(
            empty(num_tokens), empty(num_tokens), empty(num_tokens, torch.int64), empty(num_tokens, torch.float64),
            empty(num_tokens, torch.int64), empty(num_tokens), rows,
        )  # fmt: skip
        _lay_out[(1,)](
            orders, pages, self.last, self.length, self.key, self.temperature, self.tables, self.drafts,
            inputs.tokens, inputs.positions, inputs.keys, inputs.temperature, inputs.emitted_at, inputs.places,
            rows.query_start, rows.context, rows.places, num_rows, num_tokens, len(pages), self.tables.stride(0),
            num_queries, ORDER=ORDER, HEADER=HEADER, ROWS=triton.next_power_of_2(num_rows), MAX_DRAFT=MAX_DRAFT,
            PAGES=triton.next_power_of_2(len(pages)), PADDING=PADDING, num_warps=4,
        )  # fmt: skip
        return inputs

    def settle(
        self, inputs: Inputs, draws: Draws, tokens_out: Tensor, logprobs_out: Tensor, imposed: Tensor | None = None
    ) -> Tensor:
        """tokens_out int32 [R, 2 + MAX_QUERIES]: how many were emitted and how many verified, and which were emitted;
        logprobs_out float64 [R, 2, MAX_QUERIES], processed and raw. Returns which of the T tokens the last emitted one
        was drawn at, int32 [R], 0 for a row that is none. `imposed`: float32 [N], of which each drafted token has
        one, by lot, for its chance to be taken for right, whatever the target drew. That is for timing steps: what is
        emitted then is nobody's sample."""
        ends = torch.empty_like(inputs.rows.context)
        _settle[(inputs.rows.context.shape[0],)](
            inputs.tokens, inputs.rows.query_start, inputs.rows.places, draws.tokens, draws.logprobs,
            draws.raw_logprobs, self.last, self.length, tokens_out, logprobs_out, ends,
            ends if imposed is None else imposed, QUERIES=MAX_QUERIES, IMPOSED=0 if imposed is None else len(imposed),
            num_warps=1,
        )  # fmt: skip
        return ends


@triton.jit
def imposed_chance(chances, slot, position, NUM: tl.constexpr):
    """Of the token that is drafted for a position: always the same one."""
    lot = tl.rand(2, slot * 65536 + position)
    return tl.load(chances + tl.minimum((lot * NUM).to(tl.int32), NUM - 1))


# Sizes of steps are many, and none is special: a kernel for each kind of them would be compiled in the midst of a run.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["num_slots"])
def _auction(
    orders, num_slots, worth, least_kept, num_rows,
    ORDER: tl.constexpr, MAX_DRAFT: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program. The least worth that is kept is found bit by bit (a positive float's bits grow with it); of equals
    the first are kept. A token is worth no more than the one before it, so what is kept of a row is its beginning."""
    wanted = tl.load(num_slots)
    i = tl.arange(0, ROWS * QUERIES)
    r, j = i // QUERIES, i % QUERIES
    slot = tl.load(orders + r * ORDER, mask=r < num_rows, other=-1)
    num_draft = tl.load(orders + r * ORDER + 1, mask=slot >= 0, other=0)
    key = tl.load(worth + slot * MAX_DRAFT + j, mask=j < num_draft, other=0.0).to(tl.int32, bitcast=True)
    bids = key > 0
    least = tl.zeros([], tl.int32)
    bit = tl.full([], 1 << 30, tl.int32)
    while bit > 0:
        if tl.sum((bids & (key >= (least | bit))).to(tl.int32)) >= wanted:
            least = least | bit
        bit = bit >> 1
    above = bids & (key > least)
    ties = bids & (key == least)
    left = wanted - tl.sum(above.to(tl.int32))
    keeps = above | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= left))
    num = tl.sum(tl.reshape(keeps.to(tl.int32), [ROWS, QUERIES]), 1)
    row = tl.arange(0, ROWS)
    tl.store(orders + row * ORDER + 1, num, mask=row < num_rows)
    loses = (wanted > 0) & (tl.sum(bids.to(tl.int32)) > wanted)
    tl.store(least_kept, tl.where(loses, least.to(tl.float32, bitcast=True), 0.0))


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_pages", "num_queries"], do_not_specialize_on_alignment=["pages"]
)
def _lay_out(
    orders, pages, last, length, key, temperature, tables, drafts,
    tokens, positions, keys, temperatures, emitted_at, token_places, query_start, context, places,
    num_rows, num_tokens, num_pages, table_stride, num_queries,
    ORDER: tl.constexpr, HEADER: tl.constexpr, MAX_DRAFT: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
    PADDING: tl.constexpr,
):  # fmt: skip
    """One program: a step's few thousand numbers."""
    u = tl.arange(0, PAGES)
    page_slot = tl.load(pages + 3 * u, mask=u < num_pages, other=-1)
    entered = page_slot >= 0
    page_index = tl.load(pages + 3 * u + 1, mask=entered, other=0)
    page = tl.load(pages + 3 * u + 2, mask=entered, other=0)
    tl.store(tables + page_slot.to(tl.int64) * table_stride + page_index, page, mask=entered)
    r = tl.arange(0, ROWS)
    given = r < num_rows
    slot = tl.load(orders + r * ORDER, mask=given, other=-1)
    real = slot >= 0
    num_draft = tl.load(orders + r * ORDER + 1, mask=real, other=0)
    told = tl.load(orders + r * ORDER + 2, mask=real, other=-1)
    known = real & (told < 0)
    token = tl.where(known, tl.load(last + slot, mask=known, other=0), told)
    size = tl.where(
        known, tl.load(length + slot, mask=known, other=1), tl.load(orders + r * ORDER + 3, mask=real, other=1)
    )
    tl.store(length + slot, size, mask=real)
    num = tl.where(real, 1 + num_draft, 0)
    ends = tl.cumsum(num, 0)
    start = ends - num
    total = tl.sum(num)
    tl.store(query_start + r, start, mask=given)
    tl.store(query_start + num_rows, total)
    tl.store(context + r, size + num_draft, mask=given)
    tl.store(places + r, slot, mask=given)
    own_key = tl.load(key + slot, mask=real, other=0)
    own_temperature = tl.load(temperature + slot, mask=real, other=1.0)
    for j in range(num_queries):
        here = real & (j < num)
        drafted = tl.load(orders + r * ORDER + HEADER + j - 1, mask=here & (j > 0), other=0)
        own = here & (drafted < 0)
        drafted = tl.where(own, tl.load(drafts + slot * MAX_DRAFT + j - 1, mask=own, other=0), drafted)
        at = start + j
        tl.store(tokens + at, tl.where(j == 0, token, drafted), mask=here)
        tl.store(positions + at, size - 1 + j, mask=here)
        tl.store(emitted_at + at, (size + j).to(tl.int64), mask=here)
        tl.store(keys + at, own_key, mask=here)
        tl.store(temperatures + at, own_temperature, mask=here)
        tl.store(token_places + at, slot, mask=here)
    zero = tl.zeros([PADDING], tl.int32)
    for start in range(total, num_tokens, PADDING):
        t = start + tl.arange(0, PADDING)
        padding = t < num_tokens
        tl.store(tokens + t, zero, mask=padding)
        tl.store(positions + t, zero, mask=padding)
        tl.store(emitted_at + t, zero.to(tl.int64), mask=padding)
        tl.store(keys + t, zero.to(tl.int64), mask=padding)
        tl.store(temperatures + t, zero.to(tl.float64) + 1, mask=padding)
        tl.store(token_places + t, zero - 1, mask=padding)


@triton.jit
def _settle(
    tokens, query_start, places, drawn, logprobs, raw_logprobs, last, length, tokens_out, logprobs_out, ends, imposed,
    QUERIES: tl.constexpr, IMPOSED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    start = tl.load(query_start + row)
    num = tl.load(query_start + row + 1) - start
    out = tokens_out + row * (2 + QUERIES)
    tl.store(out + 1, tl.maximum(num - 1, 0))
    if num == 0:
        tl.store(out, 0)
        tl.store(ends + row, 0)
        return
    j = tl.arange(0, QUERIES)
    inside = j < num
    found = tl.load(drawn + start + j, mask=inside, other=-1)
    drafted = tl.load(tokens + start + j + 1, mask=j + 1 < num, other=-2)  # what stands after it in the input
    right = found == drafted
    if IMPOSED:
        slot = tl.load(places + row)
        size = tl.load(length + slot)
        lot = tl.rand(1, slot * 65536 + (size + j) * QUERIES + j)
        right = (lot < imposed_chance(imposed, slot, size + j, IMPOSED)) & (j + 1 < num)
        found = tl.where(right, drafted, found)
    accepted = tl.min(tl.where(right, QUERIES, j))
    tl.store(out, accepted + 1)
    tl.store(ends + row, start + accepted)
    tl.store(out + 2 + j, found, mask=inside)
    mine = logprobs_out + row * 2 * QUERIES
    tl.store(mine + j, tl.load(logprobs + start + j, mask=inside, other=0.0), mask=inside)
    tl.store(mine + QUERIES + j, tl.load(raw_logprobs + start + j, mask=inside, other=0.0), mask=inside)
    slot = tl.load(places + row)
    tl.store(last + slot, tl.sum(tl.where(j == accepted, found, 0)))
    tl.store(length + slot, tl.load(length + slot) + accepted + 1)
