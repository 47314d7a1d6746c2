"""How often a drafted position holds, given those before it: of drafts nothing need be known but how deep they are.

A position of which little is known is taken for the one before it, and the first for a prior. So a deeper draft than
those so far is tried as soon as it would pay if it held as well.
"""

from __future__ import annotations

import numpy as np

MEMORY = 256  # outcomes that a position remembers, about
PRIOR = 16.0  # outcomes that the position before counts for
FADE = 0.5  # what a new policy leaves


class Depths:
    def __init__(self, num: int, prior: float) -> None:
        self.prior = prior
        self.counts = np.zeros((2, num))  # [held, seen] by position

    def __call__(self, num: int) -> np.ndarray:
        """The chances of the first `num` positions; further ones than are counted are taken for the last."""
        found, chance = np.empty(num), self.prior
        for at, (held, seen) in enumerate(self.counts[:, :num].T.tolist()):
            chance = found[at] = (held + PRIOR * chance) / (seen + PRIOR)
        found[self.counts.shape[1] :] = chance
        return found

    def observe(self, num_held: np.ndarray, num_known: np.ndarray) -> None:
        """Of draft i the first num_known[i] positions have an outcome, and of these the first num_held[i] held."""
        self._count(self._num_beyond(num_held), self._num_beyond(num_known))

    def _num_beyond(self, ends: np.ndarray) -> np.ndarray:
        """How many of these end beyond each position."""
        num = self.counts.shape[1]
        return len(ends) - np.bincount(ends, minlength=num).cumsum()[:num]

    def estimate(self, chances: np.ndarray, num_tried: np.ndarray) -> None:
        """Drafts of which the first num_tried[i] positions were tried, and stood: those behind them count with the
        chances [N, K] that they were given instead of outcomes, as far as they would be reached. 0: not drafted, which
        of a first position means that it came to nothing."""
        position = np.arange(chances.shape[1])
        counts = (position >= num_tried[:, None]) & ((chances > 0) | (position == 0))
        survival = np.where(counts, chances, 1.0).cumprod(1)
        reached = np.ones_like(survival)
        reached[:, 1:] = survival[:, :-1]
        held, seen = np.zeros((2, self.counts.shape[1]))
        num = min(len(held), len(position))
        held[:num], seen[:num] = ((each * counts).sum(0)[:num] for each in (survival, reached))
        self._count(held, seen)

    def _count(self, held: np.ndarray, seen: np.ndarray) -> None:
        self.counts *= (1 - 1 / MEMORY) ** seen
        self.counts[0] += held
        self.counts[1] += seen

    def fade(self) -> None:
        self.counts *= FADE
