"""Rollouts for step after step, never older than `max_staleness` versions.

Step n is trained by the weights of version n and makes version n + 1. With max_staleness = s its rollouts begin under
version max(0, n - s): at s = 0 that is the version being trained, and generation and training take turns; at s > 0
generation runs ahead in a thread. New weights come in at a defined point, between two batches (`drain`), so that runs
repeat; or as soon as there are any (`keep`, `recompute`), so that rollouts are fresher.

Always: batches come in the order of their step, groups in the order of their index; a group whose oldest token is more
than s versions behind the step that would train on it is dropped and counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from paceline.engine.interface import Learned
from paceline.rl.algorithms import Algorithm
from paceline.rl.collect import Collected, Collector
from paceline.rl.order import DataOrder
from paceline.rl.stopwatch import Stopwatch
from paceline.tasks.task import Task
from paceline.types import Group, Receipt, StepTrace

Weights = Iterable[tuple[str, Tensor]]


class Stopped(Exception):
    """The run is to end; what was being generated is given up."""


@dataclass(slots=True)
class Batch:
    """What one step trains on."""

    step: int
    groups: list[Group]
    watch: Stopwatch
    traces: list[StepTrace] = field(default_factory=list)
    dropped: list[Group] = field(default_factory=list)  # nothing to learn from: all rewards alike, or none
    num_stale: int = 0
    rounds: list[Collected] = field(default_factory=list)
    position: int = 0  # of the data, after it


@dataclass(slots=True)
class Published:
    version: int
    weights: Callable[[], Weights]
    checksum: str
    head: Published | None = None  # the drafter's, where it follows the policy: the newest, changed or not


@dataclass(slots=True)
class ProducerState:
    """What generation continues from, as it was after the last finished batch. A batch that is being generated is no
    part of it: a resumed run generates that batch again, from the same state and so to the same tokens."""

    batches: list[Batch]  # finished and not trained on yet, in order
    position: int  # of the data
    surplus: list[Group]
    learned: Learned
    published: list[Published]  # versions before the newest that batches to come begin with, oldest first


class Producer:
    def __init__(
        self,
        collector: Collector,
        task: Task,
        algorithm: Algorithm,
        *,
        num_steps: int,
        groups_per_step: int,
        num_generations: int,
        max_sampling_rounds: int,
        max_staleness: int,
        inflight: str,
        seed: int,
        max_failures: float = 1.0,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        in_thread: Callable[[], None] = lambda: None,
    ) -> None:
        self.collector, self.task, self.algorithm = collector, task, algorithm
        self.engine = collector.engine
        self.num_steps, self.groups_per_step, self.num_generations = num_steps, groups_per_step, num_generations
        self.max_sampling_rounds, self.max_staleness, self.inflight = max_sampling_rounds, max_staleness, inflight
        self.seed, self.max_failures = seed, max_failures
        self.on_progress, self.in_thread = on_progress, in_thread
        self.order = DataOrder(len(task.train), seed)
        # These four change together, when a batch is finished.
        self.position = 0
        self.surplus: list[Group] = []  # groups beyond what a step needs; the next steps may use them
        self.learned: Learned = self.engine.learned()  # validations after the batch included
        self._next_step = 0
        self.stopping = False
        self._published: dict[int, Published] = {}
        self._engine_version = self._head_version = -1
        self._ready: dict[int, Batch] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._idle, self._pausing = True, False

    # -- the learner's side -----------------------------------------------------------------------------------------

    def start(self, step: int) -> None:
        """Begin with this step, or after the batches that `restore` brought."""
        if self._ready and min(self._ready) != step:
            raise ValueError(
                f"the checkpoint has the batch of step {min(self._ready)}, but not that of step {step}; resume from an "
                "earlier checkpoint by moving the newest folder out of the run's checkpoints, or start a new run"
            )
        self._next_step = max(self._ready, default=step - 1) + 1
        if self.max_staleness:
            self._thread = threading.Thread(target=self._run, args=(self._next_step,), daemon=True, name="rollouts")
            self._thread.start()

    def publish(self, published: Published) -> None:
        """Weights of a new version. With max_staleness = 0 `weights` is read before the next batch is there; else it
        must be a copy."""
        with self._changed:
            self._published[published.version] = published
            self._changed.notify_all()

    def next(self, step: int) -> Batch:
        """The batch of this step; waits for it."""
        if not self.max_staleness and step not in self._ready:
            try:
                self._produce(step)
            finally:
                self._idle = True
        with self._changed:
            self._wait(lambda: self.stopping or step in self._ready or self._error is not None)
            if self.stopping and self.max_staleness:  # what is ready stays so, for a checkpoint
                raise Stopped
            if step in self._ready:
                return self._ready.pop(step)
            assert self._error is not None
            raise self._error

    def state(self) -> ProducerState:
        """For a checkpoint, at any time between two updates of the learner."""
        with self._changed:
            batches = [self._ready[step] for step in sorted(self._ready)]
            published: list[Published] = []
            if self.inflight == "drain":  # else every batch begins with the newest version
                first, newest = self._next_step - self.max_staleness, max(self._published, default=0)
                published = [self._published[v] for v in sorted(self._published) if first <= v < newest]
            return ProducerState(batches, self.position, self.surplus, self.learned, published)

    def restore(self, state: ProducerState) -> None:
        """Before `start`."""
        self.position, self.surplus, self.learned = state.position, state.surplus, state.learned
        self._ready = {batch.step: batch for batch in state.batches}
        for published in state.published:
            self.publish(published)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No batch is in the making meanwhile, and the engine has the newest weights."""
        with self._changed:
            self._pausing = True
            self._wait(lambda: self._idle or self._error is not None)
        try:
            self._take(max(self._published), Stopwatch(), "recompute")
            yield
            if self._error is None:  # else the engine has seen part of a batch that is generated again
                self.learned = self.engine.learned()
        finally:
            with self._changed:
                self._pausing = False
                self._changed.notify_all()

    def stop(self) -> None:
        """Give up what is being generated. Safe from a signal handler."""
        self.stopping = True

    def close(self) -> None:
        self.stop()
        if self._thread is not None:
            with self._changed:
                self._changed.notify_all()
            self._thread.join()

    # -- the engine's side ------------------------------------------------------------------------------------------

    def _run(self, step: int) -> None:
        try:
            self.in_thread()
            for n in range(step, self.num_steps):
                self._produce(n)
            with self._changed:
                self._idle = True
                self._changed.notify_all()
        except BaseException as error:  # the learner raises it when it asks for the batch
            with self._changed:
                self._error, self._idle = error, True
                self._changed.notify_all()

    def _produce(self, step: int) -> Batch:
        batch = Batch(step, [], Stopwatch())
        wanted = self._await_version(step)
        if not self._take(wanted, batch.watch, "recompute"):  # nothing is in flight
            # New weights clear the prefix cache. Without them it is cleared here: a resumed run begins this batch with
            # an empty one, and counts of computed tokens must be the same.
            self.engine.forget()
        batch.groups, batch.num_stale = self._fresh(self.surplus, step)
        batch.position = self.position
        for _ in range(self.max_sampling_rounds):
            missing = self.groups_per_step - len(batch.groups)
            if missing <= 0:
                break
            # Whole rounds: how many are asked for depends on how many are missing, never on who came first.
            collected = self._collect(batch, self.groups_per_step if self.max_staleness else missing)
            batch.rounds.append(collected)
            batch.traces += self.engine.drain_trace()
            self._check_failures(step, [group for each in batch.rounds for group in each.groups])
            for group in collected.groups:
                useful = len(group.scored) > 1 and self.algorithm.keeps([r.reward for r in group.scored])
                (batch.groups if useful else batch.dropped).append(group)
        # Only a whole batch moves the data on: what is given up is generated again.
        batch.groups, surplus = batch.groups[: self.groups_per_step], batch.groups[self.groups_per_step :]
        learned = self.engine.learned()
        with self._changed:
            self.position, self.surplus, self.learned, self._next_step = batch.position, surplus, learned, step + 1
            self._ready[step] = batch
            self._changed.notify_all()
        return batch

    def _collect(self, batch: Batch, num_groups: int) -> Collected:
        problems = []
        for position in range(batch.position, batch.position + num_groups):
            problems.append((position, self.task.train[self.order[position]]))
        batch.position += num_groups
        return self.collector.collect(
            batch.step,
            problems,
            self.num_generations,
            self.seed,
            watch=batch.watch,
            between=lambda done, total: self._between(batch, done, total),
        )

    def _between(self, batch: Batch, done: int, total: int) -> None:
        """Before every engine step: is there a reason to stop, are there new weights?"""
        if self.stopping:
            raise Stopped
        if self.max_staleness and self.inflight != "drain":
            with self._changed:
                newest = max(self._published)
            self._take(newest, batch.watch, self.inflight)
        self.on_progress(done, total)

    def _await_version(self, step: int) -> int:
        """The version that this step's rollouts begin with."""
        oldest = max(0, step - self.max_staleness)
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._wait(lambda: self.stopping or (max(self._published, default=-1) >= oldest and not self._pausing))
            if self.stopping:
                raise Stopped
            self._idle = False
            for version in [v for v in self._published if v < oldest]:  # nobody will ask for these any more
                del self._published[version]
            return max(self._published) if self.inflight != "drain" else min(self._published)

    def _wait(self, happened: Callable[[], bool]) -> None:
        """Under the condition's lock. Looks up now and then, since a signal handler can't notify."""
        while not self._changed.wait_for(happened, timeout=0.2):
            pass

    def _take(self, version: int, watch: Stopwatch, inflight: str) -> bool:
        """Give the engine this version; False: it has it."""
        if version == self._engine_version:
            return False
        with watch.stage("sync"):
            published = self._published[version]
            receipt = self.engine.update_weights(published.weights(), version, inflight)
            _compare("weights", published, receipt)
            self._engine_version = version
            head = published.head
            if head is not None and head.version != self._head_version:
                _compare("the drafter's weights", head, self.engine.update_drafter(head.weights(), head.version))
                self._head_version = head.version
        return True

    def _fresh(self, groups: list[Group], step: int) -> tuple[list[Group], int]:
        fresh = [group for group in groups if step - group.oldest_version <= self.max_staleness]
        return fresh, len(groups) - len(fresh)

    def _check_failures(self, step: int, groups: list[Group]) -> None:
        failures = [r.failure for group in groups for r in group.rollouts if r.failure is not None]
        total = sum(len(group.rollouts) for group in groups)
        if len(failures) > self.max_failures * total:
            raise ValueError(
                f"step {step}: {len(failures)} of {total} samples could not be scored, more than reward.max_failures = "
                f"{self.max_failures:g} of them; the first: {failures[0]}"
            )


def _compare(what: str, sent: Published, receipt: Receipt) -> None:
    if receipt.checksum != sent.checksum:
        raise ValueError(
            f"{what} of version {sent.version}: the engine holds {receipt.checksum[:12]}, the learner sent "
            f"{sent.checksum[:12]}; the transfer went wrong, so training stops"
        )
