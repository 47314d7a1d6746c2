"""Whole decode steps as CUDA graphs: from orders to what was emitted, with one launch.

There is a graph for every (rows, tokens, queries per row) that was met, rounded up so that few exist and little of a
step is padding; each is captured when it is first needed. All share one pool of memory, which they may since they run
one after another. `eager` runs the same kernels without graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.model.cuda.attention import MAX_QUERIES, CudaPagedAttention
from paceline.model.cuda.sample import draw
from paceline.model.cuda.slots import ORDER, Slots
from paceline.model.decoder import Decoder
from paceline.model.kv import PagedKV
from paceline.model.sample import Stream

SIZES = (*range(1, 9), 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, *range(128, 512, 32), *range(512, 4097, 64))
QUERIES = (1, 2, 4, 8, MAX_QUERIES)


def round_up(number: int, sizes: tuple[int, ...]) -> int:
    return next(size for size in sizes if size >= number)


class Graphs:
    def __init__(self, decoder: Decoder, kv: PagedKV, slots: Slots, max_rows: int, eager: bool = False) -> None:
        device = decoder.device
        self.decoder, self.kv, self.slots, self.eager = decoder, kv, slots, eager
        self.max_rows = round_up(max_rows, SIZES)
        # Rows first, then the pages that are new: one copy brings both.
        self.words = torch.empty(self.max_rows * (ORDER + 6), dtype=torch.int32, device=device)
        self.tokens_out = torch.zeros(self.max_rows, 1 + MAX_QUERIES, dtype=torch.int32, device=device)
        self.logprobs_out = torch.zeros(self.max_rows, 2, MAX_QUERIES, dtype=torch.float64, device=device)
        self._captured: dict[tuple[int, int, int], Callable[[], None]] = {}
        self._pool: Any = None  # torch's handle of it

    @staticmethod
    def bucket(num_rows: int, num_tokens: int, num_queries: int) -> tuple[int, int, int]:
        """What a step of so many is rounded up to."""
        return round_up(num_rows, SIZES), round_up(num_tokens, SIZES), round_up(num_queries, QUERIES)

    def prepare(self, bucket: tuple[int, int, int]) -> None:
        """Capture it, if it was not yet. Orders that are there stay."""
        if bucket not in self._captured:
            self._captured[bucket] = self._capture(bucket)

    def run(self, bucket: tuple[int, int, int]) -> None:
        """A step by the orders in `words`, which are laid out for this bucket. It was prepared."""
        self._captured[bucket]()

    @torch.inference_mode()
    def _step(self, bucket: tuple[int, int, int]) -> None:
        num_rows, num_tokens, num_queries = bucket
        orders = self.words[: num_rows * ORDER].view(num_rows, ORDER)
        pages = self.words[num_rows * ORDER : num_rows * (ORDER + 6)].view(-1, 3)
        inputs = self.slots.lay_out(orders, pages, num_tokens)
        attention = CudaPagedAttention(self.kv, inputs.rows, num_queries)
        hidden = self.decoder(inputs.tokens, inputs.positions, attention).hidden
        logits = self.decoder.logits(hidden)
        draws = draw(logits, inputs.keys, inputs.emitted_at, inputs.temperature, Stream.SAMPLE)
        self.slots.settle(inputs, draws, self.tokens_out, self.logprobs_out)

    def _capture(self, bucket: tuple[int, int, int]) -> Callable[[], None]:
        if self.eager:
            return lambda: self._step(bucket)
        # Once without orders, so that kernels are compiled and libraries have their workspace; then for the record.
        given, words = self.words.clone(), self.words
        words.fill_(-1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(bucket)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step(bucket)
        self._pool = graph.pool()
        words.copy_(given)
        return graph.replay
