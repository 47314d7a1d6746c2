"""Whole decode steps as CUDA graphs: from orders to what was emitted, and what a head drafts for the next, with one
launch.

There is a graph for every size of step that was met, rounded up so that few exist and little of a step is padding; each
is captured when it is first needed. All share one pool of memory, which they may since they run one after another.
`eager` runs the same kernels without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.model.cuda.attention import MAX_QUERIES, CudaPagedAttention
from paceline.model.cuda.head import DeviceHead
from paceline.model.cuda.sample import draw
from paceline.model.cuda.slots import MAX_DRAFT, ORDER, Slots
from paceline.model.decoder import Decoder
from paceline.model.kv import PagedKV
from paceline.model.sample import Stream

SIZES = (*range(1, 9), 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, *range(128, 512, 32), *range(512, 8193, 64))
QUERIES = (1, 2, 4, 8, MAX_QUERIES)
PAGES = 2  # new ones of a row in a step, at most


@dataclass(frozen=True, slots=True)
class Size:
    """Of a step. `num_guesses`: what the head drafts for the next one."""

    num_rows: int
    num_tokens: int
    num_queries: int  # of a row, at most
    num_guesses: int = 0

    def rounded_up(self) -> Size:
        return Size(
            _round_up(self.num_rows, SIZES), _round_up(self.num_tokens, SIZES), _round_up(self.num_queries, QUERIES),
            self.num_guesses,
        )  # fmt: skip

    @property
    def num_order_words(self) -> int:
        return self.num_rows * ORDER

    @property
    def num_words(self) -> int:
        """Orders, and behind them the pages that are new."""
        return self.num_rows * (ORDER + 3 * PAGES)


def _round_up(number: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= number)


class Graphs:
    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        slots: Slots,
        max_rows: int,
        head: DeviceHead | None = None,
        eager: bool = False,
        imposed: float | None = None,  # see Slots.settle
    ) -> None:
        device = decoder.device
        self.decoder, self.kv, self.slots, self.head, self.eager = decoder, kv, slots, head, eager
        self.imposed = imposed
        most = _round_up(max_rows, SIZES)
        self.words = torch.empty(Size(most, most, 1).num_words, dtype=torch.int32, device=device)
        self.tokens_out = torch.zeros(most, 1 + MAX_QUERIES, dtype=torch.int32, device=device)
        self.logprobs_out = torch.zeros(most, 2, MAX_QUERIES, dtype=torch.float64, device=device)
        self.guesses_out = torch.zeros(most, MAX_DRAFT, dtype=torch.int32, device=device)
        self.chances_out = torch.zeros(most, MAX_DRAFT, dtype=torch.float64, device=device)
        self._captured: dict[Size, Callable[[], None]] = {}
        self._pool: Any = None  # torch's handle of it

    def prepare(self, size: Size) -> None:
        """Capture it, if it was not yet. Orders that are there stay."""
        if size in self._captured:
            return
        try:
            self._captured[size] = self._capture(size)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise ValueError(
                f"no device memory for a step of {size.num_rows} rows and {size.num_tokens} tokens ({free / 2**30:.1f} "
                f"of {total / 2**30:.0f} GiB are free): lower engine.kv_tokens, engine.max_num_seqs or "
                "speculation.num_speculative_tokens"
            ) from error

    def run(self, size: Size) -> None:
        """A step by the orders in `words`, which are laid out for this size. It was prepared."""
        self._captured[size]()

    @torch.inference_mode()
    def _step(self, size: Size) -> None:
        orders = self.words[: size.num_order_words].view(size.num_rows, ORDER)
        pages = self.words[size.num_order_words : size.num_words].view(-1, 3)
        inputs = self.slots.lay_out(orders, pages, size.num_tokens)
        attention = CudaPagedAttention(self.kv, inputs.rows, size.num_queries)
        taps = self.head.head.config.taps if self.head is not None else ()
        out = self.decoder(inputs.tokens, inputs.positions, attention, taps)
        logits = self.decoder.logits(out.hidden)
        draws = draw(logits, inputs.keys, inputs.emitted_at, inputs.temperature, Stream.SAMPLE)
        ends = self.slots.settle(inputs, draws, self.tokens_out, self.logprobs_out, self.imposed)
        if self.head is not None:
            features = torch.cat([out.taps[i] for i in taps], -1)
            self.head.draft(
                inputs, size.num_queries, features, draws.tokens, ends, size.num_guesses, self.guesses_out,
                self.chances_out,
            )  # fmt: skip

    def _capture(self, size: Size) -> Callable[[], None]:
        if self.eager:
            return lambda: self._step(size)
        # Once without orders, so that kernels are compiled and libraries have their workspace; then for the record.
        given, words = self.words.clone(), self.words
        words.fill_(-1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(size)
        self._pool = graph.pool()
        words.copy_(given)
        return graph.replay
