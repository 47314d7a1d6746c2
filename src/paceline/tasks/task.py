"""The types of a task: problems with stable names, and multi-turn environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.chat.messages import Message, Prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """The response of an environment to a completion."""

    observation: list[Message] | None  # the messages of the next turn; None: the episode has ended
    reward: float = 0.0  # a sample's environment reward is the sum over its turns


class Env(Protocol):
    """One episode, for one sample. `prompt` is called once, then `step` with each completion."""

    def prompt(self) -> Prompt: ...
    def step(self, completion: str) -> Turn: ...


@dataclass(frozen=True, slots=True)
class Problem:
    name: str  # stable across epochs and runs, e.g. "chain_sum/17": the key of the draft history
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)  # for rewards, e.g. `answer`
    make_env: Callable[[], Env] | None = None  # for a multi-turn problem; None: single-turn
    chat: bool = True  # apply the model's chat template
    max_tokens: int | None = None  # of a completion, over all turns; None: as many as the run allows
    task: str | None = None  # label of its task; None: the run has one task, without a label


class Task(Protocol):
    """Invariants: the same settings give the same problems in the same order; no held-out problem is trained on."""

    name: str
    train: list[Problem]
    held_out: list[Problem]
