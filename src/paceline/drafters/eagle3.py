"""Drafts with an EAGLE-3 head: one pass of one layer per token, batched over all rows.

At position i the head takes (hidden state i, token i + 1). For its own draft tokens it continues from its own state;
their KV is overwritten later, from true hidden states. With `min_confidence` it saves the passes that would follow.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.head_drafter import HeadDrafter
from paceline.model.eagle3 import Eagle3Head
from paceline.model.paged import Span, make_plan
from paceline.speculation.batch import Rows
from paceline.speculation.draft_batch import DraftBatch


class Eagle3Drafter(HeadDrafter):
    name = "eagle3"
    head: Eagle3Head

    def draft(self, rows: Rows, caps: np.ndarray, active: list[int], drafts: DraftBatch) -> None:
        distributions: list[Tensor] = []
        survival = np.ones(len(rows))
        x, h = self._catch_up(rows, active)
        for step in range(drafts.tokens.shape[1]):
            self.draw(rows, active, self.head.logits(h), step, drafts, distributions)
            likely = self.likely(rows, active, step, drafts, survival)
            drafts.num[[active[n] for n in likely]] = step + 1
            keep = [n for n in likely if caps[active[n]] > step + 1]
            if not keep:
                break
            if len(keep) < len(active):
                active, x = [active[n] for n in keep], x[keep]
            spans = []
            for i in active:
                state = self.state(rows, i)
                spans.append(Span(drafts.tokens[i, step : step + 1], state.num_computed + step, state.table, 1))
            x, h = self._forward(spans, x)
        if distributions:
            drafts.q = torch.stack(distributions, 1)

    def num_kv(self, num_tokens: int, cap: int) -> int:
        return num_tokens - 1 + cap - 1  # the last draft needs no KV

    def kv_keys(self, tokens: np.ndarray) -> np.ndarray:
        """The KV of a position depends on the token after it; that of the first position also on its own token."""
        keys = tokens[1:].astype(np.int64)
        keys[0] += int(tokens[0]) << 32
        return keys

    def _catch_up(self, rows: Rows, active: list[int]) -> tuple[Tensor, Tensor]:
        """Compute the positions that the target has computed meanwhile. Returns the states at each row's last position,
        and their norms."""
        spans, wanted = [], []
        for i in active:
            state, tokens = self.state(rows, i), rows.tokens[i]
            # At least the last position is computed again: its state is where the draft begins.
            start = min(state.start + state.num_computed, len(tokens) - 2)
            spans.append(Span(tokens[start + 1 :], start - state.start, state.table, 1))
            wanted.append((i, start, len(tokens) - 1))
        assert rows.aux_hidden_states is not None
        aux_hidden_states = rows.aux_hidden_states(wanted)
        x, h = self._forward(spans, self.head.fuse(aux_hidden_states.to(self.head.dtype)))
        for i in active:
            self.caught_up(rows, i)
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
