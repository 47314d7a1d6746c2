"""Agents: their calls become trajectories, for any order in which the engine answers."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.rl import agent_loop
from paceline.rl.collect import AgentRewards, Collector
from paceline.rl.collection import Collected
from paceline.tasks.agent import (
    AgentFailed,
    BudgetExhausted,
    ContextOverflow,
    Outcome,
    Policy,
    PolicyError,
    SampleEnded,
)
from paceline.tasks.task import Problem
from paceline.types import Completion, Request, Rollout, SamplingParams

Run = Callable[[Policy], Awaitable[Outcome]]


class Scripted:
    """An agent that is a function."""

    def __init__(self, run: Run) -> None:
        self.run = run


class RandomOrder(ScriptedEngine):
    """Answers one of the waiting requests at a time."""

    def __init__(self, seed: int, script: Callable[[Request], str]) -> None:
        super().__init__(script)
        self.random = random.Random(seed)

    def step(self) -> list[Completion]:
        self.random.shuffle(self.waiting)
        return super().step()


def agents(*runs: Run, **settings: Any) -> list[tuple[int, Problem]]:
    """A problem whose samples run these functions, in order."""
    waiting = iter(runs)
    return [(0, Problem("p0", "prompt", {}, lambda: Scripted(next(waiting)), **settings))]


def collect(
    problems: list[tuple[int, Problem]], num: int = 1, engine: ScriptedEngine | None = None, **settings: Any
) -> Collected:
    settings = {"sampling": SamplingParams(max_tokens=20), **settings}
    rewarder = settings.pop("rewarder", ScriptedRewarder(lambda sample: sample.env_reward or 0.0))
    it = Collector(engine or ScriptedEngine(), Bytes(), rewarder, **settings)
    return it.collect("step 1", problems, num, 7)


def ids(text: str) -> list[int]:
    return list(text.encode())


def text(rollout: Rollout) -> str:
    """The rollout, with what the policy sampled in brackets."""
    marked = bytes(rollout.prompt_ids).decode()
    before = False
    for token, chosen in zip(rollout.token_ids.tolist(), rollout.mask.tolist(), strict=True):
        marked += ("[" if chosen and not before else "]" if before and not chosen else "") + chr(token)
        before = chosen
    return marked + "]" * before


async def say(policy: Policy, prompt: str, **settings: Any) -> str:
    completion = await policy.generate(ids(prompt), **settings)
    return prompt + bytes(completion.token_ids.tolist()).decode()


# ---- trajectories ----


async def branches(policy: Policy) -> Outcome:
    """A tree of calls, some of them concurrent."""
    first = await say(policy, "go:")
    one, two = await asyncio.gather(say(policy, f"{first}<1>"), say(policy, f"{first}<2>"))
    await asyncio.gather(say(policy, f"{two}<4>"), say(policy, f"{one}<3>"), say(policy, "edited:"))
    return Outcome(1.0)


def counted(request: Request) -> str:
    return f"{len(request.prompt_ids)};"


def test_calls_that_extend_one_another_become_one_trajectory() -> None:
    (group,) = collect(agents(branches), engine=ScriptedEngine(counted)).groups
    assert list(map(text, group.rollouts)) == ["go:[3;]<1>[8;]<3>[13;]", "edited:[7;]", "go:3;<2>[8;]<4>[13;]"]
    assert [(r.sample, r.branch, r.num_turns) for r in group.rollouts] == [(0, 0, 3), (0, 1, 1), (0, 2, 2)]
    assert [r.turn_lengths for r in group.rollouts] == [(2, 2, 3), (2,), (2, 3)]
    assert [r.reward for r in group.rollouts] == [1.0] * 3 and group.rewards == [1.0]
    for rollout in group.rollouts:
        assert (rollout.logprobs[~rollout.mask] == 0).all() and (rollout.logprobs[rollout.mask] < 0).all()


def test_every_sampled_token_is_in_one_trajectory_for_any_order_of_answers() -> None:
    def drawn(request: Request) -> str:
        """Depends on the noise key, as an engine's tokens do."""
        return "".join(random.Random(request.noise_key).choices("abc", k=2))

    async def same_prompts(policy: Policy) -> Outcome:
        found = await asyncio.gather(*(say(policy, "p:") for _ in range(6)))
        await asyncio.gather(*(say(policy, f"{each}.") for each in found))
        return Outcome(0.5)

    seen = []
    for seed in range(8):
        found = collect(agents(branches, same_prompts), 2, RandomOrder(seed, drawn))
        seen.append([text(rollout) for rollout in found.groups[0].rollouts])
        sampled = sum(len(completion.token_ids) for completion in found.completions)
        assert sampled == sum(int(r.mask.sum()) for r in found.groups[0].rollouts) == 2 * 6 + 2 * 12
        assert [c.request for c in found.completions] == found.requests
    assert all(each == seen[0] for each in seen)


def test_a_call_with_the_same_prompt_has_other_noise() -> None:
    async def twice(policy: Policy) -> Outcome:
        await asyncio.gather(say(policy, "p"), say(policy, "p"), say(policy, "q"))
        return Outcome(0.0)

    keys = [[r.noise_key for r in collect(agents(twice, twice), 2, RandomOrder(i, counted)).requests] for i in (0, 1)]
    assert len(set(keys[0])) == 6 and set(keys[0]) == set(keys[1])


def test_a_prompt_may_go_on_where_the_completion_ended() -> None:
    async def directly(policy: Policy) -> Outcome:
        await say(policy, await say(policy, "go"))
        return Outcome(0.0)

    (group,) = collect(agents(directly)).groups
    (rollout,) = group.rollouts
    assert text(rollout) == "go[abab]" and rollout.num_turns == 2 and rollout.turn_lengths == (2, 2)


def test_calls_may_come_from_other_event_loops() -> None:
    """Those of an endpoint do."""

    async def in_thread(policy: Policy) -> Outcome:
        return Outcome(float(len(await asyncio.to_thread(lambda: asyncio.run(say(policy, "go"))))))

    (group,) = collect(agents(in_thread)).groups
    assert group.rewards == [4.0]


# ---- rewards ----


def test_rewards_of_turns_are_summed_and_kept() -> None:
    async def run(policy: Policy) -> Outcome:
        one = await policy.generate(ids("go"))
        two = await policy.generate([*ids("go"), *one.token_ids.tolist(), *ids("!")])
        return Outcome(0.5, {two.request.request_id: 2.0, one.request.request_id: 1.0}, metrics={"seconds": 2.0})

    (rollout,) = collect(agents(run)).groups[0].rollouts
    assert rollout.reward == 3.5 and rollout.turn_rewards == (1.0, 2.0) and rollout.metrics == {"seconds": 2.0}
    weighted = collect(agents(run), agent_rewards={None: AgentRewards(turn_weight=0.25)}).groups[0].rollouts
    assert weighted[0].turn_rewards == (0.25, 0.5)


def test_reward_functions_get_all_messages_after_the_prompt() -> None:
    said = [
        {"role": "assistant", "content": "A"},
        {"role": "tool", "content": "B"},
        {"role": "assistant", "content": "C"},
    ]

    async def run(policy: Policy) -> Outcome:
        await say(policy, "go")
        return Outcome(messages=[{"role": "user", "content": "prompt"}, *said])

    seen: list[Any] = []
    collect(agents(run), rewarder=ScriptedRewarder(lambda sample: seen.append(sample) or 1.0))
    assert seen[0].messages == said and seen[0].prompt == "prompt" and seen[0].completion == "C"
    assert seen[0].completion_ids == tuple(ids("ab")) and seen[0].env_reward is None


# ---- limits ----


async def until_refused(policy: Policy) -> Outcome:
    """Asks for more until it is refused."""
    said = "go"
    while True:
        said = await say(policy, f"{said}?")


def test_max_tokens_limits_each_trajectory() -> None:
    async def branches_until_refused(policy: Policy) -> Outcome:
        for prompt in ("a", "b"):
            with pytest.raises(BudgetExhausted, match="5 tokens"):
                said = prompt
                while True:
                    said = await say(policy, f"{said}?")
        return Outcome(1.0)

    found = collect(agents(branches_until_refused), sampling=SamplingParams(max_tokens=5))
    assert [text(r) for r in found.groups[0].rollouts] == ["a?[ab]?[ab]?[a]", "b?[ab]?[ab]?[a]"]
    assert [r.sampling.max_tokens for r in found.requests] == [5, 3, 1] * 2
    assert all(r.finish_reason == "budget" and r.is_truncated for r in found.groups[0].rollouts)


def test_max_calls() -> None:
    (group,) = collect(agents(until_refused, max_calls=3)).groups
    (rollout,) = group.rollouts
    assert rollout.num_turns == 3 and rollout.finish_reason == "budget" and rollout.failure is None


def test_a_full_context() -> None:
    engine = ScriptedEngine()
    engine.max_model_len = 10
    (rollout,) = collect(agents(until_refused), engine=engine).groups[0].rollouts
    assert text(rollout) == "go?[ab]?[ab]?[a]" and rollout.finish_reason == "context" and rollout.is_truncated
    assert [r.sampling.max_tokens for r in engine.submitted] == [7, 4, 1]

    async def too_long(policy: Policy) -> Outcome:
        with pytest.raises(ContextOverflow, match="11 tokens, but the model's context is 10"):
            await say(policy, "x" * 11)
        await say(policy, "short")
        return Outcome(1.0)

    assert collect(agents(too_long), engine=engine).groups[0].rollouts[0].finish_reason == "context"


class Ends(ScriptedEngine):
    """Its completions end at their limit, as an engine's do."""

    def step(self) -> list[Completion]:
        found = super().step()
        for completion in found:
            if len(completion.token_ids) == completion.request.sampling.max_tokens:
                completion.finish_reason = "length"
        return found


@pytest.mark.parametrize(
    ("max_tokens", "limits", "reason"),
    [
        (None, {}, "stop"), (1, {}, "length"), (2, {"max_tokens": 2}, "length"), (None, {"max_tokens": 2}, "budget"),
        (9, {"max_tokens": 2}, "budget"), (None, {"max_model_len": 4}, "context"), (None, {"max_model_len": 5}, "stop"),
        (2, {"max_model_len": 4}, "context"), (1, {"max_model_len": 4}, "length"),
    ],
)  # fmt: skip
def test_the_reason_of_a_completion_at_its_limit(max_tokens: int | None, limits: dict[str, int], reason: str) -> None:
    engine = Ends()
    engine.max_model_len = limits.get("max_model_len", 200)

    async def run(policy: Policy) -> Outcome:
        await say(policy, "go", max_tokens=max_tokens)
        return Outcome(1.0)

    found = collect(agents(run), engine=engine, sampling=SamplingParams(max_tokens=limits.get("max_tokens", 20)))
    assert found.groups[0].rollouts[0].finish_reason == reason


def test_penalties() -> None:
    async def named(policy: Policy) -> Outcome:
        await say(policy, "go")
        return Outcome(1.0, finish_reason="length")

    async def crashes(policy: Policy) -> Outcome:
        await say(policy, "go")
        raise RuntimeError("no more")

    async def hangs(policy: Policy) -> Outcome:
        await asyncio.Event().wait()
        return Outcome(1.0)

    engine, runs = ScriptedEngine(), (until_refused, named, crashes, hangs, branches)
    penalties = {"context": -0.5, "length": -0.25, "crash": -2.0, "timeout": 0.0}
    engine.max_model_len = 16
    rewards = {None: AgentRewards(penalties)}
    (group,) = collect(agents(*runs, timeout_s=0.2), 5, engine, agent_rewards=rewards).groups
    assert group.rewards == [-0.5, 0.75, -2.0, 0.0, 1.0], "of the fifth, no reason has a penalty"
    first, _, third, fourth, *fifth = group.rollouts
    assert first.rewards == {"judge": 0.0, "penalty": -0.5} and third.rewards == {"penalty": -2.0}
    assert [r.reward for r in fifth] == [1.0] * len(fifth) and len(fifth) > 1
    assert (
        third.finish_reason == "crash"
        and third.failure == "step 1, p0, sample 2: its agent raised RuntimeError: no more"
    )
    assert text(third) == "go[ab]", "it is trained on: it has a reward"
    assert fourth.finish_reason == "timeout" and not len(fourth.token_ids)
    assert fourth.failure == "step 1, p0, sample 3: its agent took more than task.timeout_s = 0.2 s"
    (group,) = collect(agents(*runs, timeout_s=0.2), 5, engine).groups
    assert group.rewards == [0.0, 1.0, 1.0], "without penalties, failed samples have no reward"


# ---- failures ----


async def works(policy: Policy) -> Outcome:
    for _ in range(3):
        await say(policy, "go")
        await asyncio.sleep(0.01)
    return Outcome(1.0)


class Rude(BaseException):
    pass


async def raises(error: BaseException) -> Outcome:
    raise error


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda policy: raises(AgentFailed("its tools are broken")), "its tools are broken"),
        (lambda policy: raises(SystemExit(3)), "its agent raised SystemExit: 3"),
        (lambda policy: raises(KeyboardInterrupt()), "its agent raised KeyboardInterrupt"),
        (lambda policy: asyncio.gather(raises(SystemExit(3))), "its agent raised SystemExit: 3"),
        (lambda policy: raises(Rude("hm")), "its agent raised Rude: hm"),
        (lambda policy: raises(asyncio.CancelledError()), "its agent was cancelled"),
        (lambda policy: asyncio.sleep(0, "garbage"), "its agent raised TypeError: returned str, no Outcome"),
        (lambda policy: asyncio.sleep(0, Outcome("high")), "its agent's outcome can't be used: ValueError"),
        (lambda policy: asyncio.sleep(0, Outcome(messages=[5])), "its agent's outcome can't be used: AttributeError"),
        (lambda policy: asyncio.sleep(0, Outcome(1.0, {"a": 1})), "its agent's outcome can't be used: ValueError"),
        (lambda policy: asyncio.sleep(0, Outcome(1.0, metrics={"a": "b"})), "outcome can't be used: ValueError"),
        (lambda policy: policy.generate([]), "its agent raised PolicyError: request 1: prompt_ids is empty"),
        (lambda policy: policy.generate(["x"]), "its agent raised PolicyError: invalid literal for int()"),
        (lambda policy: policy.generate(ids("a"), max_tokens=0), "PolicyError: sampling.max_tokens = 0"),
        (lambda policy: policy.generate(ids("a"), stop=[""]), "PolicyError: sampling.stop"),
        (None, "its agent raised TypeError"),
    ],
)
def test_a_failure_costs_only_its_sample(run: Any, reason: str) -> None:
    (group,) = collect(agents(run, works, works, works), 4).groups
    assert group.rewards == [1.0, 1.0, 1.0]
    failure = group.rollouts[0].failure
    assert failure is not None and failure.startswith("step 1, p0, sample 0: ") and reason in failure
    assert math.isnan(group.rollouts[0].reward) and group.rollouts[0].finish_reason == "crash"


def test_an_agent_may_go_on_after_a_refused_call() -> None:
    class Refuses(ScriptedEngine):
        def submit(self, request: Request) -> None:
            if request.prompt_ids[0] > 127:
                raise ValueError("token id 128 is not in the vocabulary")
            super().submit(request)

    async def run(policy: Policy) -> Outcome:
        with pytest.raises(PolicyError, match="not in the vocabulary"):
            await policy.generate([128])
        await say(policy, "go")
        return Outcome(1.0)

    (rollout,) = collect(agents(run), engine=Refuses()).groups[0].rollouts
    assert rollout.reward == 1.0 and rollout.finish_reason == "stop"


def test_no_call_is_answered_after_the_end() -> None:
    """Neither one that was made before, nor later ones, nor from another loop."""
    results: list[BaseException | None] = []
    done = threading.Event()

    async def leaves_calls(policy: Policy) -> Outcome:
        async def late() -> None:
            for _ in range(3):
                try:
                    await say(policy, "late")
                    results.append(None)
                except PolicyError as error:
                    results.append(error)
            done.set()

        policy.task = asyncio.create_task(late())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return Outcome(1.0)

    class Slow(ScriptedEngine):
        def step(self) -> list[Completion]:
            time.sleep(0.05)
            return [] if self.waiting and bytes(self.waiting[-1].prompt_ids) == b"late" else super().step()

    engine = Slow()
    (group,) = collect(agents(leaves_calls, works), 2, engine).groups
    assert done.wait(5) and [type(result) for result in results] == [SampleEnded] * 3
    assert group.rewards == [1.0, 1.0] and not engine.waiting, "the call was aborted"
    assert not len(group.rollouts[0].token_ids)


def test_a_cancelled_call_is_aborted() -> None:
    class Never(ScriptedEngine):
        def step(self) -> list[Completion]:
            time.sleep(0.001)
            return [] if self.waiting and bytes(self.waiting[-1].prompt_ids) == b"never" else super().step()

    async def gives_up(policy: Policy) -> Outcome:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(say(policy, "never"), 0.05)
        await say(policy, "go")
        return Outcome(1.0)

    engine = Never()
    (group,) = collect(agents(gives_up), engine=engine).groups
    assert text(group.rollouts[0]) == "go[ab]" and group.rewards == [1.0] and len(engine.aborted) == 1


def test_a_stopped_collection_stops_its_agents() -> None:
    cancelled = threading.Event()

    async def hangs(policy: Policy) -> Outcome:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Outcome(1.0)

    it = Collector(ScriptedEngine(), Bytes(), ScriptedRewarder(), sampling=SamplingParams(max_tokens=20))

    def stop(done: int, total: int) -> None:
        if done:
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        it.collect("step 1", agents(works, hangs), 2, 7, on_progress=stop)
    assert cancelled.wait(5)
    assert it.collect("step 2", agents(works), 1, 7).groups[0].rewards == [1.0]


@pytest.mark.parametrize("in_child", [False, True])
def test_an_agent_that_blocks_the_event_loop_costs_only_its_sample(
    in_child: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others run again, with the same tokens."""
    monkeypatch.setattr(agent_loop, "BLOCKED_S", 0.3)
    blocking = threading.Event()

    async def block() -> None:
        blocking.wait()

    async def blocks(policy: Policy) -> Outcome:
        await asyncio.sleep(0.02)
        await (asyncio.gather(block()) if in_child else block())
        return Outcome(1.0)

    def drawn(request: Request) -> str:
        return "".join(random.Random(request.noise_key).choices("abc", k=4))

    def others(*first: Run) -> list[tuple[int, Problem]]:
        runs = dict(enumerate((*first, works, branches)))
        counts = iter(range(99))
        again = len(runs)

        def make_agent() -> Scripted:
            i = next(counts)
            return Scripted(runs[i] if i < again else runs[i - again + 1])

        return [(0, Problem("p0", "prompt", {}, make_agent))]

    try:
        (group,) = collect(others(blocks), 3, ScriptedEngine(drawn)).groups
    finally:
        blocking.set()
    assert "its agent has blocked the event loop" in str(group.rollouts[0].failure) and group.rewards == [1.0, 1.0]

    async def nothing(policy: Policy) -> Outcome:
        return Outcome(0.0)

    (expected,) = collect(others(nothing), 3, ScriptedEngine(drawn)).groups
    assert list(map(text, group.rollouts[1:])) == list(map(text, expected.rollouts[1:]))


def test_pauses_of_generation_do_not_count() -> None:
    """No call is answered in them."""

    async def run(policy: Policy) -> Outcome:
        for _ in range(3):
            await say(policy, "go")
        return Outcome(1.0)

    it = Collector(ScriptedEngine(), Bytes(), ScriptedRewarder(), sampling=SamplingParams(max_tokens=20))
    collection = it.begin("step 1", agents(run, timeout_s=0.5), 1, 7)
    it.step()
    time.sleep(0.7)
    while not collection.is_generated:
        it.step()
    assert it.collected(collection).groups[0].rewards == [1.0]


# ---- max_parallel ----


def test_agents_wait_for_a_place_and_this_is_not_their_time() -> None:
    """Six agents of 0.9 s, two at a time: the last ones end after 2.7 s, more than the time limit of each."""
    num_running, most = 0, 0

    async def slow(policy: Policy) -> Outcome:
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        await asyncio.sleep(0.9)
        num_running -= 1
        await say(policy, "a")
        return Outcome(reward=1.0)

    found = collect(agents(*[slow] * 6, max_parallel=2, timeout_s=2.0), 6)
    assert [rollout.failure for rollout in found.groups[0].rollouts] == [None] * 6
    assert most == 2


def test_waiting_agents_of_an_aborted_collection_do_not_start() -> None:
    started: list[int] = []

    async def hang(policy: Policy) -> Outcome:
        started.append(1)
        await asyncio.sleep(60)
        return Outcome()

    rewarder = ScriptedRewarder(lambda sample: 0.0)
    collector = Collector(ScriptedEngine(), Bytes(), rewarder, sampling=SamplingParams(max_tokens=20))
    collection = collector.begin("step 1", agents(hang, hang, max_parallel=1), 2, 7)
    until = time.monotonic() + 10
    while not started and time.monotonic() < until:
        collector.step()
    collector.abort(collection)
    for _ in range(5):
        collector.step()
    assert started == [1]
