"""Reward workers as Ray actors. Each has a Rewarder of its own and scores whole groups.

A group is never split, because a reward function may compare its samples. If a worker dies, Ray restarts it and a free
worker scores the group again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from paceline.cluster.ray_calls import ACTOR_LOST, get_result, get_when_started, with_retries
from paceline.config import ClusterSection
from paceline.tasks.rewards import Rewarder, Sample, Score


class RewardActor:
    """`make` builds the rewarder in the first call, so that its errors are raised to the caller."""

    def __init__(self, make: Callable[[], Rewarder]) -> None:
        self._make = make
        self._rewarder: Rewarder | None = None

    def open(self) -> str | None:
        """Build the rewarder; return how it isolates programs on this machine."""
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
        self._sandboxes: dict[int, str | None] = {}  # by worker; workers may be on different machines
        self.num_parallel = len(actors)
        opened = [with_retries(actor.open).remote() for actor in actors]
        for i, reference in enumerate(opened):
            self._wait_until_open(i, reference)
            self._idle.put((i, actors[i]))

    @property
    def sandbox(self) -> str | None:
        return "; ".join(sorted({kind for kind in self._sandboxes.values() if kind is not None})) or None

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        while True:
            index, actor = self._idle.get()
            try:
                return get_result(actor.score.remote(samples))
            except ACTOR_LOST:
                self.num_restarts += 1
                self._note(f"reward worker {index} died; restarting it and scoring {len(samples)} samples again")
                self._wait_until_open(index, with_retries(actor.open).remote())
            finally:
                self._idle.put((index, actor))

    def close(self) -> None:
        """Nothing to do: the actors stay alive for the next learner."""

    def _wait_until_open(self, index: int, reference: Any) -> None:
        self._sandboxes[index] = get_when_started(reference, f"reward worker {index}", self._max_restarts)
