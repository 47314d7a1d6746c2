"""The drafts of a step, for all rows. B rows, K draft positions, V vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(slots=True)
class DraftBatch:
    """Row i has the draft tokens[i, :num[i]]."""

    tokens: np.ndarray  # int32 [B, K]
    num: np.ndarray  # int32 [B]
    # The drafter's own estimate of the probability that a token is accepted, given that those before it are.
    scores: np.ndarray  # float32 [B, K]
    # The distribution that each token was sampled from: [B, K, V], torch or numpy. None: the drafter is deterministic
    # (q is one-hot).
    q: Any = None
    # If several drafters draft: row i has a draft of names[sources[i]].
    names: tuple[str, ...] = ()
    sources: np.ndarray | None = None  # uint8 [B]
    match: np.ndarray | None = None  # int32 [B], tokens of context that a draft was found by
    caps: np.ndarray | None = None  # int32 [B], the most that could have been drafted
    # Set by `AcceptanceModel.rate`; 0 and -1 after a draft's end.
    probabilities: np.ndarray | None = None  # float64 [B, K], of acceptance given that those before are accepted
    cells: np.ndarray | None = None  # int64 [B, K]

    @staticmethod
    def empty(num_rows: int, k: int = 0) -> DraftBatch:
        return DraftBatch(
            np.zeros((num_rows, k), np.int32), np.zeros(num_rows, np.int32), np.zeros((num_rows, k), np.float32)
        )
