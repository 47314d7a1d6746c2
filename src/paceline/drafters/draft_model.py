"""Drafts with a smaller model of the same vocabulary, one token at a time, batched over all rows.

Under `coupled` it samples with the target's noise, so it predicts the token that the target will sample, not just a
likely one. Under the rejection rules it samples with its own noise and returns q. It has its own KV cache, in which the
entries of rejected draft tokens are overwritten.

If it consists of the target's first layers (`first_layers`), every policy update changes its weights too: it drops its
KV when the policy version changes, and refuses other weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.model.confidence import confidence
from paceline.model.kv import BLOCK, BlockTable
from paceline.model.paged import PagedDecoder, Span
from paceline.model.sample import Sampler, Stream, with_round
from paceline.model.sampling_arrays import SamplingArrays
from paceline.speculation.batch import Commits, Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.types import Receipt, Request


@dataclass(slots=True)
class _State:
    length: int  # committed tokens of the sequence
    num_computed: int = 0  # committed and draft tokens that have KV
    table: BlockTable = field(default_factory=BlockTable)


class DraftModelDrafter(Drafter):
    name = "draft_model"

    def __init__(self, paged: PagedDecoder, sampler: Sampler, coupled: bool = True, version: int = 0) -> None:
        self.paged, self.sampler, self.coupled, self.version = paged, sampler, coupled, version
        self._policy_version: int | None = None  # of the KV, if the weights are the policy's
        self._states: dict[int, _State] = {}

    def begin(self, request: Request, version: int = 0) -> None:
        self._states[request.request_id] = _State(len(request.prompt_ids))

    def end(self, request_id: int) -> None:
        self.paged.pool.truncate(self._states.pop(request_id).table, 0)

    def observe(self, commits: Commits) -> None:
        for request_id, num, num_accepted in zip(
            commits.request_ids.tolist(), commits.num.tolist(), commits.num_accepted.tolist(), strict=True
        ):
            state = self._states[request_id]
            state.num_computed = min(state.num_computed, state.length + num_accepted)
            state.length += num

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        if self.paged.decoder.shares_weights and rows.version != self._policy_version:
            self._drop_kv()
            self._policy_version = rows.version
        states = [self._states[i] for i in rows.request_ids.tolist()]
        limit = self.paged.decoder.config.max_positions
        active: list[int] = []
        for i, state in enumerate(states):
            # A draft that was not verified (its row was preempted) leaves KV past the committed tokens.
            state.num_computed = min(state.num_computed, state.length - 1)
            if caps[i] and not state.table.blocks:
                state.num_computed = self.paged.reuse_prefix(state.table, rows.tokens[i][:-1])
            num_kv = state.length + int(caps[i]) - 1  # the last draft token needs no KV
            if caps[i] and num_kv <= limit and self.paged.pool.reserve(state.table, num_kv):
                active.append(i)
        width = int(caps.max(initial=0))
        drafts = DraftBatch.empty(len(rows), width)
        distributions: list[Tensor] = []
        pending = [rows.tokens[i][states[i].num_computed :] for i in active]
        for step in range(width):
            keep = [n for n, i in enumerate(active) if caps[i] > step]
            active, pending = [active[n] for n in keep], [pending[n] for n in keep]
            if not active:
                break
            logits = self._forward(states, active, pending)
            if step == 0:
                for i in active:
                    if states[i].length // BLOCK > states[i].table.num_cached:
                        self.paged.pool.cache_blocks(states[i].table, rows.tokens[i])
            positions = np.array([states[i].length + step for i in active], np.int64)
            params = SamplingArrays.of([rows.sampling[i] for i in active])
            stream = Stream.SAMPLE
            if not self.coupled:
                positions, stream = with_round(positions, np.array([states[i].length for i in active])), Stream.DRAFT
                distributions.append(self._distributions(logits, params, active, len(rows)))
            draws = self.sampler.draw(logits, rows.noise_keys[active], positions, params, stream, margins=self.coupled)
            drafts.tokens[active, step] = draws.tokens
            drafts.scores[active, step] = confidence(draws)
            drafts.num[active] = step + 1
            pending = [draws.tokens[n : n + 1] for n in range(len(active))]
        if distributions:
            drafts.q = torch.stack(distributions, 1)
        return drafts

    def _forward(self, states: list[_State], active: list[int], pending: list[np.ndarray]) -> Tensor:
        spans = [
            Span(tokens, states[i].num_computed, states[i].table, 1) for i, tokens in zip(active, pending, strict=True)
        ]
        logits = self.paged.forward(spans)
        for i, tokens in zip(active, pending, strict=True):
            states[i].num_computed += len(tokens)
        return logits

    def _distributions(self, logits: Tensor, params: SamplingArrays, active: list[int], num_rows: int) -> Tensor:
        """[B, V], with zeros for rows that are not active."""
        q = self.sampler.distribution(logits, params)
        out = q.new_zeros(num_rows, q.shape[-1])
        out[active] = q
        return out

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        if self.paged.decoder.shares_weights:
            raise ValueError(
                "update_drafter: speculation.draft_model = 'layers:N' drafts with the policy's own layers, which "
                "update_weights updates; to update a draft model separately, set it to a model name or directory"
            )
        receipt = self.paged.update(weights, version)
        self._drop_kv()
        self.version = version
        return receipt

    def _drop_kv(self) -> None:
        """After a change of weights: KV of the old ones must not be used or shared."""
        self.paged.pool.reset_prefix_cache()
        for state in self._states.values():
            self.paged.pool.truncate(state.table, 0)
            state.num_computed = 0
