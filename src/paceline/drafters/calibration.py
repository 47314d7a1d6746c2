"""How often drafts came true, by what was said of them: confidences that mean what they say.

Each of `num_bins` bins remembers its last few hundred outcomes, the older the fainter, and starts from a prior.
"""

from __future__ import annotations

import numpy as np

MEMORY = 256  # outcomes that a bin remembers, about
PRIOR = 8.0  # outcomes that the prior counts for


class Calibration:
    def __init__(self, prior: np.ndarray) -> None:
        """`prior`: what each bin's chance is taken for before anything is seen."""
        self.counts = np.stack([PRIOR * prior, np.full(len(prior), PRIOR)])  # [came true, seen] of each bin

    @property
    def chances(self) -> np.ndarray:
        return self.counts[0] / self.counts[1]

    def observe(self, bins: np.ndarray, num_right: int) -> None:
        """A draft whose positions fell into these bins, the first num_right of them right, the next, if any, wrong."""
        for j, i in enumerate(bins[: num_right + 1].tolist()):
            self.counts[:, i] *= 1 - 1 / MEMORY
            self.counts[:, i] += (j < num_right, 1)


def by_confidence(num_bins: int = 10) -> Calibration:
    """Bins of equal width over confidences; the prior is what they say."""
    return Calibration((np.arange(num_bins) + 0.5) / num_bins)


def bins_of(confidence: np.ndarray, num_bins: int = 10) -> np.ndarray:
    return np.minimum((confidence * num_bins).astype(np.int64), num_bins - 1)
