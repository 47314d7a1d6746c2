"""Tool calls in scripted text, whole and cut into pieces."""

from __future__ import annotations

import json
import random

import pytest

from paceline.chat.tool_calls import PARSERS, for_template, parser_of

A = '{"name": "add", "arguments": {"a": 1, "b": [2, "<tool_call>"]}}'
B = '{"name": "now", "arguments": {}}'
C = '{"name": "say", "arguments": {"x": "</tool_call>"}}'
ADD, NOW = ("add", {"a": 1, "b": [2, "<tool_call>"]}), ("now", {})

CASES = [
    ("hermes", f"<tool_call>\n{A}\n</tool_call>", "", [ADD]),
    ("hermes", f"<tool_call>\n{A}\n</tool_call>\n<tool_call>{B}</tool_call>", "", [ADD, NOW]),
    ("hermes", f"Let me see. <tool_call>{B}</tool_call>", "Let me see.", [NOW]),
    ("hermes", f"<tool_call>{B}</tool_call>\n\n<tool_call>{B}</tool_call> \n", "", [NOW, NOW]),
    ("hermes", f"<tool_call>{B}</tool_call> and then", " and then", [NOW]),
    ("hermes", f"<tool_call>{{oops}}</tool_call> <tool_call>{B}</tool_call>", "<tool_call>{oops}</tool_call>", [NOW]),
    ("hermes", f"<tool_call>{C}</tool_call>", "", [("say", {"x": "</tool_call>"})]),
    ("hermes", f"<tool_call>{B}", "", [NOW]),  # the end token came instead of the mark
    ("hermes", "no call", "no call", []),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("hermes", "<tool_call>{oops}</tool_call>", "<tool_call>{oops}</tool_call>", []),
    ("hermes", '<tool_call>{"name": 3}</tool_call> x', '<tool_call>{"name": 3}</tool_call> x', []),
    ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "<tool_call>" + "[" * 100_000 + "</tool_call>", []),
    ("llama3_json", '{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
    ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "b"}', "", [("add", {}), ("b", {})]),
    ("llama3_json", '{"answer": 3}', '{"answer": 3}', []),
    ("llama3_json", "The answer is {3}", "The answer is {3}", []),
    ("llama3_json", '{"name": "add"', '{"name": "add"', []),
    ("mistral", f"[TOOL_CALLS][{A}, {B}]", "", [ADD, NOW]),
    ("mistral", f" [{B}]", "", [NOW]),
    ("mistral", "[1, 2]", "[1, 2]", []),
    ("mistral", "Hello", "Hello", []),
    *(
        (name, f'{first}{{"name": "add", "arguments": {{"a": {number}}}}}{last}', None, [])
        for number in ("NaN", "-Infinity", "1e999")
        for name, first, last in (
            ("hermes", "<tool_call>", "</tool_call>"),
            ("llama3_json", "", ""),
            ("mistral", "[", "]"),
        )
    ),
    ("mistral", '[{"name": "add", "arguments": "{\\"a\\": 1}"}]', "", [("add", {"a": 1})]),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
@pytest.mark.parametrize("pieces", ["whole", "random", "characters"])
def test_calls(name: str, text: str, content: str | None, calls: list[tuple[str, object]], pieces: str) -> None:
    if pieces == "characters" and len(text) > 10_000:
        return
    dice = random.Random(text)
    parser, found_text, found = PARSERS[name](), "", []
    at = 0
    while at < len(text):
        size = {"whole": len(text), "characters": 1}.get(pieces) or dice.randrange(1, max(2, len(text) // 5))
        piece, new = parser.add(text[at : at + size])
        found_text, found, at = found_text + piece, found + new, at + size
    piece, new = parser.finish()
    found_text, found = found_text + piece, found + new
    assert [(call.name, json.loads(call.arguments)) for call in found] == calls
    assert found_text == (text if content is None else content)
    assert len({call.id for call in found}) == len(found)


def test_text_is_not_held_back_without_need() -> None:
    parser = PARSERS["hermes"]()
    assert parser.add("2 < 3") == ("2 < 3", [])
    assert parser.add(" <to") == ("", [])
    assert parser.add("ol> x") == (" <tool> x", [])
    parser = PARSERS["mistral"]()
    assert parser.add("  ") == ("", [])
    assert parser.add("Hi") == ("  Hi", [])
    assert parser.add(" [1") == (" [1", [])


def test_the_format_of_a_template() -> None:
    assert parser_of("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert parser_of("{% if tools %}[TOOL_CALLS]{% endif %}") == "mistral"
    assert parser_of('{% if tools %}{"name": x, "parameters": y}{% endif %}') == "llama3_json"
    assert parser_of("{% if tools %}?{% endif %}") is None
    assert parser_of("<tool_call>") is None and parser_of(None) is None


def test_calls_of_a_client() -> None:
    good = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    assert for_template(good) == [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    for bad in (3, [3], [{}], [{"function": {"name": 1}}], [{"function": {"name": "f", "arguments": "[1]"}}]):
        assert for_template(bad) is None
