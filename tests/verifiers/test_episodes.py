"""Episodes of `verifiers` with a scripted policy: exact ids, tools, rewards, and what failures cost."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from verifiers_support import ScriptedPolicy, section

from paceline.agents import verifiers_agent
from paceline.agents.verifiers_task import VerifiersTask
from paceline.tasks.agent import AgentFailed, ContextOverflow, Outcome

pytestmark = pytest.mark.verifiers
CALL = 'Let me see.\n<tool_call>\n{"name": "count",  "arguments": {"text": "bbb"}}\n</tool_call>'


def make_problems(**changes: Any) -> dict[str, Any]:
    """By letter."""
    problems = VerifiersTask(section(held_out=0, **changes)).train
    return {problem.columns["letter"]: problem for problem in problems}


def run(policy: ScriptedPolicy, letter: str = "b", **changes: Any) -> Outcome:
    return asyncio.run(make_problems(**changes)[letter].make_agent().run(policy))


def begins_with(ids: list[int], *parts: list[int]) -> bool:
    expected = [token for part in parts for token in part]
    return ids[: len(expected)] == expected


def test_an_episode_gives_the_rewards_and_metrics_of_the_taskset(tokenizer):
    policy = ScriptedPolicy(tokenizer, "bb", "xx")
    outcome = run(policy, harness={"branches": 0})
    assert outcome.reward == pytest.approx(2.0 * 0.5 + 0.5)
    assert outcome.metrics == {"num_turns": 2.0, "reward/share": 1.0, "reward/done": 0.5}
    assert [message["content"] for message in outcome.messages] == ["say b", "bb", "2 letters", "xx"]
    assert policy.limits == [(None, ()), (None, ())]
    assert outcome.finish_reason is None


def test_later_calls_have_the_sampled_ids(tokenizer):
    policy = ScriptedPolicy(tokenizer, "b", "bb", "bbb", "bbbb")
    run(policy)
    first, second, *questions = policy.calls
    assert begins_with(second[0], *first)
    assert len(questions) == 2 and questions[0][0] != questions[1][0]
    for prompt, _ in questions:
        assert begins_with(prompt, *second)
    text = tokenizer.decode(second[0])
    assert text.endswith(
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\n1 letters<|im_end|>\n<|im_start|>assistant\n"
    )


def test_tool_calls_are_parsed_and_their_answers_are_not_tokenized_again(tokenizer):
    """The template would write the arguments with one space, the policy wrote two."""
    policy = ScriptedPolicy(tokenizer, CALL, "bbb")
    outcome = run(policy, harness={"branches": 0})
    call, result = outcome.messages[1], outcome.messages[2]
    assert call["content"] == "Let me see."
    assert call["tool_calls"][0]["function"] == {"name": "count", "arguments": '{"text": "bbb"}'}
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", call["tool_calls"][0]["id"], "3")
    first, second = policy.calls
    assert begins_with(second[0], *first)
    function = {"name": "count", "arguments": {"text": "bbb"}}
    messages = [{"role": "user", "content": "say b"}, {**call, "tool_calls": [{"function": function}]}]
    again = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)[:-1]  # without the last newline
    assert first[1] != again[-len(first[1]) :], "a client that tokenizes anew has other ids"
    assert run(ScriptedPolicy(tokenizer, CALL, "bbb"), harness={"branches": 0}) == outcome, "also the ids of the calls"


def test_the_trace_has_the_sampled_ids_and_logprobs(tokenizer, monkeypatch):
    episodes = []
    outcome = verifiers_agent.outcome
    monkeypatch.setattr(verifiers_agent, "outcome", lambda *args: (episodes.append(args[0]), outcome(*args))[1])
    policy = ScriptedPolicy(tokenizer, "b", "bb", "bbb", "bbbb")
    run(policy)
    branches = episodes[0].traces[0].branches
    assert len(branches) == 2
    for branch in branches:
        calls = [call for call in policy.calls if begins_with(branch.token_ids, *call)]
        assert len(calls) == 3 and branch.token_ids == [*calls[-1][0], *calls[-1][1]]
        sampled = [token for token, is_sampled in zip(branch.token_ids, branch.sampled_mask, strict=True) if is_sampled]
        assert sampled == [token for _, ids in calls for token in ids]
        logprobs = [value for value, is_sampled in zip(branch.logprobs, branch.sampled_mask, strict=True) if is_sampled]
        assert logprobs == [-float(i) for _, ids in calls for i in range(len(ids))]


def test_limits_of_the_seat_end_the_episode(tokenizer):
    params = {"agent": {"runtime": {"type": "subprocess"}, "max_turns": 1, "sampling": {"max_tokens": 7}}}
    policy = ScriptedPolicy(tokenizer, "bb")
    outcome = run(policy, params=params)
    assert (len(policy.calls), outcome.finish_reason) == (1, "budget")
    assert policy.limits == [(7, ())]
    assert outcome.reward == pytest.approx(2.0), "the trace so far is scored"


def test_samples_at_once_do_not_mix(tokenizer):
    problems = make_problems()

    async def all_at_once(policies: dict[str, ScriptedPolicy]) -> dict[str, Outcome]:
        outcomes = await asyncio.gather(*(problems[name].make_agent().run(policies[name]) for name in policies))
        return dict(zip(policies, outcomes, strict=True))

    policies = {letter: ScriptedPolicy(tokenizer, letter * 3, delay_s=0.01) for letter in problems}
    outcomes = asyncio.run(all_at_once(policies))
    for letter, policy in policies.items():
        assert outcomes[letter].reward == pytest.approx(2.5)
        assert all(f"say {letter}" in tokenizer.decode(prompt) for prompt, _ in policy.calls)
        assert len(policy.calls) == 4


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ("raise", "HarnessError: harness 'letters': RuntimeError: the harness is broken"),
        ("logit_bias", "ProviderError: logit_bias = {'1': 5}: not supported while a policy is trained"),
        ("score", "TaskError: .*the reward is broken"),
    ],
)
def test_a_failure_names_its_cause_and_costs_only_its_sample(tokenizer, trouble, message):
    problems = make_problems(harness={"trouble": trouble})

    async def both() -> list[Any]:
        runs = (problems[letter].make_agent().run(ScriptedPolicy(tokenizer, letter)) for letter in "ba")
        return await asyncio.gather(*runs, return_exceptions=True)

    failed, other = asyncio.run(both())
    with pytest.raises(AgentFailed, match=message):
        raise failed
    assert other.reward == pytest.approx(2.5)


def test_an_overflow_is_reported_as_one(tokenizer):
    with pytest.raises(ContextOverflow, match="4097 tokens"):
        run(ScriptedPolicy(tokenizer, "b", ContextOverflow("4097 tokens")))


def test_a_harness_may_go_on_after_a_refused_call(tokenizer):
    policy = ScriptedPolicy(tokenizer, "b", ContextOverflow("4097 tokens"))
    assert run(policy, harness={"tolerant": True}).reward == pytest.approx(2.0)


def test_a_sample_can_be_cancelled(tokenizer):
    """As the collector does at its time limit."""
    problems = make_problems(harness={"trouble": "hang"})

    async def with_limit() -> Outcome:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(problems["b"].make_agent().run(ScriptedPolicy(tokenizer, "b")), 3)
        return await problems["a"].make_agent().run(ScriptedPolicy(tokenizer, "a"))

    assert asyncio.run(with_limit()).reward == pytest.approx(2.5)


def test_a_harness_that_blocks_its_event_loop_costs_no_later_sample(tokenizer, monkeypatch):
    monkeypatch.setattr(verifiers_agent, "BLOCKED_S", 0.5)
    problems = make_problems(harness={"trouble": "block"})

    async def with_limit() -> Outcome:
        await problems["a"].make_agent().run(ScriptedPolicy(tokenizer, "a"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(problems["b"].make_agent().run(ScriptedPolicy(tokenizer, "b")), 2)
        return await problems["a"].make_agent().run(ScriptedPolicy(tokenizer, "a"))

    started = time.perf_counter()
    assert asyncio.run(with_limit()).reward == pytest.approx(2.5)
    assert time.perf_counter() - started < 15, "the harness sleeps for 20 seconds"


def test_an_environment_that_does_not_start_fails_its_samples(tokenizer):
    with pytest.raises(AgentFailed, match="does not start: OSError: no port is free"):
        run(ScriptedPolicy(tokenizer, "b"), name="closed_letters")


def test_the_policy_may_not_play_two_agents_of_an_episode(tokenizer):
    params = {"id": "best-of-n", "agent": {"runtime": {"type": "subprocess"}}}
    with pytest.raises(AgentFailed, match=r"the policy played \d agents of one episode"):
        run(ScriptedPolicy(tokenizer, "b"), params=params)


def test_tools_of_a_taskset_run_in_their_own_process(tokenizer, monkeypatch):
    """The server starts with the first sample, serves all of them, and ends with the environment."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "tasksets"))
    params = {"agent": {"runtime": {"type": "subprocess"}}}
    problems = make_problems(name="tool_letters", params=params)
    policies = {letter: ScriptedPolicy(tokenizer, CALL, letter) for letter in "abc"}

    async def run_all() -> list[Outcome]:
        return await asyncio.gather(*(problems[name].make_agent().run(policies[name]) for name in policies))

    for outcome, (letter, policy) in zip(asyncio.run(run_all()), policies.items(), strict=True):
        assert [message["role"] for message in outcome.messages] == ["user", "assistant", "tool", "assistant"]
        assert outcome.messages[2]["content"] == "3"
        assert '"name": "count"' in tokenizer.decode(policy.calls[0][0]), "the model sees the tool"
        assert outcome.reward == pytest.approx(0.5 + 2.0 * f"Let me see.{letter}".count(letter) / 12)


def test_threads_end_with_their_environment(tokenizer):
    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "verifiers"}

    gc.collect()
    before = threads()
    problems = make_problems()
    asyncio.run(problems["a"].make_agent().run(ScriptedPolicy(tokenizer, "a")))
    (thread,) = threads() - before
    del problems
    gc.collect()
    thread.join(5)
    assert not thread.is_alive()


def test_settings_of_the_task_reach_template_and_problem(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{% if terse %}terse: {% endif %}" + tokenizer.chat_template)
    settings = {"chat_template_kwargs": {"terse": True}, "max_parallel": 2}
    problem = make_problems(**settings, harness={"turns": 1, "branches": 0})["a"]
    assert (problem.chat_template_kwargs, problem.max_parallel) == ({"terse": True}, 2)
    policy = ScriptedPolicy(tokenizer, "a")
    asyncio.run(problem.make_agent().run(policy))
    assert tokenizer.decode(policy.calls[0][0]).startswith("terse: ")
