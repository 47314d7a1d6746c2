"""Batches in order, never too old, whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import Bytes, Judge, ScriptedEngine

from paceline.rl.collect import Collector
from paceline.rl.produce import Producer, Published, Stopped
from paceline.tasks.rewards import Sample
from paceline.tasks.task import Problem
from paceline.types import SamplingParams

TASK = SimpleNamespace(train=[Problem(f"p{i}", f"prompt {i}", {"n": i}) for i in range(6)])


def producer(
    judges: Callable[[Sample], float | str] = lambda sample: 1.0,
    keeps: Callable[[list[float]], bool] = lambda rewards: True,
    **changes: Any,
) -> Producer:
    collector = Collector(ScriptedEngine(), Bytes(), Judge(judges), sampling=SamplingParams(max_tokens=8))
    settings: dict[str, Any] = {
        "num_steps": 5, "groups_per_step": 2, "num_generations": 2, "max_sampling_rounds": 2,
        "max_staleness": 0, "inflight": "drain", "seed": 0,
    }  # fmt: skip
    made = Producer(collector, TASK, SimpleNamespace(keeps=keeps), **(settings | changes))
    publish(made, 0)
    return made


def publish(made: Producer, version: int) -> None:
    made.publish(Published(version, list, str(version)))


def test_positions_go_on_and_versions_with_them() -> None:
    made = producer()
    made.start(0)
    for step in range(4):
        publish(made, step)
        batch = made.next(step)
        assert [g.index for g in batch.groups] == [2 * step, 2 * step + 1] and batch.position == 2 * step + 2
        assert [g.problem for g in batch.groups] == [TASK.train[made.order[g.index]].name for g in batch.groups]
        assert all(g.oldest_version == step for g in batch.groups)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_runs_ahead_as_far_as_it_may(max_staleness: int) -> None:
    made = producer(max_staleness=max_staleness)
    made.start(0)
    for step in range(5):
        batch = made.next(step)
        assert [g.index for g in batch.groups] == [2 * step, 2 * step + 1]
        assert all(step - g.oldest_version == min(step, max_staleness) for g in batch.groups)
        publish(made, step + 1)
    made.close()


def arriving(inflight: str, **changes: Any) -> Producer:
    """Batch 0 is there, of version 0; version 1 arrives when two of the four samples of batch 1 are done."""
    made = producer(max_staleness=1, inflight=inflight, **changes)
    made._produce(0)
    made.on_progress = lambda done, total: publish(made, 1) if done == 2 else None
    made._produce(1)
    return made


def versions(made: Producer, step: int) -> list[int]:
    batch = made._ready[step]
    return sorted(int(version) for group in batch.groups for r in group.rollouts for version in set(r.versions))


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
def test_new_weights_arrive_while_a_batch_is_generated(inflight: str) -> None:
    made = arriving(inflight)
    assert made.engine.updates == [(0, "recompute", 0), (1, inflight, 1)], "before the last sample"
    assert versions(made, 1) == [0, 0, 0, 1]


def test_drain_waits_for_the_end_of_a_batch() -> None:
    made = arriving("drain")
    assert made.engine.updates == [(0, "recompute", 0)] and versions(made, 1) == [0, 0, 0, 0]
    made.on_progress = lambda done, total: None
    made._produce(2)
    assert made.engine.updates[1:] == [(1, "recompute", 0)] and versions(made, 2) == [1, 1, 1, 1]


def test_the_state_is_that_after_the_last_finished_batch() -> None:
    """Asked for in the middle of a batch: nothing of that batch is in it, nor of what the engine learned from it."""
    found = []
    made = producer(max_staleness=2)
    made.engine.learned = lambda: {"drafter": {"seen": len(made.engine.submitted)}}
    made._produce(0)
    made._produce(1)
    publish(made, 1)
    made.on_progress = lambda done, total: found.append(made.state()) if done == 2 else None
    made._produce(2)
    (state,) = found
    assert [batch.step for batch in state.batches] == [0, 1] and state.position == 4
    assert state.learned == {"drafter": {"seen": 8}} and len(made.engine.submitted) == 12
    # Batch 2 begins with version 0, which the learner has left behind.
    assert [published.version for published in state.published] == [0]
    assert [batch.step for batch in made.state().batches] == [0, 1, 2] and made.state().published == []


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
def test_no_older_version_is_kept_where_batches_begin_with_the_newest(inflight: str) -> None:
    made = producer(max_staleness=2, inflight=inflight)
    publish(made, 1)
    assert made.state().published == []


def test_a_batch_that_begins_with_the_same_weights_shares_no_prompts_with_the_one_before() -> None:
    """After a resume nothing is in the prefix cache; so nothing of an earlier batch may be there without one."""
    made, forgotten = producer(max_staleness=2), []
    made.engine.forget = lambda: forgotten.append(made._next_step)
    for step in range(3):
        made._produce(step)
    assert forgotten == [1, 2], "batch 0 had new weights"


def test_a_step_given_up_is_generated_again() -> None:
    """Stopped in its second round, it has moved nothing on."""
    judged: list[list[float]] = []

    def keeps(rewards: list[float]) -> bool:
        judged.append(rewards)
        if len(judged) == 3:
            made.stop()
        return False

    made = producer(keeps=keeps, groups_per_step=3)
    made.start(0)
    with pytest.raises(Stopped):
        made.next(0)
    assert len(judged) == 3, "the first round was whole"
    assert made.position == 0 and made.surplus == []


def test_surplus_of_rounds_is_used_next() -> None:
    made = producer(keeps=lambda rewards: True, max_staleness=1, groups_per_step=2, max_sampling_rounds=2)
    made.surplus = producer()._produce(0).groups[:1]
    made.position = 2
    batch = made._produce(0)
    assert [g.index for g in batch.groups] == [0, 2] and [g.index for g in made.surplus] == [3]
    assert batch.position == made.position == 4


def test_what_is_too_old_is_dropped_and_counted() -> None:
    made = producer(max_staleness=1)
    made.surplus = producer()._produce(0).groups  # of version 0
    made.position = 2
    for version in (1, 2):
        publish(made, version)
    batch = made._produce(3)
    assert batch.num_stale == 2 and [g.index for g in batch.groups] == [2, 3]
    assert all(g.oldest_version >= 2 for g in batch.groups)


def test_too_many_failures() -> None:
    def judges(sample: Sample) -> float | str:
        return "broke" if sample.columns["n"] % 2 else 1.0

    # Odd problems fail: half of the first round, two thirds of the second, which is small; 10 of 18 over the step.
    made = producer(judges, max_failures=0.6, groups_per_step=6)
    made.start(0)
    batch = made.next(0)
    assert sum(r.failure is not None for g in batch.dropped for r in g.rollouts) == 10
    assert sorted(g.index for g in [*batch.groups, *batch.dropped]) == list(range(9)), "further problems, each once"
    made = producer(judges, max_failures=0.4, groups_per_step=6)
    made.start(0)
    with pytest.raises(
        ValueError, match=r"step 0: 6 of 12 samples .* reward.max_failures = 0.4 .*: step 0, p\d, sample"
    ):
        made.next(0)
    assert made.position == 0


def test_stopped_though_a_batch_is_ready() -> None:
    made = producer(max_staleness=2)
    made.start(0)
    while not made.state().batches:
        pass
    made.stop()
    with pytest.raises(Stopped):
        made.next(0)
    made.close()
    assert made.state().batches[0].step == 0, "what is ready is kept for a checkpoint"


def test_an_error_in_the_thread_reaches_the_learner() -> None:
    made = producer(lambda sample: "broke", max_staleness=1, max_failures=0.5)
    made.start(0)
    with pytest.raises(ValueError, match="could not be scored"):
        made.next(0)
    made.close()


def test_a_transfer_that_went_wrong_stops_training() -> None:
    made = producer()
    made.publish(Published(0, list, "something else"))
    made.start(0)
    with pytest.raises(ValueError, match="the transfer went wrong"):
        made.next(0)
