"""The types of a task: problems with stable names, and environments of several turns."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.chat.messages import Message, Prompt
from paceline.chat.template import encode
from paceline.tasks.agent import Agent


@dataclass(frozen=True, slots=True)
class Turn:
    """The response of an environment to the policy's message."""

    observation: list[Message] | None  # the messages of the next turn; None: the episode has ended
    reward: float = 0.0  # of this turn; a sample's environment reward is the sum over its turns


class Env(Protocol):
    """One episode, for one sample. `reset` is called once, then `step` with each message of the policy. Methods may be
    async; others run in threads.

    Messages have OpenAI's format: {"role": "assistant", "content": "…", "tool_calls": […]}, the last only if there are
    calls. Optional attributes: `tools` (schemas, which the chat template shows to the model; then calls are parsed)
    and `chat_template_kwargs`, both read after `reset`; and a method `close()`, called at the end of the sample."""

    def reset(self) -> Prompt | Awaitable[Prompt]: ...
    def step(self, message: Message) -> Turn | Awaitable[Turn]: ...


@dataclass(frozen=True, slots=True)
class Problem:
    name: str  # stable across epochs and runs, e.g. "chain_sum/17": the key of the draft history
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)  # for rewards, e.g. `answer`
    make_agent: Callable[[], Agent] | None = None  # what drives a sample; None: one completion of the prompt
    chat: bool = True  # apply the model's chat template
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further variables of the chat template
    max_tokens: int | None = None  # of a completion, over all turns; None: as many as the run allows
    timeout_s: float | None = None  # of a sample with an agent; None: no limit
    max_calls: int | None = None  # of a sample with an agent; None: no limit
    max_parallel: int | None = None  # samples of the task whose agents run at the same time; None: no limit
    task: str | None = None  # label of its task; None: the run has one task, without a label

    def encode(self, tokenizer: Any) -> tuple[int, ...]:
        """The token ids of the prompt. Raises ValueError."""
        return encode(tokenizer, self.prompt, self.chat, template_kwargs=self.chat_template_kwargs)


class Task(Protocol):
    """Invariants: the same settings give the same problems in the same order; no held-out problem is trained on."""

    name: str
    train: list[Problem]
    held_out: list[Problem]

    def close(self) -> None:
        """End the threads and servers that its agents share. None of them runs any more."""
