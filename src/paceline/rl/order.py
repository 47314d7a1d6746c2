"""The order of the training problems: a new shuffle every epoch, determined by the seed and the position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Cursor:
    """Which groups come next: those that were put back, then all from `position` on. A group's index is its position in
    the data."""

    position: int = 0
    put_back_indices: tuple[int, ...] = ()  # ascending, below `position`

    def take(self, num: int) -> tuple[list[int], Cursor]:
        """The next groups, and the cursor after them."""
        again, num_new = self.put_back_indices[:num], max(0, num - len(self.put_back_indices))
        new = range(self.position, self.position + num_new)
        return [*again, *new], Cursor(self.position + num_new, self.put_back_indices[num:])

    def put_back(self, indices: Iterable[int]) -> Cursor:
        return Cursor(self.position, tuple(sorted({*self.put_back_indices, *indices})))


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
