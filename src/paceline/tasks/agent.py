"""Agents: what drives a sample by calling the policy, any number of times, also concurrently.

The policy records every call as token ids. An agent sees nothing of training: it returns an outcome, and what it called
becomes the sample's trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.chat.messages import Message
from paceline.types import Completion


class AgentFailed(Exception):
    """Raised by an agent: its sample has failed. The text continues "sample 2: "."""


class PolicyError(Exception):
    """A call that the policy does not answer. It ends neither the sample nor the run; an agent may go on."""


class ContextOverflow(PolicyError):
    """The prompt leaves no room for a token in the model's context."""


class BudgetExhausted(PolicyError):
    """The sample has no tokens or calls left."""


class SampleEnded(PolicyError):
    """The sample has ended, by its agent or by its deadline; later calls are not answered."""


class Policy(Protocol):
    """The policy as the agent of one sample sees it. Temperature and truncation are those of the run."""

    tokenizer: Any
    max_model_len: int  # most tokens of a prompt and its completion

    async def generate(
        self, prompt_ids: Sequence[int], max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """One call. Cancelling it aborts the request. Raises PolicyError."""
        ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an agent returns at the end of its sample."""

    reward: float | None = None  # the agent's own; None: it gives none, and reward functions decide
    call_rewards: Mapping[int, float] = field(default_factory=dict)  # by request id, besides `reward`
    messages: list[Message] = field(default_factory=list)  # the whole conversation, for reward functions
    num_prompt_messages: int | None = None  # of these, the prompt's; None: those before the first assistant message
    metrics: Mapping[str, float] = field(default_factory=dict)  # for the records
    finish_reason: str | None = None  # None: that of the last call


class Agent(Protocol):
    """Drives one sample. An exception, or the time limit, costs this sample only."""

    async def run(self, policy: Policy) -> Outcome: ...
