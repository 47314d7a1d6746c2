"""Drafts from history or with a head: for each row, the one with more expected tokens for its cost.

A draft's value is the expected number of accepted tokens, by the acceptance model. History costs nothing, the head a
share of a target step per token. The choice `before` the head drafts spends its time only on rows that it gets; the
value of its draft is then estimated from its latest ones. The choice `after` compares the two drafts themselves: under
the rejection rules that would be a bias, and engines refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from paceline.speculation.batch import Commits, Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.types import Receipt, Request

if TYPE_CHECKING:
    from torch import Tensor


class HybridDrafter(Drafter):
    """`head_cost`: time of a draft token of the head, in steps of the target."""

    name = "hybrid"

    def __init__(self, history: Drafter, head: Drafter, head_cost: float, choice: str = "before") -> None:
        assert choice in ("before", "after")
        self.history, self.head, self.head_cost = history, head, head_cost
        self.chooses_after = choice == "after"
        self.reads_drafts = self.chooses_after or head.reads_drafts
        self.aux_layers, self.version = head.aux_layers, head.version

    @property
    def num_bytes(self) -> int:
        return self.history.num_bytes + self.head.num_bytes

    def begin(self, request: Request, version: int = 0) -> None:
        self.history.begin(request, version)
        self.head.begin(request, version)

    def end(self, request_id: int) -> None:
        self.history.end(request_id)
        self.head.end(request_id)

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        found = self.history.propose(rows, caps)
        head_caps = caps if rows.head_caps is None else np.minimum(caps, rows.head_caps)
        # Compare equal lengths: if only short drafts of the head pay, the rest of a long one from history hardly does.
        history_rate = 1 + self._expected(rows, found, self.history, np.where(head_caps > 0, head_caps, caps))
        if not self.chooses_after:
            is_worse = (history_rate >= self._head_rate(rows, head_caps)) & (not rows.is_head_probe)
            head_caps = np.where(is_worse, 0, head_caps).astype(np.int32)
        drafted = self.head.propose(rows, head_caps)
        from_head = drafted.num > 0
        if self.chooses_after:
            expected = self._expected(rows, drafted, self.head, drafted.num)
            from_head &= ((1 + expected) / (1 + self.head_cost * drafted.num) > history_rate) | rows.is_head_probe
        merged = self._merged(found, drafted, from_head)
        merged.caps = np.where(from_head, head_caps, caps)
        return merged

    def _expected(self, rows: Rows, drafts: DraftBatch, drafter: Drafter, most: np.ndarray) -> np.ndarray:
        """Expected number of accepted tokens among the first most[i] of each row: float64 [B]."""
        rows.acceptance.rate(drafts, drafter.name)
        assert drafts.probabilities is not None
        return (drafts.probabilities.cumprod(1) * (np.arange(drafts.tokens.shape[1]) < most[:, None])).sum(1)

    def _head_rate(self, rows: Rows, caps: np.ndarray) -> np.ndarray:
        """Tokens per target step's time that are expected of the head, for each row."""
        k = int(caps.max(initial=0))
        expected = np.zeros(k + 1)
        if k:
            np.cumsum(rows.acceptance.survival(self.head.name, k).mean(0), out=expected[1:])
        return (1 + expected[caps]) / (1 + self.head_cost * caps)

    def _merged(self, found: DraftBatch, drafted: DraftBatch, from_head: np.ndarray) -> DraftBatch:
        width = found.tokens.shape[1]
        q = None
        if drafted.q is not None:  # [B, K, V]; history's q is one-hot
            import torch

            q = drafted.q.new_zeros(len(from_head), width, drafted.q.shape[2])
            q[:, : drafted.q.shape[1]] = drafted.q
            for i in np.flatnonzero(~from_head).tolist():
                tokens = torch.as_tensor(found.tokens[i, : found.num[i]], device=q.device).long()
                q[i] = 0
                q[i, torch.arange(len(tokens), device=q.device), tokens] = 1
        rows, k = np.flatnonzero(from_head), drafted.tokens.shape[1]
        found.tokens[rows, :k], found.num[rows], found.scores[rows, :k] = (
            drafted.tokens[rows], drafted.num[rows], drafted.scores[rows]
        )  # fmt: skip
        names = self.history.name, self.head.name
        match = np.where(from_head, 0, found.match).astype(np.int32) if found.match is not None else None
        return DraftBatch(found.tokens, found.num, found.scores, q, names, from_head.astype(np.uint8), match)

    def observe(self, commits: Commits) -> None:
        self.history.observe(commits)
        self.head.observe(commits)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        receipt = self.head.update(weights, version)
        self.version = version
        return receipt

    def state_dict(self) -> dict[str, np.ndarray]:
        return self.history.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self.history.load_state_dict(state)
