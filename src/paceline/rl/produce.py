"""Produces the batch of rollouts for each step, at most `max_staleness` policy versions old.

Step n trains version n of the policy and makes version n + 1. With max_staleness = s the rollouts of step n begin with
version max(0, n - s). At s = 0 this is the version being trained: generation and training alternate. At s > 0
generation runs ahead in a thread. With `inflight = "drain"` the engine gets new weights between two batches, so runs
are reproducible; with `keep` and `recompute` it gets them as soon as they are published, so rollouts are less stale.

Invariants:
  - Batches are in the order of their step, groups in the order of their index.
  - A group whose oldest token is more than s versions older than the step is dropped and counted.
  - A batch stays pending until the learner has trained on it (`release`), so an interrupt never loses one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from paceline.config import Config
from paceline.engine.interface import SpeculationState
from paceline.rl.algorithms import Algorithm
from paceline.rl.collect import Collected, Collector
from paceline.rl.order import DataOrder
from paceline.rl.stage_timer import StageTimer
from paceline.tasks.task import Task
from paceline.types import Group, Receipt, StepTrace

Weights = Iterable[tuple[str, Tensor]]


class Stopped(Exception):
    """`stop` was called; the batch being generated is discarded."""


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
    """The state after the last finished batch. It has nothing of the batch being generated: a resumed run generates
    that batch again, from the same state and with the same tokens."""

    batches: list[Batch]  # pending ones, in order
    position: int  # in the data
    surplus: list[Group]
    speculation_state: SpeculationState
    published: list[PublishedWeights]  # older versions that future batches begin with, oldest first


class Producer:
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
        self.order = DataOrder(len(task.train), config.train.seed)
        # These five change together when a batch is finished.
        self.position = 0
        self.surplus: list[Group] = []  # more groups than a step needs; later steps may use them
        self.speculation_state: SpeculationState = self.engine.state_dict()  # includes evaluations after the batch
        self._next_step = 0
        self._pending: dict[int, Batch] = {}  # finished batches by step, until `release`
        self.stopping = False
        self._published: dict[int, PublishedWeights] = {}
        self._engine_version = self._head_version = -1
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._idle, self._pausing = True, False

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
            self._thread = threading.Thread(target=self._run, args=(self._next_step,), daemon=True, name="rollouts")
            self._thread.start()

    def publish(self, published: PublishedWeights) -> None:
        """Make a new version available. With max_staleness = 0 its weights are read before the next batch is
        generated; otherwise they must be a copy."""
        with self._changed:
            self._published[published.version] = published
            self._changed.notify_all()

    def get(self, step: int) -> Batch:
        """Wait for the batch of this step. It stays pending until `release`."""
        if not self.max_staleness and step not in self._pending:
            try:
                self._produce(step)
            finally:
                self._idle = True
        with self._changed:
            self._wait(lambda: self.stopping or step in self._pending or self._error is not None)
            if self.stopping and self.max_staleness:
                raise Stopped
            if step in self._pending:
                return self._pending[step]
            assert self._error is not None
            raise self._error

    def release(self, step: int) -> None:
        """The learner has trained on the batch of this step."""
        with self._changed:
            del self._pending[step]

    def state(self) -> ProducerState:
        """For a checkpoint. Call it between two updates of the learner."""
        with self._changed:
            batches = [self._pending[step] for step in sorted(self._pending)]
            published: list[PublishedWeights] = []
            if self.inflight == "drain":  # otherwise every batch begins with the newest version
                first, newest = self._next_step - self.max_staleness, max(self._published, default=0)
                published = [self._published[v] for v in sorted(self._published) if first <= v < newest]
            return ProducerState(batches, self.position, self.surplus, self.speculation_state, published)

    def load_state(self, state: ProducerState) -> None:
        """Call it before `start`."""
        self.position, self.surplus, self.speculation_state = state.position, state.surplus, state.speculation_state
        self._pending = {batch.step: batch for batch in state.batches}
        for published in state.published:
            self.publish(published)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pause generation between two batches, with the newest weights in the engine."""
        with self._changed:
            self._pausing = True
            self._wait(lambda: self._idle or self._error is not None)
        try:
            self._update_engine(max(self._published), StageTimer(), "recompute")
            yield
            if self._error is None:  # otherwise the engine has seen part of a batch that will be generated again
                self.speculation_state = self.engine.state_dict()
        finally:
            with self._changed:
                self._pausing = False
                self._changed.notify_all()

    def stop(self) -> None:
        """Discard the batch being generated. Safe to call from a signal handler."""
        self.stopping = True

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            with self._changed:
                self._changed.notify_all()
            self._thread.join()

    # -- generation -------------------------------------------------------------------------------------------------

    def _run(self, step: int) -> None:
        error: BaseException | None = None
        try:
            self.in_thread()
            for n in range(step, self.config.train.num_steps):
                self._produce(n)
        except BaseException as raised:  # `get` raises it
            error = raised
        with self._changed:
            self._error, self._idle = error, True
            self._changed.notify_all()

    def _produce(self, step: int) -> Batch:
        batch = Batch(step, [], StageTimer())
        version = self._wait_for_version(step)
        if not self._update_engine(version, batch.timer, "recompute"):  # no request is running
            # New weights clear the prefix cache. Without new weights it is cleared here: a resumed run begins the batch
            # with an empty cache, and the counts of computed tokens must be the same.
            self.engine.reset_prefix_cache()
        batch.groups = [group for group in self.surplus if step - group.oldest_version <= self.max_staleness]
        batch.num_stale = len(self.surplus) - len(batch.groups)
        batch.position = self.position
        for _ in range(self.config.algorithm.max_sampling_rounds):
            missing = self.groups_per_step - len(batch.groups)
            if missing <= 0:
                break
            # Whole rounds: the number of requested groups does not depend on which samples finish first.
            collected = self._collect(batch, self.groups_per_step if self.max_staleness else missing)
            batch.rounds.append(collected)
            batch.traces += self.engine.drain_trace()
            self._check_failures(step, [group for each in batch.rounds for group in each.groups])
            for group in collected.groups:
                useful = len(group.scored) > 1 and self.algorithm.keeps([r.reward for r in group.scored])
                (batch.groups if useful else batch.dropped).append(group)
        batch.groups, surplus = batch.groups[: self.groups_per_step], batch.groups[self.groups_per_step :]
        speculation_state = self.engine.state_dict()
        with self._changed:  # only a finished batch changes the state: a discarded one is generated again
            self.position, self.surplus, self.speculation_state = batch.position, surplus, speculation_state
            self._next_step, self._pending[step] = step + 1, batch
            self._changed.notify_all()
        return batch

    def _collect(self, batch: Batch, num_groups: int) -> Collected:
        positions = range(batch.position, batch.position + num_groups)
        problems = [(position, self.task.train[self.order[position]]) for position in positions]
        batch.position += num_groups
        return self.collector.collect(
            f"step {batch.step + 1}",
            problems,
            self.config.algorithm.num_generations,
            self.config.train.seed,
            timer=batch.timer,
            on_progress=lambda done, total: self._before_engine_step(batch, done, total),
        )

    def _before_engine_step(self, batch: Batch, done: int, total: int) -> None:
        """Check for `stop`, and for new weights."""
        if self.stopping:
            raise Stopped
        if self.max_staleness and self.inflight != "drain":
            with self._changed:
                newest = max(self._published)
            self._update_engine(newest, batch.timer, self.inflight)
        self.on_progress(done, total)

    def _wait_for_version(self, step: int) -> int:
        """The version that the rollouts of this step begin with."""
        oldest = max(0, step - self.max_staleness)
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._wait(lambda: self.stopping or (max(self._published, default=-1) >= oldest and not self._pausing))
            if self.stopping:
                raise Stopped
            self._idle = False
            for version in [v for v in self._published if v < oldest]:  # no longer needed
                del self._published[version]
            return max(self._published) if self.inflight != "drain" else min(self._published)

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
        failures = [r.failure for group in groups for r in group.rollouts if r.failure is not None]
        total = sum(len(group.rollouts) for group in groups)
        max_failures = self.config.reward.max_failures
        if len(failures) > max_failures * total:
            raise ValueError(
                f"step {step + 1}: {len(failures)} of {total} samples could not be scored, more than "
                f"reward.max_failures = {max_failures:g} of them; the first: {failures[0]}. Finished steps are "
                "kept: `paceline train --resume RUN` continues"
            )


def _check_receipt(what: str, sent: PublishedWeights, receipt: Receipt) -> None:
    if receipt.checksum != sent.checksum:
        raise ValueError(
            f"{what} of version {sent.version}: the engine has checksum {receipt.checksum[:12]}, the learner sent "
            f"{sent.checksum[:12]}; the transfer failed, so training stops"
        )
