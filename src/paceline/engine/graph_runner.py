"""Steps on a CUDA device as graphs, one after another without waiting for the host.

Rows that decode (their last token, and perhaps a draft) go into a graph; what they emitted is copied to the host by the
way, and looked at when the step lands. All others (prompts) go to the eager runner behind it.

Always: the device's slot of a sequence is right at every launch. Where the host knows a sequence's tokens it tells them
anew; where a step is still flying, the device knows better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from paceline.engine.accept import Verdict
from paceline.engine.runner import EagerRunner, Landed
from paceline.engine.scheduler import Row
from paceline.engine.sequence import Sequence
from paceline.model.attention import Attention, GatheredAttention, PagedAttention, has_varlen
from paceline.model.cuda.attention import MAX_QUERIES
from paceline.model.cuda.graphs import Graphs, Letter, Size
from paceline.model.cuda.head import DeviceHead
from paceline.model.cuda.slots import HEADER, MAX_AUCTION, ORDER, Slots
from paceline.model.kv import BLOCK, BatchPlan, PagedKV
from paceline.model.paged import PagedDecoder, Span, make_plan
from paceline.speculation.batch import Ahead, Drafter

if TYPE_CHECKING:
    from paceline.drafters.ahead import Eagle3Ahead
    from paceline.drafters.hybrid import HybridAhead

FLYING = 3  # steps whose words may be on their way between host and device


class _Mail:
    """Page-locked memory for one step: its orders, and what comes back."""

    def __init__(self, graphs: Graphs) -> None:
        self.words = torch.empty(graphs.words.shape, dtype=graphs.words.dtype, pin_memory=True)
        self.array = self.words.numpy()
        self.letter = Letter(len(graphs.letter.tokens), pin_memory=True)
        self.started, self.done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@dataclass(slots=True)
class _Flight:
    """`places`: of the graph's rows and of the others, where they are among the deciding ones."""

    mail: _Mail | None
    rest: Landed | None
    places: tuple[list[int], list[int]]
    tell: Callable[[_Mail], None] | None = None  # who wants to know what was guessed for the next step
    bidders: list[Row] | None = None  # the graph's rows, where it was to choose what it verifies

    @property
    def may_wait(self) -> bool:
        return self.rest is None

    def land(self) -> Landed:
        if self.mail is None:
            assert self.rest is not None
            return self.rest
        mail, (mine, others) = self.mail, self.places
        mail.done.synchronize()
        if self.tell is not None:
            self.tell(mail)
        device_s = mail.started.elapsed_time(mail.done) / 1e3
        num = len(mine)
        tokens = mail.letter.tokens.numpy()[:num].copy()
        width = int(tokens[:, 0].max())
        logprobs = mail.letter.logprobs.numpy()[:num, :, :width].copy()
        found = Verdict(tokens[:, 2 : 2 + width], tokens[:, 0] - 1, logprobs[:, 0], logprobs[:, 1])
        for row, verified in zip(self.bidders or (), tokens[:, 1].tolist(), strict=False):
            row.draft = row.draft[:verified]
        if self.rest is None:
            return Landed(found, device_s, 0.0)
        both = Verdict.empty(num + len(others), max(width, self.rest.verdict.tokens.shape[1]))
        for place, part in ((mine, found), (others, self.rest.verdict)):
            both.num_accepted[place] = part.num_accepted
            for name in ("tokens", "logprobs", "raw_logprobs"):
                getattr(both, name)[place, : part.tokens.shape[1]] = getattr(part, name)
        return Landed(both, device_s + self.rest.forward_s, self.rest.sample_s)


class GraphRunner:
    """For the rule `coupled`. `eager`: the same kernels without graphs.
    `imposed`: for timing alone, the chance that a drafted token is taken for right: nothing but `bench step` has it."""

    def __init__(
        self,
        paged: PagedDecoder,
        others: EagerRunner,
        max_num_seqs: int,
        eager: bool = False,
        imposed: float | None = None,
    ) -> None:
        self.paged, self.others, self.max_num_seqs = paged, others, max_num_seqs
        self.eager, self.imposed = eager, imposed
        self.ahead: Eagle3Ahead | None = None  # whose head drafts on the device
        self._device = paged.decoder.device
        num_pages = -(-paged.decoder.config.max_positions // BLOCK)
        self.slots = Slots(max_num_seqs, num_pages, self._device)
        self._graphs: dict[int | None, Graphs] = {}  # by head
        self._mail: list[_Mail] = []
        self._free = list(range(max_num_seqs))
        self._slot_of: dict[int, int] = {}  # by arrival
        self._sent: list[list[int]] = [[] for _ in range(max_num_seqs)]  # the pages that each slot knows, or will: …
        self._pages: dict[tuple[int, int], int] = {}  # … by slot and index, what no step was told yet
        self._addressed: list[Row] | None = None  # whose orders are in the next mail, but for their drafts

    def equip(self, drafter: Drafter | None) -> None:
        self.ahead = None
        if isinstance(drafter, Ahead):
            self.ahead = cast("Eagle3Ahead", drafter if drafter.blind else cast("HybridAhead", drafter).head)

    def prepare(self, rows: list[Row]) -> None:
        self._addressed = None
        if all(map(_fits, rows)):
            self._address(rows, self._mail[0].array)
            self._addressed = rows

    def launch(self, rows: list[Row], q: dict[int, Tensor], num_slots: int | None = None) -> _Flight:
        graphs = self._ready()
        mine, rest = rows, list[Row]()
        places: tuple[list[int], list[int]] = [*range(len(rows))], []
        blind = bool(self.paged.taps) and self.ahead is None  # someone on the host reads features, which graphs keep
        if blind or not all(map(_fits, rows)):
            mine = [row for row in rows if _fits(row) and not blind]
            chosen = {id(row) for row in mine}
            rest = [row for row in rows if id(row) not in chosen]
            deciding = [id(row) in chosen for row in rows if row.decides]
            places = np.flatnonzero(deciding).tolist(), np.flatnonzero(~np.array(deciding, bool)).tolist()
        if num_slots is not None and len(mine) > MAX_AUCTION:
            _share(mine, num_slots)
            num_slots = None
        mail = self._run(graphs, mine, num_slots) if mine else None
        landed = self.others.launch(rest, q).land() if rest else None
        if landed is not None and graphs.head is not None:
            self._take_in(graphs.head, rest, landed)
        tell = None
        if self.ahead is not None and mail is not None:
            ids, k = [row.sequence.request.request_id for row in mine], self.ahead.num_asked
            self.ahead.made(ids, k)
            tell = partial(self._tell, ids, k)
        return _Flight(mail, landed, places, tell, None if num_slots is None else mine)

    def _tell(self, ids: list[int], k: int, mail: _Mail) -> None:
        assert self.ahead is not None
        self.ahead.told(ids, np.exp(mail.letter.chances.numpy()[: len(ids), :k]))

    @torch.inference_mode()
    def _take_in(self, head: DeviceHead, rows: list[Row], landed: Landed) -> None:
        """Prompts for the head: their features, each with the token after it."""
        firsts = iter(landed.verdict.tokens[:, 0].tolist())
        spans, wanted = [], []
        for row in rows:
            sequence, start = row.sequence, row.sequence.num_computed
            end = start + row.num_query
            after = next(firsts) if row.decides else int(sequence.tokens[end])
            tokens = np.append(sequence.tokens[start + 1 : end], after).astype(np.int32)
            spans.append(Span(tokens, start, sequence.table, 1))
            wanted.append((sequence.table, start, end))
        plan = make_plan(spans)
        x = head.head.fuse(self.paged.features(wanted))
        after_T, positions_T = (torch.as_tensor(a, device=self._device) for a in (plan.tokens, plan.positions))
        head.head(x, after_T, positions_T, self._attention(head, plan), head.embed)

    def _attention(self, head: DeviceHead, plan: BatchPlan) -> Attention:
        in_one_kernel = has_varlen(self._device, head.head.dtype, head.head.config.layer.head_dim)
        return (GatheredAttention if in_one_kernel else PagedAttention)(head.kv, plan)

    def _ready(self) -> Graphs:
        key = id(self.ahead.head) if self.ahead is not None else None
        if key not in self._graphs:
            kv, head = self.paged.kv, None
            assert kv is not None, "asleep"
            if self.ahead is not None:
                layer = self.ahead.head.config.layer
                if kv.beside is None:
                    kv.beside = PagedKV(layer, self.paged.pool.num_blocks, self.ahead.head.dtype, self._device)
                head = DeviceHead(self.ahead.head, self.paged.decoder.embed, kv.beside, self.slots)
            graphs = Graphs(self.paged.decoder, kv, self.slots, self.max_num_seqs, head, self.eager, self.imposed)
            self._graphs[key] = graphs
            self._mail = self._mail or [_Mail(graphs) for _ in range(FLYING)]
        return self._graphs[key]

    def leave(self, sequence: Sequence) -> None:
        slot = self._slot_of.pop(sequence.arrival, None)
        if slot is not None:
            self._sent[slot] = []
            self._pages = {place: block for place, block in self._pages.items() if place[0] != slot}
            self._free.append(slot)
        if self.ahead is not None:
            self.ahead.forget(sequence.request.request_id)

    def forget(self) -> None:
        self._graphs.clear()

    def _run(self, graphs: Graphs, rows: list[Row], num_slots: int | None) -> _Mail:
        mail = self._mail.pop(0)
        self._mail.append(mail)
        sizes, num = [1 + len(row.draft) for row in rows], len(rows)
        num_guesses = self.ahead.num_asked if self.ahead is not None else 0
        cuts = any([row.sequence.truncates for row in rows])
        num_tokens = sum(sizes)
        auctions = num_slots is not None and num + num_slots < num_tokens
        if auctions:
            num_tokens = num + (num_slots or 0)
        size = Size(num, num_tokens, max(sizes), num_guesses, cuts, auctions).rounded_up()
        if rows is not self._addressed:
            self._address(rows, mail.array)
        self._addressed = None
        self._pages.clear()
        orders = mail.array[: num * ORDER].reshape(num, ORDER)
        orders[:, 1] = sizes
        orders[:, 1] -= 1
        _write_drafts(rows, orders[:, HEADER:])
        mail.array[size.num_words - 1] = size.num_tokens - num  # places that would be padding are let too
        graphs.words[: size.num_words].copy_(mail.words[: size.num_words], non_blocking=True)
        graphs.prepare(size)
        mail.started.record()
        graphs.run(size)
        mail.letter.whole.copy_(graphs.letter.whole, non_blocking=True)
        mail.done.record()
        return mail

    def _address(self, rows: list[Row], words: np.ndarray) -> None:
        """The orders of a step, without its drafts."""
        size = Size(len(rows), len(rows), 1).rounded_up()
        orders = words[: size.num_order_words].reshape(-1, ORDER)
        pages = words[size.num_order_words : size.num_words - 1].reshape(-1, 3)
        header = []
        for row in rows:
            sequence = row.sequence
            slot = self._slot_of.get(sequence.arrival)
            if slot is None:
                slot = self._enter(sequence)
            last, length = (-1, 0) if sequence.num_flying else (sequence.last_token, sequence.num_tokens)
            header.append((slot, 0, last, length))
            sent, blocks, first = self._sent[slot], sequence.table.blocks, sequence.num_computed // BLOCK
            if sent[first:] != blocks[first:]:
                for index in range(first, len(blocks)):
                    if index >= len(sent) or sent[index] != blocks[index]:
                        self._pages[slot, index] = blocks[index]
                        sent[index:] = [blocks[index]]
        orders[: len(rows), :HEADER] = header
        orders[len(rows) :, 0] = -1
        new = [(slot, index, block) for (slot, index), block in self._pages.items()]
        assert len(new) <= len(pages)
        pages[: len(new)] = np.array(new, np.int32).reshape(-1, 3)
        pages[len(new) :, 0] = -1

    def _enter(self, sequence: Sequence) -> int:
        slot = self._slot_of[sequence.arrival] = self._free.pop()
        request, blocks = sequence.request, sequence.table.blocks
        self.slots.key[slot] = int(np.uint64(request.noise_key).view(np.int64))
        sampling = request.sampling
        for name in ("temperature", "top_k", "top_p", "min_p"):
            getattr(self.slots, name)[slot] = getattr(sampling, name)
        self.slots.limit[slot] = sequence.limit
        self.slots.tables[slot, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32, device=self._device)
        self._sent[slot] = list(blocks)
        return slot


def _write_drafts(rows: list[Row], places: np.ndarray) -> None:
    k = len(rows[0].draft)
    if all([len(row.draft) == k for row in rows]):
        if k:
            places[:, :k] = np.concatenate([row.draft for row in rows]).reshape(-1, k)
        return
    for row, mine in zip(rows, places, strict=True):
        mine[: len(row.draft)] = row.draft


def _share(rows: list[Row], num_slots: int) -> None:
    """Too many for an auction: all may have about the same."""
    each, more = divmod(num_slots, len(rows))
    for i, row in enumerate(rows):
        row.draft = row.draft[: each + (i < more)]


def _fits(row: Row) -> bool:
    """Whether it decodes, as the graphs do it."""
    return row.num_query == 1 and row.decides and len(row.draft) < MAX_QUERIES
