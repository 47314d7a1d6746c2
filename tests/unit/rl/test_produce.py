"""The producer: batches in order, within the staleness bound, and kept until they are trained on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.build.config import load_config
from paceline.rl.collect import Collector
from paceline.rl.produce import Producer, PublishedWeights, Stopped
from paceline.tasks.rewards import Sample
from paceline.tasks.task import Problem
from paceline.types import SamplingParams

TASK = SimpleNamespace(train=[Problem(f"p{i}", f"prompt {i}", {"n": i}) for i in range(6)])


def producer(
    reward_of: Callable[[Sample], float | str] = lambda sample: 1.0,
    keeps: Callable[[list[float]], bool] = lambda rewards: True,
    **changes: Any,
) -> Producer:
    collector = Collector(ScriptedEngine(), Bytes(), ScriptedRewarder(reward_of), sampling=SamplingParams(max_tokens=8))
    settings = ["train.num_steps=5", "train.groups_per_step=2", "algorithm.num_generations=2"]
    settings += ["algorithm.max_sampling_rounds=2", "reward.max_failures=1.0"]
    sections = {"max_failures": "reward", "num_generations": "algorithm", "max_sampling_rounds": "algorithm"}
    settings += [f"{sections.get(key, 'train')}.{key}={value}" for key, value in changes.items()]
    made = Producer(collector, TASK, SimpleNamespace(keeps=keeps), load_config(None, settings))
    publish(made, 0)
    return made


def publish(made: Producer, version: int) -> None:
    made.publish(PublishedWeights(version, list, str(version)))


def test_positions_and_versions_advance() -> None:
    made = producer()
    made.start(0)
    for step in range(4):
        publish(made, step)
        batch = made.get(step)
        assert [g.index for g in batch.groups] == [2 * step, 2 * step + 1] and batch.position == 2 * step + 2
        assert [g.problem for g in batch.groups] == [TASK.train[made.order[g.index]].name for g in batch.groups]
        assert all(g.oldest_version == step for g in batch.groups)


@pytest.mark.parametrize("max_staleness", [1, 2, 3])
def test_generation_runs_ahead_up_to_max_staleness(max_staleness: int) -> None:
    made = producer(max_staleness=max_staleness)
    made.start(0)
    for step in range(5):
        batch = made.get(step)
        assert [g.index for g in batch.groups] == [2 * step, 2 * step + 1]
        assert all(step - g.oldest_version == min(step, max_staleness) for g in batch.groups)
        publish(made, step + 1)
    made.close()


def publish_during_batch_1(inflight: str, **changes: Any) -> Producer:
    """Version 1 is published when two of the four samples of batch 1 are done."""
    made = producer(max_staleness=1, inflight=inflight, **changes)
    made._produce(0)
    made.on_progress = lambda done, total: publish(made, 1) if done == 2 else None
    made._produce(1)
    return made


def versions(made: Producer, step: int) -> list[int]:
    batch = made._pending[step]
    return sorted(int(version) for group in batch.groups for r in group.rollouts for version in set(r.versions))


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
def test_the_engine_gets_new_weights_during_a_batch(inflight: str) -> None:
    made = publish_during_batch_1(inflight)
    assert made.engine.updates == [(0, "recompute", 0), (1, inflight, 1)], "before the last sample"
    assert versions(made, 1) == [0, 0, 0, 1]


def test_with_drain_the_engine_gets_new_weights_between_batches() -> None:
    made = publish_during_batch_1("drain")
    assert made.engine.updates == [(0, "recompute", 0)] and versions(made, 1) == [0, 0, 0, 0]
    made.on_progress = lambda done, total: None
    made._produce(2)
    assert made.engine.updates[1:] == [(1, "recompute", 0)] and versions(made, 2) == [1, 1, 1, 1]


def test_the_state_excludes_the_batch_being_generated() -> None:
    """Neither its rollouts nor its effect on the engine's speculation state are in it."""
    found = []
    made = producer(max_staleness=2)
    made.engine.state_dict = lambda: {"drafter": {"seen": len(made.engine.submitted)}}
    made._produce(0)
    made._produce(1)
    publish(made, 1)
    made.on_progress = lambda done, total: found.append(made.state()) if done == 2 else None
    made._produce(2)
    (state,) = found
    assert [batch.step for batch in state.batches] == [0, 1] and state.position == 4
    assert state.speculation_state == {"drafter": {"seen": 8}} and len(made.engine.submitted) == 12
    # Batch 2 begins with version 0, which is no longer the learner's.
    assert [published.version for published in state.published] == [0]
    assert [batch.step for batch in made.state().batches] == [0, 1, 2] and made.state().published == []


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
def test_no_older_version_is_kept_if_batches_begin_with_the_newest(inflight: str) -> None:
    made = producer(max_staleness=2, inflight=inflight)
    publish(made, 1)
    assert made.state().published == []


def test_the_prefix_cache_is_cleared_before_a_batch_with_the_same_weights() -> None:
    """After a resume the prefix cache is empty, so it must be empty without one, too."""
    made, cleared = producer(max_staleness=2), []
    made.engine.reset_prefix_cache = lambda: cleared.append(made._next_step)
    for step in range(3):
        made._produce(step)
    assert cleared == [1, 2], "batch 0 had new weights"


def test_a_discarded_batch_does_not_change_the_state() -> None:
    """It is stopped in its second round."""
    all_rewards: list[list[float]] = []

    def keeps(rewards: list[float]) -> bool:
        all_rewards.append(rewards)
        if len(all_rewards) == 3:
            made.stop()
        return False

    made = producer(keeps=keeps, groups_per_step=3)
    made.start(0)
    with pytest.raises(Stopped):
        made.get(0)
    assert len(all_rewards) == 3, "the first round was finished"
    assert made.position == 0 and made.surplus == []


def test_the_next_step_uses_the_surplus() -> None:
    made = producer(keeps=lambda rewards: True, max_staleness=1, groups_per_step=2, max_sampling_rounds=2)
    made.surplus = producer()._produce(0).groups[:1]
    made.position = 2
    batch = made._produce(0)
    assert [g.index for g in batch.groups] == [0, 2] and [g.index for g in made.surplus] == [3]
    assert batch.position == made.position == 4


def test_stale_groups_are_dropped_and_counted() -> None:
    made = producer(max_staleness=1)
    made.surplus = producer()._produce(0).groups  # of version 0
    made.position = 2
    for version in (1, 2):
        publish(made, version)
    batch = made._produce(3)
    assert batch.num_stale == 2 and [g.index for g in batch.groups] == [2, 3]
    assert all(g.oldest_version >= 2 for g in batch.groups)


def test_too_many_failures() -> None:
    def reward_of(sample: Sample) -> float | str:
        return "broke" if sample.columns["n"] % 2 else 1.0

    # Odd problems fail: half of the first round, two thirds of the second, which is small; 10 of 18 over the step.
    made = producer(reward_of, max_failures=0.6, groups_per_step=6)
    made.start(0)
    batch = made.get(0)
    assert sum(r.failure is not None for g in batch.dropped for r in g.rollouts) == 10
    assert sorted(g.index for g in [*batch.groups, *batch.dropped]) == list(range(9)), "new problems, each once"
    made = producer(reward_of, max_failures=0.4, groups_per_step=6)
    made.start(0)
    with pytest.raises(
        ValueError, match=r"step 1: 6 of 12 samples .* reward.max_failures = 0.4 .*: step 1, p\d, sample"
    ):
        made.get(0)
    assert made.position == 0


def test_stop_keeps_pending_batches() -> None:
    made = producer(max_staleness=2)
    made.start(0)
    while not made.state().batches:
        pass
    made.stop()
    with pytest.raises(Stopped):
        made.get(0)
    made.close()
    assert made.state().batches[0].step == 0, "the batch is kept for a checkpoint"


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_batch_is_pending_until_it_is_released(max_staleness: int) -> None:
    made = producer(max_staleness=max_staleness)
    made.start(0)
    batch = made.get(0)
    assert made.state().batches[0] is batch is made.get(0)
    made.release(0)
    assert batch not in made.state().batches
    made.close()


def test_get_raises_an_error_of_the_thread() -> None:
    made = producer(lambda sample: "broke", max_staleness=1, max_failures=0.5)
    made.start(0)
    with pytest.raises(ValueError, match="could not be scored"):
        made.get(0)
    made.close()


def test_a_failed_transfer_stops_training() -> None:
    made = producer()
    made.publish(PublishedWeights(0, list, "something else"))
    made.start(0)
    with pytest.raises(ValueError, match="the transfer failed"):
        made.get(0)
