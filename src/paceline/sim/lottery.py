"""A drafter whose tokens stand by lot, and rounds of requests that it plays in: replay's engine without recordings.

The tape says RIGHT everywhere. Each drafted position has a chance of its own, drawn around the mean of its depth; it is
said as the confidence, and decides whether the token is RIGHT. So confidences are honest, and policies can choose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.replay.rounds import Round
from paceline.sim.speculation import Speculation
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Receipt, Request

RIGHT, WRONG = 1, 2
HISTORY, HEAD = 0, 1
NAMES = ("suffix", "eagle3")


class LotteryDrafter:
    version = 0
    wants_hidden: tuple[int, ...] = ()
    reads_drafts = False
    num_bytes = 0

    def __init__(self, speculation: Speculation, seed: int = 0) -> None:
        self.speculation = speculation
        self.name = "suffix" if speculation.method == "free" else speculation.method
        self._random = np.random.default_rng(seed)
        self._means = speculation.position_chances(max(1, speculation.k))

    def begin(self, request: Request, version: int = 0) -> None:
        pass

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        num_rows, k, s = len(rows), int(caps.max(initial=0)), self.speculation
        if not k:
            return DraftBatch.empty(num_rows)
        means, num, sources = np.broadcast_to(self._means[:k], (num_rows, k)), caps.astype(np.int32), None
        if s.method == "hybrid":
            found = self._random.random(num_rows) < s.history_share
            sources = np.where(found, HISTORY, HEAD).astype(np.uint8)
            means = np.where(found[:, None], s.history_chance, means)
            if rows.head_caps is not None:
                num = np.where(found, num, np.minimum(num, rows.head_caps)).astype(np.int32)
        chances = self._spread(means)
        stands = self._random.random((num_rows, k)) < chances
        tokens = np.where(stands, RIGHT, WRONG).astype(np.int32)
        return DraftBatch(tokens, num, chances.astype(np.float32), None, NAMES if sources is not None else (), sources)

    def _spread(self, means: np.ndarray) -> np.ndarray:
        """Chances around these means: 0 leaves them as they are, 1 makes them 0 or 1."""
        spread = self.speculation.spread
        if spread in (0.0, 1.0):
            return means if not spread else (self._random.random(means.shape) < means).astype(np.float64)
        weight = 1 / spread - 1  # of a beta distribution, whose variance is spread · p(1 - p)
        p = np.clip(means, 1e-6, 1 - 1e-6)
        return self._random.beta(p * weight, (1 - p) * weight)

    def observe(self, commits: Commits) -> None:
        pass

    def end(self, request_id: int) -> None:
        pass

    def update(self, weights: Any, version: int) -> Receipt:
        raise ValueError("a lottery has no weights")

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            raise ValueError("a lottery learns nothing, so it has no state")


def round_of(lengths: np.ndarray, prompts: np.ndarray, max_tokens: int, group: int) -> Round:
    """Requests of these lengths, for a tape that says the same everywhere."""
    total = int((lengths + prompts).max())
    num = len(lengths)
    return Round(
        version=0,
        tokens=np.full(total + 512, RIGHT, np.int32),
        start=np.zeros(num, np.int64),  # all over the same tokens
        num_prompt=prompts.astype(np.int64),
        num_total=(lengths + prompts).astype(np.int64),
        limit=(prompts + max_tokens).astype(np.int64),
        problems=[f"problem {i // group}" for i in range(num)],
        epochs=np.zeros(num, np.int64),
        follows=np.full(num, -1, np.int64),
        matches=None,
    )
