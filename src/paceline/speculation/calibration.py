"""How often drafts came true, by what was said of them: confidences that mean what they say.

What is said (a probability, a position) falls into bins. Each bin starts from a prior and remembers its last few
hundred outcomes, the older the fainter. With every new policy the memory fades towards the prior, so that a bin that
came into disrepute is tried again.
"""

from __future__ import annotations

import numpy as np

MEMORY = 256  # outcomes that a bin remembers, about
PRIOR = 16.0  # outcomes that the prior counts for
FADE = 0.5  # what a new policy leaves of the rest


class Calibration:
    def __init__(self, edges: np.ndarray, prior: np.ndarray) -> None:
        """`prior`: what each bin's chance is taken for before anything is seen; one more than there are edges."""
        assert len(prior) == len(edges) + 1
        self.edges = edges
        self.start = np.stack([PRIOR * prior, np.full(len(prior), PRIOR)])  # [came true, seen] of each bin
        self.counts = self.start.copy()

    def __call__(self, said: np.ndarray) -> np.ndarray:
        """The chance of what was said, shape by shape."""
        return self.chances[self.bins(said)]

    def bins(self, said: np.ndarray) -> np.ndarray:
        """Those that it falls into, which never change."""
        return self.edges.searchsorted(said, "right")

    @property
    def chances(self) -> np.ndarray:
        """Of each bin."""
        return self.counts[0] / self.counts[1]

    def observe_many(self, said: np.ndarray, num_right: np.ndarray, num_known: np.ndarray) -> None:
        """Drafts of which this was said, position by position [B, K]: of row i the first num_known[i] have an outcome,
        and of these the first num_right[i] are right. Older outcomes fade by all that are new to their bin, these do
        not fade against each other."""
        if len(said):
            self.observe_bins(self.bins(said), num_right, num_known)

    def observe_bins(self, bins: np.ndarray, num_right: np.ndarray, num_known: np.ndarray) -> None:
        """The same, by the bins of what was said."""
        position, num_bins = np.arange(bins.shape[1], dtype=np.int32)[:, None], self.counts.shape[1]
        right, seen = (np.bincount(bins.T[position < num], minlength=num_bins) for num in (num_right, num_known))
        self.counts *= (1 - 1 / MEMORY) ** seen
        self.counts[0] += right
        self.counts[1] += seen

    def observe(self, said: np.ndarray, num_right: int) -> None:
        """A single draft: the first num_right are right, the next, if any, is wrong."""
        self.observe_many(said[None], np.array([num_right]), np.array([num_right + 1]))

    def fade(self) -> None:
        self.counts = self.start + (self.counts - self.start) * FADE


def of_probabilities() -> Calibration:
    """For a deterministic guess of which its own probability is said: the prior takes it at its word."""
    edges = np.linspace(0, 1, 11)[1:-1]
    return Calibration(edges, np.linspace(0.05, 0.95, 10))


def of_draws() -> Calibration:
    """For draws of which it is said how sure they are; the same, and finer where most of them are."""
    edges = np.array([0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98])
    return Calibration(edges, np.array([0.22, 0.35, 0.45, 0.55, 0.65, 0.75, 0.84, 0.91, 0.96, 0.99]))


def of_positions(num: int, prior: float) -> Calibration:
    """For drafts of which nothing is known but how deep they are: position j given those before."""
    return Calibration(np.arange(1, num), np.full(num, prior))
