"""The server with OpenAI's own client, on a tiny model: the same tokens as `LLM`, streams, limits and errors."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from serving import SPECULATION, Served, serving
from tiny_run import write_model

from paceline import LLM, SamplingParams

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "model"
    write_model(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    limits = ["--max-samples", "8", "--max-body-mb", "1", "--max-tokens", "220", "--served-model-name", "tiny"]
    with serving(model, *limits) as served:
        yield served
        assert served.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return served.client()


@pytest.fixture(scope="module", params=["with drafts", "without drafts"])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(model), speculation=SPECULATION if request.param == "with drafts" else "none", device="cpu") as llm:
        yield llm


IDS: dict[str, Any] = {"extra_body": {"return_token_ids": True}}


# ---- the same tokens as LLM ----


def test_completions(client: OpenAI, llm: LLM) -> None:
    prompts = ["abc", "hello there"]
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=2, seed=7, max_tokens=24, temperature=0.8, logprobs=2, **IDS
    )
    expected = llm.generate(prompts, SamplingParams(n=2, seed=7, max_tokens=24, temperature=0.8, logprobs=2))
    outputs = [output for each in expected for output in each.outputs]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, output in zip(answer.choices, outputs, strict=True):
        assert choice.text == output.text
        assert choice.token_ids == output.token_ids  # type: ignore[attr-defined]
        assert choice.finish_reason == output.finish_reason
        assert choice.logprobs is not None and choice.logprobs.tokens is not None
        assert choice.logprobs.token_logprobs == pytest.approx(output.raw_logprobs, abs=1e-9)
        assert len(choice.logprobs.tokens) == len(output.token_ids)
        assert choice.logprobs.top_logprobs is not None and all(
            len(top) == 2 or "\ufffd" in top for top in choice.logprobs.top_logprobs
        )
    assert answer.choices[2].prompt_token_ids == expected[1].prompt_token_ids  # type: ignore[attr-defined]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
    assert answer.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in expected)
    assert answer.policy_version == 0  # type: ignore[attr-defined]


def test_prompts_as_token_ids(client: OpenAI, llm: LLM) -> None:
    ids = llm.tokenizer.encode("abc")
    params = SamplingParams(seed=3, max_tokens=16)
    (expected,) = llm.generate("abc", params)
    for prompt in (ids, [ids]):
        answer = client.completions.create(model="tiny", prompt=prompt, seed=3, **IDS)
        assert answer.choices[0].token_ids == expected.outputs[0].token_ids  # type: ignore[attr-defined]


def test_chat(client: OpenAI, llm: LLM) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
    ]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, n=2, seed=5, max_completion_tokens=20, logprobs=True, top_logprobs=3, **IDS
    )
    plain = [{"role": "system", "content": "short"}, {"role": "user", "content": "hello"}]
    (expected,) = llm.chat(plain, SamplingParams(n=2, seed=5, max_tokens=20, logprobs=3))
    assert expected.prompt == "<system>short<user>hello<a>"
    assert answer.prompt_token_ids == expected.prompt_token_ids  # type: ignore[attr-defined]
    for choice, output in zip(answer.choices, expected.outputs, strict=True):
        assert choice.message.content == output.text and choice.message.role == "assistant"
        assert choice.token_ids == output.token_ids  # type: ignore[attr-defined]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(output.raw_logprobs, abs=1e-9)
        assert all(len(entry.top_logprobs) == 3 for entry in choice.logprobs.content)
        known = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode()
        assert known == "".join(filter(str.isascii, output.text)) != ""  # parts of characters have no bytes


def test_tools_are_in_the_prompt(client: OpenAI, llm: LLM) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=tools, seed=1, max_tokens=8, **IDS)
    plain = [{"role": message["role"], "content": message.get("content", "")} for message in messages]
    (expected,) = llm.chat(plain, SamplingParams(seed=1, max_tokens=8), tools=tools)
    assert expected.prompt is not None and '"add"' in expected.prompt
    assert answer.prompt_token_ids == expected.prompt_token_ids  # type: ignore[attr-defined]
    assert answer.choices[0].message.content == expected.outputs[0].text
    without = client.chat.completions.create(
        model="tiny", messages=messages, tools=tools, tool_choice="none", seed=1, max_tokens=8, **IDS
    )
    assert len(without.prompt_token_ids) < len(expected.prompt_token_ids)  # type: ignore[attr-defined]
    for wrong in ({"tool_choice": "sometimes"}, {"tools": [{"type": "function"}]}, {"parallel_tool_calls": False}):
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**{"model": "tiny", "messages": messages, "tools": tools, **wrong})


def test_chat_fills_the_context_by_default(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "x" * 200}]
    answer = client.chat.completions.create(model="tiny", messages=messages, extra_body={"ignore_eos": True})
    assert answer.usage is not None and answer.usage.total_tokens == 256
    assert answer.choices[0].finish_reason == "length"


def test_every_sampling_parameter_reaches_the_engine(client: OpenAI, llm: LLM) -> None:
    given: dict[str, Any] = {
        "temperature": 0.9, "top_p": 0.95, "seed": 11, "presence_penalty": 0.4, "frequency_penalty": 0.3,
        "max_tokens": 40, "stop": ["q", "zz"],
    }  # fmt: skip
    extra: dict[str, Any] = {
        "top_k": 30, "min_p": 0.01, "min_tokens": 4, "repetition_penalty": 1.2, "allowed_token_ids": list(range(250)),
        "bad_words": ["ab"], "stop_token_ids": [33], "ignore_eos": True,
    }  # fmt: skip
    bias = {"65": 3.0, "66": -100.0}
    answer = client.completions.create(
        model="tiny", prompt="abc", logit_bias=bias, extra_body={**extra, "return_token_ids": True}, **given
    )
    (expected,) = llm.generate("abc", SamplingParams(**given, **extra, logit_bias={65: 3.0, 66: -100.0}))
    assert answer.choices[0].token_ids == expected.outputs[0].token_ids  # type: ignore[attr-defined]
    assert answer.choices[0].text == expected.outputs[0].text
    (plain,) = llm.generate("abc", SamplingParams(seed=11, max_tokens=40))
    assert plain.outputs[0].token_ids != expected.outputs[0].token_ids, "the parameters matter"


def test_generate_by_token_ids(served: Served, llm: LLM) -> None:
    """The route and the format that the `renderers` package, which `verifiers` uses, requires."""
    ids = llm.tokenizer.encode("abc")
    body = {
        "model": "tiny",
        "token_ids": ids,
        "request_id": "r1",
        "sampling_params": {
            "temperature": 0.7, "seed": 3, "max_tokens": 12, "logprobs": 1, "stop_token_ids": [258],
            "skip_special_tokens": False,
        },
    }  # fmt: skip
    answer = httpx.post(f"{served.root}/inference/v1/generate", json=body, timeout=60).json()
    (expected,) = llm.generate("abc", SamplingParams(temperature=0.7, seed=3, max_tokens=12, stop_token_ids=(258,)))
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected.outputs[0].token_ids
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected.outputs[0].logprobs, abs=1e-9)
    assert answer["prompt_token_ids"] == ids and answer["request_id"] == "r1"


# ---- streams ----


def test_streams_are_the_whole_response(client: OpenAI) -> None:
    common: dict[str, Any] = {"model": "tiny", "n": 2, "seed": 9, "max_tokens": 40, "temperature": 0.9, "stop": ["qu"]}
    whole = client.completions.create(prompt=["abc", "de"], logprobs=1, **common, **IDS)
    stream = client.completions.create(
        prompt=["abc", "de"], logprobs=1, stream=True, stream_options={"include_usage": True}, **common, **IDS
    )
    parts: list[dict[str, Any]] = [{"text": "", "ids": [], "logprobs": [], "offsets": []} for _ in range(4)]
    usage = None
    num_events = 0
    for event in stream:
        usage = event.usage or usage
        num_events += 1
        for choice in event.choices:
            part = parts[choice.index]
            part["text"] += choice.text
            part["ids"] += choice.token_ids  # type: ignore[attr-defined]
            assert choice.logprobs is not None
            part["logprobs"] += choice.logprobs.token_logprobs
            part["offsets"] += choice.logprobs.text_offset
            part["reason"] = choice.finish_reason
    assert num_events > 12, "in several steps"
    assert usage == whole.usage
    for part, choice in zip(parts, whole.choices, strict=True):
        assert part["text"] == choice.text and part["ids"] == choice.token_ids  # type: ignore[attr-defined]
        assert part["reason"] == choice.finish_reason and choice.logprobs is not None
        assert part["logprobs"] == pytest.approx(choice.logprobs.token_logprobs, abs=1e-9)
        assert part["offsets"] == choice.logprobs.text_offset


def test_chat_streams(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "hello"}]
    common: dict[str, Any] = {"model": "tiny", "messages": messages, "seed": 4, "max_tokens": 30}
    whole = client.chat.completions.create(**common)
    events = list(client.chat.completions.create(stream=True, **common))
    assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content
    assert events[0].choices[0].delta.role == "assistant" and events[1].choices[0].delta.role is None
    assert [event.choices[0].finish_reason for event in events[-2:]] == [None, whole.choices[0].finish_reason]


def figures(served: Served) -> dict[str, float]:
    lines = httpx.get(f"{served.root}/metrics").text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.removeprefix("paceline_"): float(value) for name, value in found}


def running(served: Served) -> tuple[float, float]:
    """Requests of clients, and sequences in the engine."""
    found = figures(served)
    return found["requests_in_progress"], found["num_requests_running"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(served: Served, stream: bool) -> None:
    num, each = 8, 220
    question = {"model": "tiny", "prompt": "abc", "max_tokens": each, "ignore_eos": True, "n": num, "stream": stream}
    body, before = json.dumps(question), figures(served)
    host, port = served.root.removeprefix("http://").split(":")
    deadline = time.monotonic() + 60
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        while running(served)[1] == 0:
            assert time.monotonic() < deadline
        if stream:
            assert connection.recv(100)
    while running(served) != (0, 0):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    after = figures(served)
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < num * each, (
        "it did not run to its end"
    )
    assert after["kv_cache_usage"] <= before["kv_cache_usage"]
    if not stream:
        left = 'requests_total{route="/v1/completions",status="499"}'
        assert after[left] == before.get(left, 0) + 1


# ---- errors, in OpenAI's format ----


def raw(served: Served, path: str = "/v1/completions", **options: Any) -> httpx.Response:
    return httpx.post(f"{served.root}{path}", timeout=60, **options)


BAD = [
    ({"prompt": "a"}, "model", "Field required"),
    ({"model": "tiny"}, "prompt", "Field required"),
    ({"model": "tiny", "prompt": ""}, "prompt", "must be Unicode text and not empty"),
    ({"model": "tiny", "prompt": []}, "prompt", "must not be empty"),
    ({"model": "tiny", "prompt": [[]]}, None, "prompt_ids is empty"),
    ({"model": "tiny", "prompt": [99999]}, None, "not in the vocabulary"),
    ({"model": "tiny", "prompt": "x" * 600}, None, "context"),
    ({"model": "tiny", "prompt": ["a", "x" * 100_000]}, "prompt", "context of 256 tokens holds at most"),
    ({"model": "tiny", "prompt": "a", "temperature": -1}, "temperature", "must be 0"),
    ({"model": "tiny", "prompt": "a", "temperature": "hot"}, "temperature", "valid number"),
    ({"model": "tiny", "prompt": "a", "n": 9}, "n", "allows 8"),
    ({"model": "tiny", "prompt": ["a"] * 5, "n": 2}, "n", "allows 8"),
    ({"model": "tiny", "prompt": "a", "max_tokens": 221}, "max_tokens", "allows 220"),
    ({"model": "tiny", "prompt": "a", "max_tokens": 0}, "max_tokens", "must be"),
    ({"model": "tiny", "prompt": "a", "stop": ["x"] * 17}, "stop", "allows 16"),
    ({"model": "tiny", "prompt": "a", "stop": "x" * 257}, "stop", "256 characters"),
    ({"model": "tiny", "prompt": "a", "logprobs": 21}, "logprobs", "allows 20"),
    ({"model": "tiny", "prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "logit_bias"),
    ({"model": "tiny", "prompt": "a", "logit_bias": {"99999": 1}}, None, "not in the vocabulary"),
    ({"model": "tiny", "prompt": "a", "echo": True}, "echo", "not supported"),
    ({"model": "tiny", "prompt": "a", "stop": "\ud800"}, "stop", "Unicode"),
    ({"model": "tiny", "prompt": "a", "bad_words": ["\ud800"]}, "bad_words", "Unicode"),
    ({"model": "tiny", "prompt": "a", "bad_words": ["x" * 257]}, "bad_words", "256 characters"),
    ({"model": "tiny", "prompt": "a", "min_tokens": 1, "stop_token_ids": [10**6]}, None, "not in the vocabulary"),
    ({"model": "tiny", "prompt": [{}] * 20_000}, "prompt", "valid"),
    ({"model": "tiny", "prompt": "a", "repetition_penalty": 1e-300}, "repetition_penalty", "0.01"),
    ({"model": "tiny", "prompt": "a", "max_token": 3}, "max_token", "Extra inputs"),
    ({"model": "tiny", "prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream = true"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_400(served: Served, body: dict[str, Any], param: str | None, message: str, stream: bool) -> None:
    if stream and "stream_options" not in body:
        body = {**body, "stream": True}
    # httpx's own JSON can't hold lone surrogates.
    answer = raw(served, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"] and error["param"] == param and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"[" * 100_000, b'{"model": NaN}', b"\xff\xfe", b'{"a":' + b"9" * 5000 + b"}"]
)
def test_400_for_what_is_not_a_json_object(served: Served, content: bytes) -> None:
    answer = raw(served, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


CHAT_BAD: list[tuple[Any, str]] = [
    ([], "messages"),
    ([{"role": "king", "content": "a"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}], "messages.0.tool_calls"),
    ([{"role": "user", "content": "a", "tool_calls": [1]}], "messages.0.tool_calls"),
]


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [TOOL | {"function": {"name": "f", "description": "x" * 100_000}}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        *(({"tools": [TOOL | {"function": {"name": name}}]}, "tools.0") for name in (5, ["a"], True, "")),
    ],
)
def test_400_for_tools_and_long_messages(served: Served, given: dict[str, Any], param: str) -> None:
    ask = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    answer = raw(served, "/v1/chat/completions", json=ask | given)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_messages_of_lm_eval(served: Served) -> None:
    def ask(**given: str) -> httpx.Response:
        message = {"role": "user", "content": "a", **given}
        return raw(served, "/v1/chat/completions", json={"model": "tiny", "messages": [message], "seed": 1})

    assert ask(type="text").json()["choices"] == ask().json()["choices"]
    assert ask(type="image").status_code == 400


@pytest.mark.parametrize(("messages", "param"), CHAT_BAD)
def test_400_for_messages(client: OpenAI, messages: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(model="tiny", messages=messages)
    assert error.value.param == param


def test_404(client: OpenAI, served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.completions.create(model="gpt-4", prompt="a")
    assert error.value.code == "model_not_found" and "'tiny'" in str(error.value)
    answer = raw(served, "/v1/nothing", json={})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"
    assert httpx.get(f"{served.url}/completions").status_code == 405


def test_413_and_415(served: Served) -> None:
    body = {"model": "tiny", "prompt": "x" * (1 << 20)}
    assert raw(served, json=body).status_code == 413

    def parts() -> Iterator[bytes]:  # without a Content-Length
        for _ in range(40):
            yield b" " * (1 << 15)

    chunked = raw(served, content=parts(), headers={"Content-Type": "application/json"})
    assert chunked.status_code == 413 and chunked.json()["error"]["code"] == "request_too_large"
    assert raw(served, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 415


@pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com", "localhost.example.com:80", ""])
def test_403_for_another_host(served: Served, host: str) -> None:
    answer = raw(served, json={"model": "tiny", "prompt": "a"}, headers={"Host": host})
    assert answer.status_code == 403 and "Host" in answer.json()["error"]["message"]


def test_loopback_names_are_allowed(served: Served) -> None:
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
        assert httpx.get(f"{served.url}/models", headers={"Host": host}).status_code == 200


def test_unicode_and_control_characters_come_back_escaped(served: Served) -> None:
    for name in ("\ud800", "\x1b[2J", "日本"):
        answer = raw(
            served, content=json.dumps({"model": name, "prompt": "a"}), headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 404 and answer.content.isascii() and b"\x1b" not in answer.content


def test_models_health_and_metrics(client: OpenAI, served: Served) -> None:
    (card,) = client.models.list().data
    assert card.id == "tiny" and card.max_model_len == 256  # type: ignore[attr-defined]
    assert httpx.get(f"{served.root}/health").json() == {"status": "ok"}
    client.completions.create(model="tiny", prompt="abc")
    text = httpx.get(f"{served.root}/metrics").text
    for name in ("generation_tokens_total", "kv_cache_usage", "mean_acceptance_length", "draft_seconds_total"):
        assert f"\npaceline_{name} " in text
    assert 'paceline_requests_total{route="/v1/completions",status="200"}' in text


# ---- keys, limits and shutdown, each with a server of its own ----


def test_api_key(model: Path) -> None:
    with serving(model, environment={"PACELINE_API_KEY": "secret"}) as served:
        with pytest.raises(openai.AuthenticationError) as error:
            served.client(api_key="wrong").models.list()
        assert error.value.code == "invalid_api_key"
        assert httpx.get(f"{served.url}/models").status_code == 401
        assert httpx.get(f"{served.root}/metrics").status_code == 401
        assert httpx.get(f"{served.root}/health").status_code == 200
        assert len(served.client(api_key="secret").models.list().data) == 1


def test_429_and_a_graceful_stop(model: Path) -> None:
    """SIGTERM lets the running request finish; a second server would take new ones."""
    with serving(model, "--max-requests", "1") as served:
        client = served.client()
        long: dict[str, Any] = {"model": served.name, "prompt": "abc", "max_tokens": 240, "n": 64}
        stream = client.completions.create(stream=True, extra_body={"ignore_eos": True}, **long)
        events = iter(stream)
        next(events)
        with pytest.raises(openai.RateLimitError) as error:
            client.completions.create(model=served.name, prompt="a")
        assert error.value.code == "rate_limit_exceeded"
        stopped: list[int] = []
        stopper = threading.Thread(target=lambda: stopped.append(served.stop()))
        stopper.start()
        rest = list(events)
        assert sum(event.choices[0].finish_reason == "length" for event in rest) == 64
        stopper.join()
        assert stopped == [0]
        with pytest.raises(openai.APIConnectionError):
            client.completions.create(model=served.name, prompt="a")


def test_a_stop_that_can_not_wait_ends_requests_with_503(model: Path) -> None:
    with serving(model, "--drain-s", "0") as served:
        long: dict[str, Any] = {"model": served.name, "prompt": "abc", "max_tokens": 240, "ignore_eos": True, "n": 64}
        answers: list[Any] = []

        def ask() -> None:
            try:
                answer = raw(served, json=long)
                answers.append((answer.status_code, answer.json()["error"]["code"]))
            except Exception as error:
                answers.append(error)

        asker = threading.Thread(target=ask)
        asker.start()
        deadline = time.monotonic() + 60
        while running(served)[1] == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert served.stop() == 0
        asker.join(20)
        assert answers == [(503, "service_unavailable")]


def test_clients_of_a_killed_server_get_errors(model: Path) -> None:
    with serving(model) as served:
        stream = served.client().completions.create(
            model=served.name, prompt="abc", max_tokens=240, n=64, stream=True, extra_body={"ignore_eos": True}
        )
        events = iter(stream)
        next(events)
        served.process.kill()
        with pytest.raises((httpx.HTTPError, openai.APIError)):
            list(events)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "give an API key"),
        (["--port", "99999"], "65535"),
        (["--host", "300.1.1.1", "--api-key", "x"], "can't listen"),
        (["engine.kind=vllm"], "engine.kind"),
    ],
)
def test_bad_options(model: Path, options: list[str], message: str) -> None:
    from typer.testing import CliRunner

    from paceline.cli import app

    done = CliRunner().invoke(app, ["serve", str(model), *options])
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
