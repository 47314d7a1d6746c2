"""Drafts with a DSpark head: one pass for all tokens of a draft, then one draw after another.

The head's context is the target's hidden states of all tokens but the last; the block begins with the last token. The
block's KV is overwritten later, by that of the context. A draft is at most as long as the blocks that the head was
trained for.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.head_drafter import HeadDrafter
from paceline.model.device import to_device
from paceline.model.dspark import DSparkHead
from paceline.model.kv import BatchPlan
from paceline.speculation.batch import Rows
from paceline.speculation.draft_batch import DraftBatch


class DSparkDrafter(HeadDrafter):
    name = "dspark"
    head: DSparkHead

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        return super().propose(rows, np.minimum(caps, self.head.config.block_size))

    def draft(self, rows: Rows, caps: np.ndarray, active: list[int], drafts: DraftBatch) -> None:
        self._catch_up(rows, active)
        h_PD, first = self._blocks(rows, caps, active)
        base_PN = self.head.base_logits(h_PD)
        distributions: list[Tensor] = []
        survival = np.ones(len(rows))
        previous = np.array([rows.tokens[i][-1] for i in active], np.int64)
        for step in range(drafts.tokens.shape[1]):
            at = to_device(first + step, self.head.device)
            markov = self.head.markov_logits(self.head.previous(to_device(previous, self.head.device)))
            self.draw(rows, active, base_PN[at] + markov, step, drafts, distributions)
            likely = self.likely(rows, active, step, drafts, survival)
            drafts.num[[active[n] for n in likely]] = step + 1
            keep = [n for n in likely if caps[active[n]] > step + 1]
            if not keep:
                break
            active, first = [active[n] for n in keep], first[keep]
            previous = drafts.tokens[active, step].astype(np.int64)
        if distributions:
            drafts.q = torch.stack(distributions, 1)

    def num_kv(self, num_tokens: int, cap: int) -> int:
        return num_tokens - 1 + cap

    def kv_keys(self, tokens: np.ndarray) -> np.ndarray:
        """The KV of a position depends on its token."""
        return tokens[:-1].astype(np.int64)

    def _catch_up(self, rows: Rows, active: list[int]) -> None:
        """Compute the KV of the positions that the target has computed meanwhile."""
        wanted, slots, positions = [], [], []
        for i in active:
            state, end = self.state(rows, i), len(rows.tokens[i]) - 1
            start = state.num_computed
            if state.start + start < end:
                wanted.append((i, state.start + start, end))
                slots.append(state.table.slot_mapping(start, end - state.start))
                positions.append(np.arange(start, end - state.start))
        if not wanted:
            return
        kv, device = self.memory.kv, self.head.device
        assert kv is not None and rows.aux_hidden_states is not None
        fused = self.head.fuse(rows.aux_hidden_states(wanted).to(self.head.dtype))
        slots_T, positions_T = (to_device(np.concatenate(each).astype(np.int64), device) for each in (slots, positions))
        for layer, (k, v) in enumerate(self.head.context(fused, positions_T)):
            kv.write(layer, slots_T, k, v)
        for i in active:
            self.caught_up(rows, i)

    def _blocks(self, rows: Rows, caps: np.ndarray, active: list[int]) -> tuple[Tensor, np.ndarray]:
        """The states of each row's block, concatenated, and where each begins."""
        kv, device = self.memory.kv, self.head.device
        assert kv is not None, "asleep"
        states = [self.state(rows, i) for i in active]
        sizes, starts = caps[active].astype(np.int64), np.array([state.num_computed for state in states])
        ends = sizes.cumsum()
        first = ends - sizes
        row = np.repeat(np.arange(len(active)), sizes)
        offset = np.arange(ends[-1]) - first[row]
        tokens = np.full(len(row), self.head.config.mask_token_id, np.int64)
        tokens[first] = [rows.tokens[i][-1] for i in active]
        tables = np.zeros((len(active), max(len(state.table.blocks) for state in states)), np.int32)
        for n, state in enumerate(states):
            tables[n, : len(state.table.blocks)] = state.table.blocks
        # Each position attends to its whole block: as a row of its own, with the block's end as its context.
        plan = BatchPlan(
            tokens=tokens,
            positions=starts[row] + offset,
            query_start=np.arange(len(row) + 1, dtype=np.int32),
            context=(starts + sizes)[row].astype(np.int32),
            block_tables=tables[row],
            logits_at=np.arange(len(row)),
        )
        tokens_T, positions_T = (to_device(each, device) for each in (plan.tokens, plan.positions))
        h = self.head(tokens_T, positions_T, self.head.ops.paged_attention(kv, plan), self.embed)
        return h, first
