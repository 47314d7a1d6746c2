"""Problems in, scored groups out, in order, whoever was first."""

from __future__ import annotations

import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scripted import Bytes, Judge, ScriptedEngine

from paceline.rl import collect
from paceline.rl.collect import Collector
from paceline.tasks.task import Problem, Turn
from paceline.types import Completion, SamplingParams


def collector(engine: ScriptedEngine, judge: Judge | None = None, **kwargs: Any) -> Collector:
    return Collector(engine, Bytes(), judge or Judge(), sampling=SamplingParams(max_tokens=20), **kwargs)


def problems(num: int, **kwargs: Any) -> list[tuple[int, Problem]]:
    return [(10 + i, Problem(f"p{i}", f"prompt {i}", {"answer": i}, **kwargs)) for i in range(num)]


def test_order_goes_by_index_though_the_last_is_done_first() -> None:
    engine = ScriptedEngine(lambda request: f"{bytes(request.prompt_ids).decode()}!")
    found = collector(engine, Judge(lambda s: s.columns["answer"] + 0.5)).collect(3, problems(3), 2, "seed")
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


def test_noise_is_known_from_seed_place_sample_and_turn() -> None:
    def keys(seed: object) -> list[int]:
        engine = ScriptedEngine()
        collector(engine).collect(0, problems(2), 3, seed)
        return [request.noise_key for request in engine.submitted]

    assert keys("a") == keys("a") and len(set(keys("a"))) == 6
    assert not set(keys("a")) & set(keys("b"))


def test_failures_are_named_and_the_rest_is_scored() -> None:
    judge = Judge(lambda s: "would not say" if s.name.endswith("p1, sample 0") else 1.0)
    first, second = collector(ScriptedEngine(), judge).collect(4, problems(2), 2, 0).groups
    assert [r.failure for r in first.rollouts] == [None, None]
    assert second.rollouts[0].failure == "step 4, p1, sample 0: would not say" and math.isnan(second.rollouts[0].reward)
    assert second.scored == [second.rollouts[1]]


class Counts:
    """Says how often it was spoken to; ends at three, or as it is told."""

    def __init__(self, last: Any = None) -> None:
        self.turns, self.last = 0, last

    def prompt(self) -> str:
        return "go"

    def step(self, completion: str) -> Any:
        self.turns += 1
        if self.turns == 2 and self.last is not None:
            return self.last
        return Turn([{"role": "user", "content": f"<{self.turns}>"}] if self.turns < 3 else None, self.turns)


def test_turns() -> None:
    """What the environment says is in the stream with mask false, and is never tokenised again."""
    engine = ScriptedEngine(lambda request: f"{len(request.prompt_ids)};")
    (group,) = collector(engine, Judge(lambda s: s.env_reward)).collect(0, problems(1, make_env=Counts), 1, 0).groups
    (rollout,) = group.rollouts
    assert bytes(rollout.token_ids.tolist()).decode() == "2;<1>7;<2>12;"
    assert "".join("x" if chosen else "." for chosen in rollout.mask) == "xx...xx...xxx"
    assert (rollout.logprobs[~rollout.mask] == 0).all() and (rollout.logprobs[rollout.mask] < 0).all()
    assert rollout.num_turns == 3 and rollout.reward == 1 + 2 + 3 and rollout.text == "12;"
    assert [bytes(r.prompt_ids).decode() for r in engine.submitted] == ["go", "go2;<1>", "go2;<1>7;<2>"]
    assert [r.sampling.max_tokens for r in engine.submitted] == [20, 18, 16], "all turns share the room"
    assert len({r.noise_key for r in engine.submitted}) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("a word", "its environment's answer can't be used: AttributeError"),
        (Turn([{"no": "content"}]), "its environment's answer can't be used: KeyError"),
        (Turn([{"role": "user", "content": "x" * 300}]), "the context is full"),
    ],
)
def test_an_answer_that_can_not_be_used_costs_the_sample(answer: Any, reason: str) -> None:
    made = iter([Counts(answer), Counts()])
    found = collector(ScriptedEngine(), Judge(lambda s: s.env_reward)).collect(
        7, problems(1, make_env=lambda: next(made)), 2, 0
    )
    bad, good = found.groups[0].rollouts
    assert bad.failure is not None and bad.failure.startswith("step 7, p0, sample 0: ") and reason in bad.failure
    assert len(bad.token_ids) == len(bad.mask) == 2 + 3 + 2, "what it said is kept"
    assert good.failure is None and good.reward == 6


def test_environments_that_never_open_wait_together() -> None:
    """Were each waited for in its turn, this would take the better part of an hour."""

    class Hangs(Counts):
        def prompt(self) -> str:
            threading.Event().wait()
            return ""

    (group,) = collector(ScriptedEngine(), env_timeout_s=20 / 60).collect(0, problems(1, make_env=Hangs), 60, 0).groups
    assert all(
        "took more than train.env_timeout_s" in (r.failure or "") and not len(r.token_ids) for r in group.rollouts
    )
    assert all(np.isnan(r.reward) for r in group.rollouts)


class Enough(Exception):
    pass


def test_stopped_in_the_middle_it_leaves_nothing_running() -> None:
    engine = ScriptedEngine()

    def between(done: int, total: int) -> None:
        assert total == 6
        if done == 2:
            raise Enough

    with pytest.raises(Enough):
        collector(engine).collect(0, problems(2), 3, 0, between=between)
    assert len(engine.aborted) == 4 and engine.waiting == []


def test_stopped_while_rewards_are_awaited() -> None:
    release = threading.Event()

    def between(done: int, total: int) -> None:
        if done == total:
            raise Enough

    with pytest.raises(Enough):
        collector(ScriptedEngine(), Judge(lambda s: float(release.wait()))).collect(
            0, problems(1), 2, 0, between=between
        )
    release.set()


def test_a_prompt_that_the_engine_refuses_costs_its_samples() -> None:
    class Short(ScriptedEngine):
        def submit(self, request: Any) -> Any:
            if bytes(request.prompt_ids) == b"prompt 1":
                raise ValueError("the model's context is 4")
            return super().submit(request)

    first, second = collector(Short()).collect(0, problems(2), 2, 0).groups
    assert [r.failure for r in first.rollouts] == [None, None]
    assert [r.failure for r in second.rollouts] == [f"step 0, p1, sample {i}: the model's context is 4" for i in (0, 1)]


class AllAtOnce(ScriptedEngine):
    """And it knows what it has handed over."""

    def step(self) -> list[Completion]:
        return [completion for _ in range(len(self.waiting)) for completion in super(AllAtOnce, self).step()]

    def abort(self, request_id: int) -> None:
        if all(request.request_id != request_id for request in self.waiting):
            raise ValueError(f"request {request_id} is not running")
        super().abort(request_id)


def test_an_error_is_not_hidden_by_what_comes_of_giving_up() -> None:
    engine = AllAtOnce()
    it = collector(engine)

    class Broken(Bytes):
        def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
            raise RuntimeError("the first error")

    it.tokenizer = Broken()
    with pytest.raises(RuntimeError, match="the first error"):
        it.collect(0, problems(2), 2, 0)
    assert not engine.waiting


def test_what_was_given_up_and_is_told_of_later_is_nobodys() -> None:
    """As by an engine whose steps land when something is aborted: what ended then is returned by its next step."""

    class Late(ScriptedEngine):
        kept: tuple[Completion, ...] = ()

        def step(self) -> list[Completion]:
            done, self.kept = [*self.kept, *super().step()], ()
            return done

        def abort(self, request_id: int) -> None:
            self.kept = (*self.kept, *super().step())

    def stop(done: int, total: int) -> None:
        if done == 1:
            raise KeyError("mine")

    it = collector(Late())
    with pytest.raises(KeyError, match="mine"):
        it.collect(0, problems(2), 2, 0, between=stop)
    assert it.engine.kept
    found = it.collect(1, problems(2), 2, 1)
    assert [len(group.scored) for group in found.groups] == [2, 2] and len(found.completions) == 4


@pytest.mark.parametrize("has_env", [False, True])
def test_of_many_that_end_at_once_some_wait_for_the_next_step_unless_an_environment_waits(
    has_env: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine end in the first step, and one in each that follows; a device does not wait until all are put into words,
    of which three take a tenth of a step."""
    put_into_words, now = [], [0.0]

    class Nine(ScriptedEngine):
        num_steps = 0

        def step(self) -> list[Completion]:
            put_into_words.append(it.tokenizer.num)
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
    found = it.collect(0, problems(3, make_env=Counts) if has_env else problems(3), 4, 0)
    assert put_into_words[:2] == [0, 9] if has_env else put_into_words == [0, 3, 6, 9]
    assert [len(group.scored) for group in found.groups] == [4, 4, 4]
    assert len(found.completions) == (36 if has_env else 12)
