"""Drafters made to be wrong, for the ladder: an exact engine does not care."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Receipt, Request


class AdversarialDrafter:
    """Guesses at random, of random length and confidence, reproducibly: by request and by its last tokens."""

    name = "adversarial"
    version = 0
    wants_hidden: tuple[int, ...] = ()
    reads_drafts = False
    num_bytes = 0  # keeps nothing of ended requests

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size, self.seed = vocab_size, seed

    def begin(self, request: Request, version: int = 0) -> None:
        pass

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        drafts = DraftBatch.empty(len(rows), int(caps.max(initial=0)))
        for i, tokens in enumerate(rows.tokens):
            rng = np.random.default_rng([self.seed, int(rows.noise_keys[i]), *tokens[-4:].tolist(), len(tokens)])
            drafts.num[i] = rng.integers(0, caps[i] + 1)
            drafts.tokens[i] = rng.integers(0, self.vocab_size, drafts.tokens.shape[1])
            drafts.confidence[i] = rng.random(drafts.tokens.shape[1])
        return drafts

    def observe(self, commits: Commits) -> None:
        pass

    def end(self, request_id: int) -> None:
        pass

    def update(self, weights: Any, version: int) -> Receipt:
        raise ValueError("the adversarial drafter has no weights")

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            raise ValueError(f"not a state of the adversarial drafter, which keeps none: it holds {sorted(state)}")
