"""What an agent returns, as the outcome of its sample."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from paceline.agents.endpoint import Session
from paceline.tasks.agent import AgentFailed, Outcome

EXPECTED = 'a number, {"reward": NUMBER, "metrics": {"NAME": NUMBER}}, or nothing'


def outcome_of(value: Any, session: Session) -> Outcome:
    """Raises AgentFailed if it is no number, object or None, or not finite."""
    metrics: Mapping[str, Any] = {}
    if isinstance(value, Mapping):
        metrics = value.get("metrics") or {}
        value = value.get("reward")
        if not isinstance(metrics, Mapping):
            raise AgentFailed(f"its agent returned metrics {_short(metrics)}; they must be an object of numbers")
    reward = None if value is None else _number("reward", value)
    found = {str(name): _number(f"metric {str(name)[:80]}", each) for name, each in metrics.items()}
    messages, num_prompt = session.backend.conversations.longest()
    return Outcome(reward=reward, messages=messages, num_prompt_messages=num_prompt, metrics=found)


def last_line(text: str) -> Any:
    """The value of the last line that is not empty, if it is JSON with a number or an object; else None."""
    line = next((each for each in reversed(text.splitlines()) if each.strip()), "")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_value = isinstance(value, dict) or (isinstance(value, int | float) and not isinstance(value, bool))
    return value if is_value else None


def _number(what: str, value: Any) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise AgentFailed(f"its agent returned {what} {_short(value)}; expected {EXPECTED}")
    return number


def _short(value: Any) -> str:
    return " ".join(repr(value).split())[:80]
