"""Agents: their calls become trajectories, for any order in which the engine answers."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.rl.collect import AgentRewards, Collected, Collector
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
