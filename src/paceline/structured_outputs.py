"""What a completion's text must be: valid JSON, one of several strings, or a text of a grammar. Names are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """Exactly one of the first five. It applies from the first token on, and the completion ends with an
    end-of-sequence token where the text is complete."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema; kept as text
    regex: str | None = None  # Rust's syntax, of the whole text
    choice: tuple[str, ...] | None = None  # the text is one of these
    grammar: str | None = None  # in Lark's syntax, as llguidance reads it; begins with `start`
    json_object: bool | None = None  # any JSON object
    disable_any_whitespace: bool = False  # no whitespace between the parts of JSON
    whitespace_pattern: str | None = None  # a regex of the whitespace between the parts of JSON

    def __post_init__(self) -> None:
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", _schema_text(self.json))
        if isinstance(self.choice, list):
            object.__setattr__(self, "choice", tuple(self.choice))
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured_outputs: give one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}")
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not _is_unicode(value):
                raise ValueError(f"structured_outputs.{name}: must be Unicode text" + " or a dict" * (name == "json"))
        if self.choice is not None and not (
            isinstance(self.choice, tuple) and self.choice and all(_is_unicode(each) and each for each in self.choice)
        ):
            raise ValueError("structured_outputs.choice: must be a list of non-empty Unicode strings")
        for name in ("json_object", "disable_any_whitespace"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"structured_outputs.{name}: must be true or false")

    @property
    def kind(self) -> str:
        return next(name for name in KINDS if getattr(self, name) is not None)

    @property
    def num_characters(self) -> int:
        """Of what must be compiled."""
        texts = (self.json, self.regex, self.grammar, self.whitespace_pattern, *(self.choice or ()))
        return sum(len(text) for text in texts if text is not None)


def _schema_text(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(schema))
    except (TypeError, ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"structured_outputs.json: not a JSON schema: {reason}") from None


def _is_unicode(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False
