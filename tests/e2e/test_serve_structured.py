"""Structured outputs and forced tool calls in the server, on a tiny model with one token per byte: the same tokens as
`LLM`, errors that name a key, and schemas that would take forever."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from serving import SPECULATION, Served, serving
from tiny_run import write_model

from paceline import LLM, SamplingParams, StructuredOutputsParams

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
ADD = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"]}
ADD["additionalProperties"] = False
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": ADD}},
    {"type": "function", "function": {"name": "now"}},
]
ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
COMPACT: dict[str, Any] = {"disable_any_whitespace": True}  # a model with random weights likes whitespace


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("structured") / "model"
    write_model(folder, max_positions=1024)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    with serving(model, "--served-model-name", "tiny") as served:
        yield served
        assert served.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return served.client()


@pytest.fixture(scope="module", params=["with drafts", "without drafts"])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(model), speculation=SPECULATION if request.param == "with drafts" else "none", device="cpu") as llm:
        yield llm


def json_schema(schema: Any, **others: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **others}}


STRUCTURES: list[dict[str, Any]] = [
    {"json": SCHEMA, **COMPACT}, {"regex": "[a-f]{3,9}-[0-9]+"}, {"choice": ["yes", "no", "it depends"]},
    {"grammar": 'start: "(" e ")"\ne: N | e "+" e\nN: /[0-9]{1,3}/'}, {"json": SCHEMA, "whitespace_pattern": " ?"},
]  # fmt: skip


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: next(iter(structure)))
def test_the_tokens_of_llm(client: OpenAI, llm: LLM, structure: dict[str, Any]) -> None:
    extra = {"structured_outputs": structure, "return_token_ids": True}
    answer = client.chat.completions.create(n=3, seed=3, extra_body=extra, **ASK)
    params = SamplingParams(n=3, seed=3, max_tokens=200, structured_outputs=StructuredOutputsParams(**structure))
    (expected,) = llm.chat(ASK["messages"], params)
    for choice, output in zip(answer.choices, expected.outputs, strict=True):
        assert choice.token_ids == output.token_ids  # type: ignore[attr-defined]
        assert choice.message.content == output.text
        if "json" in structure and choice.finish_reason == "stop":
            found = json.loads(output.text)
            assert found.keys() == {"kind", "age"} and found["kind"] in ("cat", "dog") and 0 <= found["age"] <= 30
    assert {choice.finish_reason for choice in answer.choices} & {"stop"}


def test_response_format(client: OpenAI, llm: LLM) -> None:
    for form, params in (
        (json_schema(SCHEMA, strict=True, description="x"), StructuredOutputsParams(json=SCHEMA)),
        ({"type": "json_object"}, StructuredOutputsParams(json_object=True)),
        ({"type": "text"}, None),
    ):
        answer = client.chat.completions.create(seed=5, response_format=form, **ASK)  # type: ignore[call-overload]
        (expected,) = llm.chat(ASK["messages"], SamplingParams(seed=5, max_tokens=200, structured_outputs=params))
        assert answer.choices[0].message.content == expected.outputs[0].text
        assert params is None or answer.choices[0].message.content.startswith("{")
    extra = {"response_format": {"type": "json_object"}}
    assert client.completions.create(model="tiny", prompt="abc", extra_body=extra).choices[0].text.startswith("{")


def test_a_stream_and_token_ids(client: OpenAI, served: Served) -> None:
    form: Any = {"seed": 6, "extra_body": {"structured_outputs": {"regex": "[ab]{5}c?"}}}
    whole = client.chat.completions.create(**form, **ASK).choices[0].message.content
    events = list(client.chat.completions.create(stream=True, **form, **ASK))
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole
    sampling = {"seed": 6, "max_tokens": 9, "structured_outputs": {"choice": ["ab"]}}
    body = {"model": "tiny", "token_ids": [1, 2], "sampling_params": sampling}
    answer = httpx.post(f"{served.root}/inference/v1/generate", json=body, timeout=60).json()
    assert bytes(answer["choices"][0]["token_ids"][:2]) != b"" and len(answer["choices"][0]["token_ids"]) == 3


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "add", "now"])
def test_forced_calls(client: OpenAI, choice: str, stream: bool) -> None:
    forced: Any = choice if choice == "required" else {"type": "function", "function": {"name": choice}}
    for seed in range(6):
        asked: dict[str, Any] = {
            "tools": TOOLS, "tool_choice": forced, "parallel_tool_calls": False, "seed": seed, **ASK, "max_tokens": 400,
        }  # fmt: skip
        if stream:
            events: list[Any] = list(client.chat.completions.create(stream=True, **asked))
            calls = [call for event in events for call in event.choices[0].delta.tool_calls or []]
            reason, content = events[-1].choices[0].finish_reason, [e.choices[0].delta.content for e in events]
            assert not any(content)
        else:
            (answer,) = client.chat.completions.create(**asked).choices
            calls, reason = answer.message.tool_calls or [], answer.finish_reason
            assert calls == [] or answer.message.content is None
        if reason == "length":  # endless whitespace
            continue
        (call,) = calls
        assert call.function.name in (("add", "now") if choice == "required" else (choice,))
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == ({"a"} if call.function.name == "add" else set())
        assert reason == ("tool_calls" if choice == "required" else "stop")
        break
    else:
        pytest.fail("no call was complete")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must have a schema"),
    ({"response_format": json_schema({"type": "nope"})}, "response_format", "Invalid type"),
    ({"response_format": json_schema({"not": {}})}, "response_format", "Unimplemented"),
    ({"response_format": json_schema({"$ref": "#"})}, "response_format", "no text"),
    ({"response_format": json_schema({"$ref": "http://127.0.0.1:9/x"})}, "response_format", "not present"),
    ({"response_format": json_schema({"$ref": "file:///etc/passwd"})}, "response_format", "not present"),
    ({"response_format": json_schema({"x-guidance": {"lenient": True}, "not": {}})}, "response_format", "x-guidance"),
    ({"response_format": json_schema(SCHEMA, shape=1)}, "response_format", "must have a schema"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "response_format", "not both"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
    ({"structured_outputs": {}}, "structured_outputs", "give one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "give one of"),
    ({"structured_outputs": {"json": [1]}}, "structured_outputs", "json: must be Unicode text or a dict"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "non-empty"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "Extra inputs"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "end-of-sequence"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "end-of-sequence"),
    ({"structured_outputs": {"choice": ["a"]}, "min_tokens": 9}, "", "no token"),
    ({"structured_outputs": {"choice": ["a"]}, "allowed_token_ids": [3]}, "", "no token"),
    ({"tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "named 'x'"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "must be"),
    ({"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": json_schema({})}, "response_format", "own"),
    ({"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls", "required"),
]


def post(served: Served, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{served.url}/chat/completions", json=ASK | body, timeout=60)


@pytest.mark.parametrize(("body", "param", "message"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_400(served: Served, body: dict[str, Any], param: str, message: str, stream: bool) -> None:
    answer = post(served, body | ({"stream": True} if stream else {}))
    if stream and answer.status_code == 200:  # after the first token
        error = json.loads(answer.text.split("data: ")[-2])["error"]
    else:
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
    assert message in error["message"] and (error["param"] or "") == param


def function(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.mark.parametrize("parameters", [{"type": "string"}, [1], {"type": "object", "not": {}}, {"$ref": "#/$defs/x"}])
def test_400_for_the_parameters_of_a_forced_function(served: Served, parameters: Any) -> None:
    answer = post(served, function(parameters) | {"tool_choice": "required"})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tools")
    assert post(served, function(parameters) | {"max_tokens": 2}).status_code == 200  # a call that is not forced


def nested(depth: int) -> Any:
    return json.loads('{"properties":{"a":' * depth + "{}" + "}}" * depth)


def branching(depth: int) -> dict[str, Any]:
    names = [f"a{i}" for i in range(depth)]
    pairs = zip(names, [*names[1:], "end"], strict=True)
    both = {a: {"allOf": [{"$ref": f"#/$defs/{b}"}, {"anyOf": [{"$ref": f"#/$defs/{b}"}, {}]}]} for a, b in pairs}
    return {"$ref": "#/$defs/a0", "$defs": {**both, "end": {"type": "string"}}}


HOSTILE: dict[str, dict[str, Any]] = {
    "deep": {"response_format": json_schema(nested(300))},
    "large": {"response_format": json_schema({"enum": ["x" * 40_000]})},
    "properties": {"response_format": json_schema({"properties": {str(i): {} for i in range(1500)}})},
    "multiple": {"response_format": json_schema({"type": "integer", "multipleOf": 99_999_989})},
    "multiples": {
        "response_format": json_schema({"allOf": [{"multipleOf": n, "type": "integer"} for n in (997, 991)]})
    },
    "multiple in a grammar": {"structured_outputs": {"grammar": 'start: %json {"multiple\\u004ff": 99999989}'}},
    "branches": {"response_format": json_schema(branching(30))},
    "references": {"response_format": json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})},
    "repeated": {"structured_outputs": {"regex": "((a{1000}){1000}){1000}"}},
    "nested regex": {"structured_outputs": {"regex": "(" * 9000 + "a" + ")" * 9000}},
    "states": {"structured_outputs": {"regex": "(.*a.{300}){9}"}, "max_tokens": 40},
    "long": {"structured_outputs": {"regex": ".{1,100000}"}, "max_tokens": 40},
    "conjunction": {
        "structured_outputs": {"grammar": "start: T\nT: " + " & ".join(f"/.*{c}.*{c}.*/" for c in "abcdefgh")},
        "max_tokens": 40,
    },
    "ambiguous": {"structured_outputs": {"grammar": 'start: s\ns: s s s | s s | "a" |'}, "max_tokens": 40},
    "tool": function({"type": "object", "properties": {"a": {"multipleOf": 99_999_989, "type": "integer"}}})
    | {"tool_choice": "required"},
}  # fmt: skip


def test_hostile_schemas_neither_stop_nor_delay_other_clients(served: Served) -> None:
    plain = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "seed": 1}
    expected = httpx.post(f"{served.url}/completions", json=plain, timeout=60).json()["choices"]
    with ThreadPoolExecutor(2) as clients:
        asked = [clients.submit(timed, served, body) for body in HOSTILE.values()]
        slowest = 0.0
        while not all(each.done() for each in asked):
            started = time.monotonic()
            assert httpx.post(f"{served.url}/completions", json=plain, timeout=60).json()["choices"] == expected
            slowest = max(slowest, time.monotonic() - started)
        answers = dict(zip(HOSTILE, (each.result() for each in asked), strict=True))
    assert {name: status for name, (status, _) in answers.items() if status not in (200, 400)} == {}
    slow = {"states", "long", "ambiguous", "branches", "conjunction"}  # but within llguidance's limits
    assert {name for name, (status, _) in answers.items() if status == 200} <= slow
    assert max(seconds for _, seconds in answers.values()) < 20 and slowest < 10, (answers, slowest)
    assert httpx.get(f"{served.root}/health").status_code == 200


def test_plain_requests_do_not_wait_for_compilations(served: Served) -> None:
    """Nor do those whose structured output is compiled."""
    known = {"structured_outputs": {"choice": ["a"]}}
    assert post(served, known).status_code == 200
    with ThreadPoolExecutor(3) as clients:
        asked = [clients.submit(timed, served, {"response_format": json_schema(branching(30 + i))}) for i in range(3)]
        while not all(each.done() for each in asked):
            assert post(served, {"max_tokens": 2}).status_code == 200
            assert post(served, known).status_code == 200


def test_a_slow_grammar_delays_nobody_for_long(served: Served) -> None:
    """Its masks are computed between the steps of all requests, and take longer with every token."""
    plain = {"model": "tiny", "prompt": "abc", "max_tokens": 8, "seed": 1}
    expected = httpx.post(f"{served.url}/completions", json=plain, timeout=60).json()["choices"]
    slow = {"model": "tiny", "prompt": "a", "max_tokens": 900, "n": 16, "logit_bias": {"258": -100}, "seed": 1}
    grammar = HOSTILE["ambiguous"]["structured_outputs"]
    with ThreadPoolExecutor(1) as clients:
        ask = slow | {"structured_outputs": grammar}
        asked = clients.submit(httpx.post, f"{served.url}/completions", json=ask, timeout=120)
        slowest = 0.0
        while not asked.done():
            started = time.monotonic()
            assert httpx.post(f"{served.url}/completions", json=plain, timeout=60).json()["choices"] == expected
            slowest = max(slowest, time.monotonic() - started)
    error = asked.result().json()["error"]
    assert asked.result().status_code == 400 and "its masks take too long" in error["message"]
    assert slowest < 30, slowest


def timed(served: Served, body: dict[str, Any]) -> tuple[int, float]:
    started = time.monotonic()
    return post(served, body).status_code, time.monotonic() - started


def test_a_dead_end_is_an_error_of_one_request(served: Served, client: OpenAI) -> None:
    """While others run."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "max_tokens": 200, "seed": 2}
    alone = client.completions.create(**asked).choices[0].text
    with ThreadPoolExecutor(4) as clients:
        others = [clients.submit(client.completions.create, **asked) for _ in range(3)]
        with pytest.raises(openai.BadRequestError, match="no token"):
            client.completions.create(
                model="tiny", prompt="a", extra_body={"structured_outputs": {"choice": ["ab"]}, "min_tokens": 8}
            )
        assert [each.result().choices[0].text for each in others] == [alone] * 3
