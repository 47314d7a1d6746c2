"""Whole decode steps as CUDA graphs: from orders to what was emitted, and what a head drafts for the next, with one
launch.

There is a graph for every size of step that was met, rounded up so that few exist and little of a step is padding; each
is captured when it is first needed. Where an auction is held on the device, sizes come as a policy finds them best, and
not twice the same way. There a wide one is captured first, and does for others until what its padding has cost is what
a graph of their own costs: capturing takes as long as dozens of steps. All share one pool of memory, which they may
since they run one after another. `eager` runs the same kernels without graphs.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.model.cuda.attention import MAX_QUERIES, CudaPagedAttention
from paceline.model.cuda.cut import cut
from paceline.model.cuda.head import DeviceHead
from paceline.model.cuda.recall import DeviceHistory
from paceline.model.cuda.sample import draw
from paceline.model.cuda.slots import MAX_AUCTION, MAX_DRAFT, ORDER, Slots
from paceline.model.decoder import Decoder
from paceline.model.kv import PagedKV
from paceline.model.sample import Stream

ROWS = tuple(sorted({size for i in range(14) for size in (2**i, 3 * 2**i // 2) if size <= 8192}))
# Of tokens. Products of matrices go by tiles of 128: on an H200 448 tokens take as long as 512, 384 a fifth less.
SIZES = (
    *(size for size in ROWS if size < 256), *range(256, 1024, 128), *range(1024, 2048, 256), *range(2048, 4096, 512),
    *range(4096, 8193, 1024),
)  # fmt: skip
QUERIES = (1, 2, 4, 8, MAX_QUERIES)
PAGES = 2  # new ones of a row in a step, at most
MAX_GRAPHS = 256  # captured sizes; the one that was not used for longest goes first
CROWD = 32  # rows from which one auction says what the next will keep


@dataclass(frozen=True, slots=True)
class Size:
    """Of a step. `num_guesses`: what the head drafts for the next one; `cuts`: whether a row truncates what it draws
    from; `auctions`: whether rows have more drafted tokens than there are places for."""

    num_rows: int
    num_tokens: int
    num_queries: int  # of a row, at most
    num_guesses: int = 0
    cuts: bool = False
    auctions: bool = False

    def rounded_up(self) -> Size:
        return Size(
            _round_up(self.num_rows, ROWS), _round_up(self.num_tokens, SIZES), _round_up(self.num_queries, QUERIES),
            self.num_guesses, self.cuts, self.auctions,
        )  # fmt: skip

    def serves(self, other: Size) -> bool:
        """Whether a step of the other size can go by this one's graph, with not much more padding. Where none are asked
        for it must not guess: there may be no pages."""
        return (
            self.num_rows == other.num_rows
            and other.num_tokens <= self.num_tokens <= 2 * other.num_tokens + 8
            and self.num_queries >= other.num_queries
            and self.num_guesses >= other.num_guesses
            and bool(self.num_guesses) == bool(other.num_guesses)
            and self.cuts >= other.cuts
            and self.auctions >= other.auctions
        )

    def widened(self, most_guesses: int) -> Size:
        """One that serves for most of what as many rows may come to want, if they are given up to so many tokens."""
        if not self.num_guesses and self.num_tokens == self.num_rows:
            return self
        most = self.num_rows * (1 + most_guesses)
        return replace(
            self,
            num_tokens=max(self.num_tokens, min(most, 2 * self.num_tokens)),
            num_queries=max(self.num_queries, 1 + most_guesses),
            num_guesses=most_guesses if self.num_guesses else 0,
            auctions=self.num_rows <= MAX_AUCTION,
        ).rounded_up()

    @property
    def work(self) -> float:
        """In tokens: those that go through the model or the head, and a little for attention of more queries."""
        return self.num_tokens + self.num_rows * (self.num_guesses + self.num_queries / 16)

    @property
    def looks_away(self) -> bool:
        """Whether the head leaves rows out that could hardly win the next auction: that one must be held then."""
        return self.auctions and self.num_rows >= CROWD and self.num_guesses > 0

    @property
    def num_order_words(self) -> int:
        return self.num_rows * ORDER

    @property
    def num_words(self) -> int:
        """Orders, behind them the pages that are new, and last the number of slots in an auction."""
        return self.num_rows * (ORDER + 3 * PAGES) + 1


def _round_up(number: int, sizes: tuple[int, ...]) -> int:
    """Beyond the last, by thousands."""
    at = bisect_left(sizes, number)
    return sizes[at] if at < len(sizes) else -(-number // 1024) * 1024


class Letter:
    """What a step has to say of its rows, in one piece of memory: one copy brings it all."""

    def __init__(self, num_rows: int, **where: Any) -> None:
        shapes = {
            "logprobs": ((2, MAX_QUERIES), torch.float64),  # processed and raw
            "chances": ((MAX_DRAFT,), torch.float64),  # how sure the head is of what it guesses
            "tokens": ((2 + MAX_QUERIES,), torch.int32),  # how many were emitted and verified, and which were emitted
        }
        sizes = {name: num_rows * math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        self.whole = torch.zeros(sum(sizes.values()), dtype=torch.uint8, **where)
        parts = dict(zip(shapes, self.whole.split(list(sizes.values())), strict=True))
        self.logprobs, self.chances, self.tokens = (
            parts[name].view(dtype).view(num_rows, *shape) for name, (shape, dtype) in shapes.items()
        )


class Graphs:
    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        slots: Slots,
        max_rows: int,
        head: DeviceHead | DeviceHistory | None = None,  # who drafts
        eager: bool = False,
        imposed: Tensor | None = None,  # see Slots.settle
    ) -> None:
        device = decoder.device
        self.decoder, self.kv, self.slots, self.head, self.eager = decoder, kv, slots, head, eager
        self.imposed = imposed
        most = _round_up(max_rows, ROWS)
        self.words = torch.empty(Size(most, most, 1).num_words, dtype=torch.int32, device=device)
        self.letter = Letter(most, device=device)
        self.seconds: dict[Size, float] = {}  # what the last step took that went by it
        self._captured: OrderedDict[Size, Callable[[], None]] = OrderedDict()  # the last used at the end
        self.num_captured = 0  # graphs so far, those that were dropped included
        self._price_s = math.inf  # of a graph
        self._is_tight = False  # there was no memory for a wide one
        self._paid_s: defaultdict[Size, float] = defaultdict(float)  # for padding, by those that are not captured
        self._pool: Any = None  # torch's handle of it

    @property
    def stream(self) -> torch.cuda.Stream:
        """The one on which a step runs that is launched now."""
        return torch.cuda.current_stream(self.words.device)

    def fit(self, size: Size, most_guesses: int) -> Size:
        """The size by which a step of this one goes for now; orders are not there yet. `most_guesses`: what others may
        ask for, and for how many there are pages."""
        if size in self._captured or self.eager:
            return size
        larger = [known for known in self._captured if known.serves(size) and known.num_guesses <= most_guesses]
        if not larger:
            return self._wide(size, most_guesses)
        best = min(larger, key=lambda known: known.work)
        self._paid_s[size] += self.seconds.get(best, 0.0) * (1 - size.work / best.work)
        return size if self._paid_s[size] > self._price_s else best

    def _wide(self, size: Size, most_guesses: int) -> Size:
        if self._is_tight:
            return size
        wide = size.widened(most_guesses)
        try:
            self.prepare(wide)
        except ValueError:
            self._is_tight = True
            return size
        return wide

    def prepare(self, size: Size) -> None:
        """Capture it, if it was not yet. Orders that are there stay."""
        if size in self._captured:
            return
        started = time.perf_counter()
        try:
            self._captured[size] = self._capture(size)
            self.num_captured += 1
            if len(self._captured) > MAX_GRAPHS:  # not in use: capturing waits for the device
                oldest, _ = self._captured.popitem(last=False)
                self.seconds.pop(oldest, None)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise ValueError(
                f"no device memory for a step of {size.num_rows} rows and {size.num_tokens} tokens ({free / 2**30:.1f} "
                f"of {total / 2**30:.0f} GiB are free): lower engine.kv_tokens, engine.max_num_seqs or "
                "speculation.num_speculative_tokens"
            ) from error
        self._price_s = min(self._price_s, time.perf_counter() - started)  # others had kernels to compile too

    def run(self, size: Size) -> None:
        """A step by the orders in `words`, which are laid out for this size. It was prepared."""
        self._captured.move_to_end(size)
        self._captured[size]()

    @torch.inference_mode()
    def _step(self, size: Size) -> None:
        orders = self.words[: size.num_order_words].view(size.num_rows, ORDER)
        pages = self.words[size.num_order_words : size.num_words - 1].view(-1, 3)
        if size.auctions:
            self.slots.auction(orders, self.words[size.num_words - 1 : size.num_words], size.num_queries)
        inputs = self.slots.lay_out(orders, pages, size.num_tokens, size.num_queries)
        attention = CudaPagedAttention(self.kv, inputs.rows, size.num_queries)
        taps = self.head.taps if self.head is not None else ()
        out = self.decoder(inputs.tokens, inputs.positions, attention, taps)
        logits = self.decoder.logits(out.hidden)
        limits = cut(logits, inputs.places, self.slots) if size.cuts else None
        draws = draw(logits, inputs.keys, inputs.emitted_at, inputs.temperature, Stream.SAMPLE, cut=limits)
        ends = self.slots.settle(inputs, draws, self.letter.tokens, self.letter.logprobs, self.imposed)
        if isinstance(self.head, DeviceHistory):
            self.head.draft(inputs, self.letter.tokens, size.num_guesses, self.letter.chances)
        elif self.head is not None:
            features = torch.cat([out.taps[i] for i in taps], -1)
            self.head.draft(
                inputs, size.num_queries, features, draws.tokens, ends, size.num_guesses, size.cuts, size.looks_away,
                self.letter.chances, self.imposed,
            )  # fmt: skip

    def _capture(self, size: Size) -> Callable[[], None]:
        if self.eager:
            return lambda: self._step(size)
        # Once without orders, so that kernels are compiled and libraries have their workspace; then for the record.
        given, words = self.words.clone(), self.words
        words.fill_(-1)
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Only this thread's calls can spoil the capture: a learner in another thread may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(size)
        finally:
            words.copy_(given)
        self._pool = graph.pool()
        return graph.replay
