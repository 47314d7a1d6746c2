"""The continuous producer: no group is lost or trained on twice or too late, however the learner and the engine are
timed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.build.config import load_config
from paceline.rl.batch_producer import BatchProducer
from paceline.rl.collect import Collector
from paceline.rl.continuous_producer import ContinuousProducer
from paceline.rl.order import Cursor
from paceline.rl.produce import Batch, Producer, PublishedWeights, Stopped
from paceline.tasks.rewards import Sample
from paceline.tasks.task import Problem
from paceline.types import Completion, SamplingParams

TASK = SimpleNamespace(train=[Problem(f"p{i}", f"prompt {i}", {"n": i}) for i in range(1000)])
NUM_STEPS = 12


class Lengths(ScriptedEngine):
    """A completion has as many tokens as `length(request)` says and gets one in each step, of the current version. At
    most `max_num_seqs` run."""

    max_num_seqs = 16

    def __init__(self, length: Callable[[str], int], step_s: float = 0.0005) -> None:
        super().__init__()
        self.length, self.step_s, self.num_steps = length, step_s, 0
        self.versions: dict[int, list[int]] = {}

    def step(self) -> list[Completion]:
        time.sleep(self.step_s)
        self.num_steps += bool(self.waiting)
        finished = []
        for request in self.waiting[: self.max_num_seqs]:
            versions = self.versions.setdefault(request.request_id, [])
            versions.append(self.version)
            if len(versions) >= self.length(request.problem):
                self.waiting.remove(request)
                [completion] = _completions(request, versions)
                finished.append(completion)
        return finished


def _completions(request: Any, versions: list[int]) -> list[Completion]:
    engine = ScriptedEngine(lambda _: "a" * len(versions))
    engine.submit(request)
    [completion] = engine.step()
    completion.versions[:] = versions[: len(completion.token_ids)]
    return [completion]


def producer(
    engine: ScriptedEngine,
    keeps: Callable[[list[float]], bool] = lambda rewards: True,
    kind: type[Producer] = ContinuousProducer,
    **changes: Any,
) -> Any:
    rewarder = ScriptedRewarder(lambda sample: float(sample.columns["n"] % 3))
    collector = Collector(engine, Bytes(), rewarder, sampling=SamplingParams(max_tokens=200))
    settings = [f"train.num_steps={NUM_STEPS}", "train.groups_per_step=3", "algorithm.num_generations=2"]
    settings += ["train.inflight=recompute", *(f"{key.replace('__', '.')}={value}" for key, value in changes.items())]
    made = kind(collector, TASK, SimpleNamespace(keeps=keeps), load_config(None, settings))
    publish(made, 0)
    return made


def publish(made: Producer, version: int) -> None:
    made.publish(PublishedWeights(version, list, str(version)))


def train(made: Producer, first: int = 0, last: int = NUM_STEPS, step_s: float = 0.01) -> list[Batch]:
    batches = []
    for step in range(first, last):
        batches.append(made.get(step))
        time.sleep(step_s)
        made.release(step)
        publish(made, step + 1)
    return batches


def one_in_six_is_long(problem: str) -> int:
    return 90 if hash_of(problem) % 6 == 0 else 3 + hash_of(problem) % 5


def hash_of(problem: str) -> int:
    return random.Random(problem).randrange(1000)


def check(batches: list[Batch], max_staleness: int, per_step: int = 3) -> None:
    seen = [group.index for batch in batches for group in batch.all_groups]
    assert len(seen) == len(set(seen)), "a group was used twice"
    for batch in batches:
        assert len(batch.groups) == per_step and not batch.num_stale
        assert all(batch.step - group.oldest_version <= max_staleness for group in batch.groups)
        assert [g.index for g in batch.groups] == sorted(g.index for g in batch.groups)


@pytest.mark.parametrize("max_staleness", [1, 2, 4])
@pytest.mark.parametrize("step_s", [0.0, 0.02])
def test_every_group_is_trained_on_once_and_within_the_bound(max_staleness: int, step_s: float) -> None:
    made = producer(Lengths(one_in_six_is_long), train__max_staleness=max_staleness)
    made.start(0)
    batches = train(made, step_s=step_s)
    made.close()
    check(batches, max_staleness)
    # None is left out, long or not: what was not taken is too new for the last step.
    used = {group.index for batch in batches for group in batch.groups}
    left = set(range(made.cursor.position)) - used
    assert made.cursor.position == 3 * NUM_STEPS and not left


def test_the_bound_is_reached_and_long_groups_go_on_across_versions() -> None:
    engine = Lengths(one_in_six_is_long)
    made = producer(engine, train__max_staleness=2)
    made.start(0)
    batches = train(made)
    made.close()
    lags = [batch.step - group.oldest_version for batch in batches for group in batch.groups]
    assert max(lags) == 2
    assert any(inflight == "recompute" and num > 0 for version, inflight, num in engine.updates), "nothing ran"
    spans = [len(set(r.versions.tolist())) for b in batches for g in b.groups for r in g.rollouts]
    assert max(spans) > 1, "no completion has tokens of two versions"


class Unbounded(ContinuousProducer):
    """Deliberately broken: takes what is finished, as if long groups could always wait."""

    def _can_wait(self, step: int, versions: Any) -> bool:
        return True


def test_a_producer_that_takes_only_what_is_finished_is_caught() -> None:
    made = producer(Lengths(one_in_six_is_long), train__max_staleness=1)
    made.__class__ = Unbounded
    made.start(0)
    batches = train(made, last=NUM_STEPS - 1, step_s=0.0)
    made.close()
    with pytest.raises(AssertionError):
        check(batches, 1)
        assert {g.index for b in batches for g in b.groups} >= set(range(3 * (NUM_STEPS - 3)))


def test_the_engine_does_not_wait_for_the_last_sample_of_a_batch() -> None:
    """With the same lengths, bound and learner, it needs fewer steps than batch by batch: long groups overlap."""
    num_steps = {}
    for kind in (BatchProducer, ContinuousProducer):
        engine = Lengths(one_in_six_is_long)
        made = producer(engine, kind=kind, train__max_staleness=1)
        made.start(0)
        check(train(made, step_s=0.0), 1)
        made.close()
        num_steps[kind] = engine.num_steps
    assert num_steps[ContinuousProducer] < 0.8 * num_steps[BatchProducer], num_steps


def test_groups_with_equal_rewards_are_replaced_at_once() -> None:
    made = producer(
        Lengths(one_in_six_is_long), keeps=lambda rewards: rewards[0] > 0, train__max_staleness=1,
        algorithm__max_sampling_rounds=5,
    )  # fmt: skip
    made.start(0)
    batches = train(made)
    made.close()
    check(batches, 1)
    assert sum(len(batch.dropped) for batch in batches) > 0
    assert all(group.rollouts[0].reward > 0 for batch in batches for group in batch.groups)


def test_after_max_sampling_rounds_a_step_trains_on_fewer_groups() -> None:
    made = producer(
        Lengths(lambda problem: 2), keeps=lambda rewards: False, train__max_staleness=1,
        algorithm__max_sampling_rounds=2,
    )  # fmt: skip
    made.start(0)
    batch = made.get(0)
    made.close()
    assert not batch.groups and len(batch.dropped) >= 6


def test_the_state_has_every_group_exactly_once() -> None:
    """Also those that are being generated: a resumed run generates them again. A checkpoint does not wait for them."""
    engine = Lengths(lambda problem: 3 if int(problem[1:]) % 2 else 10_000, step_s=0.002)
    made = producer(engine, train__max_staleness=3)
    made.start(0)
    batch = made.get(0)
    started = time.perf_counter()
    state = made.state()
    assert time.perf_counter() - started < 1, "it waited for a group that is being generated"
    made.close()
    assert state.batches == [batch] and state.cursor.position == 12
    groups = [g.index for g in batch.groups] + [g.index for g in state.surplus] + [*state.cursor.put_back_indices]
    assert sorted(groups) == list(range(12)) and len(state.cursor.put_back_indices) > 0


def test_kills_and_resumes_lose_and_repeat_nothing() -> None:
    """Each life ends at a random moment, after the state of the last finished step."""
    rng = random.Random(0)
    state, step, recorded = None, 0, []
    for life in range(12):
        made = producer(Lengths(one_in_six_is_long), train__max_staleness=2, train__num_steps=24)
        publish(made, step)
        if state is not None:
            made.load_state(state)
        made.start(step)
        last = 24 if life == 11 else min(24, step + rng.randrange(4))
        recorded += train(made, step, last, step_s=0.005)
        step, state = last, made.state()
        time.sleep(rng.random() / 50)  # what is generated meanwhile is lost
        made.close()
    assert [batch.step for batch in recorded] == list(range(24))
    check(recorded, 2)
    assert {g.index for b in recorded for g in b.groups} == set(range(72))


def test_a_pause_stops_the_engine_between_two_steps_and_has_the_newest_weights() -> None:
    engine = Lengths(lambda problem: 50)
    made = producer(engine, train__max_staleness=1)
    made.start(0)
    while not engine.versions:
        time.sleep(0.001)
    publish(made, 1)
    with made.paused():
        seen = {key: len(value) for key, value in engine.versions.items()}
        assert engine.version == 1
        time.sleep(0.05)
        assert seen == {key: len(value) for key, value in engine.versions.items()}, "the engine ran in the pause"
        # An evaluation in the pause: requests of rollouts go on beside it.
        held_out = [(0, Problem("held out", "?", {"n": 1}))]
        found = made.collector.collect("evaluation", held_out, 2, "held out", sampling=SamplingParams(max_tokens=5))
        assert [len(r.token_ids) for r in found.groups[0].rollouts] == [5, 5]
    batch = made.get(0)
    made.close()
    assert len(batch.groups) == 3


def test_stop_and_errors_end_the_thread() -> None:
    made = producer(Lengths(lambda problem: 10_000), train__max_staleness=1)
    made.start(0)
    threading.Timer(0.2, made.stop).start()
    with pytest.raises(Stopped):
        made.get(0)
    made.close()
    assert not made.engine.waiting, "the requests were not aborted"
    failing = producer(Lengths(lambda problem: 2), train__max_staleness=1)
    failing.collector.rewarder.reward_of = lambda sample: _raise(sample)
    failing.start(0)
    with pytest.raises(ZeroDivisionError):
        failing.get(0)
    failing.close()


def _raise(sample: Sample) -> float:
    raise ZeroDivisionError


def test_failures_stop_the_run_and_their_groups_come_again() -> None:
    made = producer(Lengths(lambda problem: 2), train__max_staleness=1)
    made.collector.rewarder.reward_of = lambda sample: "broke"
    made.start(0)
    with pytest.raises(ValueError, match="could not be scored"):
        made.get(0)
    made.close()
    assert made.state().cursor.take(3)[0] == [0, 1, 2]
    assert isinstance(made.state().cursor, Cursor)
