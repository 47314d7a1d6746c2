"""The device's state of running sequences, so that one step can follow another without the host.

Each sequence has a slot: its last token, its length and its limit, its noise key, its sampling parameters, its block
table, and the draft that a drafter on the device made for it. A step's input has one row per sequence: its slot, and
its draft if the host knows it. `select_drafts` selects which draft tokens to verify, `prepare_inputs` makes the inputs
of the forward pass, and `commit_tokens` accepts draft tokens (rule `coupled`), updates the slots and writes the outputs
for the host.

R rows, T tokens, at most Q queries per row (the last token and Q - 1 draft tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.attention import MAX_QUERIES, AttentionRows
from paceline.model.cuda.sample import Draws

MAX_DRAFT = MAX_QUERIES - 1
HEADER = 4  # words of a row: slot (-1: padding), number of draft tokens, last token (-1: the slot's own), length
ROW_WORDS = HEADER + MAX_DRAFT  # int32 words of a row; after the header its draft tokens (-1: the slot's own)
MAX_SELECT_ROWS = 1024  # rows that `select_drafts` can select from
PADDING = 256  # padding tokens that are written at a time


@dataclass(slots=True)
class Inputs:
    """Of one forward pass. Tokens after those of the last row are padding."""

    tokens: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    keys: Tensor  # int64 [T]
    temperature: Tensor  # float64 [T]
    emitted_at: Tensor  # int64 [T], position of the token that is sampled there
    slots: Tensor  # int32 [T], -1: padding
    rows: AttentionRows


class DeviceState:
    """Of all running sequences, by slot. Graphs read and write it, so that a step needs nothing that the host learns
    from the step before."""

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        def zeros(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=device)

        self.last, self.length, self.limit = zeros(num_slots), zeros(num_slots), zeros(num_slots)
        self.drafts = zeros(num_slots, MAX_DRAFT)
        # Of each draft token: the probability that it and all before it are accepted, by the drafter's own estimate.
        self.survival = zeros(num_slots, MAX_DRAFT, dtype=torch.float32)
        self.threshold = zeros(1, dtype=torch.float32)  # least survival selected last; 0 if all tokens were selected
        self.key, self.temperature = zeros(num_slots, dtype=torch.int64), zeros(num_slots, dtype=torch.float64)
        self.top_k, self.top_p = zeros(num_slots), zeros(num_slots, dtype=torch.float64)
        self.min_p = zeros(num_slots, dtype=torch.float64)
        self.block_tables = zeros(num_slots, max_blocks)

    def select_drafts(self, row_inputs: Tensor, draft_budget: Tensor, num_queries: int) -> None:
        """Select the draft_budget (int32 [1]) draft tokens with the highest survival probability, and set the rows'
        numbers of draft tokens to what is selected. The drafts must be the slots' own. Tokens with a probability of 0
        are never selected. num_queries: a power of two; every row has fewer draft tokens."""
        num_rows = len(row_inputs)
        assert num_rows <= MAX_SELECT_ROWS
        # A single warp sums without waiting for others, but has a limited number of registers.
        warps = min(8, triton.cdiv(triton.next_power_of_2(num_rows) * num_queries, 1024))
        _select_drafts[(1,)](
            row_inputs, draft_budget, self.survival, self.threshold, num_rows, ROW_WORDS=ROW_WORDS,
            MAX_DRAFT=MAX_DRAFT, QUERIES=num_queries, ROWS=triton.next_power_of_2(num_rows), num_warps=warps,
        )  # fmt: skip

    def prepare_inputs(self, row_inputs: Tensor, new_blocks: Tensor, num_tokens: int, num_queries: int) -> Inputs:
        """row_inputs int32 [R, ROW_WORDS]; new_blocks int32 [N, 3]: (slot, index, block), written to the block tables
        first, slot -1: padding. num_queries: the most of a row."""
        device, num_rows = row_inputs.device, len(row_inputs)

        def empty(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        rows = AttentionRows(empty(num_rows + 1), empty(num_rows), empty(num_rows), self.block_tables)
        inputs = Inputs(
            empty(num_tokens), empty(num_tokens), empty(num_tokens, torch.int64), empty(num_tokens, torch.float64),
            empty(num_tokens, torch.int64), empty(num_tokens), rows,
        )  # fmt: skip
        _prepare_inputs[(1,)](
            row_inputs, new_blocks, self.last, self.length, self.key, self.temperature, self.block_tables, self.drafts,
            inputs.tokens, inputs.positions, inputs.keys, inputs.temperature, inputs.emitted_at, inputs.slots,
            rows.query_start, rows.context, rows.slots, num_rows, num_tokens, len(new_blocks),
            self.block_tables.stride(0), num_queries, ROW_WORDS=ROW_WORDS, HEADER=HEADER,
            ROWS=triton.next_power_of_2(num_rows), MAX_DRAFT=MAX_DRAFT,
            NEW_BLOCKS=triton.next_power_of_2(len(new_blocks)), PADDING=PADDING, num_warps=4,
        )  # fmt: skip
        return inputs

    def commit_tokens(
        self, inputs: Inputs, draws: Draws, tokens_out: Tensor, logprobs_out: Tensor, imposed: Tensor | None = None
    ) -> Tensor:
        """tokens_out int32 [R, 2 + MAX_QUERIES]: number emitted, number of draft tokens verified, emitted tokens.
        logprobs_out float64 [R, 2, MAX_QUERIES]: processed and raw. Returns at which of the T positions each row's last
        token was sampled, int32 [R]; 0 for padding.

        imposed: float32 [N], only for measuring step times. Each draft token is accepted with one of these
        probabilities, whatever the target samples; the emitted tokens are then not samples of the target."""
        ends = torch.empty_like(inputs.rows.context)
        _commit_tokens[(inputs.rows.context.shape[0],)](
            inputs.tokens, inputs.rows.query_start, inputs.rows.slots, draws.tokens, draws.logprobs,
            draws.raw_logprobs, self.last, self.length, tokens_out, logprobs_out, ends,
            ends if imposed is None else imposed, QUERIES=MAX_QUERIES, IMPOSED=0 if imposed is None else len(imposed),
            num_warps=1,
        )  # fmt: skip
        return ends


@triton.jit
def imposed_probability(probabilities, slot, position, NUM: tl.constexpr):
    """A pseudo-random one of them for each slot and position."""
    random = tl.rand(2, slot * 65536 + position)
    return tl.load(probabilities + tl.minimum((random * NUM).to(tl.int32), NUM - 1))


# Not specialized on sizes: steps have many sizes, and each specialization would be compiled during a run.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["draft_budget"])
def _select_drafts(
    row_inputs, draft_budget, survival, threshold_out, num_rows,
    ROW_WORDS: tl.constexpr, MAX_DRAFT: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program. The threshold is found bit by bit (the bits of positive floats are ordered like the floats); of
    equal tokens the first are selected. Survival never grows along a draft, so a prefix of each draft is selected."""
    budget = tl.load(draft_budget)
    i = tl.arange(0, ROWS * QUERIES)
    r, j = i // QUERIES, i % QUERIES
    slot = tl.load(row_inputs + r * ROW_WORDS, mask=r < num_rows, other=-1)
    num_draft = tl.load(row_inputs + r * ROW_WORDS + 1, mask=slot >= 0, other=0)
    key = tl.load(survival + slot * MAX_DRAFT + j, mask=j < num_draft, other=0.0).to(tl.int32, bitcast=True)
    candidates = key > 0
    threshold = tl.zeros([], tl.int32)
    bit = tl.full([], 1 << 30, tl.int32)
    while bit > 0:
        if tl.sum((candidates & (key >= (threshold | bit))).to(tl.int32)) >= budget:
            threshold = threshold | bit
        bit = bit >> 1
    above = candidates & (key > threshold)
    ties = candidates & (key == threshold)
    left = budget - tl.sum(above.to(tl.int32))
    selected = above | (ties & (tl.cumsum(ties.to(tl.int32), 0) <= left))
    num = tl.sum(tl.reshape(selected.to(tl.int32), [ROWS, QUERIES]), 1)
    row = tl.arange(0, ROWS)
    tl.store(row_inputs + row * ROW_WORDS + 1, num, mask=row < num_rows)
    any_dropped = (budget > 0) & (tl.sum(candidates.to(tl.int32)) > budget)
    tl.store(threshold_out, tl.where(any_dropped, threshold.to(tl.float32, bitcast=True), 0.0))


@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "num_new_blocks", "num_queries"],
    do_not_specialize_on_alignment=["new_blocks"],
)
def _prepare_inputs(
    row_inputs, new_blocks, last, length, key, temperature, block_tables, drafts,
    tokens, positions, keys, temperatures, emitted_at, token_slots, query_start, context, slots,
    num_rows, num_tokens, num_new_blocks, table_stride, num_queries,
    ROW_WORDS: tl.constexpr, HEADER: tl.constexpr, MAX_DRAFT: tl.constexpr, ROWS: tl.constexpr,
    NEW_BLOCKS: tl.constexpr, PADDING: tl.constexpr,
):  # fmt: skip
    """One program: these are a few thousand numbers."""
    u = tl.arange(0, NEW_BLOCKS)
    block_slot = tl.load(new_blocks + 3 * u, mask=u < num_new_blocks, other=-1)
    is_block = block_slot >= 0
    block_index = tl.load(new_blocks + 3 * u + 1, mask=is_block, other=0)
    block = tl.load(new_blocks + 3 * u + 2, mask=is_block, other=0)
    tl.store(block_tables + block_slot.to(tl.int64) * table_stride + block_index, block, mask=is_block)
    r = tl.arange(0, ROWS)
    in_range = r < num_rows
    slot = tl.load(row_inputs + r * ROW_WORDS, mask=in_range, other=-1)
    is_row = slot >= 0
    num_draft = tl.load(row_inputs + r * ROW_WORDS + 1, mask=is_row, other=0)
    host_token = tl.load(row_inputs + r * ROW_WORDS + 2, mask=is_row, other=-1)
    on_device = is_row & (host_token < 0)
    token = tl.where(on_device, tl.load(last + slot, mask=on_device, other=0), host_token)
    host_size = tl.load(row_inputs + r * ROW_WORDS + 3, mask=is_row, other=1)
    size = tl.where(on_device, tl.load(length + slot, mask=on_device, other=1), host_size)
    tl.store(length + slot, size, mask=is_row)
    num = tl.where(is_row, 1 + num_draft, 0)
    ends = tl.cumsum(num, 0)
    start = ends - num
    total = tl.sum(num)
    tl.store(query_start + r, start, mask=in_range)
    tl.store(query_start + num_rows, total)
    tl.store(context + r, size + num_draft, mask=in_range)
    tl.store(slots + r, slot, mask=in_range)
    own_key = tl.load(key + slot, mask=is_row, other=0)
    own_temperature = tl.load(temperature + slot, mask=is_row, other=1.0)
    for j in range(num_queries):
        here = is_row & (j < num)
        drafted = tl.load(row_inputs + r * ROW_WORDS + HEADER + j - 1, mask=here & (j > 0), other=0)
        own = here & (drafted < 0)
        drafted = tl.where(own, tl.load(drafts + slot * MAX_DRAFT + j - 1, mask=own, other=0), drafted)
        at = start + j
        tl.store(tokens + at, tl.where(j == 0, token, drafted), mask=here)
        tl.store(positions + at, size - 1 + j, mask=here)
        tl.store(emitted_at + at, (size + j).to(tl.int64), mask=here)
        tl.store(keys + at, own_key, mask=here)
        tl.store(temperatures + at, own_temperature, mask=here)
        tl.store(token_slots + at, slot, mask=here)
    zero = tl.zeros([PADDING], tl.int32)
    for start in range(total, num_tokens, PADDING):
        t = start + tl.arange(0, PADDING)
        padding = t < num_tokens
        tl.store(tokens + t, zero, mask=padding)
        tl.store(positions + t, zero, mask=padding)
        tl.store(emitted_at + t, zero.to(tl.int64), mask=padding)
        tl.store(keys + t, zero.to(tl.int64), mask=padding)
        tl.store(temperatures + t, zero.to(tl.float64) + 1, mask=padding)
        tl.store(token_slots + t, zero - 1, mask=padding)


@triton.jit
def _commit_tokens(
    tokens, query_start, slots, sampled, logprobs, raw_logprobs, last, length, tokens_out, logprobs_out, ends, imposed,
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
    found = tl.load(sampled + start + j, mask=inside, other=-1)
    drafted = tl.load(tokens + start + j + 1, mask=j + 1 < num, other=-2)
    right = found == drafted
    if IMPOSED:
        slot = tl.load(slots + row)
        size = tl.load(length + slot)
        random = tl.rand(1, slot * 65536 + (size + j) * QUERIES + j)
        right = (random < imposed_probability(imposed, slot, size + j, IMPOSED)) & (j + 1 < num)
        found = tl.where(right, drafted, found)
    accepted = tl.min(tl.where(right, QUERIES, j))
    tl.store(out, accepted + 1)
    tl.store(ends + row, start + accepted)
    tl.store(out + 2 + j, found, mask=inside)
    own = logprobs_out + row * 2 * QUERIES
    tl.store(own + j, tl.load(logprobs + start + j, mask=inside, other=0.0), mask=inside)
    tl.store(own + QUERIES + j, tl.load(raw_logprobs + start + j, mask=inside, other=0.0), mask=inside)
    slot = tl.load(slots + row)
    tl.store(last + slot, tl.sum(tl.where(j == accepted, found, 0)))
    tl.store(length + slot, tl.load(length + slot) + accepted + 1)
