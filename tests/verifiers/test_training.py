"""RL on an environment of `verifiers`, with a tiny model and no network: the policy that is trained makes its calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import lines, make, policy

from paceline.agents import verifiers_client
from paceline.chat.conversation import Conversations

pytestmark = pytest.mark.verifiers
NUM_STEPS = 3
PARAMS = {
    "agent": {
        "runtime": {"type": "subprocess"},
        "harness": {"id": "letters", "turns": 2, "branches": 2},
        "sampling": {"max_tokens": 8},
    }
}
Call = tuple[tuple[int, ...], tuple[int, ...]]  # prompt and completion


def settings(params: dict[str, Any] = PARAMS) -> tuple[str, ...]:
    return (
        "task.kind=verifiers", "task.name=letters", f"task.params={json.dumps(params).replace(':', '=')}",
        "task.chat=true", "task.held_out=2", 'reward.functions=["env"]', "sampling.max_tokens=40",
        f"train.num_steps={NUM_STEPS}", "engine.threads=1", "learner.threads=1",
    )  # fmt: skip


def train(folder: Path, name: str, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], int]:
    """Rollouts, weights, and accepted draft tokens."""
    trainer = make(folder, name, *settings(), *overrides)
    before = policy(trainer)
    trainer.run()
    weights = policy(trainer)
    trainer.close()
    assert any(not torch.equal(weights[key], before[key]) for key in weights), "nothing was trained"
    return lines(folder / name, "rollouts"), weights, sum(m["num_accepted_tokens"] for m in trainer.callback.metrics)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """All calls that verifiers got answers to."""
    found: list[Call] = []
    respond = verifiers_client.PolicyClient.get_response

    async def record(self: Any, *args: Any, **options: Any) -> Any:
        response = await respond(self, *args, **options)
        found.append((tuple(response.tokens.prompt_ids), tuple(response.tokens.completion_ids)))
        return response

    monkeypatch.setattr(verifiers_client.PolicyClient, "get_response", record)
    return found


def mask_of(rollout: dict[str, Any]) -> list[bool]:
    return [bool(each) for each in rollout.get("mask", [1] * len(rollout["token_ids"]))]


def sampled(rollout: dict[str, Any]) -> list[int]:
    return [token for token, is_sampled in zip(rollout["token_ids"], mask_of(rollout), strict=True) if is_sampled]


def unmatched(rollouts: list[dict[str, Any]], calls: list[Call]) -> list[dict[str, Any]]:
    """Rollouts whose trained tokens are not exactly the completions of a chain of calls."""
    found = []
    for rollout in rollouts:
        ids = (*rollout["prompt_ids"], *rollout["token_ids"])
        expected = [False] * len(ids)
        for prompt, completion in calls:
            end = len(prompt) + len(completion)
            if len(prompt) >= len(rollout["prompt_ids"]) and ids[:end] == (*prompt, *completion):
                expected[len(prompt) : end] = [True] * len(completion)
        if expected[len(rollout["prompt_ids"]) :] != mask_of(rollout) or not any(expected):
            found.append(rollout)
    return found


def test_three_steps_train_on_exactly_the_tokens_that_were_sampled(tmp_path, calls, only_loopback):
    rollouts, _, _ = train(tmp_path, "run")
    assert only_loopback == [], "no connection to another host was tried"
    assert {rollout["step"] for rollout in rollouts} == set(range(NUM_STEPS))
    assert all(rollout.get("failure") is None for rollout in rollouts)
    assert unmatched(rollouts, calls) == []
    wrong = next({**rollout, "mask": [True] * len(rollout["token_ids"])} for rollout in rollouts if "mask" in rollout)
    assert unmatched([wrong], calls) == [wrong]
    assert sorted(token for rollout in rollouts for token in sampled(rollout)) == sorted(
        token for _, completion in calls for token in completion
    ), "every sampled token is trained on once"
    samples = {(rollout["group"], rollout["sample"]) for rollout in rollouts}
    assert len(samples) == NUM_STEPS * 2 * 4
    assert len(rollouts) == 2 * len(samples), "two questions at once: two sequences for each sample"
    assert all(len({r["reward"] for r in rollouts if (r["group"], r["sample"]) == key}) == 1 for key in samples)
    rewards = [rollout["reward"] for rollout in rollouts]
    assert len(set(rewards)) > 4 and all(0.5 <= reward <= 2.5 for reward in rewards)
    assert rollouts[0]["metrics"]["num_turns"] == 4.0


def test_a_client_that_tokenizes_answers_again_is_caught(tmp_path, calls, monkeypatch):
    """Deliberately broken: the prompt of a later call has the ids of its text. Random models sample bytes that are no
    text, which do not survive this."""
    extend = Conversations._extend

    def retokenize(self: Conversations, *args: Any) -> Any:
        found = extend(self, *args)
        if found is None:
            return None
        ids = self._tokenizer.encode(self._tokenizer.decode(found.token_ids), add_special_tokens=False)
        return type(found)(found.messages, found.text, tuple(ids))

    monkeypatch.setattr(Conversations, "_extend", retokenize)
    rollouts, _, _ = train(tmp_path, "broken", "train.num_steps=1")
    samples = {(rollout["group"], rollout["sample"]) for rollout in rollouts}
    assert len(rollouts) > 2 * len(samples)


KEYS = ("step", "problem", "sample", "branch", "prompt_ids", "token_ids", "mask", "reward", "advantage", "metrics")


def test_speculation_changes_nothing(tmp_path):
    def kept(rollouts: list[dict[str, Any]]) -> list[list[Any]]:
        return [[rollout.get(key) for key in KEYS] for rollout in rollouts]

    evaluate = "train.eval_every=3"
    plain, weights, accepted = train(tmp_path, "plain", evaluate)
    assert accepted == 0
    drafts = ("speculation.method=suffix", "speculation.prompt_lookup_min=1")
    drafted, others, accepted = train(tmp_path, "suffix", evaluate, *drafts)
    assert accepted > 0, "the test needs accepted drafts"
    assert kept(drafted) == kept(plain)
    assert all(torch.equal(others[name], tensor) for name, tensor in weights.items())
    seeded, _, _ = train(tmp_path, "seed", "train.seed=1", evaluate)
    assert kept(seeded) != kept(plain), "otherwise this would compare too little"


def test_an_episode_that_fails_is_not_trained_on(tmp_path):
    agent = {**PARAMS["agent"], "harness": {"id": "letters", "trouble": "raise"}}  # if it is asked for b
    trainer = make(tmp_path, "failing", *settings({"agent": agent}), "train.groups_per_step=10", "train.num_steps=1")
    trainer.run()
    trainer.close()
    rollouts = lines(tmp_path / "failing", "rollouts")
    failed = [rollout for rollout in rollouts if rollout.get("failure") is not None]
    assert {rollout["problem"] for rollout in failed} == {"letters/1"}
    assert all("the harness is broken" in rollout["failure"] for rollout in failed)
    assert len({rollout["problem"] for rollout in rollouts}) == 10
