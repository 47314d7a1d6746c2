"""What there is to be learned: problems, each with a name that stays the same from epoch to epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

Message = dict[str, Any]  # {"role": …, "content": …}
Prompt = str | list[Message]


@dataclass(frozen=True, slots=True)
class Turn:
    """What an environment says to a completion: messages to go on with, or None at the end."""

    observation: list[Message] | None
    reward: float = 0.0  # a sample's environment reward is the sum over its turns


class Env(Protocol):
    """One episode, single-use: made for a sample, asked for its prompt once, then told each completion."""

    def prompt(self) -> Prompt: ...
    def step(self, completion: str) -> Turn: ...


@dataclass(frozen=True, slots=True)
class Problem:
    name: str  # stable across epochs and runs, e.g. "chain_sum/17": draft history hangs on it
    prompt: Prompt
    columns: dict[str, Any] = field(default_factory=dict)  # `answer` and what else rewards may want
    make_env: Callable[[], Env] | None = None  # multi-turn; None: the answer is the first completion


class Task(Protocol):
    """Always: the same settings give the same problems in the same order; no held-out problem is trained on."""

    name: str
    train: list[Problem]
    held_out: list[Problem]


def as_messages(prompt: Prompt, system: str | None = None) -> list[Message]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [{"role": "system", "content": system}, *messages] if system else messages
