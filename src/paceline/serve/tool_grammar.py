"""The grammar of a forced tool call: one of the given functions, in the model's own format (`tool_calls`), with
arguments of the function's JSON schema. The grammar is Lark's, as llguidance reads it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.chat.messages import Tool
from paceline.serve.errors import ApiError

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def call_grammar(form: str, tools: Sequence[Tool], several: bool, tokenizer: Any) -> str:
    """At least one call; exactly one, if not `several`. Raises ApiError."""
    before, arguments, separator, after = {
        "hermes": (_text("<tool_call>\n"), "arguments", '"\\n"', _text("\n</tool_call>")),
        "llama3_json": ("", "parameters", '"; "', ""),
        "mistral": ("", "arguments", '", "', ""),
    }[form]
    rules, names = list[str](), list[str]()
    for i, tool in enumerate(tools):
        name = json.dumps(tool["function"]["name"], ensure_ascii=False)
        head = _text(f'{{"name": {name}, "{arguments}": ')
        rules += [f'f{i}: {before} {head} a{i} "}}" {after}', f"a{i}: %json {_schema(i, tool)}"]
        names.append(f"f{i}")
    calls = f"call ({separator} call)*" if several else "call"
    if form == "mistral":
        calls = f'{_mark(tokenizer, "[TOOL_CALLS]")} "[" {calls} "]"'
    return "\n".join([f"start: {calls}", f"call: {' | '.join(names)}", *rules])


def _text(text: str) -> str:
    """As a literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _schema(index: int, tool: Tool) -> str:
    parameters = tool["function"].get("parameters")
    if parameters is None or parameters == {}:
        parameters = NO_PARAMETERS
    key = f"tools.{index}.function.parameters"
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ApiError(400, f"{key}: must be a JSON schema of type object", key)
    return json.dumps({"type": "object", **parameters})


def _mark(tokenizer: Any, text: str) -> str:
    """A special token does not match its text: it is named by its id."""
    token = tokenizer.get_added_vocab().get(text)
    is_special = token is not None and tokenizer.added_tokens_decoder[token].special
    return f"<[{token}]>" if is_special else _text(text)
