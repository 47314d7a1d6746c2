"""Reward workers as Ray actors. Each has a Rewarder of its own, and scores as many calls at once as that one can.

A call is never split between workers, because a reward function may compare its samples. If a worker dies, Ray restarts
it, and free workers score its calls again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from paceline.cluster.ray_calls import ACTOR_LOST, get_result, get_when_started, with_retries
from paceline.config import ClusterSection
from paceline.tasks.rewards import Rewarder, Sample, Score


class RewardActor:
    """`make` builds the rewarder in the first call, so that its errors are raised to the caller. Ray calls this from
    several threads."""

    def __init__(self, make: Callable[[], Rewarder]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._rewarder: Rewarder | None = None

    def open(self) -> tuple[str | None, bool]:
        """Build the rewarder; return its `sandbox`, on this machine, and `by_sample`."""
        with self._lock:
            self._rewarder = self._rewarder or self._make()
        return self._rewarder.sandbox, self._rewarder.by_sample

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        self.open()
        assert self._rewarder is not None
        return self._rewarder.score(samples)


class RayRewarder:
    def __init__(
        self, actors: Sequence[Any], calls_per_actor: int, section: ClusterSection, note: Callable[[str], None]
    ) -> None:
        self._max_restarts, self._note = section.max_restarts, note
        self._idle: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # a worker is in it for each call it can take
        self._lock = threading.Lock()  # held to restart a worker
        self._num_restarts = [0] * len(actors)
        self._sandboxes: dict[int, str | None] = {}  # by worker; workers may be on different machines
        self.num_parallel = len(actors) * calls_per_actor
        opened = [with_retries(actor.open).remote() for actor in actors]
        for i, reference in enumerate(opened):
            self._wait_until_open(i, reference)
        for _ in range(calls_per_actor):
            for i, actor in enumerate(actors):
                self._idle.put((i, actor))

    @property
    def sandbox(self) -> str | None:
        return "; ".join(sorted({kind for kind in self._sandboxes.values() if kind is not None})) or None

    @property
    def num_restarts(self) -> int:
        return sum(self._num_restarts)

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        while True:
            index, actor = self._idle.get()
            num_restarts = self._num_restarts[index]
            try:
                return get_result(actor.score.remote(samples))
            except ACTOR_LOST:
                with self._lock:
                    if num_restarts == self._num_restarts[index]:  # no other call has noticed
                        self._num_restarts[index] += 1
                        self._note(f"reward worker {index} died; restarting it and scoring its samples again")
                        self._wait_until_open(index, with_retries(actor.open).remote())
            finally:
                self._idle.put((index, actor))

    def close(self) -> None:
        """Nothing to do: the actors stay alive for the next learner."""

    def _wait_until_open(self, index: int, reference: Any) -> None:
        opened = get_when_started(reference, f"reward worker {index}", self._max_restarts)
        self._sandboxes[index], self.by_sample = opened
