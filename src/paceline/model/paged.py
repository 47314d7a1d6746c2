"""A decoder with a paged KV cache, for the engine's target and for the draft model.

`forward` takes spans: any number of query tokens of any sequences in one forward pass, for prefill, decoding and
verification alike.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.model import lora
from paceline.model import weights as weights_io
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.device import to_device
from paceline.model.kv import BatchPlan, BlockPool, BlockTable, PagedKV
from paceline.types import Receipt


@dataclass(slots=True)
class Span:
    """The next query tokens of one sequence, at positions start, start + 1, … Logits are computed for the last
    `num_logits` of them."""

    tokens: np.ndarray
    start: int
    table: BlockTable
    num_logits: int


def make_plan(spans: Sequence[Span]) -> BatchPlan:
    sizes = np.array([len(s.tokens) for s in spans])
    starts = np.array([s.start for s in spans])
    num_logits = np.array([s.num_logits for s in spans])
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
        logits_at=np.flatnonzero(np.arange(total) >= np.repeat(query_start[1:] - num_logits, sizes)),
    )


def is_large(kv_bytes: int, total_bytes: int) -> bool:
    """Whether a KV cache takes more than an eighth of a GPU's memory: then it is worth freeing it while training."""
    return 8 * kv_bytes > total_bytes


class PagedMemory:
    """KV tensors and their BlockPool, for a decoder or for a draft head. `native`: in the layout of the CPU
    kernels."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, dtype: torch.dtype, device: torch.device, native: bool
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.kv: PagedKV | None = None
        self._native = native
        self._make_kv = partial(PagedKV, config, num_blocks, dtype, device, transposed=native)
        self.wake()

    def wake(self) -> None:
        if self.kv is None:
            self.kv = self._make_kv()

    @property
    def has_large_kv(self) -> bool:
        if self.kv is None or not self.kv.k.is_cuda:
            return False
        return is_large(self.kv.num_bytes, torch.cuda.get_device_properties(self.kv.k.device).total_memory)

    def sleep(self) -> None:
        """Free the KV tensors. No sequence may hold a block."""
        assert not any(self.pool.ref_counts)
        self.pool.reset_prefix_cache()
        self.kv = None
        torch.cuda.empty_cache()  # else the learner's small tensors may get parts of it, and `wake` too little

    def reuse_prefix(self, table: BlockTable, tokens: np.ndarray) -> int:
        """Fill an empty table with the cached KV of a prefix of `tokens`; returns the prefix's length. Full blocks are
        shared, a partial block is copied."""
        assert self.kv is not None, "asleep"
        covered, source = self.pool.share_prefix(table, tokens)
        if source is not None:
            self.kv.copy_blocks([source], table.blocks[-1:])
            self.pool.release(source)
        return covered


class PagedDecoder(PagedMemory):
    """Invariant: a sequence's KV and auxiliary hidden states, up to its number of computed tokens, come from the
    current weights of `decoder`, or from older weights if the caller keeps them across an update."""

    def __init__(self, decoder: Decoder, num_blocks: int) -> None:
        self.decoder = decoder
        self.has_adapters = bool(lora.adapters_of(decoder))  # they are attached before
        self.aux_layers: tuple[int, ...] = ()
        native = decoder.embed.panels is not None
        super().__init__(decoder.config, num_blocks, decoder.dtype, decoder.device, native)

    def wake(self) -> None:
        super().wake()
        self.set_aux_layers(self.aux_layers)

    def set_aux_layers(self, layers: tuple[int, ...]) -> None:
        """Keep the outputs of these layers for every token from now on. Tokens that are computed already do not have
        them: the prefix cache is reset, and the caller must compute running sequences again."""
        if layers != self.aux_layers:
            self.pool.reset_prefix_cache()
        self.aux_layers = layers
        if layers and self.kv is not None:  # when asleep, `wake` calls this again
            self.kv.allocate_aux_hidden_states(len(layers) * self.decoder.config.hidden_size)

    def aux_hidden_states(self, spans: Sequence[tuple[BlockTable, int, int]]) -> Tensor:
        """Those of the tokens start … end-1 of each table, concatenated: [T, F]."""
        assert self.kv is not None and self.kv.aux_hidden_states is not None
        slots = np.concatenate([table.slot_mapping(start, end) for table, start, end in spans])
        return self.kv.aux_hidden_states[to_device(slots, self.kv.aux_hidden_states.device)]

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        """Load new weights (Hugging Face names), or the adapters (PEFT's names) of a decoder that has them, and reset
        the prefix cache. The receipt's checksum is computed from the decoder's tensors after the update."""
        started = time.perf_counter()
        lora.assign_policy(self.decoder, weights)
        self.pool.reset_prefix_cache()
        return receipt_of(lora.policy_state(self.decoder), version, started)

    @torch.inference_mode()
    def forward(self, spans: Sequence[Span]) -> Tensor:
        """Logits [P, V] of the last `num_logits` tokens of each span, concatenated. The host does not wait."""
        assert self.kv is not None, "asleep"
        plan = make_plan(spans)
        device, ops, num = self.decoder.device, self.decoder.ops, len(plan.tokens)
        padding = np.zeros(ops.padded(num) - num, np.int64)
        tokens, positions = (
            to_device(np.concatenate([each, padding]), device) for each in (plan.tokens, plan.positions)
        )
        out = self.decoder(tokens, positions, ops.paged_attention(self.kv, plan), self.aux_layers)
        if self.aux_layers:
            assert self.kv.aux_hidden_states is not None
            slots = to_device(plan.slot_mapping(), device)
            self.kv.aux_hidden_states[slots] = torch.cat([out.aux_hidden_states[i][:num] for i in self.aux_layers], -1)
        hidden = out.hidden
        if not len(plan.logits_at):
            return hidden.new_empty(0, self.decoder.config.vocab_size)
        if len(plan.logits_at) < len(hidden):
            hidden = hidden[to_device(plan.logits_at, device)]
        return self.decoder.logits(hidden)


def receipt_of(held: Iterable[tuple[str, Tensor]], version: int, started: float) -> Receipt:
    """The receipt of a weight update that began at `started`. `held` are the receiver's weights after it."""
    sizes: list[int] = []

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in held:
            sizes.append(tensor.nbytes)
            yield name, tensor

    checksum = weights_io.checksum(counted())
    return Receipt(version, checksum, len(sizes), sum(sizes), time.perf_counter() - started)
