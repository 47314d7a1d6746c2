"""Responses with tool calls, whole and in a stream, from scripted text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from paceline.outputs import CompletionChunk, CompletionOutput
from paceline.serve.errors import ApiError
from paceline.serve.formats import ChatFormat

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TEXT = f"Let me see. {CALL}{CALL}"


def chat(parser: str | None, reports_calls: bool = True) -> ChatFormat:
    return ChatFormat(parser, reports_calls, "tiny", str, False, False, [[1, 2]])


def columns(num: int) -> dict[str, Any]:
    return {
        "token_ids": [0] * num, "logprobs": [0.0] * num, "raw_logprobs": [0.0] * num, "top_logprobs": None,
        "drafted": [False] * num, "versions": [3] * num,
    }  # fmt: skip


def output(text: str, reason: str = "stop") -> CompletionOutput:
    return CompletionOutput(0, text, finish_reason=reason, stop_reason=None, **columns(2))


def test_a_response_with_calls() -> None:
    made = chat("hermes").response([[output(TEXT)]])
    choice = ChatCompletion.model_validate(made).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None and len(choice.message.tool_calls) == 2
    for call in choice.message.tool_calls:
        assert call.type == "function" and json.loads(call.function.arguments) == {"a": 1}
    assert made["policy_version"] == 3 and made["usage"]["total_tokens"] == 4


def test_a_response_without_calls() -> None:
    for parser, text in ((None, TEXT), ("hermes", "plain")):
        choice = ChatCompletion.model_validate(chat(parser).response([[output(text)]])).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", text, None)
    assert chat("hermes").response([[output(CALL, "length")]])["choices"][0]["finish_reason"] == "length"


def test_a_call_of_a_named_function_ends_with_stop() -> None:
    (choice,) = ChatCompletion.model_validate(chat("hermes", False).response([[output(CALL)]])).choices
    assert choice.finish_reason == "stop" and choice.message.content is None and choice.message.tool_calls is not None


def test_a_completion_that_could_not_go_on_is_an_error() -> None:
    failed = CompletionOutput(0, "", finish_reason="error", stop_reason="no token", **columns(0))
    with pytest.raises(ApiError, match="no token") as error:
        chat(None).response([[failed]])
    assert error.value.status == 400


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stream_with_calls(size: int) -> None:
    made, pieces = chat("hermes"), [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    content, calls, reason = "", [], None
    for i, piece in enumerate(pieces):
        last = i == len(pieces) - 1
        chunk = CompletionChunk(0, piece, finish_reason="stop" if last else None, stop_reason=None, **columns(1))
        event = ChatCompletionChunk.model_validate(made.chunk(0, chunk, 0, i == 0))
        (choice,) = event.choices
        content += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reason = choice.finish_reason
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert [(call.index, call.function and call.function.name) for call in calls] == [(0, "add"), (1, "add")]


def test_an_aborted_request_is_an_error() -> None:
    with pytest.raises(ApiError, match="shutting down"):
        chat(None).response([[output("a", "abort")]])
