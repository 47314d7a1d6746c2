"""The model client of `verifiers`, over a sample's policy: no HTTP between both, and exact token ids.

`verifiers` runs a small HTTP server in this process, its interception server, which the harness calls as an OpenAI API.
It hands every call to the client of the call's rollout.

Invariants: an answer of the policy is never tokenized again while the conversation goes on after it. The trace gets the
token ids and logprobs that the policy sampled. Parameters that would change the distribution are refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from verifiers.v1.clients.client import Client
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception import Interception
from verifiers.v1.types import AssistantMessage, Response, ToolCall, TurnTokens, Usage

from paceline.chat.conversation import Conversations
from paceline.chat.messages import Message
from paceline.chat.tool_calls import for_template, parser_of
from paceline.outputs import completion_text
from paceline.tasks.agent import Policy, PolicyError
from paceline.tasks.env_agent import assistant_message
from paceline.types import Completion

# How verifiers names the policy in its settings. Nothing listens there: calls go to `PolicyClient`.
POLICY = TrainClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="PACELINE_POLICY_KEY")
MODEL = "policy"
# Parameters of a call that would change the distribution, and the values that do not.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logit_bias": (None, {}),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "chat_template_kwargs": (None, {}),
}


class PolicyInterception(Interception):
    """Gives the rollouts that play the policy a client of their sample's policy."""

    def __init__(self, inner: Interception, clients: Mapping[str, PolicyClient]) -> None:
        super().__init__()
        self._inner, self._clients = inner, clients  # clients by trace

    async def start(self) -> None:
        """`inner` has an owner, who starts and stops it."""

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        async with self._inner.acquire(session) as slot:
            if session.ctx.client == POLICY:
                session.client = self._clients[session.trace.id]
            yield slot


class PolicyClient(Client):
    """The calls of one sample."""

    def __init__(self, policy: Policy, template_kwargs: Mapping[str, Any]) -> None:
        self.policy = policy
        self.error: PolicyError | None = None  # the last one; a harness may end by it
        self.traces: set[str] = set()  # those that called the policy
        self._conversations = Conversations(policy.tokenizer, template_kwargs)
        self._parser = parser_of(policy.tokenizer.chat_template)

    async def get_response(
        self,
        dialect: Any,
        body: dict[str, Any],
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(f"{type(dialect).__name__}: use chat completions, not another API", status_code=400)
        self.traces.add(str(session_id))
        max_tokens, stop = limits(body)
        request = turn or dialect.parse_request(body)
        tools = [tool_to_wire(tool) for tool in request.tools or []]
        messages = [template_message(message) for message in (turn.prompt if turn else request.messages)]
        try:
            rendered = self._conversations.render(messages, tools)
            completion = await self.policy.generate(rendered.token_ids, max_tokens, stop)
        except PolicyError as error:
            self.error = error
            raise ProviderError(f"{type(error).__name__}: {error}", status_code=400) from error
        except ValueError as error:  # the chat template refuses the messages
            raise ProviderError(str(error), status_code=400) from error
        ids = [int(token) for token in completion.token_ids]
        text = completion_text(completion, self.policy.tokenizer)
        self._conversations.record(messages, tools, rendered, ids, text)
        message = assistant_message(text, self._parser if tools else None, len(messages))
        return response_of(message, rendered.token_ids, ids, completion)


def response_of(
    message: Message, prompt_ids: Sequence[int], completion_ids: list[int], completion: Completion
) -> Response:
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    has_ended = completion.finish_reason == "stop"
    response = Response(
        id=f"call-{completion.request.request_id}",
        created=0,
        model=MODEL,
        message=AssistantMessage(content=message["content"] or None, tool_calls=calls or None),
        finish_reason=("tool_calls" if calls else "stop") if has_ended else "length",
        usage=Usage(prompt_tokens=len(prompt_ids), completion_tokens=len(completion_ids)),
        tokens=TurnTokens(
            prompt_ids=list(prompt_ids),
            completion_ids=completion_ids,
            completion_logprobs=[float(logprob) for logprob in completion.logprobs],
        ),
    )
    response.raw = serialize_completion(response, MODEL)
    return response


def limits(body: Mapping[str, Any]) -> tuple[int | None, tuple[str, ...]]:
    """max_tokens and stop strings of a call. Temperature and truncation are the run's."""
    for key, allowed in REFUSED.items():
        if body.get(key) not in allowed:
            raise ProviderError(f"{key} = {body[key]!r}: not supported while a policy is trained", status_code=400)
    stop = body.get("stop") or ()
    max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    return max_tokens, (stop,) if isinstance(stop, str) else tuple(stop)


def template_message(message: Any) -> Message:
    """A message of verifiers, as chat templates expect it: text, and the arguments of tool calls as objects."""
    wire: Message = message_to_wire(message)
    content = wire.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise ProviderError("a message has an image; the policy reads text only", status_code=400)
        content = "".join(part["text"] for part in content)
    wire["content"] = content
    if "tool_calls" in wire:
        calls = for_template(wire["tool_calls"])
        if calls is None:
            raise ProviderError("a message has a malformed tool call", status_code=400)
        wire["tool_calls"] = calls
    return wire
