"""An EAGLE-3 head that drafts at the end of a step, on the device, for the step that follows.

It takes in what the target has just computed (at every token of the step: that token's features and the token drawn
there), then guesses k tokens one after another, from the place where each row now ends. Its keys and values lie in the
same pages as the target's, so that it needs no tables of its own and shares what the target shares. What it computes
for tokens that do not stand lies behind a row's end, where the next step overwrites it.

Where drafted tokens of many rows are chosen by auctions, a row whose last guess is worth less than what the last one
kept will hardly be given more: it neither looks at its context any more nor draws, nearly half of a guess's time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.attention import CudaPagedAttention, Rows
from paceline.model.cuda.cut import cut
from paceline.model.cuda.early import early, wait
from paceline.model.cuda.ops import CudaOps
from paceline.model.cuda.sample import Draws, draw
from paceline.model.cuda.slots import MAX_DRAFT, Inputs, Slots, imposed_chance
from paceline.model.eagle3 import Eagle3Head
from paceline.model.kv import PagedKV
from paceline.model.layer import Linear
from paceline.model.sample import Stream
from paceline.model.surety import BY_LEAD, BY_LOGPROB, START

LINE = 16


@dataclass(slots=True)
class _Course:
    """R rows through k drafted tokens; those of one token are a line of each, which begins where memory is aligned: for
    others, kernels would be compiled once more."""

    positions: Tensor  # int32 [k, R], where the head stands
    context: Tensor  # int32 [k, R], 0: it does not look there
    emitted_at: Tensor  # int64 [k, R], position of the token that is guessed there
    keys: Tensor  # int64 [R]
    temperature: Tensor  # float64 [R]
    query_start: Tensor  # int32 [R + 1]


class DeviceHead:
    """`embed` is the target's; `kv` has the target's pages."""

    def __init__(self, head: Eagle3Head, embed: Linear, kv: PagedKV, slots: Slots) -> None:
        self.head, self.embed, self.kv, self.slots = head, embed, kv, slots
        if not isinstance(head.ops, CudaOps):
            head.ops = CudaOps()
        config = head.config
        self.taps = config.taps
        self.ids = head.draft_ids if config.draft_vocab_size < config.layer.vocab_size else None

    def draft(
        self, inputs: Inputs, max_queries: int, features_TF: Tensor, drawn_T: Tensor, ends_R: Tensor, k: int,
        cuts: bool, looks_away: bool, chances_out: Tensor, imposed: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Take the step in, and guess k tokens for each row, as the target would draw them: into its slot, and how sure
        they are, for the host too: chances_out float64 [R, MAX_DRAFT]. `looks_away`: there was an auction in this step,
        and there will be one of these, in which rows take no part that were not looked at. `imposed`: see Slots.settle;
        then it knows."""
        rows = inputs.rows
        seen = CudaPagedAttention(self.kv, rows, max_queries)
        x, h = self.head(self.head.fuse(features_TF), drawn_T, inputs.positions, seen, self.embed, ends_R)
        if not k:
            return
        course = self._course(rows, k)
        for i in range(k):
            logits = self.head.logits(h)
            limits = cut(logits, rows.places, self.slots) if cuts else None
            draws = draw(
                logits, course.keys, course.emitted_at[i], course.temperature, Stream.SAMPLE, self.ids, limits,
                leads=True, counts_P=course.context[i] if looks_away else None,
            )  # fmt: skip
            self._keep(draws, rows.places, course, i, looks_away, chances_out, imposed)
            if i + 1 < k:
                ahead = Rows(course.query_start, course.context[i + 1], rows.places, rows.tables)
                seen = CudaPagedAttention(self.kv, ahead, 1)
                x, h = self.head(x, draws.tokens, course.positions[i + 1], seen, self.embed)

    def _course(self, rows: Rows, k: int) -> _Course:
        def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=rows.context.device)

        num = rows.num
        width = triton.cdiv(num, LINE) * LINE
        positions, context, emitted_at = empty(k, width), empty(k, width), empty(k, width, dtype=torch.int64)
        course = _Course(
            positions[:, :num], context[:, :num], emitted_at[:, :num], empty(num, dtype=torch.int64),
            empty(num, dtype=torch.float64), empty(num + 1),
        )  # fmt: skip
        slots = self.slots
        _lead[(1,)](
            rows.places, slots.length, slots.limit, slots.key, slots.temperature, course.positions, course.context,
            course.emitted_at, course.keys, course.temperature, course.query_start, num, k, width,
            ROWS=triton.next_power_of_2(num), num_warps=4,
        )  # fmt: skip
        return course

    def _keep(
        self, draws: Draws, places: Tensor, course: _Course, i: int, looks_away: bool, chances_out: Tensor,
        imposed: Tensor | None,
    ) -> None:  # fmt: skip
        num, slots = len(places), self.slots
        _keep[(1,)](
            draws.tokens, draws.raw_logprobs, draws.leads, places, slots.drafts, slots.worth, slots.length, slots.least,
            course.context, chances_out, slots.worth if imposed is None else imposed, i, num, len(course.context),
            course.context.stride(0), MAX_DRAFT=MAX_DRAFT, ROWS=triton.next_power_of_2(num), LOOKS_AWAY=looks_away,
            IMPOSED=0 if imposed is None else len(imposed), START=START, BY_LEAD=BY_LEAD, BY_LOGPROB=BY_LOGPROB,
            num_warps=4, **early(places.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "k"])
def _lead(
    places, length, limit, key, temperature, positions, context, emitted_at, keys, temperatures, query_start,
    num_rows, k, width, ROWS: tl.constexpr,
):  # fmt: skip
    """The last token stands at length - 1, and the head's own state at the position before it. Past a sequence's limit
    there are no pages: what is guessed there is of no use, and stays where it does no harm."""
    r = tl.arange(0, ROWS)
    given = r < num_rows
    slot = tl.load(places + r, mask=given, other=-1)
    real = slot >= 0
    size = tl.load(length + slot, mask=real, other=2)
    most = tl.load(limit + slot, mask=real, other=2)
    tl.store(keys + r, tl.load(key + slot, mask=real, other=0), mask=given)
    tl.store(temperatures + r, tl.load(temperature + slot, mask=real, other=1.0), mask=given)
    num = real.to(tl.int32)
    ends = tl.cumsum(num, 0)
    tl.store(query_start + r, ends - num, mask=given)
    tl.store(query_start + num_rows, tl.sum(num))
    for i in range(k):
        at = tl.minimum(size - 2 + i, most - 1)
        tl.store(positions + i * width + r, at, mask=given)
        tl.store(context + i * width + r, at + 1, mask=given)
        tl.store(emitted_at + i * width + r, (size + i).to(tl.int64), mask=given)


@triton.jit(do_not_specialize=["i", "num_rows", "k"])
def _keep(
    tokens, raw_logprobs, leads, places, drafts, worth, length, least, context, chances_out, imposed, i, num_rows, k,
    width, MAX_DRAFT: tl.constexpr, ROWS: tl.constexpr, LOOKS_AWAY: tl.constexpr, IMPOSED: tl.constexpr,
    START: tl.constexpr, BY_LEAD: tl.constexpr, BY_LOGPROB: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """How sure they are: see `model/surety.py`. A token for which it did not look is worth nothing, and taken to be as
    sure as the one before it. (Attention reads the contexts before it waits: kernels that do not begin early lie
    between, that of the embedding and others.)"""
    r = tl.arange(0, ROWS)
    given = r < num_rows
    slot = tl.load(places + r, mask=given, other=-1)
    wait(EARLY)
    token = tl.load(tokens + r, mask=given, other=0)
    tl.store(drafts + slot * MAX_DRAFT + i, token, mask=slot >= 0)
    if IMPOSED:
        place = tl.maximum(slot, 0)
        chance = imposed_chance(imposed, place, tl.load(length + place) + i, IMPOSED)
    else:
        logprob = tl.load(raw_logprobs + r, mask=given, other=0.0).to(tl.float32)
        lead = tl.load(leads + r, mask=given, other=0.0)
        chance = tl.sigmoid(START + BY_LEAD * lead + BY_LOGPROB * logprob)
    now = chance * tl.load(worth + slot * MAX_DRAFT + i - 1, mask=(slot >= 0) & (i > 0), other=1.0)
    if LOOKS_AWAY:
        blind = tl.load(context + i * width + r, mask=given, other=1) == 0
        before = tl.load(chances_out + r * MAX_DRAFT + i - 1, mask=given & (i > 0), other=0.0)
        chance, now = tl.where(blind, before.to(tl.float32), chance), tl.where(blind, 0.0, now)
        hopeless = now < tl.load(least)
        tl.store(context + (i + 1) * width + r, tl.zeros([ROWS], tl.int32), mask=given & hopeless & (i + 1 < k))
    tl.store(chances_out + r * MAX_DRAFT + i, chance.to(tl.float64), mask=given)
    tl.store(worth + slot * MAX_DRAFT + i, now, mask=slot >= 0)
