"""A target whose exact distribution is known: logits are a fixed function of the context, tokens live in real blocks.

It stands where a decoder stands (same scheduler, same block pool, same spans), but its KV holds the tokens themselves,
and logits are looked up from the context *as read back from the blocks*: a block leaked, shared wrongly, left stale or
truncated wrongly gives another context and so another distribution.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.model.kv import BLOCK, BlockPool
from paceline.model.paged import PagedDecoder, Span, make_plan


class TokenMemory:
    def __init__(self, num_blocks: int) -> None:
        self.slots = np.full(num_blocks * BLOCK, -1, np.int64)
        self.features: Tensor | None = None

    def make_features(self, num_features: int) -> None:
        self.features = torch.zeros(len(self.slots), num_features, dtype=torch.float64)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        for slots in (self.slots, self.features):
            if slots is not None:
                blocks: Any = slots.reshape(-1, BLOCK, *slots.shape[1:])
                blocks[targets] = blocks[sources]


class Table:
    """The function: `seed` picks it, `sharpness` scales its logits."""

    def __init__(self, vocab_size: int, seed: int = 0, sharpness: float = 1.5) -> None:
        self.vocab_size, self.seed, self.sharpness = vocab_size, seed, sharpness
        self._cache: dict[bytes, np.ndarray] = {}

    def logits_after(self, context: np.ndarray) -> np.ndarray:
        """float64 [V], from the context's last 8 tokens and its length."""
        key = np.append(context[-8:].astype(np.int64), len(context)).tobytes()
        if key not in self._cache:
            digest = hashlib.blake2b(key, digest_size=8, salt=self.seed.to_bytes(8, "little")).digest()
            rng = np.random.default_rng(int.from_bytes(digest, "little"))
            self._cache[key] = self.sharpness * rng.standard_normal(self.vocab_size)
        return self._cache[key]


class TableDecoder(PagedDecoder):
    kv: Any

    def __init__(
        self,
        table: Table,
        num_blocks: int = 64,
        max_positions: int = 512,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.table = table
        self.config = ModelConfig(
            family="llama",
            vocab_size=table.vocab_size,
            hidden_size=table.vocab_size,  # what stands for a hidden state is the context's logits
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=2,
            norm_eps=1e-6,
            rope_theta=1.0,
            max_positions=max_positions,
            eos_token_ids=eos_token_ids,
        )
        self.decoder: Any = self  # what an engine asks of a decoder is its config, and whose weights it has
        self.shares_weights = False
        self.pool = BlockPool(num_blocks)
        self.taps = ()
        self.kv = None
        self.wake()

    def wake(self) -> None:
        self.kv = TokenMemory(self.pool.num_blocks)
        self.tap(self.taps)

    def forward(self, spans: Sequence[Span]) -> Tensor:
        plan = make_plan(spans)
        slots = plan.slots()
        self.kv.slots[slots] = plan.tokens
        rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_start))
        out = np.zeros((len(plan.tokens), self.config.vocab_size))
        for at in range(len(plan.tokens)) if self.taps else plan.logits_at.tolist():
            positions = np.arange(plan.positions[at] + 1)
            blocks = plan.block_tables[rows[at], positions // BLOCK].astype(np.int64)
            out[at] = self.table.logits_after(self.kv.slots[blocks * BLOCK + positions % BLOCK])
        logits = torch.from_numpy(out)
        if self.taps:
            self.kv.features[slots] = logits
        return logits[plan.logits_at]
