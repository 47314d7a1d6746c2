"""Rewards in processes of Ray's: every worker has a Rewarder of its own, and scores whole groups.

A group is never divided, since a reward function may compare its samples. A worker that dies is restarted, and its
group scored again, by whoever is free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from paceline.cluster.ray_calls import LOST, answer, answer_at_last, patient
from paceline.config import ClusterSection
from paceline.tasks.rewards import Judge, Sample, Score


class RewardActor:
    """`make` builds the rewarder when it is first needed, so that what is wrong with it is told to who asks."""

    def __init__(self, make: Callable[[], Judge]) -> None:
        self._make = make
        self._rewarder: Judge | None = None

    def open(self) -> str | None:
        """How programs are isolated where this worker runs."""
        self._rewarder = self._rewarder or self._make()
        return self._rewarder.sandbox

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        self.open()
        assert self._rewarder is not None
        return self._rewarder.score(samples)


class RayRewarder:
    def __init__(self, actors: Sequence[Any], section: ClusterSection, note: Callable[[str], None]) -> None:
        self.num_restarts = 0
        self._max_restarts, self._note = section.max_restarts, note
        self._idle: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._sandboxes: dict[int, str | None] = {}  # by worker, which may be on different machines
        self.num_parallel = len(actors)
        opened = [patient(actor.open).remote() for actor in actors]
        for i, reference in enumerate(opened):
            self._wait(i, reference)
            self._idle.put((i, actors[i]))

    @property
    def sandbox(self) -> str | None:
        return "; ".join(sorted({kind for kind in self._sandboxes.values() if kind is not None})) or None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        while True:
            number, actor = self._idle.get()
            try:
                return answer(actor.score.remote(samples))
            except LOST:
                self.num_restarts += 1
                self._note(f"reward worker {number} died; it starts again, with {len(samples)} samples to score anew")
                self._wait(number, patient(actor.open).remote())
            finally:
                self._idle.put((number, actor))

    def close(self) -> None:
        """The workers stay, for the next learner."""

    def _wait(self, number: int, reference: Any) -> None:
        self._sandboxes[number] = answer_at_last(reference, f"reward worker {number}", self._max_restarts)
