"""A drafter with random acceptance, and rounds of requests for it, to run the replay engine without recordings.

Every token of a round is CORRECT. Each draft position gets its own acceptance probability, drawn around the mean of its
depth. It is the draft's confidence, and it is the probability that the draft token is CORRECT. So confidences are
calibrated, and policies can select by them.
"""

from __future__ import annotations

import numpy as np

from paceline.replay.rounds import Round
from paceline.sim.speculation import Speculation
from paceline.speculation.batch import Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch

CORRECT, WRONG = 1, 2  # token ids
HISTORY, HEAD = 0, 1
NAMES = ("suffix", "eagle3")


class SimulatedDrafter(Drafter):
    def __init__(self, speculation: Speculation, seed: int = 0) -> None:
        self.speculation = speculation
        self.name = "suffix" if speculation.method == "free" else speculation.method
        self._random = np.random.default_rng(seed)
        self._means = speculation.position_probabilities(max(1, speculation.k))

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        num_rows, k, s = len(rows), int(caps.max(initial=0)), self.speculation
        if not k:
            return DraftBatch.empty(num_rows)
        means, num, sources = np.broadcast_to(self._means[:k], (num_rows, k)), caps.astype(np.int32), None
        if s.method == "hybrid":
            found = self._random.random(num_rows) < s.history_share
            sources = np.where(found, HISTORY, HEAD).astype(np.uint8)
            means = np.where(found[:, None], s.history_acceptance, means)
            if rows.head_caps is not None:
                num = np.where(found, num, np.minimum(num, rows.head_caps)).astype(np.int32)
        p = self._spread(means)
        correct = self._random.random((num_rows, k)) < p
        tokens = np.where(correct, CORRECT, WRONG).astype(np.int32)
        return DraftBatch(tokens, num, p.astype(np.float32), None, NAMES if sources is not None else (), sources)

    def _spread(self, means: np.ndarray) -> np.ndarray:
        """Draw probabilities with these means. Spread 0: the means themselves; spread 1: only 0 and 1."""
        spread = self.speculation.spread
        if spread in (0.0, 1.0):
            return means if not spread else (self._random.random(means.shape) < means).astype(np.float64)
        weight = 1 / spread - 1  # a beta distribution with variance spread · p(1 - p)
        p = np.clip(means, 1e-6, 1 - 1e-6)
        return self._random.beta(p * weight, (1 - p) * weight)


def make_round(lengths: np.ndarray, prompts: np.ndarray, max_tokens: int, group: int) -> Round:
    """A round of requests with these lengths. All of its tokens are CORRECT."""
    total = int((lengths + prompts).max())
    num = len(lengths)
    return Round(
        version=0,
        tokens=np.full(total + 512, CORRECT, np.int32),
        start=np.zeros(num, np.int64),  # all requests share the same tokens
        num_prompt=prompts.astype(np.int64),
        num_total=(lengths + prompts).astype(np.int64),
        limit=(prompts + max_tokens).astype(np.int64),
        problems=[f"problem {i // group}" for i in range(num)],
        epochs=np.zeros(num, np.int64),
        previous_turn=np.full(num, -1, np.int64),
        head_accepted=None,
    )
