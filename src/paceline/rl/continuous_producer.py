"""Generates groups all the time, while the learner trains. New weights reach the engine as soon as they are published,
also while requests run.

With max_staleness = s a step takes finished groups, the oldest first. It waits for a group that is not finished only if
later steps could not take it within the bound. So no group is dropped because it takes long, and long completions are
trained on as often as short ones.

Invariants:
  - A group starts with version v only if at most groups_per_step * s other groups would come before it after step v.
    Then it can be taken within the bound.
  - What a group yields does not depend on when it is taken; which step takes it does. Runs do not repeat bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.rl.collection import Collection
from paceline.rl.produce import Batch, Producer, ProducerState, Stopped
from paceline.rl.stage_timer import StageTimer
from paceline.types import Group, StepTrace

WAIT_S = 0.01  # between two looks at rewards, if nothing is generated


@dataclass(slots=True)
class _Started:
    """A group that is generated or scored. `version`: the engine's when it was submitted."""

    collection: Collection
    version: int


class ContinuousProducer(Producer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._started: dict[int, _Started] = {}  # by index of the group
        # Since the last batch:
        self._dropped: list[Group] = []
        self._num_stale = 0
        self._traces: list[StepTrace] = []
        self._timer = StageTimer()

    @property
    def _inflight_when_paused(self) -> str:
        return self.inflight

    def get(self, step: int) -> Batch:
        with self._changed:
            self._wait(lambda: self.stopping or self._error is not None or self._take(step))
            if step in self._pending and not self.stopping:
                return self._pending[step]
            raise self._error if self._error is not None else Stopped

    def state(self) -> ProducerState:
        """Groups that are started are generated again, and those that were dropped since the last batch: no step has
        recorded them yet."""
        with self._held(), self._changed:
            if self._error is None:
                self.speculation_state = self.engine.state_dict()
            batches = [self._pending[step] for step in sorted(self._pending)]
            cursor = self.cursor.put_back([*self._started, *(group.index for group in self._dropped)])
            return ProducerState(batches, cursor, list(self.surplus), self.speculation_state, [], self._traces)

    def load_state(self, state: ProducerState) -> None:
        super().load_state(state)
        self._traces = state.traces

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _generate(self) -> None:
        try:
            while self._next_step < self.config.train.num_steps:
                self._wait_while_paused()
                timer = StageTimer()
                self._update_to_newest(timer)
                self._start_groups(timer)
                self._step(timer)
                traces = self.engine.drain_trace()
                with self._changed:  # together: a batch has the times of its traces
                    self._timer.add(timer)
                    self._traces += traces
                self._finish_groups()
        finally:
            for started in self._started.values():
                self.collector.abort(started.collection)

    def _wait_while_paused(self) -> None:
        with self._changed:
            if self._pausing:
                self._idle = True
                self._changed.notify_all()
                self._wait(lambda: self.stopping or not self._pausing)
                self._idle = False
        if self.stopping:
            raise Stopped

    def _update_to_newest(self, timer: StageTimer) -> None:
        with self._changed:
            self._wait(lambda: self.stopping or bool(self._published))
            newest = max(self._published)
            for version in [v for v in self._published if v < newest]:
                del self._published[version]
        self._update_engine(newest, timer, self.inflight)

    def _start_groups(self, timer: StageTimer) -> None:
        version, train = self._engine_version, self.config.train
        with self._changed:
            num_batches = min(version + self.max_staleness + 1, train.num_steps) - self._next_step
            num = self.groups_per_step * num_batches - len(self._started) - len(self.surplus)
        for _ in range(num):
            [index], cursor = self.cursor.take(1)
            collection = self.collector.begin(
                f"group {index + 1}", self._problems([index]), self.config.algorithm.num_generations, train.seed,
                timer=timer,
            )  # fmt: skip
            with self._changed:
                self.cursor, self._started[index] = cursor, _Started(collection, version)

    def _step(self, timer: StageTimer) -> None:
        collections = [started.collection for started in self._started.values()]
        if all(collection.is_generated for collection in collections):
            with timer.stage("reward" if collections else "idle"), self._changed:
                self._changed.wait(WAIT_S)
            return
        with timer.stage("generation"):
            self.collector.step()
        num_samples = self.config.algorithm.num_generations
        done = len(self.surplus) * num_samples + sum(collection.num_generated for collection in collections)
        total = self.groups_per_step * num_samples
        self.on_progress(min(done, total), total)

    def _finish_groups(self) -> None:
        for index, started in list(self._started.items()):
            if started.collection.rewards(0) is None:
                continue
            [group] = self.collector.collected(started.collection).groups
            with self._changed:
                del self._started[index]
                (self.surplus if self._is_trained_on(group) else self._dropped).append(group)
                self._changed.notify_all()

    # -- making a batch ---------------------------------------------------------------------------------------------

    def _take(self, step: int) -> bool:
        """Make the batch of this step if that is possible now. Call it with the lock held."""
        if step in self._pending:
            return True
        usable = [group for group in self.surplus if step - group.oldest_version <= self.max_staleness]
        self._num_stale += len(self.surplus) - len(usable)
        self.surplus = sorted(usable, key=lambda group: (group.oldest_version, group.index))
        groups, left = self.surplus[: self.groups_per_step], self.surplus[self.groups_per_step :]
        most_dropped = self.config.algorithm.max_sampling_rounds * self.groups_per_step
        if len(groups) < self.groups_per_step and len(self._dropped) < most_dropped:
            return False
        versions = [group.oldest_version for group in left] + [started.version for started in self._started.values()]
        if self._started and not self._can_wait(step, versions):
            return False
        self._check_failures(step, [*groups, *self._dropped])
        groups.sort(key=lambda group: group.index)
        self._pending[step] = Batch(
            step, groups, self._timer, self._traces, self._dropped, self._num_stale, position=self.cursor.position
        )
        self._timer, self._traces, self._dropped, self._num_stale, self.surplus = StageTimer(), [], [], 0, left
        self._next_step = step + 1
        self._changed.notify_all()
        return True

    def _can_wait(self, step: int, versions: Iterable[int]) -> bool:
        """Whether the steps after this one can take groups of these versions within the bound."""
        return all(
            step + 1 + i // self.groups_per_step <= version + self.max_staleness
            for i, version in enumerate(sorted(versions))
        )
