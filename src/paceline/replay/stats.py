"""Statistics of a replay by epoch. A request's epoch is the number of earlier rounds with its problem (0: cold)."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.speculation.batch import Commits
from paceline.types import StepTrace

# Rows of `ReplayStats.counts`: emitted tokens, engine steps with a row of that epoch, emitting rows, drafts, draft
# tokens, accepted tokens.
TOKENS, STEPS, ROW_STEPS, DRAFTS, DRAFT_TOKENS, ACCEPTED = range(6)


class ReplayStats:
    """A step's time is divided among epochs by their rows: with one row of epoch 0 and three of epoch 1, a quarter of
    it counts for epoch 0."""

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

    def count(self, epoch: int, trace: StepTrace, num_emitting: int) -> None:
        """Count a step in which all rows have the same epoch."""
        self.num_steps += 1
        self.total_s[epoch] += trace.total_s
        self.draft_s[epoch] += trace.draft_s
        drafts = trace.num_drafts, trace.num_draft_tokens, trace.num_accepted_tokens
        self.counts[:, epoch] += (trace.num_emitted, 1, num_emitting, *drafts)

    def count_mixed(self, epochs: np.ndarray, trace: StepTrace, commits: Commits) -> None:
        """Count a step in which rows have different epochs. `epochs`: of the emitting rows, then of the others."""
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

    def summary(self, epochs: slice = slice(None), baseline: ReplayStats | None = None) -> dict[str, Any]:
        """Metrics over some epochs, by default over all. `baseline`: the same replay without speculation."""
        counts = self.counts[:, epochs].sum(1).tolist()
        total_s, draft_s = float(self.total_s[epochs].sum()), float(self.draft_s[epochs].sum())
        baseline_s = float(baseline.total_s[epochs].sum()) if baseline is not None else None
        drafts = counts[DRAFTS]
        return {
            "num_tokens": counts[TOKENS],
            "num_steps": self.num_steps if epochs == slice(None) else counts[STEPS],
            "num_drafts": drafts,
            "num_draft_tokens": counts[DRAFT_TOKENS],
            "num_accepted_tokens": counts[ACCEPTED],
            # As vLLM counts it.
            "mean_acceptance_length": 1 + counts[ACCEPTED] / drafts if drafts else 1.0,
            "draft_acceptance_rate": counts[ACCEPTED] / counts[DRAFT_TOKENS] if counts[DRAFT_TOKENS] else None,
            "tokens_per_row_step": counts[TOKENS] / counts[ROW_STEPS] if counts[ROW_STEPS] else None,
            "makespan_s": total_s,
            "plain_makespan_s": baseline_s,
            "speedup": baseline_s / total_s if baseline_s is not None and total_s else None,
            "draft_share": draft_s / total_s if total_s else None,
        }
