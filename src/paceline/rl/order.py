"""The order of the training problems, determined by the seed and the position: a new shuffle every epoch. With several
tasks, which of them is next, too."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from paceline.config import Config
from paceline.tasks.task import Problem
from paceline.types import noise_key


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


class Shares:
    """`shares[p]` is (the index of the task at position p, how many positions before p have this task).

    The task whose next turn is due first comes next, of those that have had less than their share. So after any number
    n of positions, a task with share w has had n * w of them, rounded up or down (Balinski and Young's quota method).
    """

    def __init__(self, weights: Sequence[float]) -> None:
        exact = [Fraction(str(weight)) for weight in weights]  # 0.7 is 7/10, not the nearest binary fraction
        unit = math.lcm(*(weight.denominator for weight in exact))
        self.weights = [int(weight * unit) for weight in exact]
        self._interval = [math.lcm(*self.weights) // weight for weight in self.weights]  # between two turns of a task
        self._turns: list[tuple[int, int]] = []
        self._counts = [0] * len(weights)
        self._lock = threading.Lock()  # trainer and producer may read positions at the same time

    def __getitem__(self, position: int) -> tuple[int, int]:
        with self._lock:
            while len(self._turns) <= position:
                num, total = len(self._turns) + 1, sum(self.weights)
                below = [j for j, weight in enumerate(self.weights) if self._counts[j] * total < num * weight]
                task = min(below, key=lambda j: (self._counts[j] + 1) * self._interval[j])
                self._turns.append((task, self._counts[task]))
                self._counts[task] += 1
            return self._turns[position]

    def counts(self, num: int) -> list[int]:
        """How many of the first `num` positions each task has."""
        tasks = [self[position][0] for position in range(num)]
        return [tasks.count(j) for j in range(len(self.weights))]


class MixedOrder:
    """As DataOrder, for the problems of several tasks. Each task has its own shuffles, which do not depend on the other
    tasks."""

    def __init__(self, problems: Sequence[Problem], weights: Mapping[str, float], seed: int) -> None:
        """`weights`: by label."""
        self._labels, self._shares = list(weights), Shares(list(weights.values()))
        self._indices = [[i for i, p in enumerate(problems) if p.task == label] for label in weights]
        self._orders = [
            DataOrder(len(indices), noise_key(seed, "order", label))
            for label, indices in zip(weights, self._indices, strict=True)
        ]

    def epoch(self, position: int) -> int:
        """Of the task that has made the fewest."""
        return min(self.epochs(position).values())

    def epochs(self, position: int) -> dict[str, int]:
        """By label: of the task's last problem up to this position."""
        found: dict[int, int] = {}
        while position >= 0 and len(found) < len(self._labels):
            task, turn = self._shares[position]
            found.setdefault(task, self._orders[task].epoch(turn))
            position -= 1
        return {label: found.get(task, 0) for task, label in enumerate(self._labels)}

    def __getitem__(self, position: int) -> int:
        task, turn = self._shares[position]
        return self._indices[task][self._orders[task][turn]]


def training_order(problems: Sequence[Problem], config: Config) -> DataOrder | MixedOrder:
    """The order of a run's training problems."""
    if weights := config.task_weights:
        return MixedOrder(problems, weights, config.train.seed)
    return DataOrder(len(problems), config.train.seed)
