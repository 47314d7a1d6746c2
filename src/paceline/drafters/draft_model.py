"""A smaller model of the same vocabulary drafts, a token at a time, batched over all rows.

Under `coupled` it draws with the target's own noise (so it guesses what the target will draw, not merely what is
likely); under the rejection rules it draws with noise of its own and hands over q. Its KV is its own; what it
computed for drafts that fell is overwritten.

Where it is the target's own first layers (`first_layers`), every policy update changes its weights too: it drops its
KV when the policy version changes, and refuses weights of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.model.kv import BLOCK, BlockTable
from paceline.model.paged import PagedDecoder, Span
from paceline.model.sample import Sampler, SamplingArrays, Stream, with_round
from paceline.model.surety import surety
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Receipt, Request


@dataclass(slots=True)
class _State:
    length: int  # tokens of the sequence, as committed
    num_computed: int = 0  # of these and the drafts behind them, how many have KV here
    table: BlockTable = field(default_factory=BlockTable)


class DraftModelDrafter:
    name = "draft_model"
    wants_hidden: tuple[int, ...] = ()
    reads_drafts = False
    num_bytes = 0  # keeps nothing of ended requests

    def __init__(self, paged: PagedDecoder, sampler: Sampler, coupled: bool = True, version: int = 0) -> None:
        self.paged, self.sampler, self.coupled, self.version = paged, sampler, coupled, version
        self._policy_version: int | None = None  # that the KV was computed under, where weights are the policy's
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
            # A draft that was proposed but never verified (its row lost its place) leaves KV past the committed end.
            state.num_computed = min(state.num_computed, state.length - 1)
            if caps[i] and not state.table.blocks:
                state.num_computed = self.paged.adopt(state.table, rows.tokens[i][:-1])
            reach = state.length + int(caps[i]) - 1  # the last draft needs no KV
            if caps[i] and reach <= limit and self.paged.pool.reserve(state.table, reach):
                active.append(i)
        width = int(caps.max(initial=0))
        drafts = DraftBatch.empty(len(rows), width)
        chances: list[Tensor] = []
        pending = [rows.tokens[i][states[i].num_computed :] for i in active]
        for step in range(width):
            keep = [n for n, i in enumerate(active) if caps[i] > step]
            active, pending = [active[n] for n in keep], [pending[n] for n in keep]
            if not active:
                break
            logits = self._forward(states, active, pending)
            if step == 0:
                for i in active:
                    if states[i].length // BLOCK > states[i].table.num_indexed:
                        self.paged.pool.index(states[i].table, rows.tokens[i])
            at = np.array([states[i].length + step for i in active], np.int64)
            params = SamplingArrays.of([rows.sampling[i] for i in active])
            stream = Stream.SAMPLE
            if not self.coupled:
                at, stream = with_round(at, np.array([states[i].length for i in active])), Stream.DRAFT
                chances.append(self._spread(logits, params, active, len(rows)))
            draws = self.sampler.draw(logits, rows.noise_keys[active], at, params, stream, leads=self.coupled)
            drafts.tokens[active, step] = draws.tokens
            drafts.confidence[active, step] = surety(draws)
            drafts.num[active] = step + 1
            pending = [draws.tokens[n : n + 1] for n in range(len(active))]
        if chances:
            drafts.q = torch.stack(chances, 1)
        return drafts

    def _forward(self, states: list[_State], active: list[int], pending: list[np.ndarray]) -> Tensor:
        spans = [
            Span(tokens, states[i].num_computed, states[i].table, 1) for i, tokens in zip(active, pending, strict=True)
        ]
        logits = self.paged.forward(spans)
        for i, tokens in zip(active, pending, strict=True):
            states[i].num_computed += len(tokens)
        return logits

    def _spread(self, logits: Tensor, params: SamplingArrays, active: list[int], num_rows: int) -> Tensor:
        """The active rows' distributions among all rows' [B, V]."""
        q = self.sampler.distribution(logits, params)
        out = q.new_zeros(num_rows, q.shape[-1])
        out[active] = q
        return out

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        if self.paged.decoder.shares_weights:
            raise ValueError(
                "update_drafter: speculation.draft_model = 'layers:N' drafts with the policy's own layers, which "
                "update_weights updates; a draft model with weights of its own is a model name or directory"
            )
        receipt = self.paged.update(weights, version)
        self._drop_kv()
        self.version = version
        return receipt

    def _drop_kv(self) -> None:
        """After a change of weights: what the old ones computed is neither used nor shared any more."""
        self.paged.pool.forget_all()
        for state in self._states.values():
            self.paged.pool.truncate(state.table, 0)
            state.num_computed = 0

    def state(self) -> dict[str, np.ndarray]:
        return {}  # its weights come from where they came from; its KV is computed again

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            raise ValueError(f"not a state of the draft_model drafter, which keeps none: it holds {sorted(state)}")
