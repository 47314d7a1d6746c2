"""From the messages of an agent to the exact token ids of its policy.

An agent sends messages, and among them earlier answers of the policy as text. Tokenizing these again may give other ids
than those that were sampled, so the ids of every answer are kept, and messages that go on after an answer get them.

Invariants:
  - Ids that begin with an earlier prompt and its answer are those ids exactly; only what comes after is tokenized.
  - That happens only if the chat template keeps the earlier turns: the rendered text begins with the earlier prompt,
    followed by the answer as it was sampled, apart from white space. Otherwise, for example if the template removes
    thinking or the agent has edited its history, all messages are tokenized anew.
  - The result depends on the messages and the recorded answers, not on the order in which these were recorded.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from paceline.chat.messages import Message, Tool
from paceline.chat.template import encode_rendered, render_chat
from paceline.chat.tool_calls import PARSERS, parser_of

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Rendered:
    """Messages in the model's chat template, and their ids."""

    messages: tuple[Message, ...]  # answers of the policy in them are as sampled, where their ids are too
    text: str
    token_ids: TokenIds


@dataclass(frozen=True, slots=True)
class Answered:
    """A call that was answered: what its messages were, and what the policy sampled."""

    messages: tuple[Message, ...]
    message: Message  # that the agent got
    key: tuple[str, ...]  # the messages in canonical form
    answer: str  # the message that the agent got, in canonical form
    rendered: Rendered
    completion_ids: TokenIds
    raw_text: str  # of the completion, without its end token


class Conversations:
    """All calls of one sample. Several threads may use it at once."""

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any] = {}) -> None:
        """`template_kwargs`: further variables of the chat template."""
        self._tokenizer, self._template_kwargs = tokenizer, template_kwargs
        self._parser = parser_of(tokenizer.chat_template)
        self._special_ids = frozenset(tokenizer.all_special_ids)
        self._answered: dict[str, list[Answered]] = {}  # by tools, in canonical form
        self._texts: list[tuple[str, TokenIds]] = []  # prompts without messages, with what the policy said after them
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Rendered:
        """The prompt of a call."""
        key = tuple(map(canonical, messages))
        for earlier in self._begun_by(key, tools):
            if (found := self._extend(earlier, messages[len(earlier.key) + 1 :], tools)) is not None:
                return found
        text = self._text(messages, tools)
        return Rendered(tuple(messages), text, encode_rendered(self._tokenizer, text))

    def record(
        self, messages: Sequence[Message], tools: Sequence[Tool], rendered: Rendered, completion_ids: Sequence[int],
        text: str,
    ) -> None:  # fmt: skip
        """A call's answer. `text`: what the agent got, without stop string and special tokens."""
        message = self._answer(text, bool(tools))
        ids = tuple(map(int, completion_ids))
        own = ids[:-1] if ids and ids[-1] in self._special_ids else ids
        raw_text = self._tokenizer.decode(list(own), skip_special_tokens=False)
        key = tuple(map(canonical, messages))
        answered = Answered(tuple(messages), message, key, canonical(message), rendered, ids, raw_text)
        with self._lock:
            self._answered.setdefault(canonical_tools(tools), []).append(answered)

    def encode_text(self, text: str) -> TokenIds:
        """The ids of a prompt without messages. It goes on with the ids of an earlier one and its completion, if it
        begins with their text."""
        with self._lock:
            begun = [(len(known), ids) for known, ids in self._texts if text.startswith(known)]
        if not begun:
            return tuple(self._tokenizer.encode(text))
        num, ids = max(begun)
        return (*ids, *encode_rendered(self._tokenizer, text[num:]))

    def record_text(self, text: str, ids: TokenIds, completion_ids: Sequence[int]) -> None:
        """A completion of such a prompt. After an end token no text goes on."""
        sampled = tuple(map(int, completion_ids))
        if not sampled or sampled[-1] not in self._special_ids:
            said = self._tokenizer.decode(list(sampled), skip_special_tokens=False)
            with self._lock:
                self._texts.append((text + said, (*ids, *sampled)))

    def longest(self) -> tuple[list[Message], int]:
        """The longest conversation, with its last answer, and how many messages came before the policy's first one.
        Empty if there was no call."""
        with self._lock:
            found = [each for answered in self._answered.values() for each in answered]
        last = max(found, key=_order, default=None)
        if last is None:
            return [], 0
        said = (*last.key, last.answer)
        own = [each for each in found if said[: len(each.key) + 1] == (*each.key, each.answer)]
        return [*last.messages, last.message], min(len(each.key) for each in own)

    def _begun_by(self, key: tuple[str, ...], tools: Sequence[Tool]) -> Iterator[Answered]:
        """Earlier calls that these messages go on after, the longest first."""
        with self._lock:
            answered = list(self._answered.get(canonical_tools(tools), ()))
        for each in sorted(answered, key=_order, reverse=True):
            num = len(each.key)
            if len(key) > num and key[:num] == each.key and key[num] == each.answer:
                yield each

    def _extend(self, earlier: Answered, rest: Sequence[Message], tools: Sequence[Tool]) -> Rendered | None:
        """None if the template does not keep the earlier turns."""
        answer = {"role": "assistant", "content": earlier.raw_text}
        messages = (*earlier.rendered.messages, answer, *rest)
        try:
            text = self._text(messages, tools)
        except ValueError:  # the template wants calls of tools in their own field
            return None
        after = text_after(text, earlier.rendered.text, earlier.raw_text)
        if after is None:
            return None
        closing = encode_rendered(self._tokenizer, after)
        ids = (*earlier.rendered.token_ids, *earlier.completion_ids)
        return Rendered(messages, text, (*ids, *closing[num_repeated(earlier.completion_ids, closing) :]))

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
        return render_chat(self._tokenizer, messages, True, tools, self._template_kwargs)

    def _answer(self, text: str, has_tools: bool) -> Message:
        """The message that the API makes of a text."""
        if not has_tools or self._parser is None:
            return {"role": "assistant", "content": text}
        parser = PARSERS[self._parser]()
        content, calls = parser.add(text)
        rest, more = parser.finish()
        found = [
            {"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}
            for call in [*calls, *more]
        ]
        return {"role": "assistant", "content": content + rest, **({"tool_calls": found} if found else {})}


def _order(answered: Answered) -> tuple[Any, ...]:
    """Longer conversations are greater; equal ones are told apart by their ids, not by when they were recorded."""
    return len(answered.key), answered.rendered.token_ids, answered.completion_ids


def canonical(message: Mapping[str, Any]) -> str:
    """Equal for messages that say the same: without empty fields and the ids of tool calls, which clients drop or
    rename, with the arguments of calls parsed, and without white space around an answer."""
    found = {key: value for key, value in message.items() if value not in (None, "", [], {}) and key != "tool_call_id"}
    if message.get("role") == "assistant" and isinstance(content := found.pop("content", None), str):
        found |= {"content": content.strip()} if content.strip() else {}
    if "tool_calls" in found:
        found["tool_calls"] = [_canonical_call(call) for call in found["tool_calls"]]
    return json.dumps(found, sort_keys=True, default=str)


def _canonical_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments or {}}


def canonical_tools(tools: Sequence[Tool]) -> str:
    return json.dumps(list(tools), sort_keys=True, default=str)


def text_after(text: str, prompt: str, answer: str) -> str | None:
    """What follows the prompt and the answer in a text; None if the text does not begin with them. White space in and
    around the answer may differ, since templates strip it."""
    if not text.startswith(prompt):
        return None
    at = len(prompt)
    for character in answer:
        if character.isspace():
            continue
        while at < len(text) and text[at].isspace():
            at += 1
        if at == len(text) or text[at] != character:
            return None
        at += 1
    sampled, after = answer[len(answer.rstrip()) :], text[at:]  # the space that was sampled is not written twice
    num = next((n for n in range(len(sampled), 0, -1) if after.startswith(sampled[:n])), 0)
    return after[num:]


def num_repeated(completion_ids: Sequence[int], closing: Sequence[int]) -> int:
    """How many of the first closing ids the policy sampled itself, such as its end token."""
    longest = min(len(completion_ids), len(closing))
    return next((n for n in range(longest, 0, -1) if tuple(completion_ids[-n:]) == tuple(closing[:n])), 0)
