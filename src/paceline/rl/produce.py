"""Producers: what generates the rollouts of each step, at most `max_staleness` policy versions old.

Step n trains version n of the policy and makes version n + 1. With max_staleness = s the rollouts of step n begin with
version n - s or newer. At s = 0 this is the version being trained: generation and training alternate. At s > 0
generation runs ahead in a thread. There are two producers: `BatchProducer` generates one batch after another, so runs
are reproducible; `ContinuousProducer` starts groups all the time, so that the engine never waits for the last samples
of a batch.

Invariants:
  - Batches are in the order of their step, groups in the order of their index.
  - A group whose oldest token is more than s versions older than the step is dropped and counted.
  - A batch stays pending until the learner has trained on it (`release`), so an interrupt never loses one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from paceline.config import Config
from paceline.engine.interface import SpeculationState
from paceline.rl.algorithms import Algorithm
from paceline.rl.collect import Collector
from paceline.rl.collection import Collected
from paceline.rl.order import Cursor, training_order
from paceline.rl.stage_timer import StageTimer
from paceline.tasks.task import Problem, Task
from paceline.types import Group, Receipt, Rollout, StepTrace, first_branches

Weights = Iterable[tuple[str, Tensor]]


class Stopped(Exception):
    """`stop` was called; what is being generated is discarded."""


@dataclass(slots=True)
class Batch:
    """The rollouts of one step."""

    step: int
    groups: list[Group]
    timer: StageTimer
    traces: list[StepTrace] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)  # by dynamic sampling, or with fewer than two rewards
    num_stale: int = 0
    rounds: list[Collected] = field(default_factory=list)
    position: int = 0  # in the data, after this batch

    @property
    def all_groups(self) -> list[Group]:
        """Trained on or dropped, in the order of their index."""
        return sorted([*self.groups, *self.dropped], key=lambda group: group.index)


@dataclass(slots=True)
class PublishedWeights:
    version: int
    weights: Callable[[], Weights]
    checksum: str
    head: PublishedWeights | None = None  # the newest weights of a head that is trained online


@dataclass(slots=True)
class ProducerState:
    """What a resumed run continues from. It has nothing of the rollouts being generated: a resumed run generates them
    again."""

    batches: list[Batch]  # pending ones, in order
    cursor: Cursor
    surplus: list[Group]
    speculation_state: SpeculationState
    published: list[PublishedWeights]  # older versions that future batches begin with, oldest first
    traces: list[StepTrace] = field(default_factory=list)  # of the engine, in no batch yet


class Producer(ABC):
    def __init__(
        self,
        collector: Collector,
        task: Task,
        algorithm: Algorithm,
        config: Config,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        in_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.collector, self.task, self.algorithm = collector, task, algorithm
        self.engine = collector.engine
        self.config, self.groups_per_step = config, config.train.groups_per_step
        self.max_staleness, self.inflight = config.train.max_staleness, config.train.inflight
        self.on_progress, self.in_thread = on_progress, in_thread
        self.order = training_order(task.train, config)
        self.cursor = Cursor()
        self.surplus: list[Group] = []  # finished groups that are in no batch yet; later steps may use them
        self.speculation_state: SpeculationState = self.engine.state_dict()
        self.stopping = False
        self._next_step = 0  # after the last batch
        self._pending: dict[int, Batch] = {}  # finished batches by step, until `release`
        self._published: dict[int, PublishedWeights] = {}
        self._engine_version = self._head_version = -1
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._idle, self._pausing = True, False  # whether the thread waits; whether it must

    # -- called by the trainer --------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Start with the batch of this step, or after the pending ones that `load_state` brought."""
        if self._pending and min(self._pending) != step:
            raise ValueError(
                f"the checkpoint has the batch of step {min(self._pending) + 1}, but not that of step {step + 1}; "
                "resume from an earlier checkpoint by moving the newest folder out of the run's checkpoints, or start "
                "a new run"
            )
        self._next_step = max(self._pending, default=step - 1) + 1
        if self.max_staleness:
            self._idle = False
            self._thread = threading.Thread(target=self._run, daemon=True, name="rollouts")
            self._thread.start()

    def publish(self, published: PublishedWeights) -> None:
        """Make a new version available. With max_staleness = 0 its weights are read before the next batch is
        generated; otherwise they must be a copy."""
        with self._changed:
            self._published[published.version] = published
            self._changed.notify_all()

    @abstractmethod
    def get(self, step: int) -> Batch:
        """Wait for the batch of this step. It stays pending until `release`."""

    def release(self, step: int) -> None:
        """The learner has trained on the batch of this step."""
        with self._changed:
            del self._pending[step]

    @abstractmethod
    def state(self) -> ProducerState:
        """For a checkpoint. Call it between two updates of the learner."""

    def load_state(self, state: ProducerState) -> None:
        """Call it before `start`."""
        self.cursor, self.surplus, self.speculation_state = state.cursor, state.surplus, state.speculation_state
        self._pending = {batch.step: batch for batch in state.batches}
        for published in state.published:
            self.publish(published)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause generation, with the newest weights in the engine."""
        with self._held():
            with self._changed:
                newest = max(self._published)
            self._update_engine(newest, StageTimer(), self._inflight_when_paused)
            yield
            if self._error is None:  # otherwise the engine has seen rollouts that will be generated again
                self.speculation_state = self.engine.state_dict()

    @property
    @abstractmethod
    def _inflight_when_paused(self) -> str:
        """How requests that may run in a pause get new weights."""

    @contextmanager
    def _held(self) -> Iterator[None]:
        """While the thread waits."""
        with self._changed:
            self._pausing = True
            self._wait(lambda: self._idle or self._error is not None)
        try:
            yield
        finally:
            with self._changed:
                self._pausing = False
                self._changed.notify_all()

    def stop(self) -> None:
        """Discard what is being generated. Safe to call from a signal handler."""
        self.stopping = True

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            with self._changed:
                self._changed.notify_all()
            self._thread.join()

    # -- generation -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _generate(self) -> None:
        """In the thread: generate batches to the last step, or raise `Stopped`."""

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self.in_thread()
            self._generate()
        except BaseException as raised:  # `get` raises it
            error = raised
        with self._changed:
            self._error, self._idle = error, True
            self._changed.notify_all()

    def _problems(self, indices: Sequence[int]) -> list[tuple[int, Problem]]:
        return [(index, self.task.train[self.order[index]]) for index in indices]

    def _is_useful(self, rewards: Sequence[float]) -> bool:
        return len(rewards) > 1 and self.algorithm.keeps(rewards)

    def _is_trained_on(self, group: Group) -> bool:
        return group.has_tokens and self._is_useful(group.rewards)

    def _wait(self, predicate: Callable[[], bool]) -> None:
        """Call it with the lock held. It polls, because a signal handler can't notify the condition."""
        while not self._changed.wait_for(predicate, timeout=0.2):
            pass

    def _update_engine(self, version: int, timer: StageTimer, inflight: str) -> bool:
        """Send this version to the engine; False if the engine already has it."""
        if version == self._engine_version:
            return False
        with timer.stage("sync"):
            published = self._published[version]
            receipt = self.engine.update_weights(published.weights(), version, inflight)
            _check_receipt("weights", published, receipt)
            self._engine_version = version
            head = published.head
            if head is not None and head.version != self._head_version:
                receipt = self.engine.update_drafter(head.weights(), head.version)
                _check_receipt("the drafter's weights", head, receipt)
                self._head_version = head.version
        return True

    def _check_failures(self, step: int, groups: list[Group]) -> None:
        for settings in self.config.tasks:
            rollouts = [r for group in groups if group.task == settings.label for r in group.rollouts]
            check_failures(step, rollouts, settings.reward.max_failures, settings.reward_key)


def check_failures(step: int, rollouts: Sequence[Rollout], max_failures: float, key: str) -> None:
    """Stop if too many samples could not be scored. Samples that on_failure gave 0 do not count: bad answers may cause
    many. But if every sample failed, the reward itself is broken, and 0 for all would hide that. `rollouts`: of whole
    samples. `key`: of the reward's settings."""
    rollouts = first_branches(rollouts)
    failures = [r.failure for r in rollouts if r.failure is not None]
    num_excluded = sum(not r.is_scored for r in rollouts)
    kept = "Finished steps are kept: `paceline train --resume RUN` continues"
    if num_excluded > max_failures * len(rollouts):
        first = next(r.failure for r in rollouts if not r.is_scored)
        raise ValueError(
            f"step {step + 1}: {num_excluded} of {len(rollouts)} samples could not be scored, more than "
            f"{key}.max_failures = {max_failures:g} of them; the first: {first}. {kept}"
        )
    if len(failures) == len(rollouts) > 0 and max_failures < 1:
        raise ValueError(
            f"step {step + 1}: rewards failed for all {len(rollouts)} samples, so the cause is hardly the answers; "
            f"the first: {failures[0]}. Correct the reward function, or raise {key}.timeout_s; with "
            f"{key}.max_failures = 1 the run goes on. {kept}"
        )


def _check_receipt(what: str, sent: PublishedWeights, receipt: Receipt) -> None:
    if receipt.checksum != sent.checksum:
        raise ValueError(
            f"{what} of version {sent.version}: the engine has checksum {receipt.checksum[:12]}, the learner sent "
            f"{sent.checksum[:12]}; the transfer failed, so training stops"
        )
