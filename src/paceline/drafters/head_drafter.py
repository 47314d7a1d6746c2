"""What drafters with a draft head have in common: the head's KV memory, draws of tokens, and updates of the weights.

A head reads the target's auxiliary hidden states, which are in the target's paged memory (Rows.aux_hidden_states). So
it computes a row only when it drafts for it, and then catches up. Its KV is shared between rows with the same prefix,
and dropped when the policy or the head changes.

Under `coupled` it samples with the target's noise, so it predicts the token that the target will sample, not just a
likely one. Under the rejection rules it samples with its own noise and returns q. With `min_confidence` it stops a
draft when its survival probability falls below that.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.model.confidence import confidence
from paceline.model.draft_head import DraftHead
from paceline.model.head_files import assign_head, head_state
from paceline.model.kv import BLOCK, BlockTable
from paceline.model.layer import Linear
from paceline.model.paged import PagedMemory, receipt_of
from paceline.model.sample import Sampler, Stream, with_round
from paceline.model.sampling_arrays import SamplingArrays
from paceline.speculation.batch import HEAD_WINDOW, Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.types import Receipt, Request


@dataclass(slots=True)
class HeadState:
    """Of one row. Positions are counted from `start`, the first that the head computed: its attention depends on
    distances only."""

    start: int = 0
    num_computed: int = 0  # positions from there whose KV is from true hidden states
    table: BlockTable = field(default_factory=BlockTable)


class HeadDrafter(Drafter):
    """`embed` is the target's embedding, which the head shares."""

    def __init__(
        self,
        head: DraftHead,
        embed: Linear,
        sampler: Sampler,
        num_blocks: int,
        coupled: bool = True,
        min_confidence: float = 0.0,
        window: int = HEAD_WINDOW,
        version: int = 0,
    ) -> None:
        self.head, self.embed, self.sampler, self.coupled, self.version = head, embed, sampler, coupled, version
        self.window = window
        self.aux_layers = head.config.aux_layers
        self.min_confidence = min_confidence
        self.reads_drafts = min_confidence > 0
        native = head.lm_head.panels is not None
        self.memory = PagedMemory(head.config.layer, num_blocks, head.dtype, head.device, native)
        self._states: dict[int, HeadState] = {}
        self._policy_version = -1  # none yet

    @abstractmethod
    def draft(self, rows: Rows, caps: np.ndarray, active: list[int], drafts: DraftBatch) -> None:
        """Draft for these rows."""

    @abstractmethod
    def num_kv(self, num_tokens: int, cap: int) -> int:
        """Positions of a row with so many tokens that need KV while up to `cap` tokens are drafted."""

    @abstractmethod
    def kv_keys(self, tokens: np.ndarray) -> np.ndarray:
        """Keys for the prefix cache, one for each position of the context: what its KV depends on, besides the
        positions before. int64, one less than the tokens."""

    def begin(self, request: Request, version: int = 0) -> None:
        self._states[request.request_id] = HeadState()

    def end(self, request_id: int) -> None:
        self.memory.pool.truncate(self._states.pop(request_id).table, 0)

    @torch.inference_mode()
    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        if rows.version != self._policy_version:
            self._drop_kv()
            self._policy_version = rows.version
        drafts = DraftBatch.empty(len(rows), int(caps.max(initial=0)))
        active = [i for i in range(len(rows)) if caps[i] and self._reserve(rows, i, int(caps[i]))]
        if active:
            self.draft(rows, caps, active, drafts)
        return drafts

    def state(self, rows: Rows, i: int) -> HeadState:
        return self._states[int(rows.request_ids[i])]

    def _reserve(self, rows: Rows, i: int, cap: int) -> bool:
        """Whether row i can be drafted for: the target has computed all but its last token, and blocks are free."""
        num_tokens = len(rows.tokens[i])
        if num_tokens < 2 or rows.num_computed[i] < num_tokens - 1:
            return False
        state = self.state(rows, i)
        if not state.table.blocks:
            state.start, state.num_computed = 0, self.memory.reuse_prefix(state.table, self.kv_keys(rows.tokens[i]))
        if num_tokens - 1 - state.start - state.num_computed > self.window:  # too much to catch up with: start later
            self.memory.pool.truncate(state.table, 0)
            state.start, state.num_computed = num_tokens - 1 - self.window, 0
        reach = self.num_kv(num_tokens, cap) - state.start
        return reach <= self.head.config.layer.max_positions and self.memory.pool.reserve(state.table, reach)

    def caught_up(self, rows: Rows, i: int) -> None:
        """The KV of row i's context is computed."""
        state = self.state(rows, i)
        before, state.num_computed = state.num_computed, len(rows.tokens[i]) - 1 - state.start
        if state.start == 0 and state.num_computed // BLOCK > before // BLOCK:
            self.memory.pool.cache_blocks(state.table, self.kv_keys(rows.tokens[i]))

    def draw(
        self,
        rows: Rows,
        active: list[int],
        logits_PN: Tensor,
        step: int,
        drafts: DraftBatch,
        distributions: list[Tensor],
    ) -> None:
        """The next token of each active row, from logits over the draft vocabulary."""
        logits = self.head.to_target_vocab(logits_PN)
        lengths = np.array([len(rows.tokens[i]) for i in active], np.int64)
        params = SamplingArrays.of([rows.sampling[i] for i in active])
        at, stream = lengths + step, Stream.SAMPLE
        if not self.coupled:
            at, stream = with_round(at, lengths), Stream.DRAFT
            q = self.sampler.distribution(logits, params)
            distributions.append(q.new_zeros(len(rows), q.shape[-1]))
            distributions[-1][active] = q
        draws = self.sampler.draw(logits, rows.noise_keys[active], at, params, stream, margins=self.coupled)
        drafts.tokens[active, step] = draws.tokens
        drafts.scores[active, step] = confidence(draws)

    def likely(self, rows: Rows, active: list[int], step: int, drafts: DraftBatch, survival: np.ndarray) -> list[int]:
        """Which of the active rows keep the token of this step: those with `min_confidence`. `survival` [B] is that of
        the tokens before, and is updated."""
        if not self.min_confidence:
            return list(range(len(active)))
        scores = drafts.scores[active, step : step + 1]
        cells = rows.acceptance.cells_of(scores, np.array([step]), (self.name,))
        survival[active] *= rows.acceptance.probabilities(cells)[:, 0]
        return [n for n, i in enumerate(active) if survival[i] >= self.min_confidence]

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        started = time.perf_counter()
        assign_head(self.head, weights)
        self._drop_kv()
        self.version = version
        return receipt_of(head_state(self.head), version, started)

    def _drop_kv(self) -> None:
        self.memory.pool.reset_prefix_cache()
        for state in self._states.values():
            self.memory.pool.truncate(state.table, 0)
            state.start = state.num_computed = 0
