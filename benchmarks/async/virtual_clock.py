"""A clock that counts engine steps, for a trainer whose engine and learner are too small to take realistic times.

An engine step takes one tick, an update of the learner a given number of ticks. All else takes none: while the trainer
does something else, the engine waits. So what happens depends on the producer alone, not on the machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any

from paceline.rl.continuous_producer import ContinuousProducer
from paceline.rl.trainer import Trainer

BUSY, TRAINING, WAITING = "busy", "training", "waiting"  # what the trainer does


class VirtualClock:
    """`rows[t]`: sequences that the engine ran in tick t; 0 if it had nothing to do. `waits`: per RL step, the ticks
    that the trainer waited for its batch. `ends`: when the RL steps ended."""

    def __init__(self, trainer: Trainer, update_ticks: int) -> None:
        self.rows: list[int] = []
        self.waits: list[int] = []
        self.ends: list[int] = []
        self.trainer, self.producer, self.update_ticks = trainer, trainer.producer, update_ticks
        self._changed = threading.Condition()
        self._state, self._step, self._until = BUSY, 0, 0
        self._num_idle_looks = 0  # of the producer's thread, since the training began
        self._wrap(self.producer, "get", self._get)
        self._wrap(trainer.learner, "update", self._update)
        self._wrap(trainer.engine, "step", self._engine_step)
        self._wrap(trainer.callback, "step", self._end_step)
        if isinstance(self.producer, ContinuousProducer):
            self._wrap(self.producer, "_step", self._look)

    @property
    def now(self) -> int:
        return len(self.rows)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        function = getattr(owner, name)
        setattr(owner, name, lambda *args, **options: around(function, *args, **options))

    def _set(self, state: str) -> None:
        with self._changed:
            self._state, self._num_idle_looks = state, 0
            self._changed.notify_all()

    # -- the trainer --

    def _get(self, get: Any, step: int) -> Any:
        self._step, started = step, self.now
        self._set(WAITING)
        batch = get(step)
        self._set(BUSY)
        self.waits.append(self.now - started)
        return batch

    def _update(self, update: Any, *args: Any) -> Any:
        report = update(*args)
        self._until = self.now + self.update_ticks
        self._set(TRAINING)
        with self._changed:
            while self.now < self._until:
                if self._engine_is_idle():
                    self.rows.append(0)
                else:
                    self._changed.wait(0.002)
        self._set(BUSY)
        return report

    def _end_step(self, function: Any, metrics: Any) -> None:
        function(metrics)
        self.ends.append(self.now)

    def _engine_is_idle(self) -> bool:
        producer = self.producer
        if producer._thread is None or not producer._thread.is_alive():
            return True
        if isinstance(producer, ContinuousProducer):
            return self._num_idle_looks >= 2  # the first may have begun before the newest weights were published
        return producer._idle and max(producer._published) < producer._next_step - producer.max_staleness

    # -- the producer's thread --

    def _look(self, function: Any, timer: Any) -> None:
        if not self.producer._started:
            self._num_idle_looks += 1
        function(timer)

    def _engine_step(self, step: Any) -> Any:
        self._wait_for_trainer()
        self._wait_for_environments()
        rows = min(len(self.trainer.collector._running), self.trainer.config.engine.max_num_seqs)
        finished = step()
        with self._changed:
            self.rows.append(rows)
            self._changed.notify_all()
        return finished

    def _wait_for_environments(self) -> None:
        """They take no time: wait until each has ended, or waits for a completion of the engine."""
        collector = self.trainer.collector
        while True:
            collector._read_inbox(wait_s=0.0)
            open_calls = [list(episode.policy._open) for episode in collector._agents]
            if all(calls and all(c.request.request_id in collector._running for c in calls) for calls in open_calls):
                return
            time.sleep(0.0005)

    def _wait_for_trainer(self) -> None:
        """Until time may pass: the trainer waits for a batch that can't be made yet, or trains."""
        producer = self.producer
        if isinstance(producer, ContinuousProducer):
            wait([future for each in producer._started.values() for future in each.collection.futures])
            producer._finish_groups()
        while not producer.stopping:
            if self._state == TRAINING and self.now < self._until:
                return
            if self._state == WAITING and not self._can_take():
                return
            with self._changed:
                self._changed.wait(0.002)

    def _can_take(self) -> bool:
        with self.producer._changed:
            if isinstance(self.producer, ContinuousProducer):
                return self.producer._take(self._step)
            return self._step in self.producer._pending
