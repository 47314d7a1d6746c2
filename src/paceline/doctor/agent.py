"""`paceline train --dry-run` of an agent: it is started once, on the first problem, with fixed text as answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.config import TaskSection
from paceline.engine.sequence import NO_SOURCE
from paceline.tasks.agent import AgentFailed, BudgetExhausted, ContextOverflow, Outcome
from paceline.tasks.task import Problem
from paceline.types import Completion, Provenance, Request

MAX_CALLS = 20
TIMEOUT_S = 120.0


class FixedPolicy:
    """Gives the same answer to every call."""

    def __init__(self, tokenizer: Any, text: str, max_model_len: int) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self.num_calls = 0
        self._ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)

    async def generate(
        self, prompt_ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        if len(prompt_ids) >= self.max_model_len:
            raise ContextOverflow(f"the prompt has {len(prompt_ids)} tokens; the context is {self.max_model_len}")
        if self.num_calls >= MAX_CALLS:
            raise BudgetExhausted(f"a dry run answers {MAX_CALLS} calls")
        self.num_calls += 1
        ids = self._ids[:max_tokens]
        zeros, numbers = np.zeros(len(ids)), np.zeros(len(ids), np.int32)
        provenance = np.full(len(ids), Provenance.SAMPLED, np.uint8)
        sources = np.full(len(ids), NO_SOURCE, np.uint8)
        request = Request(self.num_calls, tuple(prompt_ids))
        return Completion(request, ids, zeros, zeros, numbers, provenance, sources, (), "stop")


def try_agent(section: TaskSection, first: Problem, tokenizer: Any, text: str, max_model_len: int) -> str:
    """What the agent of the first problem did. Raises ValueError if it failed."""
    what = section.agent or " ".join(section.command or [])
    key = f"task.agent = {section.agent!r}" if section.agent is not None else f"task.command = {section.command!r}"
    policy = FixedPolicy(tokenizer, text, max_model_len)
    try:
        outcome = asyncio.run(_run(first, policy))
    except TimeoutError:
        raise ValueError(f"{key}: the agent did not end within {TIMEOUT_S:g} s on the first problem") from None
    except AgentFailed as error:
        remedy = f"correct it; the policy answered {policy.num_calls} calls with {text!r}"
        raise ValueError(f"{key}: on the first problem, {error}; {remedy}") from None
    reward = "no reward of its own" if outcome.reward is None else f"reward {outcome.reward:.3g}"
    return f"{what}; on the first problem, with {text!r} as answers: {policy.num_calls} calls, {reward}"


async def _run(first: Problem, policy: FixedPolicy) -> Outcome:
    assert first.make_agent is not None
    async with asyncio.timeout(TIMEOUT_S):
        return await first.make_agent().run(policy)
