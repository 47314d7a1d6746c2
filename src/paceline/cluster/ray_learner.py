"""The learner's ranks as Ray actors. Rank 0 runs the Trainer; engines and reward workers are other actors.

The supervisor, in another process, polls for the Trainer's events. They are buffered here. The other ranks run for as
long as rank 0 does. If any rank dies, all ranks restart from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from paceline.cluster.ray_engine import RayEngine
    from paceline.cluster.ray_rewarder import RayRewarder
    from paceline.rl.callback import ProgressCallback
    from paceline.rl.trainer import Trainer

POLL_WAIT_S = 0.5  # how long `poll_events` waits for an event


@dataclass(frozen=True, slots=True)
class Workers:
    """Ray's handles of the actors that the learner uses."""

    engines: list[Any]
    reward_workers: list[Any]
    other_ranks: list[Any]  # of the learner, from rank 1


# The last arguments: the run's folder, whether to resume it, and whether this learner was restarted.
MakeTrainer = Callable[[Workers, "ProgressCallback", Path, bool, bool], "Trainer"]
RunRank = Callable[[int, int, str], None]  # rank, world size, and rank 0's address: HOST:PORT


class EventBuffer:
    """A ProgressCallback that keeps events until they are fetched."""

    def __init__(self) -> None:
        self._events: list[tuple[Any, ...]] = []  # ("note", text) or ("step", metrics)
        self._progress: tuple[Any, ...] | None = None  # only the latest is kept
        self._changed = threading.Condition()

    def progress(self, stage: str, done: int, total: int) -> None:
        with self._changed:
            self._progress = "progress", stage, done, total

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._add("step", dict(metrics))

    def note(self, text: str) -> None:
        self._add("note", text)

    def _add(self, *event: Any) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def fetch(self, wait_s: float) -> list[tuple[Any, ...]]:
        """The events since the last call, in order."""
        with self._changed:
            self._changed.wait_for(lambda: self._events, wait_s)
            events, self._events = self._events, []
            if self._progress is not None:
                events.append(self._progress)
                self._progress = None
            return events


class LearnerActor:
    """`run` has a thread of its own. `poll_events` and `stop` run in concurrency group "control"."""

    def __init__(self, make: MakeTrainer) -> None:
        self._make = make
        self._events = EventBuffer()
        self._trainer: Trainer | None = None
        self._stopping = False

    def run(self, workers: Workers, folder: str, resume: bool, restarted: bool) -> dict[str, Any]:
        """Run to the last step, or until `stop`; return the summary. If another rank dies, this process exits too: a
        process can join the ranks' process group only once."""
        try:
            self._trainer = self._make(workers, self._events, Path(folder), resume, restarted)
            with contextlib.closing(self._trainer):
                if self._stopping:
                    self._trainer.producer.stop()
                return self._trainer.run()
        except ConnectionError:
            if workers.other_ranks:
                os._exit(1)
            raise

    @ray.method(concurrency_group="control")
    def poll_events(self, wait_s: float = POLL_WAIT_S) -> list[tuple[Any, ...]]:
        return self._events.fetch(wait_s)

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        self._stopping = True
        if self._trainer is not None:
            self._trainer.producer.stop()


class LearnerRankActor:
    """A rank from 1 up."""

    def __init__(self, run_rank: RunRank) -> None:
        self._run_rank = run_rank

    def run(self, rank: int, world_size: int, address: str) -> None:
        self._run_rank(rank, world_size, address)


def start_ranks(other_ranks: Sequence[Any]) -> str:
    """Called by rank 0: choose its address, start the other ranks with it, and return it."""
    host = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        free.bind((host, 0))
        address = f"{host}:{free.getsockname()[1]}"
    for rank, actor in enumerate(other_ranks, 1):
        actor.run.remote(rank, 1 + len(other_ranks), address)
    return address


class RestartCounter:
    """Each call returns the restarted processes since the last one. The first call includes the learner's own
    restart."""

    def __init__(self, engine: RayEngine, rewarder: RayRewarder, learner_restarted: bool) -> None:
        self._engine, self._rewarder, self._learner = engine, rewarder, int(learner_restarted)
        self._reported: Counter[str] = Counter()

    def __call__(self) -> dict[str, int]:
        counts = {
            "engine_restarts": self._engine.num_restarts,
            "reward_restarts": self._rewarder.num_restarts,
            "learner_restarts": self._learner,
        }
        before, self._reported = self._reported, Counter(counts)
        return {name: count - before[name] for name, count in counts.items()}
