"""Steps on a CUDA device as graphs, one after another without waiting for the host.

Rows that decode (their last token, and perhaps a draft) go into a graph; what they emitted is copied to the host by the
way, and looked at when the step lands. All others (prompts) go to the eager runner behind it.

Always: the device's slot of a sequence is right at every launch. Where the host knows a sequence's tokens it tells them
anew; where a step is still flying, the device knows better.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from paceline.engine.accept import Verdict
from paceline.engine.lineup import Lineup, Row
from paceline.engine.runner import EagerRunner, Landed, Over
from paceline.engine.seats import VACANT, Seats
from paceline.engine.sequence import Sequence
from paceline.model.attention import Attention, GatheredAttention, PagedAttention, has_varlen
from paceline.model.cuda.attention import MAX_QUERIES
from paceline.model.cuda.graphs import Graphs, Letter, Size
from paceline.model.cuda.head import DeviceHead
from paceline.model.cuda.recall import DeviceHistory, Entry, Reading
from paceline.model.cuda.slots import HEADER, MAX_AUCTION, MAX_DRAFT, ORDER, Slots
from paceline.model.kv import BLOCK, BatchPlan, PagedKV
from paceline.model.paged import PagedDecoder, Span, make_plan
from paceline.speculation.batch import Ahead, Blind, Drafter
from paceline.speculation.library import Historian

if TYPE_CHECKING:
    from paceline.drafters.ahead import DraftsAhead, Eagle3Ahead
    from paceline.drafters.hybrid import HybridAhead

Places = tuple[np.ndarray, np.ndarray]
LEAST_TOLD, MOST_TOLD = 1 << 24, 1 << 26  # tokens of history on a device, of 4 bytes each
FEW = 256  # tokens, of which one more costs little: their time is that of the weights
FLYING = 3  # steps whose words may be on their way between host and device
MAX_DRAFTERS = 4  # whose graphs are kept; those of the one that was not used for longest go first
ALL = 2**31 - 1  # drafted tokens: as many as there are


class _Mail:
    """Page-locked memory for one step: its orders, and what comes back."""

    def __init__(self, graphs: Graphs) -> None:
        self.words = torch.empty(graphs.words.shape, dtype=graphs.words.dtype, pin_memory=True)
        self.array = self.words.numpy()
        self.letter = letter = Letter(len(graphs.letter.tokens), pin_memory=True)
        self.tokens, self.logprobs, self.chances = (
            part.numpy() for part in (letter.tokens, letter.logprobs, letter.chances)
        )
        self.started, self.done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@dataclass(slots=True)
class _Flight:
    """`places`: of the graph's rows and of the others, where they are among the deciding ones."""

    mail: _Mail | None
    rest: Over | None
    places: Places
    tell: Callable[[_Mail], None] | None = None  # who wants to know what was guessed for the next step
    size: Size | None = None  # of the graph, …
    seconds: dict[Size, float] = field(default_factory=dict)  # … and who wants to know what it took

    @property
    def may_wait(self) -> bool:
        return self.rest is None

    def land(self) -> Landed:
        if self.mail is None:
            assert self.rest is not None
            return self.rest.landed
        mail, (mine, others) = self.mail, self.places
        mail.done.synchronize()
        if self.tell is not None:
            self.tell(mail)
        num, num_guessed = len(mine), self.size.num_guesses if self.size is not None else 0
        tokens = mail.tokens[:num].copy()
        width = max(tokens[:, 0].tolist())
        logprobs = mail.logprobs[:num, :, :width].copy()
        found = Verdict(tokens[:, 2 : 2 + width], tokens[:, 0] - 1, logprobs[:, 0], logprobs[:, 1])
        if self.rest is None:
            return Landed(found, tokens[:, 1], num_guessed)
        rest = self.rest.landed.verdict
        both = Verdict.empty(num + len(others), max(width, rest.tokens.shape[1]))
        for place, part in ((mine, found), (others, rest)):
            both.num_accepted[place] = part.num_accepted
            for name in ("tokens", "logprobs", "raw_logprobs"):
                getattr(both, name)[place, : part.tokens.shape[1]] = getattr(part, name)
        num_verified = np.full(len(both.tokens), ALL)
        num_verified[mine] = tokens[:, 1]
        return Landed(both, num_verified, num_guessed)

    def took(self) -> tuple[float, float]:
        device_s = 0.0
        if self.mail is not None and self.size is not None:
            device_s = self.seconds[self.size] = self.mail.started.elapsed_time(self.mail.done) / 1e3
        forward_s, sample_s = self.rest.took() if self.rest is not None else (0.0, 0.0)
        return device_s + forward_s, sample_s


@dataclass(slots=True)
class _Orders:
    """A step's, in its mail: written but for the drafts, for which there is room."""

    words: np.ndarray  # int32, all of them; …
    num_draft: np.ndarray  # … of these [R], …
    drafts: np.ndarray  # … and [R, MAX_DRAFT]
    here: Tensor  # the same words, …
    there: Tensor  # … and where they go
    stream: torch.cuda.Stream  # by which all of it goes: to ask torch for it takes as long as to launch a graph
    cuts: bool


class GraphRunner:
    """For the rule `coupled`. `eager`: the same kernels without graphs.
    `imposed`: for timing alone, chances that drafted tokens are taken for right: nothing but `bench step` has them."""

    def __init__(
        self,
        paged: PagedDecoder,
        others: EagerRunner,
        max_num_seqs: int,
        eager: bool = False,
        imposed: np.ndarray | None = None,
    ) -> None:
        self.paged, self.others, self.max_num_seqs = paged, others, max_num_seqs
        self.ahead: DraftsAhead | None = None  # who drafts on the device, …
        self._historian: Historian | None = None  # … if it is by what was said
        self._device = paged.decoder.device
        self.eager = eager
        self.imposed = None if imposed is None else self._over(imposed, torch.float32)
        num_pages = -(-paged.decoder.config.max_positions // BLOCK)
        self.slots = Slots(max_num_seqs, num_pages, self._device)
        self._graphs: dict[Hashable, Graphs] = {}  # by drafter
        self._num_dropped = 0  # captured sizes of graphs that are gone
        self._mail: list[_Mail] = []
        # A sequence's slot is its seat. Of each slot: whose it is by arrival, and which state of its table it knows.
        self._known, self._changes = np.full(max_num_seqs, VACANT), np.zeros(max_num_seqs, np.int64)
        self._sent: list[list[int]] = [[] for _ in range(max_num_seqs)]  # the pages that each slot knows, or will: …
        self._pages: dict[tuple[int, int], int] = {}  # … by slot and index, what no step was told yet
        self._prepared: tuple[Lineup, Places, _Orders] | None = None  # for the next launch, in the next mail
        self._looked_away = False  # of what was drafted last not all is worth verifying: the device knows what is not

    @property
    def num_captured(self) -> int:
        return self._num_dropped + sum(graphs.num_captured for graphs in self._graphs.values())

    def equip(self, drafter: Drafter | None) -> None:
        self.ahead = self._prepared = None
        self._known[:] = VACANT  # whoever drafts now is told of all
        self._pages.clear()
        if isinstance(drafter, Ahead):
            head = drafter if isinstance(drafter, Blind) else cast("HybridAhead", drafter).head
            self.ahead = cast("DraftsAhead", head)
        self._historian = self.ahead if isinstance(self.ahead, Historian) else None

    @property
    def has_head(self) -> bool:
        return self.ahead is not None

    def guess(self, num: int) -> None:
        if self.ahead is not None:
            self.ahead.num_asked = num

    def prepare(self, rows: Seq[Row]) -> None:
        self._prepared = None
        mine, rest, places = self._divide(Lineup.of(rows))
        if rest is None:
            self._prepared = mine, places, self._address(self._ready(), mine, self._mail[0])

    def launch(self, rows: Seq[Row], q: dict[int, Tensor], num_slots: int | None = None) -> _Flight:
        graphs, prepared, self._prepared = self._ready(), self._prepared, None
        rest = orders = None
        if prepared is not None and prepared[0] is rows:
            mine, places, orders = prepared
        else:
            mine, rest, places = self._divide(Lineup.of(rows))
        chosen = num_slots is not None
        if num_slots is not None and len(mine) > MAX_AUCTION:
            _share(mine, num_slots)
            num_slots = None
        mail, size = self._run(graphs, mine, orders, num_slots, chosen) if len(mine) else (None, None)
        over = self.others.launch(rest, q) if rest is not None else None
        if rest is not None and over is not None and isinstance(graphs.head, DeviceHead):
            self._take_in(graphs.head, rest, over.landed)
        tell = None
        if self.ahead is not None and mail is not None:
            ids, k = mine.seats.request_ids(mine.at), self.ahead.num_asked
            self.ahead.made(ids, k)
            tell = partial(self._tell, ids, k)
        return _Flight(mail, over, places, tell, size, graphs.seconds)

    def _divide(self, line: Lineup) -> tuple[Lineup, Lineup | None, Places]:
        """The graph's rows, the others if there are any, and their places."""
        fits = _fit(line)
        if self.paged.taps and self.ahead is None:  # someone on the host reads features, which graphs keep
            fits = np.zeros(len(line), bool)
        if fits.all():
            return line, None, (np.arange(len(line)), np.zeros(0, np.int64))
        deciding = fits[line.decides]
        return line.pick(fits), line.pick(~fits), (np.flatnonzero(deciding), np.flatnonzero(~deciding))

    def _tell(self, ids: np.ndarray, k: int, mail: _Mail) -> None:
        assert self.ahead is not None
        self.ahead.told(ids, mail.chances[: len(ids), :k].copy())

    @torch.inference_mode()
    def _take_in(self, head: DeviceHead, rows: Seq[Row], landed: Landed) -> None:
        """Rows outside of the graph for the head: their features, each with the token after it. A row that decides
        may have verified a draft; the tokens that were accepted count as its own."""
        verdict, spans, wanted = landed.verdict, [], []
        deciding = iter(range(len(verdict.tokens)))
        for row in rows:
            sequence, start = row.sequence, row.sequence.num_computed
            end = start + row.num_query
            after = sequence.tokens[end : end + 1]
            if row.decides:
                i = next(deciding)
                after = verdict.tokens[i, : verdict.num_accepted[i] + 1]
            tokens = np.concatenate([sequence.tokens[start + 1 : end], after]).astype(np.int32)
            spans.append(Span(tokens, start, sequence.table, 1))
            wanted.append((sequence.table, start, start + len(tokens)))
        plan = make_plan(spans)
        x = head.head.fuse(self.paged.features(wanted))
        after_T, positions_T = (torch.as_tensor(a, device=self._device) for a in (plan.tokens, plan.positions))
        head.head(x, after_T, positions_T, self._attention(head, plan), head.embed)

    def _attention(self, head: DeviceHead, plan: BatchPlan) -> Attention:
        in_one_kernel = has_varlen(self._device, head.head.dtype, head.head.config.layer.head_dim)
        return (GatheredAttention if in_one_kernel else PagedAttention)(head.kv, plan)

    def _ready(self) -> Graphs:
        ahead, history = self.ahead, self._historian
        model = None if ahead is None or history is not None else cast("Eagle3Ahead", ahead).head
        key = ("history", history.recency, history.min_match) if history is not None else id(model)
        if key not in self._graphs:
            kv, head = self.paged.kv, cast(DeviceHead | DeviceHistory | None, None)
            assert kv is not None, "asleep"
            if model is not None:
                if kv.beside is None:
                    kv.beside = PagedKV(model.config.layer, self.paged.pool.num_blocks, model.dtype, self._device)
                head = DeviceHead(model, self.paged.decoder.embed, kv.beside, self.slots)
            elif history is not None:
                longest = self.paged.decoder.config.max_positions
                size = min(max(LEAST_TOLD, 2 * self.max_num_seqs * longest), MOST_TOLD)
                reading = Reading(history.recency, history.min_match, longest)
                head = DeviceHistory(self.slots, self.max_num_seqs, size, reading, self._device)
            graphs = Graphs(self.paged.decoder, kv, self.slots, self.max_num_seqs, head, self.eager, self.imposed)
            if len(self._graphs) == MAX_DRAFTERS:
                self._drop(next(iter(self._graphs)))
            self._graphs[key] = graphs
            self._mail = self._mail or [_Mail(graphs) for _ in range(FLYING)]
        self._graphs[key] = self._graphs.pop(key)  # the last used at the end
        return self._graphs[key]

    def leave(self, sequence: Sequence) -> None:
        for slot in (self._known == sequence.arrival).nonzero()[0].tolist():
            self._known[slot] = VACANT
            self._pages = {place: block for place, block in self._pages.items() if place[0] != slot}
        if self.ahead is not None:
            self.ahead.forget(sequence.request.request_id)

    def _drop(self, key: Hashable) -> None:
        self._num_dropped += self._graphs.pop(key).num_captured

    def forget(self) -> None:
        for key in list(self._graphs):
            self._drop(key)
        self._prepared = None
        self._known[:] = VACANT

    def _run(
        self, graphs: Graphs, line: Lineup, orders: _Orders | None, num_slots: int | None, chosen: bool
    ) -> tuple[_Mail, Size]:
        """`chosen`: by somebody who looks at the clock, so that no two runs have the same sizes."""
        mail = self._mail.pop(0)
        self._mail.append(mail)
        orders = orders or self._address(graphs, line, mail)
        num, lengths = len(line), line.num_draft.tolist()
        num_tokens = num + sum(lengths)
        num_guesses, most_guesses = (self.ahead.num_asked, self.ahead.most_asked) if self.ahead is not None else (0, 0)
        auctions = False
        if self._historian is not None and num_slots != 0 and num <= MAX_AUCTION and (line.drafts < 0).any():
            # It does not always find something; what is worth nothing does not win.
            num_slots, self._looked_away = num_tokens - num if num_slots is None else num_slots, True
        if num_slots and (num + num_slots < num_tokens or self._looked_away):
            auctions, num_tokens = True, num + num_slots
        size = _size(num, num_tokens, 1 + max(lengths), num_guesses, orders.cuts, auctions, not chosen)
        if chosen:
            size = graphs.fit(size, most_guesses)
        self._looked_away = size.looks_away
        self._pages.clear()
        orders.num_draft[:] = line.num_draft
        orders.drafts[:, : line.drafts.shape[1]] = line.drafts[:, :MAX_DRAFT]
        if size.auctions:
            orders.words[-1] = size.num_tokens - num  # places that would be padding are let too
        orders.there.copy_(orders.here, non_blocking=True)
        graphs.prepare(size)
        mail.started.record(orders.stream)
        graphs.run(size)
        mail.letter.whole.copy_(graphs.letter.whole, non_blocking=True)
        mail.done.record(orders.stream)
        return mail, size

    def _address(self, graphs: Graphs, line: Lineup, mail: _Mail) -> _Orders:
        num, size = len(line), _size(len(line), len(line), 1)
        words = mail.array[: size.num_words]
        orders = words[: size.num_order_words].reshape(-1, ORDER)
        pages = words[size.num_order_words : -1].reshape(-1, 3)
        seats, at = line.seats, line.at
        self._enter(seats, at[self._known[at] != line.arrivals])
        self._turn_pages(seats, at[self._changes[at] != seats.changes[at]])
        length, flies = seats.num_tokens[at], seats.num_flying[at] > 0
        orders[:num, 0] = at
        orders[:num, 1] = 0
        orders[:num, 2] = np.where(flies, -1, seats.record.tokens[at, length - 1])
        orders[:num, 3] = np.where(flies, 0, length)
        orders[num:, 0] = -1
        new = [(slot, index, block) for (slot, index), block in self._pages.items()]
        assert len(new) <= len(pages)
        pages[: len(new)] = np.array(new, np.int32).reshape(-1, 3)
        pages[len(new) :, 0] = -1
        return _Orders(
            words, orders[:num, 1], orders[:num, HEADER : HEADER + MAX_DRAFT],
            mail.words[: size.num_words], graphs.words[: size.num_words], graphs.stream,
            bool(seats.truncates[at].any()),
        )  # fmt: skip

    def _turn_pages(self, seats: Seats, slots: np.ndarray) -> None:
        """These tables have changed: what is new in them is to be told."""
        self._changes[slots] = seats.changes[slots]
        firsts = (seats.num_computed[slots] // BLOCK).tolist()
        for slot, sequence, first in zip(slots.tolist(), seats.of(slots), firsts, strict=True):
            sent, blocks = self._sent[slot], sequence.table.blocks
            for index in range(first, len(blocks)):
                if index >= len(sent) or sent[index] != blocks[index]:
                    self._pages[slot, index] = blocks[index]
                    sent[index:] = [blocks[index]]

    def _enter(self, seats: Seats, slots: np.ndarray) -> None:
        """Who sits there now is told of to the device."""
        if not len(slots):
            return
        sequences, at = seats.of(slots), self._over(slots)
        self._known[slots], self._changes[slots] = seats.arrival[slots], seats.changes[slots]
        self._put("key", at, seats.noise_key[slots].view(np.int64))
        self._put("limit", at, seats.limit[slots])
        wishes = [sequence.request.sampling for sequence in sequences]
        for name in ("temperature", "top_k", "top_p", "min_p"):
            self._put(name, at, np.array([getattr(wish, name) for wish in wishes]))
        tables = np.zeros((len(slots), max(len(sequence.table.blocks) for sequence in sequences)), np.int32)
        for slot, sequence, table in zip(slots.tolist(), sequences, tables, strict=True):
            table[: len(sequence.table.blocks)] = sequence.table.blocks
            self._sent[slot] = list(sequence.table.blocks)
        self.slots.tables[at, : tables.shape[1]] = self._over(tables)
        head = self._ready().head
        if isinstance(head, DeviceHistory) and self._historian is not None:
            library = self._historian.library
            seated = [(slot, sequence.request) for slot, sequence in zip(slots.tolist(), sequences, strict=True)]
            head.enter(
                Entry(slot, library.live.get(r.request_id), r.problem, library.texts(r.problem)) for slot, r in seated
            )

    def _put(self, name: str, at: Tensor, values: np.ndarray) -> None:
        column: Tensor = getattr(self.slots, name)
        column[at] = self._over(values, column.dtype)

    def _over(self, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        """On the device, without waiting for the step that flies."""
        return torch.as_tensor(values, dtype=dtype).to(self._device, non_blocking=True)


@lru_cache(maxsize=4096)
def _size(
    num_rows: int, num_tokens: int, num_queries: int, num_guesses: int = 0, cuts: bool = False, auctions: bool = False,
    fills: bool = False,
) -> Size:  # fmt: skip
    """Of a graph for so much. `fills`: where two thirds of what the rows might have is there, or half of a few, it has
    room for all of it. How many lack something, at their beginning or end, differs from step to step."""
    full = num_rows * num_queries
    if fills and full <= (2 if full <= FEW else 1.5) * num_tokens:
        num_tokens = full
    return Size(num_rows, num_tokens, num_queries, num_guesses, cuts, auctions).rounded_up()


def _share(line: Lineup, num_slots: int) -> None:
    """Too many for an auction: all may have about the same."""
    each, more = divmod(num_slots, len(line))
    line.num_draft = np.minimum(line.num_draft, each + (np.arange(len(line)) < more))


def _fit(line: Lineup) -> np.ndarray:
    """Which rows decode, as the graphs do it."""
    return (line.num_query == 1) & line.decides & (line.num_draft < MAX_QUERIES)
