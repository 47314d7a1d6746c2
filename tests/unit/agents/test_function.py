"""Agents that are functions of the user."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_templates import sampled, tokenizer_of
from scripted_policy import ScriptedPolicy

from paceline.agents.endpoint import Endpoint
from paceline.agents.function import FunctionAgent, _Call, import_agent
from paceline.tasks.agent import AgentFailed, BudgetExhausted


@pytest.fixture(scope="module")
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture(autouse=True)
def functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def agent_of(endpoint: Endpoint, name: str) -> tuple[FunctionAgent, ScriptedPolicy]:
    tokenizer = tokenizer_of("smollm2")
    policy = ScriptedPolicy(tokenizer, lambda ids: sampled(tokenizer, "the name"))
    return FunctionAgent(endpoint, import_agent(f"broken_agents:{name}"), {"answer": "3"}), policy


@pytest.mark.parametrize(("name", "reward"), [("good", 8.0), ("not_async", 8.0), ("silent", None)])
def test_rewards(endpoint: Endpoint, name: str, reward: float | None) -> None:
    agent, policy = agent_of(endpoint, name)
    outcome = asyncio.run(agent.run(policy))
    assert outcome.reward == reward and outcome.metrics == ({"answer": 3.0} if name == "good" else {})
    assert [message["content"] for message in outcome.messages] == ["add", "the name"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raises", r"raised KeyError: 'lost' \(.*broken_agents.py, line \d+\)"),
        ("tells", r"raised KeyError: '\$OPENAI_BASE_URL \$OPENAI_API_KEY'"),
        ("exits", "raised SystemExit: 3"),
        ("stops", "raised RuntimeError: coroutine raised StopIteration"),
        ("text", "returned reward 'much'; expected a number"),
    ],
)
def test_a_broken_function_fails(endpoint: Endpoint, name: str, message: str) -> None:
    agent, policy = agent_of(endpoint, name)
    with pytest.raises(AgentFailed, match=message):
        asyncio.run(agent.run(policy))


def test_one_that_ends_by_a_refused_call_keeps_its_conversation(endpoint: Endpoint) -> None:
    """Reward functions get messages of every sample that has not failed."""
    agent, policy = agent_of(endpoint, "asks_twice")
    answers = [sampled(policy.tokenizer, "the name"), BudgetExhausted("no calls left")]
    policy = ScriptedPolicy(policy.tokenizer, lambda ids: answers.pop(0))
    outcome = asyncio.run(agent.run(policy))
    assert [message["content"] for message in outcome.messages] == ["add", "the name"] and outcome.reward is None


def test_one_that_is_cancelled_at_once_does_not_run() -> None:
    async def never_ends() -> None:
        await asyncio.Event().wait()

    calls = [_Call(never_ends) for _ in range(20)]
    for call in calls:
        call.cancel()
    assert all(isinstance(call.result.result(5)[1], asyncio.CancelledError) for call in calls)


@pytest.mark.parametrize("name", ["blocks", "blocks_its_loop"])
def test_one_that_blocks_delays_no_other(endpoint: Endpoint, name: str) -> None:
    blocking, policy = agent_of(endpoint, name)
    good, other = agent_of(endpoint, "good")

    async def main() -> None:
        running = asyncio.create_task(blocking.run(policy))
        await asyncio.sleep(0.1)
        await good.run(other)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    started = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - started < 2.5, "the deadline of one that blocks is kept"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("broken_agents", "write a function as module:function"),
        ("lost_module:f", "can't be imported .ModuleNotFoundError.*; install it"),
        ("broken_agents:lost", "has no attribute 'lost'"),
        ("broken_agents:ASK", "is not a function"),
        ("broken_agents:no_arguments", "too many positional arguments; write async def no_arguments"),
    ],
)
def test_import_agent(path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        import_agent(path)
    assert str(Path.cwd()) in sys.path
