"""An episode: one sample while it is generated, then its rollouts.

Without an agent it is one call, of the problem's prompt. With one it is all calls of the agent (`calls`), which become
one or more trajectories (`trajectory`), each a rollout.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.chat.messages import Message, Prompt, as_messages
from paceline.rl.agent_loop import Ended
from paceline.rl.calls import Call, SamplePolicy
from paceline.rl.trajectory import Trajectory, in_order, trajectories
from paceline.tasks.agent import AgentFailed, BudgetExhausted, ContextOverflow, Outcome
from paceline.tasks.rewards import Sample
from paceline.tasks.task import Problem
from paceline.types import Request, Rollout, SamplingParams, noise_key


class Episode:
    def __init__(self, problem: Problem, group: int, sample: int, prompt_ids: tuple[int, ...]) -> None:
        self.problem, self.group, self.sample, self.prompt_ids = problem, group, sample, prompt_ids
        self.policy: SamplePolicy | None = None  # if the problem has an agent
        self.calls: list[Call] = []  # answered ones
        self.outcome: Outcome | None = None  # the agent's
        self.failure: str | None = None
        self.finish_reason = "abort"
        self.rollouts: list[Rollout] = []  # without scores, when it has ended
        self.text = ""  # the policy's last message

    @property
    def name(self) -> str:
        return f"{self.problem.name}, sample {self.sample}"

    def request(self, request_id: int, sampling: SamplingParams, seed: object) -> Request:
        """Without an agent. The noise key is unique to (seed, group, sample, turn); there is one turn."""
        key = noise_key(seed, self.group, self.sample, 0)
        return Request(request_id, self.prompt_ids, sampling, key, self.problem.name)

    # -- its end ------------------------------------------------------------------------------------------------------

    def fail(self, finish_reason: str, failure: str) -> None:
        self.finish_reason, self.failure = finish_reason, failure

    def end_agent(self, ended: Ended) -> None:
        """The agent has returned or raised. If it was refused a call and raised, the refusal is the reason."""
        assert self.policy is not None
        at_limits = self.policy.refusals | {call.finish_reason for call in self.policy.answered}
        limit = next((reason for reason in ("context", "budget") if reason in at_limits), None)
        if isinstance(ended, Outcome):
            try:
                self.outcome = checked(ended)
            except Exception as error:
                self.fail("crash", f"its agent's outcome can't be used: {_described(error)}")
                return
        elif self.policy.refusals or isinstance(ended, ContextOverflow | BudgetExhausted):
            self.outcome = Outcome()
        else:
            self.fail(
                "crash", str(ended) if isinstance(ended, AgentFailed) else f"its agent raised {_described(ended)}"
            )
            return
        last = in_order(self.policy.answered)[-1].finish_reason if self.policy.answered else "abort"
        self.finish_reason = self.outcome.finish_reason or limit or last

    def make_rollouts(self, tokenizer: Any, turn_weight: float) -> None:
        """`turn_weight`: of the agent's rewards in the sample's."""
        if self.policy is not None:
            self.calls = self.policy.answered
        found = trajectories(self.calls) or [Trajectory(self.prompt_ids)]
        turn_rewards = {id: turn_weight * reward for id, reward in self._call_rewards.items()} if turn_weight else {}
        for branch, trajectory in enumerate(found):
            last = trajectory.turns[-1].token_ids if trajectory.turns else np.empty(0, np.int32)
            # An array is faster than a list, whose elements the tokenizer would check one by one.
            text = tokenizer.decode(last, skip_special_tokens=True) if len(last) else ""
            rollout = Rollout(
                sample=self.sample, branch=branch, finish_reason=self.finish_reason, text=text, failure=self.failure,
                metrics=dict(self.outcome.metrics) if self.outcome is not None else {},
                **trajectory.fields(turn_rewards),
            )  # fmt: skip
            self.rollouts.append(rollout)

    @property
    def _call_rewards(self) -> dict[int, float]:
        """By request id; empty if one is not finite, because then the sample has no reward."""
        rewards = dict(self.outcome.call_rewards) if self.outcome is not None else {}
        return rewards if all(map(math.isfinite, rewards.values())) else {}

    # -- its reward ---------------------------------------------------------------------------------------------------

    def to_score(self, when: str) -> Sample:
        last = in_order(self.calls)[-1:]
        main = next((r for r in self.rollouts if last and _ends_with(r, last[0])), self.rollouts[0])
        prompt, messages = self._conversation()
        texts = [message.get("content") for message in messages or () if message["role"] == "assistant"]
        return Sample(
            name=f"{when}, {self.name}",
            prompt=prompt,
            completion=texts[-1] if texts and isinstance(texts[-1], str) else main.text,
            completion_ids=tuple(main.token_ids.tolist()),
            columns=self.problem.columns,
            env_reward=self._agent_reward(),
            task=self.problem.task,
            messages=messages,
        )

    def _conversation(self) -> tuple[Prompt, list[Message] | None]:
        """The prompt, and all messages after it; None without an agent, or if it gives none."""
        messages = self.outcome.messages if self.outcome is not None else []
        if not messages:
            return self.problem.prompt, None
        first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
        given = self.outcome.num_prompt_messages if self.outcome is not None else None
        num = first if given is None else given
        prompt = messages[:num]
        return self.problem.prompt if as_messages(self.problem.prompt) == prompt else prompt, messages[num:]

    def _agent_reward(self) -> float | None:
        if self.outcome is None:
            return None
        given = list(self.outcome.call_rewards.values())
        if self.outcome.reward is not None:
            given.append(self.outcome.reward)
        if not given and self.policy is not None and self.policy.refusals:
            return 0.0  # it ran out of context or budget before it could return a reward
        return sum(given) if given else None


def checked(outcome: Outcome) -> Outcome:
    """The outcome with numbers that are floats; metrics that are not finite are left out. Raises any exception if it is
    not one: agents are the user's code."""
    metrics = {str(name): float(value) for name, value in outcome.metrics.items()}
    for message in outcome.messages:
        if not isinstance(message.get("role"), str):
            raise ValueError(f"a message has no role: {str(message)[:80]}")
    return replace(
        outcome,
        reward=None if outcome.reward is None else float(outcome.reward),
        call_rewards={int(id): float(reward) for id, reward in outcome.call_rewards.items()},
        metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
    )


def _ends_with(rollout: Rollout, call: Call) -> bool:
    return (*rollout.prompt_ids, *rollout.token_ids.tolist()) == call.ids


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
