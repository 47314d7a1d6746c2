"""History where it knows, an EAGLE-3 head elsewhere: row by row, whichever promises more tokens for its cost.

A draft's worth is the number of its tokens expected to stand, by confidences calibrated on what really stood. History
costs nothing, the head a share of a target step per token. Choosing `before` the head drafts spends its time only on
rows that it gets; what it would say is then estimated from how its drafts fared, position by position. Choosing `after`
compares the two drafts themselves: under the rejection rules that would be a bias, and engines refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from paceline.speculation.batch import Commits, DraftBatch, Drafter, Listener, Rows, are_same, look_up
from paceline.speculation.calibration import of_positions, of_probabilities
from paceline.types import Receipt, Request

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.drafters.ahead import Eagle3Ahead

MAX_POSITIONS = 16  # further ones are taken for the last
HEAD_PRIOR = 0.6  # a head's acceptance at each position before any was seen


class HybridDrafter:
    """`head_cost`: a drafted token of the head, in steps of the target."""

    name = "hybrid"

    def __init__(self, history: Drafter, head: Drafter, head_cost: float, choice: str = "before") -> None:
        assert choice in ("before", "after")
        self.history, self.head, self.head_cost = history, head, head_cost
        self.chooses_after = choice == "after"
        self.reads_drafts = self.chooses_after or head.reads_drafts
        self.wants_hidden, self.version = head.wants_hidden, head.version
        self.calibrations = {"history": of_probabilities(), "positions": of_positions(MAX_POSITIONS, HEAD_PRIOR)}
        self._policy_version = -1  # none yet
        # Of the rows drafted for last, until it is known what stood.
        self._ids = np.zeros(0, np.int64)
        self._from_head = np.zeros(0, bool)
        self._bins = np.zeros((0, 0), np.int64)  # of history's own confidence, by its calibration
        # Commits, and of their rows the bins, which had history's drafts and which the head's: not learned from yet.
        self._heard: tuple[Commits, np.ndarray, np.ndarray, np.ndarray] | None = None

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
        if rows.version != self._policy_version:
            if self._policy_version >= 0:
                for calibration in self.calibrations.values():
                    calibration.fade()
            self._policy_version = rows.version
        past = self.history.propose(rows, caps)
        bins = self.calibrations["history"].bins(past.confidence)
        past.confidence = self.calibrations["history"].chances.astype(np.float32)[bins]
        head_caps = caps if rows.head_caps is None else np.minimum(caps, rows.head_caps)
        # On equal terms: where only short drafts of the head pay, the rest of a long one from history hardly does.
        past_rate = 1 + _expected(past, np.where(head_caps > 0, head_caps, caps))
        if not self.chooses_after:
            head_caps = np.where(past_rate >= self._head_rate(head_caps), 0, head_caps).astype(np.int32)
        guess = self.head.propose(rows, head_caps)
        from_head = guess.num > 0
        if self.chooses_after:
            from_head &= (1 + _expected(guess, guess.num)) / (1 + self.head_cost * guess.num) > past_rate
        self._ids, self._from_head, self._bins = rows.request_ids, from_head, bins
        return self._merged(past, guess, from_head)

    def _head_rate(self, caps: np.ndarray) -> np.ndarray:
        """Tokens per target step's time that the head may be expected to bring to each row."""
        survival = np.zeros(MAX_POSITIONS + 1)
        np.cumsum(self.calibrations["positions"].chances.cumprod(), out=survival[1:])
        num = np.minimum(caps, MAX_POSITIONS)
        return (1 + survival[num]) / (1 + self.head_cost * num)

    def _merged(self, past: DraftBatch, guess: DraftBatch, from_head: np.ndarray) -> DraftBatch:
        width = past.tokens.shape[1]
        q = None
        if guess.q is not None:  # [B, K, V]; history's guesses are certain
            import torch

            q = guess.q.new_zeros(len(from_head), width, guess.q.shape[2])
            q[:, : guess.q.shape[1]] = guess.q
            for i in np.flatnonzero(~from_head).tolist():
                drafted = torch.as_tensor(past.tokens[i, : past.num[i]], device=q.device).long()
                q[i] = 0
                q[i, torch.arange(len(drafted), device=q.device), drafted] = 1
        take = np.flatnonzero(from_head)
        short = guess.tokens.shape[1]
        tokens, num, confidence = past.tokens.copy(), past.num.copy(), past.confidence
        tokens[take, :short], num[take], confidence[take, :short] = (
            guess.tokens[take],
            guess.num[take],
            guess.confidence[take],
        )
        names = self.history.name, self.head.name
        match = np.where(from_head, 0, past.match).astype(np.int32) if past.match is not None else None
        return DraftBatch(tokens, num, confidence, q, names, from_head.astype(np.uint8), match)

    def observe(self, commits: Commits) -> None:
        self._hear(commits)
        self._learn()

    def _hear(self, commits: Commits) -> None:
        """Both are told; what there is to learn of it waits."""
        self._learn()  # what waits already
        drafted = commits.num_drafted > 0
        bins, from_head = self._bins, self._from_head
        if not len(self._ids):
            from_head = np.zeros(len(drafted), bool)
        elif not are_same(commits.request_ids, self._ids):
            place, is_there = look_up(commits.request_ids, self._ids)
            bins, from_head, drafted = bins[place], from_head[place], drafted & is_there
        from_head = from_head & drafted
        for drafter, own in ((self.history, ~from_head), (self.head, from_head)):
            drafter.observe(
                Commits(
                    commits.request_ids, commits.tokens, commits.num, commits.num_drafted * own, commits.num_accepted
                )
            )
        if len(self._ids):
            self._heard = commits, bins, drafted & ~from_head, from_head

    def _learn(self) -> None:
        """What stood of which drafts."""
        if self._heard is None:
            return
        (commits, bins, from_history, from_head), self._heard = self._heard, None
        positions = np.broadcast_to(np.minimum(np.arange(bins.shape[1]), MAX_POSITIONS - 1), bins.shape)
        for name, words, own in (("history", bins, from_history), ("positions", positions, from_head)):
            self.calibrations[name].observe_bins(words, commits.num_accepted * own, commits.num_known * own)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        receipt = self.head.update(weights, version)
        self.version = version
        return receipt

    def state(self) -> dict[str, np.ndarray]:
        self._learn()
        parts = {"history": self.history.state(), "head": self.head.state()}
        parts["calibration"] = {name: calibration.counts.copy() for name, calibration in self.calibrations.items()}
        parts["calibration"]["policy_version"] = np.array([self._policy_version])
        return {f"{part}.{key}": array for part, state in parts.items() for key, array in state.items()}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        parts: dict[str, dict[str, np.ndarray]] = {"history": {}, "head": {}, "calibration": {}}
        for name, array in state.items():
            part, _, key = name.partition(".")
            parts.setdefault(part, {})[key] = array
        if len(parts) > 3 or parts["calibration"].keys() != {*self.calibrations, "policy_version"}:
            raise ValueError(
                f"not a state of the hybrid drafter: it holds {sorted(state) or 'nothing'}; was speculation.method "
                "changed?"
            )
        self._heard = None
        self.history.restore(parts["history"])
        self.head.restore(parts["head"])
        for name, calibration in self.calibrations.items():
            calibration.counts = parts["calibration"][name].copy()
        self._policy_version = int(parts["calibration"]["policy_version"][0])


class HybridAhead(HybridDrafter):
    """With a head that has drafted already (`drafters/ahead.py`), for rows where history then speaks instead too. It is
    not blind, since history listens. What it observed it learns from when it is asked for more: by then the next step
    may fly, and the device need not wait for it."""

    head: Eagle3Ahead

    @property
    def listens(self) -> bool:
        return isinstance(self.history, Listener) and self.history.listens

    def observe(self, commits: Commits) -> None:
        self._hear(commits)

    def ask(self, rows: Rows, caps: np.ndarray) -> int:
        self._learn()
        return self.head.ask(rows, caps)


def _expected(drafts: DraftBatch, most: np.ndarray) -> np.ndarray:
    """How many of each row's drafted tokens, of the first most[i], may be expected to stand: float64 [B]."""
    drafted = np.arange(drafts.tokens.shape[1]) < np.minimum(drafts.num, most)[:, None]
    return (drafts.confidence.cumprod(1, np.float64) * drafted).sum(1)
