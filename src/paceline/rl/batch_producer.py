"""Generates one batch after another. With max_staleness = s the batch of step n begins with version max(0, n - s), and
the engine gets new weights between two batches, so runs are reproducible."""

from __future__ import annotations

import math

from paceline.rl.collection import Collected, Collection
from paceline.rl.order import Cursor
from paceline.rl.produce import Batch, Producer, ProducerState, PublishedWeights, Stopped
from paceline.rl.stage_timer import StageTimer


class BatchProducer(Producer):
    """`cursor`, `surplus`, `speculation_state`, the pending batches and the next step change together, when a batch is
    finished."""

    _inflight_when_paused = "recompute"  # no request is running

    def get(self, step: int) -> Batch:
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

    def state(self) -> ProducerState:
        """The state after the last finished batch: a resumed run generates the next one with the same tokens."""
        with self._changed:
            batches = [self._pending[step] for step in sorted(self._pending)]
            first, newest = self._next_step - self.max_staleness, max(self._published, default=0)
            published: list[PublishedWeights] = [
                self._published[version] for version in sorted(self._published) if first <= version < newest
            ]
            return ProducerState(batches, self.cursor, self.surplus, self.speculation_state, published)

    def _generate(self) -> None:
        for step in range(self._next_step, self.config.train.num_steps):
            self._produce(step)

    def _produce(self, step: int) -> Batch:
        batch, cursor = Batch(step, [], StageTimer()), self.cursor
        with batch.timer.stage("idle"):
            version = self._wait_for_version(step)
        if not self._update_engine(version, batch.timer, "recompute"):  # no request is running
            # New weights clear the prefix cache. Without new weights it is cleared here: a resumed run begins the batch
            # with an empty cache, and the counts of computed tokens must be the same.
            self.engine.reset_prefix_cache()
        batch.groups = [group for group in self.surplus if step - group.oldest_version <= self.max_staleness]
        batch.num_stale = len(self.surplus) - len(batch.groups)
        for _ in range(self.config.algorithm.max_sampling_rounds):
            missing = self.groups_per_step - len(batch.groups)
            if missing <= 0:
                break
            collected, cursor = self._collect(batch, cursor, missing)
            batch.rounds.append(collected)
            batch.traces += self.engine.drain_trace()
            self._check_failures(step, [group for each in batch.rounds for group in each.groups])
            for group in collected.groups:
                (batch.groups if self._is_trained_on(group) else batch.dropped).append(group)
        batch.groups, surplus = batch.groups[: self.groups_per_step], batch.groups[self.groups_per_step :]
        batch.position = cursor.position
        speculation_state = self.engine.state_dict()
        with self._changed:  # only a finished batch changes the state: a discarded one is generated again
            self.cursor, self.surplus, self.speculation_state = cursor, surplus, speculation_state
            self._next_step, self._pending[step] = step + 1, batch
            self._changed.notify_all()
        return batch

    def _collect(self, batch: Batch, cursor: Cursor, missing: int) -> tuple[Collected, Cursor]:
        """A round of groups, and where the next one begins. Its size does not depend on which samples finish first.

        With `train.oversample` a round has more groups than are missing. It ends as soon as the first ones, by index,
        are enough; the others are discarded and their problems come next. So which groups are trained on does not
        depend on their length."""
        num, oversample = missing, self.config.train.oversample
        if self.max_staleness:
            num = self.groups_per_step  # later steps may use the surplus
        elif oversample > 1:
            num = math.ceil(oversample * missing)
        indices, after = cursor.take(num)

        def num_wanted(collection: Collection) -> int | None:
            """How many groups are enough; None: not known yet."""
            num_useful = 0
            for i in range(num):
                if (rewards := collection.rewards(i)) is None:
                    return None
                num_useful += self._is_useful(rewards)
                if num_useful == missing:
                    return i + 1
            return num

        collected = self.collector.collect(
            f"step {batch.step + 1}",
            self._problems(indices),
            self.config.algorithm.num_generations,
            self.config.train.seed,
            timer=batch.timer,
            on_progress=self._on_progress,
            num_wanted=num_wanted if num > missing and not self.max_staleness else None,
        )
        return collected, after if len(collected.groups) == num else cursor.take(len(collected.groups))[1]

    def _on_progress(self, done: int, total: int) -> None:
        if self.stopping:
            raise Stopped
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
            return min(self._published)
