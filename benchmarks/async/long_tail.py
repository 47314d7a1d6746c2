"""An environment whose episodes have a long tail: the number of turns is log-normal. A turn ends at a stop token.

Every problem has a fixed list of numbers of turns, and its n-th episode has the n-th of them. So runs with other
settings have episodes of the same lengths.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import count

from paceline.chat.messages import Message
from paceline.tasks.task import Turn

STARTED: dict[int, count[int]] = {}  # by problem: counts its episodes


class LongTail:
    def __init__(self, number: int, median: float, sigma: float, max_turns: int) -> None:
        self.number = number
        episode = next(STARTED.setdefault(number, count()))
        turns = random.Random(f"{number} {episode}").lognormvariate(0.0, sigma) * median
        self.num_turns_left = max(1, min(max_turns, round(turns)))

    @staticmethod
    def problems(
        seed: int, median: float = 3.0, sigma: float = 1.0, max_turns: int = 60
    ) -> Iterator[dict[str, object]]:
        for number in count(seed * 1_000_000):
            yield {"number": number, "median": median, "sigma": sigma, "max_turns": max_turns}

    def reset(self) -> str:
        return f"problem {self.number}: "

    def step(self, message: Message) -> Turn:
        self.num_turns_left -= 1
        reward = sum("a" <= letter <= "m" for letter in message["content"]) / 100
        if not self.num_turns_left:
            return Turn(None, reward)
        return Turn([{"role": "user", "content": "go on"}], reward)
