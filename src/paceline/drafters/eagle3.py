"""Drafts with an EAGLE-3 head: one pass of one layer per token, batched over all rows.

The head reads the target's auxiliary hidden states, which are in the target's paged memory (Rows.aux_hidden_states). So
it computes a row only when it drafts for it, and then catches up: at position i it takes (hidden state i, token i + 1).
For its own draft tokens it continues from its own state; their KV is overwritten later, from true hidden states. Its KV
is shared between rows with the same prefix, and dropped when the policy or the head changes.

Under `coupled` it samples with the target's noise, so it predicts the token that the target will sample, not just a
likely one. Under the rejection rules it samples with its own noise and returns q. With `min_confidence` it stops a
draft when its survival probability falls below that, which saves the passes that would follow.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.model.confidence import confidence
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import assign_head, head_state
from paceline.model.kv import BLOCK, BlockTable
from paceline.model.layer import Linear
from paceline.model.paged import PagedMemory, Span, make_plan, receipt_of
from paceline.model.sample import Sampler, Stream, with_round
from paceline.model.sampling_arrays import SamplingArrays
from paceline.speculation.batch import HEAD_WINDOW, Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.types import Receipt, Request


@dataclass(slots=True)
class _State:
    """Positions are counted from `start`, the first that the head computed: its attention depends on distances only."""

    start: int = 0
    num_computed: int = 0  # positions from there whose KV is from true hidden states
    table: BlockTable = field(default_factory=BlockTable)


class Eagle3Drafter(Drafter):
    """`embed` is the target's embedding, which the head shares."""

    name = "eagle3"

    def __init__(
        self,
        head: Eagle3Head,
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
        self._states: dict[int, _State] = {}
        self._policy_version = -1  # none yet

    def begin(self, request: Request, version: int = 0) -> None:
        self._states[request.request_id] = _State()

    def end(self, request_id: int) -> None:
        self.memory.pool.truncate(self._states.pop(request_id).table, 0)

    @torch.inference_mode()
    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        if rows.version != self._policy_version:
            self._drop_kv()
            self._policy_version = rows.version
        drafts = DraftBatch.empty(len(rows), int(caps.max(initial=0)))
        active = [i for i in range(len(rows)) if caps[i] and self._reserve(rows, i, int(caps[i]))]
        if not active:
            return drafts
        distributions: list[Tensor] = []
        survival = np.ones(len(rows))
        x, h = self._catch_up(rows, active)
        for step in range(drafts.tokens.shape[1]):
            self._draw(rows, active, h, step, drafts, distributions)
            likely = list(range(len(active)))
            if self.min_confidence:
                scores = drafts.scores[active, step : step + 1]
                cells = rows.acceptance.cells_of(scores, np.array([step]), (self.name,))
                survival[active] *= rows.acceptance.probabilities(cells)[:, 0]
                likely = [n for n, i in enumerate(active) if survival[i] >= self.min_confidence]
            drafts.num[[active[n] for n in likely]] = step + 1
            keep = [n for n in likely if caps[active[n]] > step + 1]
            if not keep:
                break
            if len(keep) < len(active):
                active, x = [active[n] for n in keep], x[keep]
            spans = []
            for i in active:
                state = self._state(rows, i)
                spans.append(Span(drafts.tokens[i, step : step + 1], state.num_computed + step, state.table, 1))
            x, h = self._forward(spans, x)
        if distributions:
            drafts.q = torch.stack(distributions, 1)
        return drafts

    def _state(self, rows: Rows, i: int) -> _State:
        return self._states[int(rows.request_ids[i])]

    def _reserve(self, rows: Rows, i: int, cap: int) -> bool:
        """Whether row i can be drafted for: the target has computed all but its last token, and blocks are free."""
        num_tokens = len(rows.tokens[i])
        if num_tokens < 2 or rows.num_computed[i] < num_tokens - 1:
            return False
        state = self._state(rows, i)
        if not state.table.blocks:
            state.start, state.num_computed = 0, self.memory.reuse_prefix(state.table, _pairs(rows.tokens[i]))
        if num_tokens - 1 - state.start - state.num_computed > self.window:  # too much to catch up with: start later
            self.memory.pool.truncate(state.table, 0)
            state.start, state.num_computed = num_tokens - 1 - self.window, 0
        reach = num_tokens - 1 - state.start + cap - 1  # the last draft needs no KV
        return reach <= self.head.config.layer.max_positions and self.memory.pool.reserve(state.table, reach)

    def _catch_up(self, rows: Rows, active: list[int]) -> tuple[Tensor, Tensor]:
        """Compute the positions that the target has computed meanwhile. Returns the states at each row's last position,
        and their norms."""
        spans, wanted = [], []
        for i in active:
            state, tokens = self._state(rows, i), rows.tokens[i]
            # At least the last position is computed again: its state is where the draft begins.
            start = min(state.start + state.num_computed, len(tokens) - 2)
            spans.append(Span(tokens[start + 1 :], start - state.start, state.table, 1))
            wanted.append((i, start, len(tokens) - 1))
        assert rows.aux_hidden_states is not None
        aux_hidden_states = rows.aux_hidden_states(wanted)
        x, h = self._forward(spans, self.head.fuse(aux_hidden_states.to(self.head.dtype)))
        for i in active:
            state = self._state(rows, i)
            before, state.num_computed = state.num_computed, len(rows.tokens[i]) - 1 - state.start
            if state.start == 0 and state.num_computed // BLOCK > before // BLOCK:
                self.memory.pool.cache_blocks(state.table, _pairs(rows.tokens[i]))
        return x, h

    def _forward(self, spans: list[Span], x: Tensor) -> tuple[Tensor, Tensor]:
        plan, kv = make_plan(spans), self.memory.kv
        assert kv is not None, "asleep"
        tokens, positions = (torch.as_tensor(each, device=self.head.device) for each in (plan.tokens, plan.positions))
        x, h = self.head(x, tokens, positions, self.head.ops.paged_attention(kv, plan), self.embed)
        if len(plan.logits_at) < len(x):
            last = torch.as_tensor(plan.logits_at, device=self.head.device)
            x, h = x[last], h[last]
        return x, h

    def _draw(
        self,
        rows: Rows,
        active: list[int],
        h: Tensor,
        step: int,
        drafts: DraftBatch,
        distributions: list[Tensor],
    ) -> None:
        """The next token of each active row."""
        logits = self.head.to_target_vocab(self.head.logits(h))
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


def _pairs(tokens: np.ndarray) -> np.ndarray:
    """Keys for the prefix cache. The KV of a position depends on the token after it and on the positions before, and
    that of the first position also on its own token. int64, one less than the tokens."""
    keys = tokens[1:].astype(np.int64)
    keys[0] += int(tokens[0]) << 32
    return keys
