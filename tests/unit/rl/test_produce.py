"""The batch producer: batches in order, within the staleness bound, and kept until they are trained on."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.build.config import load_config
from paceline.rl.batch_producer import BatchProducer
from paceline.rl.collect import Collector
from paceline.rl.order import Cursor
from paceline.rl.produce import Batch, PublishedWeights, Stopped
from paceline.tasks.rewards import Sample, Score
from paceline.tasks.task import Problem
from paceline.types import SamplingParams

TASK = SimpleNamespace(train=[Problem(f"p{i}", f"prompt {i}", {"n": i}) for i in range(6)])


def producer(
    reward_of: Callable[[Sample], float | str | Score] = lambda sample: 1.0,
    keeps: Callable[[list[float]], bool] = lambda rewards: True,
    **changes: Any,
) -> BatchProducer:
    collector = Collector(ScriptedEngine(), Bytes(), ScriptedRewarder(reward_of), sampling=SamplingParams(max_tokens=8))
    settings = ["train.num_steps=5", "train.groups_per_step=2", "algorithm.num_generations=2"]
    settings += ["algorithm.max_sampling_rounds=2", "reward.max_failures=1.0"]
    sections = {"max_failures": "reward", "num_generations": "algorithm", "max_sampling_rounds": "algorithm"}
    sections["dynamic_sampling"] = "algorithm"
    settings += [f"{sections.get(key, 'train')}.{key}={value}" for key, value in changes.items()]
    made = BatchProducer(collector, TASK, SimpleNamespace(keeps=keeps), load_config(None, settings))
    publish(made, 0)
    return made


def publish(made: BatchProducer, version: int) -> None:
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


def test_the_engine_gets_new_weights_between_batches() -> None:
    """Version 1 is published when two of the four samples of batch 1 are done."""
    made = producer(max_staleness=1)
    made._produce(0)
    made.on_progress = lambda done, total: publish(made, 1) if done == 2 else None
    batch = made._produce(1)
    assert made.engine.updates == [(0, "recompute", 0)] and versions(batch) == {0}
    made.on_progress = lambda done, total: None
    assert versions(made._produce(2)) == {1} and made.engine.updates[1:] == [(1, "recompute", 0)]


def versions(batch: Batch) -> set[int]:
    return {int(version) for group in batch.groups for r in group.rollouts for version in r.versions}


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
    assert [batch.step for batch in state.batches] == [0, 1] and state.cursor == Cursor(4)
    assert state.speculation_state == {"drafter": {"seen": 8}} and len(made.engine.submitted) == 12
    # Batch 2 begins with version 0, which is no longer the learner's.
    assert [published.version for published in state.published] == [0]
    assert [batch.step for batch in made.state().batches] == [0, 1, 2] and made.state().published == []


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
    assert made.cursor == Cursor(0) and made.surplus == []


def test_the_next_step_uses_the_surplus() -> None:
    made = producer(keeps=lambda rewards: True, max_staleness=1, groups_per_step=2, max_sampling_rounds=2)
    made.surplus = producer()._produce(0).groups[:1]
    made.cursor = Cursor(2)
    batch = made._produce(0)
    assert [g.index for g in batch.groups] == [0, 2] and [g.index for g in made.surplus] == [3]
    assert batch.position == made.cursor.position == 4


def test_stale_groups_are_dropped_and_counted() -> None:
    made = producer(max_staleness=1)
    made.surplus = producer()._produce(0).groups  # of version 0
    made.cursor = Cursor(2)
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
    assert made.cursor == Cursor(0)


def zero(sample: Sample) -> Score:
    return Score(0.0, {"judge": 0.0}, f"{sample.name}: hung: scored 0")


def test_samples_that_scored_0_do_not_count_unless_all_failed() -> None:
    made = producer(lambda s: 1.0 if s.name.endswith("p0, sample 0") else zero(s), max_failures=0.0, groups_per_step=6)
    made.start(0)
    assert sum(r.failure is not None for g in made.get(0).all_groups for r in g.rollouts) == 11
    for reward_of in (zero, lambda sample: "broke" if sample.name.endswith("sample 0") else zero(sample)):
        made = producer(reward_of, max_failures=0.5, groups_per_step=6)
        made.start(0)
        with pytest.raises(
            ValueError, match=r"step 1: rewards failed for all 12 samples.*the first: step 1, p\d, sampl"
        ):
            made.get(0)
    made = producer(zero, max_failures=1.0, groups_per_step=6)
    made.start(0)
    assert len(made.get(0).groups) == 6


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


def oversampled(order: list[int], **changes: Any) -> tuple[BatchProducer, Batch]:
    """Groups have equal rewards if their index is even. Samples finish in the order of `order`."""

    def keeps(rewards: list[float]) -> bool:
        return len(set(rewards)) > 1

    def reward_of(sample: Sample) -> float:
        index = made.order_of[sample.columns["n"]]
        return 1.0 if index % 2 == 0 else float(sample.name[-1])

    made = producer(reward_of, keeps=keeps, dynamic_sampling="true", **{"groups_per_step": 2} | changes)
    made.order_of = {made.order[i]: i for i in range(6)}
    places = {made.task.train[made.order[i]].name: place for place, i in enumerate(order)}

    def step() -> list[Any]:
        made.engine.waiting.sort(key=lambda request: -places[request.problem])
        time.sleep(0.02)  # so that finished groups are scored before the next one finishes
        return engine_step()

    engine_step, made.engine.step = made.engine.step, step
    made.start(0)
    return made, made.get(0)


@pytest.mark.parametrize("order", [range(6), range(5, -1, -1), (3, 0, 5, 1, 4, 2)])
def test_oversampling_takes_the_first_useful_groups_whatever_finishes_first(order: Any) -> None:
    made, batch = oversampled([*order], oversample=3)
    assert [g.index for g in batch.groups] == [1, 3] and [g.index for g in batch.dropped] == [0, 2]
    assert made.cursor == Cursor(4), "groups 4 and 5 are discarded, their problems come next"
    assert made.surplus == []
    if list(order) == sorted(order):
        assert len(made.engine.aborted) > 0, "the rest is aborted as soon as the first ones are enough"


def test_without_enough_useful_groups_another_round_begins() -> None:
    made, batch = oversampled([*range(6)], groups_per_step=2, oversample=1.5)  # 0, 1, 2; then 3, 4
    assert [g.index for g in batch.groups] == [1, 3] and made.cursor == Cursor(4) and len(batch.rounds) == 2
    rounds = [[c.request.problem for c in each.completions] for each in batch.rounds]
    names = [made.task.train[made.order[i]].name for i in range(4)]
    assert rounds == [[name for name in names[:3] for _ in range(2)], [names[3]] * 2], "an audit sees what counts"


def test_groups_that_were_put_back_come_first() -> None:
    cursor = Cursor(7).put_back([5, 2]).put_back([5])
    assert cursor == Cursor(7, (2, 5))
    assert cursor.take(1) == ([2], Cursor(7, (5,))) and cursor.take(4) == ([2, 5, 7, 8], Cursor(9))
    made = producer()
    made.cursor = Cursor(2, (0,))
    made.start(0)
    assert [g.index for g in made.get(0).groups] == [0, 2] and made.cursor == Cursor(3)
