"""Collecting rollouts: scored groups in order, for any order in which the samples finish."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.rl import collect
from paceline.rl.collect import Collector
from paceline.tasks.env_agent import EnvAgent
from paceline.tasks.rewards import Score
from paceline.tasks.task import Problem, Turn
from paceline.types import Completion, SamplingParams


def collector(engine: ScriptedEngine, rewarder: ScriptedRewarder | None = None, **kwargs: Any) -> Collector:
    return Collector(engine, Bytes(), rewarder or ScriptedRewarder(), sampling=SamplingParams(max_tokens=20), **kwargs)


def problems(num: int, make_env: Any = None, step_timeout_s: float = 30.0, **kwargs: Any) -> list[tuple[int, Problem]]:
    if make_env is not None:
        kwargs["make_agent"] = lambda: EnvAgent(make_env, step_timeout_s=step_timeout_s)
    return [(10 + i, Problem(f"p{i}", f"prompt {i}", {"answer": i}, **kwargs)) for i in range(num)]


def test_groups_are_in_the_order_of_their_index() -> None:
    """The engine finishes the last request first."""
    engine = ScriptedEngine(lambda request: f"{bytes(request.prompt_ids).decode()}!")
    found = collector(engine, ScriptedRewarder(lambda s: s.columns["answer"] + 0.5)).collect(
        "step 4", problems(3), 2, "seed"
    )
    assert [(g.index, g.problem, g.prompt) for g in found.groups] == [
        (10 + i, f"p{i}", f"prompt {i}") for i in range(3)
    ]
    for i, group in enumerate(found.groups):
        assert [r.sample for r in group.rollouts] == [0, 1]
        assert all(
            r.text == f"prompt {i}!" and r.reward == i + 0.5 and r.rewards == {"judge": i + 0.5} for r in group.rollouts
        )
    assert found.requests == engine.submitted
    assert [c.request for c in found.completions] == found.requests


def test_the_noise_key_depends_on_seed_group_sample_and_turn() -> None:
    def keys(seed: object) -> list[int]:
        engine = ScriptedEngine()
        collector(engine).collect("step 1", problems(2), 3, seed)
        return [request.noise_key for request in engine.submitted]

    assert keys("a") == keys("a") and len(set(keys("a"))) == 6
    assert not set(keys("a")) & set(keys("b"))


def test_failures_are_named_and_the_other_samples_are_scored() -> None:
    rewarder = ScriptedRewarder(lambda s: "no reward" if s.name.endswith("p1, sample 0") else 1.0)
    first, second = collector(ScriptedEngine(), rewarder).collect("step 5", problems(2), 2, 0).groups
    assert [r.failure for r in first.rollouts] == [None, None]
    assert second.rollouts[0].failure == "step 5, p1, sample 0: no reward" and math.isnan(second.rollouts[0].reward)
    assert second.scored == [second.rollouts[1]]


@pytest.mark.parametrize("by_sample", [False, True])
def test_rewards_of_a_group_are_those_of_all_its_samples_that_could_be_scored(by_sample: bool) -> None:
    """Also of a sample that scored 0 because its reward failed."""
    scores = [1.0, "no reward", Score(0.0, {}, "hung: scored 0"), 0.5]
    scored = threading.Event()

    def reward_of(sample: Any) -> Any:
        if not sample.name.endswith("sample 3"):  # which is generated first
            scored.wait()
        return scores[int(sample.name[-1])]

    rewarder = ScriptedRewarder(reward_of)
    rewarder.by_sample = by_sample
    it = collector(ScriptedEngine(), rewarder)
    collection = it.begin("step 1", problems(1), 4, 0)
    while not collection.is_generated:
        assert collection.rewards(0) is None
        it.step()
        assert len(collection.futures) == (collection.num_generated if by_sample else collection.is_generated)
        wait(collection.futures[: not collection.is_generated])
    assert collection.rewards(0) is None, "not scored yet"
    scored.set()
    wait(collection.futures)
    assert collection.rewards(0) == [1.0, 0.0, 0.5]
    (group,) = it.collected(collection).groups
    assert [r.sample for r in group.scored] == [0, 2, 3] and group.rollouts[2].failure == "hung: scored 0"


class Counts:
    """Answers with the number of its turns, and ends after three. `last` replaces the second answer."""

    def __init__(self, last: Any = None) -> None:
        self.turns, self.last = 0, last

    def reset(self) -> str:
        return "go"

    def step(self, message: Any) -> Any:
        self.turns += 1
        if self.turns == 2 and self.last is not None:
            return self.last
        return Turn([{"role": "user", "content": f"<{self.turns}>"}] if self.turns < 3 else None, self.turns)


def test_turns() -> None:
    """Observations are part of the rollout with mask false, and emitted tokens are not tokenized again."""
    engine = ScriptedEngine(lambda request: f"{len(request.prompt_ids)};")
    rewarder = ScriptedRewarder(lambda s: s.env_reward)
    (group,) = collector(engine, rewarder).collect("step 1", problems(1, make_env=Counts), 1, 0).groups
    (rollout,) = group.rollouts
    assert bytes(rollout.token_ids.tolist()).decode() == "2;<1>7;<2>12;"
    assert "".join("x" if chosen else "." for chosen in rollout.mask) == "xx...xx...xxx"
    assert (rollout.logprobs[~rollout.mask] == 0).all() and (rollout.logprobs[rollout.mask] < 0).all()
    assert rollout.num_turns == 3 and rollout.reward == 1 + 2 + 3 and rollout.text == "12;"
    assert [bytes(r.prompt_ids).decode() for r in engine.submitted] == ["go", "go2;<1>", "go2;<1>7;<2>"]
    assert [r.sampling.max_tokens for r in engine.submitted] == [20, 18, 16], "all turns share max_tokens"
    assert len({r.noise_key for r in engine.submitted}) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("not a Turn", "its environment's answer can't be used: AttributeError"),
        (Turn([{"no": "content"}]), "its environment's answer can't be used: KeyError"),
    ],
)
def test_an_invalid_answer_costs_only_the_sample(answer: Any, reason: str) -> None:
    made = iter([Counts(answer), Counts()])
    found = collector(ScriptedEngine(), ScriptedRewarder(lambda s: s.env_reward)).collect(
        "step 7", problems(1, make_env=lambda: next(made)), 2, 0
    )
    bad, good = found.groups[0].rollouts
    assert bad.failure is not None and bad.failure.startswith("step 7, p0, sample 0: ") and reason in bad.failure
    assert len(bad.token_ids) == len(bad.mask) == 2 + 3 + 2, "its tokens are kept"
    assert good.failure is None and good.reward == 6


def test_environments_open_in_parallel() -> None:
    """One after the other, the timeouts would add up."""

    class Hangs(Counts):
        def reset(self) -> str:
            threading.Event().wait()
            return ""

    hanging = problems(1, make_env=Hangs, step_timeout_s=20 / 60)
    (group,) = collector(ScriptedEngine()).collect("step 1", hanging, 60, 0).groups
    assert all(
        "took more than train.env_timeout_s" in (r.failure or "") and not len(r.token_ids) for r in group.rollouts
    )
    assert all(np.isnan(r.reward) for r in group.rollouts)


class StopTest(Exception):
    pass


def test_an_error_aborts_all_requests() -> None:
    engine = ScriptedEngine()

    def on_progress(done: int, total: int) -> None:
        assert total == 6
        if done == 2:
            raise StopTest

    with pytest.raises(StopTest):
        collector(engine).collect("step 1", problems(2), 3, 0, on_progress=on_progress)
    assert len(engine.aborted) == 4 and engine.waiting == []


def test_stopped_while_waiting_for_rewards() -> None:
    release = threading.Event()

    def on_progress(done: int, total: int) -> None:
        if done == total:
            raise StopTest

    with pytest.raises(StopTest):
        collector(ScriptedEngine(), ScriptedRewarder(lambda s: float(release.wait()))).collect(
            "step 1", problems(1), 2, 0, on_progress=on_progress
        )
    release.set()


def test_a_rejected_prompt_costs_only_its_samples() -> None:
    class Short(ScriptedEngine):
        def submit(self, request: Any) -> Any:
            if bytes(request.prompt_ids) == b"prompt 1":
                raise ValueError("the model's context is 4")
            return super().submit(request)

    first, second = collector(Short()).collect("step 1", problems(2), 2, 0).groups
    assert [r.failure for r in first.rollouts] == [None, None]
    assert [r.failure for r in second.rollouts] == [f"step 1, p1, sample {i}: the model's context is 4" for i in (0, 1)]


class AllAtOnce(ScriptedEngine):
    """Finishes all requests in one step, and rejects `abort` of a finished request."""

    def step(self) -> list[Completion]:
        return [completion for _ in range(len(self.waiting)) for completion in super(AllAtOnce, self).step()]

    def abort(self, request_id: int) -> None:
        if all(request.request_id != request_id for request in self.waiting):
            raise ValueError(f"request {request_id} is not running")
        super().abort(request_id)


def test_an_error_while_aborting_does_not_hide_the_first_error() -> None:
    engine = AllAtOnce()
    it = collector(engine)

    class Broken(Bytes):
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            raise RuntimeError("the first error")

    it.tokenizer = Broken()
    with pytest.raises(RuntimeError, match="the first error"):
        it.collect("step 1", problems(2), 2, 0)
    assert not engine.waiting


def test_late_completions_of_an_aborted_run_are_ignored() -> None:
    """An asynchronous engine may finish a request during `abort` and return it from its next step."""

    class Late(ScriptedEngine):
        kept: tuple[Completion, ...] = ()

        def step(self) -> list[Completion]:
            done, self.kept = [*self.kept, *super().step()], ()
            return done

        def abort(self, request_id: int) -> None:
            self.kept = (*self.kept, *super().step())

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyError("stop")

    it = collector(Late())
    with pytest.raises(KeyError, match="stop"):
        it.collect("step 1", problems(2), 2, 0, on_progress=stop)
    assert it.engine.kept
    found = it.collect("step 2", problems(2), 2, 1)
    assert [len(group.scored) for group in found.groups] == [2, 2] and len(found.completions) == 4


def test_detokenization_is_spread_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine samples finish in the first step, and one in each later step. Detokenizing three of them takes a tenth of a
    step."""
    num_detokenized, now = [], [0.0]

    class Nine(ScriptedEngine):
        num_steps = 0

        def step(self) -> list[Completion]:
            num_detokenized.append(it.tokenizer.num)
            self.num_steps += 1
            now[0] += 10.0
            return [c for _ in range(9 if self.num_steps == 1 else 1) for c in super(Nine, self).step()]

    class Counting(Bytes):
        num = 0

        def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
            self.num += 1
            now[0] += 0.4
            return super().decode(ids, skip_special_tokens)

    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(collect, "time", clock)
    it = collector(Nine())
    it.tokenizer = Counting()
    found = it.collect("step 1", problems(3), 4, 0)
    assert num_detokenized == [0, 3, 6, 9]
    assert [len(group.scored) for group in found.groups] == [4, 4, 4]
    assert len(found.completions) == 12
