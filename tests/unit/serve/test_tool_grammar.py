"""The grammars of forced tool calls: what they allow is what the parsers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_tokenizer

from paceline.chat.tool_calls import PARSERS
from paceline.engine.grammar import GrammarCompiler
from paceline.model.store import load_tokenizer
from paceline.serve.errors import ApiError
from paceline.serve.limits import Limits
from paceline.serve.structure import call_structure, check_size
from paceline.serve.tool_grammar import call_grammar
from paceline.structured_outputs import StructuredOutputsParams

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}},
    {"type": "function", "function": {"name": 'na"me é', "parameters": None}},
]
A, B = '{"name": "add", "arguments": {"a": [1, "</tool_call>"]}}', '{"name": "na\\"me é", "arguments": {}}'
TEXTS = {
    "hermes": [f"<tool_call>\n{A}\n</tool_call>", f"<tool_call>\n{A}\n</tool_call>\n<tool_call>\n{B}\n</tool_call>"],
    "llama3_json": [A.replace("arguments", "parameters"), f"{A}; {B}".replace("arguments", "parameters")],
    "mistral": [f"[TOOL_CALLS][{A}]", f"[TOOL_CALLS][{A}, {B}]"],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return load_tokenizer(folder)


def is_whole(tokenizer: Any, grammar: str, ids: list[int]) -> bool:
    """Whether the grammar allows these tokens, and their end."""
    compiler = GrammarCompiler(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    matcher = compiler.matcher(StructuredOutputsParams(grammar=grammar))
    assert matcher is not None
    allowed = matcher.allowed(np.array(ids, np.int32))
    return allowed is not None and bool(allowed[tokenizer.eos_token_id])


@pytest.mark.parametrize("form", TEXTS)
def test_calls(tokenizer: Any, form: str) -> None:
    one, two = (tokenizer.encode(text) for text in TEXTS[form])
    for several in (False, True):
        grammar = call_grammar(form, TOOLS, several, tokenizer)
        assert is_whole(tokenizer, grammar, one)
        assert is_whole(tokenizer, grammar, two) == several
        assert not is_whole(tokenizer, grammar, [])
        assert not is_whole(tokenizer, grammar, tokenizer.encode(TEXTS[form][0].replace('"add"', '"sub"')))
    only = call_grammar(form, TOOLS[1:], True, tokenizer)
    assert not is_whole(tokenizer, only, one)
    parser = PARSERS[form]()
    text, calls = parser.add(TEXTS[form][1])
    rest, more = parser.finish()
    assert text + rest == "" and [call.name for call in calls + more] == ["add", 'na"me é']


def test_a_mark_that_is_a_special_token(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    own = load_tokenizer(tmp_path)
    own.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    ids = own.encode(TEXTS["mistral"][0])
    assert ids[0] == len(own) - 1
    assert is_whole(own, call_grammar("mistral", TOOLS, False, own), ids)


@pytest.mark.parametrize("parameters", [{"type": "array"}, [1], "x"])
def test_parameters_are_objects(tokenizer: Any, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with pytest.raises(ApiError, match=r"tools\.0\.function\.parameters"):
        call_grammar("hermes", [tool], False, tokenizer)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"multipleOf": 10_001}, "multipleOf"), ({"a": [{"multipleOf": 101}, {"multipleOf": 103}]}, "multipleOf"),
        ({"multipleOf": 1e17}, "multipleOf"), ({"multipleOf": 1.2345678}, "multipleOf"),
        ({"allOf": [{"multipleOf": 0}, {"multipleOf": 99_999}]}, "multipleOf"), ({"multipleOf": 0.01}, ""),
        ({"properties": {"multipleOf": {"type": "string"}}}, ""), ({"enum": ["x" * 40_000]}, "characters"),
        ({"properties": {str(i): {} for i in range(1001)}}, "properties"), ({"multipleOf": True}, ""),
    ],
)  # fmt: skip
def test_sizes(schema: Any, message: str) -> None:
    text = json.dumps(schema)
    for params in (StructuredOutputsParams(json=text), StructuredOutputsParams(grammar=f"start: %json {text}")):
        if message:
            with pytest.raises(ValueError, match=message):
                check_size(params, Limits())
        else:
            check_size(params, Limits())


def test_the_schemas_of_tools_are_checked_as_objects(tokenizer: Any) -> None:
    """Not as the text after `%json`, which a description may contain."""

    def structure(**parameters: Any) -> StructuredOutputsParams:
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
        return call_structure(call_grammar("hermes", tools, False, tokenizer), tools, Limits())

    compiler = GrammarCompiler(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    compiler.compile(structure(description="after %json comes a schema"))
    with pytest.raises(ApiError, match="multipleOf"):
        structure(description="%json 1", properties={"a": {"multipleOf": 99_999_989}})
    with pytest.raises(ApiError, match="characters"):
        structure(description="x" * 40_000)
