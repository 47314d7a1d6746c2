"""The learner in a process of its own, as Ray runs it: the whole loop, with engines and rewards elsewhere.

Who looks on is in another process and may come and go. What there is to see waits here until it is asked for.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from paceline.rl.loop import Loop, Watcher

WAIT_S = 0.5  # how long `news` waits for some


@dataclass(frozen=True, slots=True)
class Crew:
    """Who works for the learner: Ray's handles of them."""

    engines: list[Any]
    rewards: list[Any]
    followers: list[Any]  # the learner's further ranks


# The run's folder, whether it goes on there, and whether this learner was restarted.
MakeLoop = Callable[[Crew, "Watcher", Path, bool, bool], "Loop"]


class Relay:
    """A Watcher whose news are fetched."""

    def __init__(self) -> None:
        self._news: list[tuple[Any, ...]] = []  # ("note", text) or ("step", metrics)
        self._progress: tuple[Any, ...] | None = None  # only the last one matters
        self._changed = threading.Condition()

    def progress(self, stage: str, done: int, total: int) -> None:
        with self._changed:
            self._progress = "progress", stage, done, total

    def step(self, metrics: Mapping[str, Any]) -> None:
        self._tell("step", dict(metrics))

    def note(self, text: str) -> None:
        self._tell("note", text)

    def _tell(self, *event: Any) -> None:
        with self._changed:
            self._news.append(event)
            self._changed.notify_all()

    def fetch(self, wait_s: float) -> list[tuple[Any, ...]]:
        """What has happened since the last time, in order."""
        with self._changed:
            self._changed.wait_for(lambda: self._news, wait_s)
            events, self._news = self._news, []
            if self._progress is not None:
                events.append(self._progress)
                self._progress = None
            return events


class LearnerActor:
    """`run` has a thread of its own; `news` and `stop` are answered beside it."""

    def __init__(self, make: MakeLoop) -> None:
        self._make = make
        self._relay = Relay()
        self._loop: Loop | None = None
        self._stopping = False

    def run(self, crew: Crew, folder: str, resume: bool, restarted: bool) -> dict[str, Any]:
        """To the last step, or until `stop`; returns the summary. Where one of its ranks is gone it dies too: a process
        can't meet the others twice."""
        try:
            self._loop = self._make(crew, self._relay, Path(folder), resume, restarted)
            with contextlib.closing(self._loop):
                if self._stopping:
                    self._loop.producer.stop()
                return self._loop.run()
        except ConnectionError:
            if crew.followers:
                os._exit(1)
            raise

    @ray.method(concurrency_group="beside")
    def news(self, wait_s: float = WAIT_S) -> list[tuple[Any, ...]]:
        return self._relay.fetch(wait_s)

    @ray.method(concurrency_group="beside")
    def stop(self) -> None:
        self._stopping = True
        if self._loop is not None:
            self._loop.producer.stop()
