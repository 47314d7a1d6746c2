"""The bodies of requests. Unknown keys are errors: nothing that a client asks for is ignored silently.

Keys and meanings are OpenAI's; those that OpenAI does not have are vLLM's. `null` is the same as no value.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.chat.messages import Message, Tool
from paceline.chat.tool_calls import for_template
from paceline.serve.errors import ApiError
from paceline.serve.limits import Limits
from paceline.serve.structure import StructuredOutputs, response_structure, structured_outputs, with_structure
from paceline.types import SamplingParams

# Of OpenAI's keys, those that the server does not have. Each is an error that says so, unless it has no effect.
NOT_SUPPORTED = {
    "best_of": "use n",
    "echo": "the prompt is not scored",
    "suffix": "the model is not trained to insert text",
    "prompt_logprobs": "the prompt is not scored",
    "functions": "use tools",
    "function_call": "use tools",
    "audio": "the model has text only",
    "modalities": "the model has text only",
    "include_stop_str_in_output": "text ends before the stop string",
    "truncate_prompt_tokens": "shorten the prompt",
    "chat_template": "the model's own template is used",
}
NO_EFFECT = {
    "echo": False, "best_of": 1, "include_stop_str_in_output": False, "modalities": ["text"],
}  # fmt: skip


# The error is of the first wrong element: a list may have millions.
Ids = Annotated[list[int], Field(fail_fast=True)]
Strings = Annotated[list[str], Field(fail_fast=True)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    include_usage: bool | None = None


class SamplingBody(Body):
    """Sampling parameters. All may be `null`."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # 0 or -1: off
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Ids | None = None
    bad_words: Strings | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool | None = None

    def params(self, limits: Limits, max_tokens: int, num_prompts: int, logprobs: int) -> SamplingParams:
        """`max_tokens`: of each sample; `logprobs`: most probable tokens to report. Raises ApiError."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        sizes = {
            "n": ((self.n or 1) * num_prompts, limits.max_samples, "samples in a request, prompts times n"),
            "stop": (len(stop), limits.max_stop_strings, "stop strings"),
            "max_tokens": (max_tokens, limits.max_tokens or max_tokens, "tokens in a completion"),
            "logprobs": (logprobs, limits.max_logprobs, "logprobs of each token"),
            **{
                key: (len(getattr(self, key) or ()), limits.max_listed, "entries")
                for key in ("logit_bias", "bad_words", "allowed_token_ids", "stop_token_ids")
            },
        }
        for key, (size, limit, what) in sizes.items():
            if size > limit:
                raise ApiError(400, f"{key}: {size} {what}; this server allows {limit}", key)
        for key, strings in (("stop", stop), ("bad_words", self.bad_words or [])):
            if any(len(each) > limits.max_stop_chars for each in strings):
                raise ApiError(400, f"{key}: this server allows {limits.max_stop_chars} characters in a string", key)
        given = {key: getattr(self, key) for key in SamplingBody.model_fields if getattr(self, key) is not None}
        given.pop("skip_special_tokens", None)
        if self.structured_outputs is not None:
            found = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            given["structured_outputs"] = structured_outputs("structured_outputs", limits, **found)
        given |= {"stop": tuple(stop), "max_tokens": max_tokens, "logprobs": logprobs}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        try:
            return SamplingParams(**given)
        except ValueError as error:
            message = str(error).removeprefix("sampling.")
            raise ApiError(400, message, message.partition(" ")[0]) from None


class TextBody(SamplingBody):
    """What completions and chat completions have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    # Accepted and without effect, because they do not concern the completion.
    user: Any = None
    store: Any = None
    metadata: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def structure_key(self) -> str:
        """Which key asks for a structured output."""
        return "response_format" if self.structured_outputs is None else "structured_outputs"

    def params(self, limits: Limits, max_tokens: int, num_prompts: int, logprobs: int) -> SamplingParams:
        params = super().params(limits, max_tokens, num_prompts, logprobs)
        structure = response_structure(self.response_format, limits)
        if structure is None:
            return params
        if params.structured_outputs is not None:
            raise ApiError(400, "response_format: give it or structured_outputs, not both", "response_format")
        return with_structure(params, structure)


class CompletionBody(TextBody):
    prompt: str | Ids | Strings | Annotated[list[Ids], Field(fail_fast=True)]
    max_tokens: int | None = None
    logprobs: int | None = None


class ChatBody(TextBody):
    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model may call. Raises ApiError."""
        for i, tool in enumerate(self.tools or []):
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if tool.get("type") != "function" or not isinstance(name, str) or not name:
                raise ApiError(400, f"tools.{i}: must be of type function, with a name", f"tools.{i}")
        if self.forced_tools is None and self.parallel_tool_calls is False:
            reason = 'calls can be limited to one only if tool_choice is "required" or a function'
            raise ApiError(400, f"parallel_tool_calls: {reason}", "parallel_tool_calls")
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[Tool] | None:
        """The tools of which the model must call one; None: it need not. Raises ApiError."""
        choice, tools = self.tool_choice, self.tools or []
        if choice is None or choice in ("none", "auto"):
            return None
        if not tools:
            raise ApiError(400, "tool_choice: needs tools", "tool_choice")
        if self.response_format not in (None, {"type": "text"}) or self.structured_outputs is not None:
            reason = "a forced tool call has a format of its own; leave it out"
            raise ApiError(400, f"{self.structure_key}: {reason}", self.structure_key)
        if choice == "required":
            return tools
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        if not isinstance(function, dict):
            message = 'tool_choice: must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}'
            raise ApiError(400, message, "tool_choice")
        named = [tool for tool in tools if tool["function"]["name"] == function.get("name")]
        if not named:
            raise ApiError(400, f"tool_choice: no function of tools is named {function.get('name')!r}", "tool_choice")
        return named[:1]


class GenerateSampling(SamplingBody):
    max_tokens: int | None = None
    logprobs: int | None = None


class GenerateBody(Body):
    """vLLM's token-level route, which the clients of RL environments use."""

    model: str | None = None
    token_ids: Ids
    sampling_params: GenerateSampling
    request_id: str | None = None  # of the response too
    cache_salt: Any = None  # accepted, but the prefix cache is shared: one server has one user
    priority: int | None = None
    stream: bool | None = None

    def check(self) -> None:
        """Raises ApiError."""
        if self.stream:
            raise ApiError(400, "stream is not supported on this route; use /v1/completions", "stream")
        if self.priority:
            raise ApiError(400, "priority is not supported", "priority")
        if (self.sampling_params.logprobs or 0) > 1:
            raise ApiError(400, "logprobs: this route reports those of the sampled tokens only", "logprobs")


AnyBody = TypeVar("AnyBody", bound=Body)


def parse_body(kind: type[AnyBody], content: bytes) -> AnyBody:
    """Raises ApiError."""
    try:
        found = json.loads(content, parse_constant=_not_a_number)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"The body is not valid JSON: {reason}") from None
    if not isinstance(found, dict):
        raise ApiError(400, "The body must be a JSON object")
    for name, reason in NOT_SUPPORTED.items():
        if found.get(name) is not None and found[name] != NO_EFFECT.get(name):
            raise ApiError(400, f"{name} is not supported: {reason}", name)
        found.pop(name, None)
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = (
            first["loc"][:1] if first["loc"][:1] in (("prompt",), ("stop",)) else first["loc"][:2]
        )  # unions have tags
        key = ".".join(map(str, path)) or None
        raise ApiError(400, f"{key}: {first['msg']}", key) from None


def _not_a_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def template_messages(messages: list[Message]) -> list[Message]:
    """The messages as chat templates expect them. Raises ApiError."""
    if not messages:
        raise ApiError(400, "messages: must not be empty", "messages")
    return [_template_message(f"messages.{i}", message) for i, message in enumerate(messages)]


KEYS = {
    "assistant": {"tool_calls", "refusal", "audio", "function_call"},  # as the server's own answers have them
    "tool": {"tool_call_id"},
}


def _template_message(where: str, message: Message) -> Message:
    role, content = message.get("role"), message.get("content")
    if role not in ("system", "developer", "user", "assistant", "tool"):
        raise ApiError(400, f"{where}.role: must be system, developer, user, assistant or tool", f"{where}.role")
    if message.get("type") == "text":  # lm-eval writes it
        message = {key: value for key, value in message.items() if key != "type"}
    own = KEYS.get(role, set())
    if unknown := {key for key, value in message.items() if value is not None} - {"role", "content", "name"} - own:
        key = f"{where}.{sorted(unknown)[0]}"
        raise ApiError(400, f"{key} is not supported", key)
    found: Message = {"role": "system" if role == "developer" else role}
    found |= {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}
    if message.get("tool_calls"):
        found["tool_calls"] = for_template(message["tool_calls"])
        if found["tool_calls"] is None:
            key = f"{where}.tool_calls"
            raise ApiError(400, f"{key}: must be functions with a name, and arguments as a JSON object", key)
        content = content or ""
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content: must be a string or parts of type text", f"{where}.content")
    return found | {"content": content}
