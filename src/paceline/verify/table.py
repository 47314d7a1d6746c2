"""A target with a known distribution: its logits are a fixed function of the context.

It replaces the decoder in a real engine (same scheduler, block pool and spans). Its KV blocks store the tokens
themselves, and the logits are computed from the context *as read back from the blocks*. So a block that is leaked,
shared wrongly, stale or truncated wrongly changes the context, and with it the distribution.
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


class TokenKV:
    """In place of `PagedKV`: one token per slot."""

    def __init__(self, num_blocks: int) -> None:
        self.slots = np.full(num_blocks * BLOCK, -1, np.int64)
        self.aux_hidden_states: Tensor | None = None

    def allocate_aux_hidden_states(self, size: int) -> None:
        self.aux_hidden_states = torch.zeros(len(self.slots), size, dtype=torch.float64)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        for slots in (self.slots, self.aux_hidden_states):
            if slots is not None:
                blocks: Any = slots.reshape(-1, BLOCK, *slots.shape[1:])
                blocks[targets] = blocks[sources]


class Table:
    """A fixed random function from contexts to logits. `seed` selects it, `sharpness` scales the logits."""

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
            hidden_size=table.vocab_size,  # the logits serve as hidden states
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
        self.decoder: Any = self  # engines read only its config
        self.shares_weights = False
        self.pool = BlockPool(num_blocks)
        self.aux_layers = ()
        self.kv = None
        self.wake()

    def wake(self) -> None:
        self.kv = TokenKV(self.pool.num_blocks)
        self.set_aux_layers(self.aux_layers)

    def forward(self, spans: Sequence[Span]) -> Tensor:
        plan = make_plan(spans)
        slots = plan.slot_mapping()
        self.kv.slots[slots] = plan.tokens
        rows = np.repeat(np.arange(plan.num_rows), np.diff(plan.query_start))
        out = np.zeros((len(plan.tokens), self.config.vocab_size))
        for at in range(len(plan.tokens)) if self.aux_layers else plan.logits_at.tolist():
            positions = np.arange(plan.positions[at] + 1)
            blocks = plan.block_tables[rows[at], positions // BLOCK].astype(np.int64)
            out[at] = self.table.logits_after(self.kv.slots[blocks * BLOCK + positions % BLOCK])
        logits = torch.from_numpy(out)
        if self.aux_layers:
            self.kv.aux_hidden_states[slots] = logits
        return logits[plan.logits_at]
