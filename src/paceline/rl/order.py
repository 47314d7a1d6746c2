"""The order in which problems come: every epoch a new shuffle, known from the seed and the position alone."""

from __future__ import annotations

import numpy as np


class DataOrder:
    """Position p, counted from the start of the run, is problem `order[p]`. Nothing to save but p."""

    def __init__(self, num_problems: int, seed: int) -> None:
        self.num_problems, self.seed = num_problems, seed
        self._epoch, self._shuffled = -1, np.empty(0, np.int64)

    def epoch(self, position: int) -> int:
        return position // self.num_problems

    def __getitem__(self, position: int) -> int:
        epoch, at = divmod(position, self.num_problems)
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = np.random.default_rng((self.seed, epoch)).permutation(self.num_problems)
        return int(self._shuffled[at])
