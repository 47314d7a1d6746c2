"""A decoder with paged memory: what the engine decodes with, and the draft model too.

`forward` takes spans: any number of queries of any sequences in one pass, whatever each of them is doing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.model import weights as weights_io
from paceline.model.attention import Attention, GatheredAttention, PagedAttention, has_varlen
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.kv import BatchPlan, BlockPool, BlockTable, PagedKV
from paceline.types import Receipt


@dataclass(slots=True)
class Span:
    """The next queries of one sequence: `tokens` stand at positions start, start + 1, …; the last num_logits of them
    want logits."""

    tokens: np.ndarray
    start: int
    table: BlockTable
    num_logits: int


def make_plan(spans: Sequence[Span]) -> BatchPlan:
    sizes = np.array([len(s.tokens) for s in spans])
    starts = np.array([s.start for s in spans])
    wanted = np.array([s.num_logits for s in spans])
    query_start = np.zeros(len(spans) + 1, np.int32)
    np.cumsum(sizes, out=query_start[1:])
    tables = np.zeros((len(spans), max(len(s.table.blocks) for s in spans)), np.int32)
    for row, span in enumerate(spans):
        tables[row, : len(span.table.blocks)] = span.table.blocks
    total = int(query_start[-1])
    return BatchPlan(
        tokens=np.concatenate([s.tokens for s in spans]).astype(np.int64),
        positions=np.arange(total) + np.repeat(starts - query_start[:-1], sizes),
        query_start=query_start,
        context=(starts + sizes).astype(np.int32),
        block_tables=tables,
        logits_at=np.flatnonzero(np.arange(total) >= np.repeat(query_start[1:] - wanted, sizes)),
    )


class PagedMemory:
    """Blocks, what is in them and who holds them: for a decoder, or for a drafting head. `native`: the CPU kernels read
    it."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device, native: bool
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.kv: PagedKV | None = None
        self._shape = config, dtype, device, native
        self.wake()

    def wake(self) -> None:
        if self.kv is None:
            config, dtype, device, native = self._shape
            self.kv = PagedKV(config, self.pool.num_blocks, dtype, device, transposed=native)

    def sleep(self) -> None:
        """Give the memory back. No sequence may hold a block."""
        assert not any(self.pool.references)
        self.pool.forget_all()
        self.kv = None

    def adopt(self, table: BlockTable, tokens: np.ndarray) -> int:
        """Give an empty table the KV that already exists for a prefix of `tokens`; returns that prefix's length. Whole
        blocks are shared, the part of a block is copied."""
        assert self.kv is not None, "asleep"
        covered, source = self.pool.share(table, tokens)
        if source is not None:
            self.kv.copy_blocks([source], table.blocks[-1:])
            self.pool.release(source)
        return covered

    def attention(self, plan: BatchPlan) -> Attention:
        assert self.kv is not None, "asleep"
        if not self._shape[3]:
            return PagedAttention(self.kv, plan)
        from paceline.model.kernels import NativePagedAttention

        return NativePagedAttention(self.kv, plan)


class PagedDecoder(PagedMemory):
    """Always: a sequence's KV up to its number of computed tokens is that of `decoder`'s present weights, or of those
    the caller chose to keep it from; and so are its features, the outputs of the layers that are tapped."""

    def __init__(self, decoder: Decoder, num_blocks: int) -> None:
        self.decoder = decoder
        self.taps: tuple[int, ...] = ()
        native = decoder.embed.panels is not None
        super().__init__(decoder.config, num_blocks, decoder.dtype, decoder.device, native)

    def wake(self) -> None:
        super().wake()
        self.tap(self.taps)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Keep these layers' outputs of every token from now on. Nothing computed before has them, so nothing of it is
        shared any more; what runs is to be computed again."""
        if layers != self.taps:
            self.pool.forget_all()
        self.taps = layers
        if layers and self.kv is not None:  # asleep, it has none; when it wakes it comes here again
            self.kv.make_features(len(layers) * self.decoder.config.hidden_size)

    def features(self, spans: Sequence[tuple[BlockTable, int, int]]) -> Tensor:
        """The features of the tokens start … end-1 of each table, one after another: [T, F]."""
        assert self.kv is not None and self.kv.features is not None
        slots = np.concatenate([table.slots(start, end) for table, start, end in spans])
        return self.kv.features[torch.as_tensor(slots, device=self.kv.features.device)]

    def attention(self, plan: BatchPlan) -> Attention:
        decoder = self.decoder
        if decoder.ops.is_cuda and has_varlen(decoder.device, decoder.dtype, decoder.config.head_dim):
            assert self.kv is not None, "asleep"
            return GatheredAttention(self.kv, plan)
        return super().attention(plan)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        """Take new weights (Hugging Face names). Nothing computed before is shared from now on. The receipt's checksum
        is of what is held now, not of what was sent."""
        started = time.perf_counter()
        weights_io.assign(self.decoder, weights)
        self.pool.forget_all()
        return receipt_of(weights_io.hf_state(self.decoder), version, started)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Logits [P, V] of the positions that want them, span by span."""
        assert self.kv is not None, "asleep"
        plan = make_plan(spans)
        device = self.decoder.device
        out = self.decoder(
            torch.as_tensor(plan.tokens, device=device),
            torch.as_tensor(plan.positions, device=device),
            self.attention(plan),
            self.taps,
        )
        if self.taps:
            assert self.kv.features is not None
            slots = torch.as_tensor(plan.slots(), device=device)
            self.kv.features[slots] = torch.cat([out.taps[i] for i in self.taps], -1)
        hidden = out.hidden
        if len(plan.logits_at) < len(hidden):
            hidden = hidden[torch.as_tensor(plan.logits_at, device=device)]
        return self.decoder.logits(hidden)


def receipt_of(held: Iterable[tuple[str, Tensor]], version: int, started: float) -> Receipt:
    """Proof of a transfer that began at `started`: of what is held now, not of what was sent."""
    sizes: list[int] = []

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in held:
            sizes.append(tensor.nbytes)
            yield name, tensor

    checksum = weights_io.checksum(counted())
    return Receipt(version, checksum, len(sizes), sum(sizes), time.perf_counter() - started)
