"""Structured outputs in the bodies of requests: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from paceline.chat.messages import Tool
from paceline.serve.errors import ApiError
from paceline.serve.limits import Limits
from paceline.structured_outputs import StructuredOutputsParams
from paceline.types import SamplingParams

# The time to compile a schema grows with the square of the number of properties, and with the least common multiple of
# its `multipleOf`.
MAX_PROPERTIES = 1000
MAX_MULTIPLE = 10_000


class StructuredOutputs(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    json_: Any = Field(None, alias="json")  # text or an object; checked by StructuredOutputsParams
    regex: str | None = None
    choice: list[str] | None = Field(None, fail_fast=True)
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None


def response_structure(form: dict[str, Any] | None, limits: Limits) -> StructuredOutputsParams | None:
    """What OpenAI's `response_format` asks for. Raises ApiError."""
    key = "response_format"
    if form is None or form == {"type": "text"}:
        return None
    if form == {"type": "json_object"}:
        return structured_outputs(key, limits, json_object=True)
    if form.get("type") != "json_schema":
        raise ApiError(400, f"{key}.type: must be text, json_object or json_schema", key)
    inner = form.get("json_schema")
    # A schema holds for every completion, with `strict` and without.
    known = {"name", "description", "schema", "strict"}
    is_known = form.keys() == {"type", "json_schema"} and isinstance(inner, dict) and inner.keys() <= known
    if not is_known or not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise ApiError(400, f"{key}.json_schema: must have a schema, a name and perhaps strict and description", key)
    return structured_outputs(key, limits, json=inner["schema"])


def call_structure(grammar: str, tools: Sequence[Tool], limits: Limits) -> StructuredOutputsParams:
    """Of a forced call of one of these tools. Raises ApiError."""
    try:
        params = StructuredOutputsParams(grammar=grammar)
        _check_chars(params, limits)
        for tool in tools:  # not as text of the grammar: a description may contain `%json`
            _check_schema(tool)
        return params
    except ValueError as error:
        raise ApiError(400, f"tools: {error}", "tools") from None


def structured_outputs(key: str, limits: Limits, **values: Any) -> StructuredOutputsParams:
    """Raises ApiError that names the key of the body."""
    try:
        params = StructuredOutputsParams(**values)
        check_size(params, limits)
        return params
    except ValueError as error:
        message = str(error)
        raise ApiError(400, message if message.startswith(key) else f"{key}: {message}", key) from None


def check_size(params: StructuredOutputsParams, limits: Limits) -> None:
    """Raise ValueError for what may take too long to compile."""
    _check_chars(params, limits)
    for schema in _schemas(params):
        _check_schema(schema)


def _check_chars(params: StructuredOutputsParams, limits: Limits) -> None:
    if params.num_characters > limits.max_grammar_chars:
        raise ValueError(
            f"{params.num_characters} characters; this server allows {limits.max_grammar_chars} in a schema or grammar"
        )


def _check_schema(schema: Any) -> None:
    objects = list(_objects(schema))
    num_properties = max((len(each) for each in objects), default=0)
    if num_properties > MAX_PROPERTIES:
        raise ValueError(f"{num_properties} properties of an object; this server allows {MAX_PROPERTIES}")
    multiples = {_digits(each["multipleOf"]) for each in objects if "multipleOf" in each}
    if math.prod(multiples) > MAX_MULTIPLE:
        raise ValueError(f"multipleOf is too large; this server allows {MAX_MULTIPLE} as the product of all")


def _schemas(params: StructuredOutputsParams) -> Iterator[Any]:
    """All JSON schemas in it. Those within a grammar follow `%json`."""
    decoder = json.JSONDecoder()
    texts = [str(params.json)] if params.json is not None else (params.grammar or "").split("%json")[1:]
    for text in texts:
        try:
            yield decoder.raw_decode(text.lstrip())[0]
        except (ValueError, RecursionError):
            raise ValueError("not a valid JSON schema") from None


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _digits(number: Any) -> int:
    """Of a multiple: 0.25 counts as 25. What is no number counts as 1: it is no multiple, or an error later."""
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        return 1
    digits = int("".join(map(str, Decimal(repr(number)).as_tuple().digits)))
    return max(1, digits, int(abs(number)))


def with_structure(params: SamplingParams, structure: StructuredOutputsParams) -> SamplingParams:
    try:
        return replace(params, structured_outputs=structure)
    except ValueError as error:
        message = str(error).removeprefix("sampling.")
        raise ApiError(400, message, message.partition(" ")[0]) from None
