"""The order of the training problems: a new shuffle every epoch, determined by the seed and the position."""

from __future__ import annotations

import numpy as np


class DataOrder:
    """`order[p]` is the problem at position p, counted from the start of the run. A checkpoint saves only p."""

    def __init__(self, num_problems: int, seed: int) -> None:
        self.num_problems, self.seed = num_problems, seed
        self._epoch, self._shuffled = -1, np.empty(0, np.int64)

    def epoch(self, position: int) -> int:
        return position // self.num_problems

    def __getitem__(self, position: int) -> int:
        epoch, index = divmod(position, self.num_problems)
        if epoch != self._epoch:
            self._epoch = epoch
            self._shuffled = np.random.default_rng((self.seed, epoch)).permutation(self.num_problems)
        return int(self._shuffled[index])
