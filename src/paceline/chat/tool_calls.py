"""Tool calls in a model's text, in the formats of the common chat templates.

- hermes (Qwen2.5, Qwen3, Hermes): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number, also within text
- llama3_json (Llama 3): the whole text is `{"name": …, "parameters": {…}}`, several of them separated by `;`
- mistral: the whole text is `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]`; the marker is a special token, which the
  text may lack

What is not a valid call stays text, also a forced one with a number such as 1e999, which no double can hold.
"""

from __future__ import annotations

import json
import math
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not a number of JSON")


def _finite(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse(text)


DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse)  # what it reads can be written again
OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: str  # JSON
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:9])  # Mistral's templates require nine characters


Found = tuple[str, list[ToolCall]]  # text that is no tool call, and the calls after it


class ToolParser(ABC):
    """Gets a sample's text in pieces. What may become a call is held back until it is known to be one."""

    @abstractmethod
    def add(self, text: str) -> Found: ...
    @abstractmethod
    def finish(self) -> Found:
        """What is still held back."""
        ...


class HermesParser(ToolParser):
    def __init__(self) -> None:
        self._held, self._has_calls = "", False

    def add(self, text: str) -> Found:
        self._held += text
        content, calls = "", list[ToolCall]()
        while (start := self._held.find(OPEN)) >= 0 and (block := self._block(start)) is not None:
            call, end = block
            content += self._held[:end] if call is None else self._held[:start].rstrip()
            calls += [] if call is None else [call]
            self._held = self._held[end:]
        self._has_calls |= bool(calls)
        known = start if start >= 0 else len(self._held) - _overlap(self._held, OPEN)
        known = len(self._held[:known].rstrip())  # space before a call is not text
        content, self._held = content + self._held[:known], self._held[known:]
        return content, calls

    def _block(self, start: int) -> tuple[ToolCall | None, int] | None:
        """The call that begins at `start` and its end; no call and the end of what is none; or None: not known yet. The
        arguments may contain the closing mark."""
        begin = start + len(OPEN)
        first = end = self._held.find(CLOSE, begin)
        while end >= 0:
            if (call := _one_call(self._held[begin:end])) is not None:
                return call, end + len(CLOSE)
            end = self._held.find(CLOSE, end + 1)
        is_followed = first >= 0 and self._held.find(OPEN, first) >= 0
        return (None, first + len(CLOSE)) if is_followed else None

    def finish(self) -> Found:
        held, self._held = self._held, ""
        block = held.lstrip()
        call = _one_call(block.removeprefix(OPEN)) if block.startswith(OPEN) else None  # the end token was the mark
        if call is not None:
            return "", [call]
        return ("" if self._has_calls and not block else held), []


class WholeTextParser(ToolParser):
    """For formats without a mark that the text keeps: it is known at the end whether all of it are calls."""

    def __init__(self, first: str, mark: str) -> None:
        self._first, self._mark = first, mark  # the first character of a call, and a mark that may come before it
        self._held, self._is_text = "", False

    def add(self, text: str) -> Found:
        if self._is_text:
            return text, []
        self._held += text
        begun = self._held.lstrip()
        if not begun or begun.startswith((self._first, self._mark)) or self._mark.startswith(begun):
            return "", []
        self._is_text = True
        held, self._held = self._held, ""
        return held, []

    def finish(self) -> Found:
        held, self._held = self._held, ""
        content = held.strip().removeprefix(self._mark).strip()
        calls = self._calls(content) if content.startswith(self._first) else []
        return ("", calls) if calls else (held, [])

    def _calls(self, content: str) -> list[ToolCall]:
        """Empty if anything in it is no call."""
        values = _json(content) if self._first == "[" else _json_values(content)
        calls = [_to_call(value) for value in values] if isinstance(values, list) else []
        return [call for call in calls if call is not None] if None not in calls else []


def _json_values(text: str) -> list[Any] | None:
    """JSON values one after another, separated by semicolons."""
    values = list[Any]()
    while text := text.lstrip("; \n"):
        try:
            value, end = DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return None
        values.append(value)
        text = text[end:]
    return values


def _one_call(text: str) -> ToolCall | None:
    return _to_call(_json(text))


def _json(text: str) -> Any:
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _to_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write them as JSON in a string
        arguments = _json(arguments)
    return ToolCall(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of the text that begins the mark."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if text.endswith(mark[:n])), 0)


PARSERS = {
    "hermes": HermesParser,
    "llama3_json": lambda: WholeTextParser("{", "<|python_tag|>"),
    "mistral": lambda: WholeTextParser("[", "[TOOL_CALLS]"),
}


def parser_of(template: str | None) -> str | None:
    """The format that a chat template asks the model for; None if it has no tools, or an unknown format."""
    if not template or "tools" not in template:
        return None
    for mark, name in ((OPEN, "hermes"), ("[TOOL_CALLS]", "mistral"), ('"parameters"', "llama3_json")):
        if mark in template:
            return name
    return None


def to_api(calls: Sequence[ToolCall], first_index: int | None = None) -> list[dict[str, Any]]:
    """OpenAI's format; with indices in a stream."""
    return [
        ({} if first_index is None else {"index": first_index + i})
        | {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(calls)
    ]


def for_template(calls: Any) -> list[dict[str, Any]] | None:
    """A client's calls, as chat templates expect them: the arguments are an object. None if they are malformed."""
    found = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if call is None or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            return None
        arguments = function.get("arguments") or "{}"
        arguments = _json(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            return None
        identity = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return found
