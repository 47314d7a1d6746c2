"""History where it knows, an EAGLE-3 head elsewhere: row by row, whichever promises more tokens for its cost.

A draft's worth is the number of its tokens expected to stand, by confidences calibrated on what really stood. History
costs nothing, the head a share of a target step per token. Choosing `before` the head drafts spends its time only on
rows that it gets; what it would say is then estimated from how its drafts fared, position by position. Choosing `after`
compares the two drafts themselves: under the rejection rules that would be a bias, and engines refuse it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.calibration import Calibration, bins_of, by_confidence
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.speculation.batch import Commits, Drafter, DraftBatch, Rows
from paceline.types import Receipt, Request

MAX_POSITIONS = 16  # further ones are taken for the last
HEAD_PRIOR = 0.6  # a head's acceptance at each position before any was seen
CALIBRATIONS = ("history", "head", "head_position")


@dataclass(slots=True)
class _Pending:
    """What was proposed for a row, until it is known what stood."""

    from_head: bool
    confidence: np.ndarray  # as the drafter itself said


class HybridDrafter:
    """`head_cost`: a drafted token of the head, in steps of the target."""

    name = "hybrid"

    def __init__(self, history: Drafter, head: Eagle3Drafter, head_cost: float, choice: str = "before") -> None:
        assert choice in ("before", "after")
        self.history, self.head, self.head_cost = history, head, head_cost
        self.reads_drafts = choice == "after"
        self.wants_hidden = head.wants_hidden
        self.calibrations = {
            "history": by_confidence(),
            "head": by_confidence(),
            "head_position": Calibration(np.full(MAX_POSITIONS, HEAD_PRIOR)),
        }
        self._pending: dict[int, _Pending] = {}

    @property
    def version(self) -> int:
        return self.head.version

    def begin(self, request: Request) -> None:
        self.history.begin(request)
        self.head.begin(request)

    def end(self, request_id: int) -> None:
        self.history.end(request_id)
        self.head.end(request_id)
        self._pending.pop(request_id, None)

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        past = self.history.propose(rows, caps)
        past_said = past.confidence.copy()
        past.confidence = self._calibrated("history", past)
        past_rate = 1 + _expected(past)
        head_caps = caps
        if not self.reads_drafts:
            head_caps = np.where(past_rate >= self._head_rate(caps), 0, caps).astype(np.int32)
        guess = self.head.propose(rows, head_caps)
        guess_said = guess.confidence.copy()
        guess.confidence = self._calibrated("head", guess)
        from_head = guess.num > 0
        if self.reads_drafts:
            from_head &= (1 + _expected(guess)) / (1 + self.head_cost * guess.num) > past_rate
        for i, request_id in enumerate(rows.request_ids.tolist()):
            said = guess_said if from_head[i] else past_said
            self._pending[request_id] = _Pending(bool(from_head[i]), said[i])
        return self._merged(past, guess, from_head)

    def _calibrated(self, name: str, drafts: DraftBatch) -> np.ndarray:
        return self.calibrations[name].chances[bins_of(drafts.confidence)].astype(np.float32)

    def _head_rate(self, caps: np.ndarray) -> np.ndarray:
        """Tokens per target step's time that the head may be expected to bring to each row."""
        chances = self.calibrations["head_position"].chances
        survival = np.append(0.0, np.cumsum(np.cumprod(chances)))
        num = np.minimum(caps, MAX_POSITIONS)
        return (1 + survival[num]) / (1 + self.head_cost * num)

    def _merged(self, past: DraftBatch, guess: DraftBatch, from_head: np.ndarray) -> DraftBatch:
        width = past.tokens.shape[1]
        q = None
        if guess.q is not None:  # [B, K, V]; history's guesses are certain
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
        return DraftBatch(tokens, num, confidence, q, names, from_head.astype(np.uint8))

    def observe(self, commits: Commits) -> None:
        self.history.observe(commits)
        self.head.observe(commits)
        for request_id, num_drafted, num_accepted in zip(
            commits.request_ids.tolist(), commits.num_drafted.tolist(), commits.num_accepted.tolist(), strict=True
        ):
            pending = self._pending.pop(request_id, None)
            if pending is None or not num_drafted:
                continue
            bins = bins_of(pending.confidence[:num_drafted])
            self.calibrations["head" if pending.from_head else "history"].observe(bins, num_accepted)
            if pending.from_head:
                positions = np.minimum(np.arange(num_drafted), MAX_POSITIONS - 1)
                self.calibrations["head_position"].observe(positions, num_accepted)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        return self.head.update(weights, version)

    def state(self) -> dict[str, np.ndarray]:
        counts = {f"calibration.{name}": self.calibrations[name].counts.copy() for name in CALIBRATIONS}
        return {**{f"history.{key}": array for key, array in self.history.state().items()}, **counts}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        wanted = {f"calibration.{name}" for name in CALIBRATIONS}
        if not wanted <= state.keys():
            raise ValueError(
                f"not a state of the hybrid drafter: it holds {sorted(state) or 'nothing'}; was speculation.method "
                "changed?"
            )
        rest = {key: array for key, array in state.items() if key not in wanted}
        self.history.restore({key.removeprefix("history."): array for key, array in rest.items()})
        for name in CALIBRATIONS:
            self.calibrations[name].counts = state[f"calibration.{name}"].copy()


def _expected(drafts: DraftBatch) -> np.ndarray:
    """How many of each row's drafted tokens may be expected to stand: float64 [B]."""
    drafted = np.arange(drafts.tokens.shape[1]) < drafts.num[:, None]
    return (drafts.confidence.cumprod(1, np.float64) * drafted).sum(1)
