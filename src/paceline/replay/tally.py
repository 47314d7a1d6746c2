"""What a replay came to, by epoch: how often a request's problem had been seen before (0: cold)."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.speculation.batch import Commits
from paceline.types import StepTrace

# Rows of `Tally.counts`: emitted tokens, engine steps with a row of that epoch, rows that decided tokens, drafts,
# drafted tokens, accepted tokens.
TOKENS, STEPS, ROW_STEPS, DRAFTS, DRAFT_TOKENS, ACCEPTED = range(6)


class Tally:
    """Time is shared out by rows: a step with one row of epoch 0 and three of epoch 1 counts a quarter and three."""

    def __init__(self) -> None:
        self.counts = np.zeros((6, 0), np.int64)
        self.total_s = np.zeros(0)
        self.draft_s = np.zeros(0)
        self.num_steps = 0

    @property
    def num_epochs(self) -> int:
        return len(self.total_s)

    def grow(self, num_epochs: int) -> None:
        more = num_epochs - self.num_epochs
        if more > 0:
            self.counts = np.pad(self.counts, ((0, 0), (0, more)))
            self.total_s, self.draft_s = np.pad(self.total_s, (0, more)), np.pad(self.draft_s, (0, more))

    def count(self, epoch: int, trace: StepTrace, num_deciding: int) -> None:
        """A step whose rows are all of one epoch."""
        self.num_steps += 1
        self.total_s[epoch] += trace.total_s
        self.draft_s[epoch] += trace.draft_s
        counts = self.counts
        counts[TOKENS, epoch] += trace.num_emitted
        counts[STEPS, epoch] += 1
        counts[ROW_STEPS, epoch] += num_deciding
        if trace.num_drafts:
            counts[DRAFTS, epoch] += trace.num_drafts
            counts[DRAFT_TOKENS, epoch] += trace.num_draft_tokens
            counts[ACCEPTED, epoch] += trace.num_accepted_tokens

    def count_mixed(self, epochs: np.ndarray, trace: StepTrace, commits: Commits) -> None:
        """epochs: of the rows that decided tokens, then of those that did not."""
        self.num_steps += 1
        num = np.bincount(epochs, minlength=self.num_epochs)
        self.total_s += trace.total_s * num / len(epochs)
        self.draft_s += trace.draft_s * num / len(epochs)
        self.counts[STEPS] += num > 0
        epochs = epochs[: len(commits.num)]
        for kind, values in (
            (TOKENS, commits.num),
            (ROW_STEPS, np.ones(len(epochs))),
            (DRAFTS, commits.num_drafted > 0),
            (DRAFT_TOKENS, commits.num_drafted),
            (ACCEPTED, commits.num_accepted),
        ):
            self.counts[kind] += np.bincount(epochs, values, self.num_epochs).astype(np.int64)

    def figures(self, epochs: slice = slice(None), plain: Tally | None = None) -> dict[str, Any]:
        """Of some epochs together, the whole where they are not told. `plain`: the same without speculation."""
        counts = self.counts[:, epochs].sum(1).tolist()
        total_s, draft_s = float(self.total_s[epochs].sum()), float(self.draft_s[epochs].sum())
        plain_s = float(plain.total_s[epochs].sum()) if plain is not None else None
        drafts = counts[DRAFTS]
        return {
            "tokens": counts[TOKENS],
            "steps": self.num_steps if epochs == slice(None) else counts[STEPS],
            "drafts": drafts,
            "draft_tokens": counts[DRAFT_TOKENS],
            "accepted_tokens": counts[ACCEPTED],
            # As vLLM counts it.
            "mean_acceptance_length": 1 + counts[ACCEPTED] / drafts if drafts else 1.0,
            "acceptance_rate": counts[ACCEPTED] / counts[DRAFT_TOKENS] if counts[DRAFT_TOKENS] else None,
            "tokens_per_row_step": counts[TOKENS] / counts[ROW_STEPS] if counts[ROW_STEPS] else None,
            "makespan_s": total_s,
            "plain_makespan_s": plain_s,
            "speedup": plain_s / total_s if plain_s is not None and total_s else None,
            "draft_share": draft_s / total_s if total_s else None,
        }
