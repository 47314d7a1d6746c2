"""A drafter that is wrong on purpose: it must not change the output of an exact engine."""

from __future__ import annotations

import numpy as np

from paceline.speculation.batch import Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch


class AdversarialDrafter(Drafter):
    """Drafts random tokens of random length and confidence. They are a function of the request and its last tokens."""

    name = "adversarial"

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self.vocab_size, self.seed = vocab_size, seed

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        drafts = DraftBatch.empty(len(rows), int(caps.max(initial=0)))
        for i, tokens in enumerate(rows.tokens):
            rng = np.random.default_rng([self.seed, int(rows.noise_keys[i]), *tokens[-4:].tolist(), len(tokens)])
            drafts.num[i] = rng.integers(0, caps[i] + 1)
            drafts.tokens[i] = rng.integers(0, self.vocab_size, drafts.tokens.shape[1])
            drafts.scores[i] = rng.random(drafts.tokens.shape[1])
        return drafts
