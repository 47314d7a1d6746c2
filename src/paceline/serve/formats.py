"""The responses of each route: OpenAI's, with vLLM's `token_ids` and `prompt_token_ids`."""

from __future__ import annotations

import hashlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.chat.tool_calls import PARSERS, ToolCall, ToolParser, to_api
from paceline.outputs import CompletionChunk, CompletionOutput
from paceline.serve.errors import ApiError

Output = CompletionOutput | CompletionChunk


class Format(ABC):
    """Of one response. `token_text`: decodes one token. `index`: of the choice; `prompt_index`: of its prompt; `first`:
    nothing was sent for this choice before."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self, model: str, token_text: Callable[[int], str], logprobs: bool, token_ids: bool, prompt_ids: list[list[int]]
    ) -> None:
        self.token_text, self.logprobs, self.token_ids, self.prompt_ids = token_text, logprobs, token_ids, prompt_ids
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._num_tokens = 0
        self._versions: set[int] = set()

    @abstractmethod
    def choice(self, index: int, output: Output, prompt_index: int, first: bool) -> dict[str, Any]: ...
    def chunk_choice(self, index: int, output: Output, prompt_index: int, first: bool) -> dict[str, Any]:
        return self.choice(index, output, prompt_index, first)

    def response(self, outputs: list[list[CompletionOutput]]) -> dict[str, Any]:
        """`outputs`: for each prompt."""
        choices: list[dict[str, Any]] = []
        for prompt_index, samples in enumerate(outputs):
            for output in samples:
                self._count(output)
                choices.append(self.choice(len(choices), output, prompt_index, first=True))
        return self._body(self.kind, choices) | {"usage": self.usage()} | self._extra()

    def chunk(self, index: int, output: CompletionChunk, prompt_index: int, first: bool) -> dict[str, Any]:
        self._count(output)
        extra = self._extra() if first or output.finish_reason is not None else {}
        return self._body(self.chunk_kind, [self.chunk_choice(index, output, prompt_index, first)]) | extra

    def usage_chunk(self) -> dict[str, Any]:
        return self._body(self.chunk_kind, []) | {"usage": self.usage()} | self._extra()

    def usage(self) -> dict[str, int]:
        num_prompt = sum(map(len, self.prompt_ids))
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt + self._num_tokens,
        }

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    def _extra(self) -> dict[str, Any]:
        """The newest policy version that emitted a token."""
        return {"policy_version": max(self._versions)} if self._versions else {}

    def _count(self, output: Output) -> None:
        if output.finish_reason == "abort":
            raise ApiError(503, "The server is shutting down")
        if output.finish_reason == "error":
            raise ApiError(400, f"A completion could not go on: {output.stop_reason}")
        self._num_tokens += len(output.token_ids)
        self._versions.update(output.versions)


class CompletionFormat(Format):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}  # by choice, of the next token's text

    def choice(self, index: int, output: Output, prompt_index: int, first: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": output.text,
            "logprobs": self._logprobs(index, output) if self.logprobs else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        if self.token_ids:
            choice |= {"token_ids": output.token_ids, "versions": output.versions}
            if first:
                choice["prompt_token_ids"] = self.prompt_ids[prompt_index]
        return choice

    def _logprobs(self, index: int, output: Output) -> dict[str, Any]:
        tokens = [self.token_text(token) for token in output.token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(token)
        tops = output.top_logprobs or [{} for _ in tokens]
        return {
            "tokens": tokens,
            "token_logprobs": output.raw_logprobs,
            "top_logprobs": [self._by_text(top) for top in tops],
            "text_offset": offsets,
        }

    def _by_text(self, top: dict[int, float]) -> dict[str, float]:
        """Of tokens with the same text, such as parts of characters, the most probable one."""
        found: dict[str, float] = {}
        for token, value in top.items():
            found.setdefault(self.token_text(token), value)
        return found


class ChatFormat(Format):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tool_parser: str | None, reports_calls: bool, *args: Any, repeats: bool = False) -> None:
        """`reports_calls`: the reason why a choice with calls finished is `tool_calls`. `repeats`: the ids of calls
        depend only on prompt and completion; not in streams of several chunks."""
        super().__init__(*args)
        self._reports_calls, self._repeats = reports_calls, repeats
        self._make_parser = PARSERS[tool_parser] if tool_parser is not None else None
        self._parsers: dict[int, ToolParser] = {}  # by choice
        self._num_calls: dict[int, int] = {}

    def choice(self, index: int, output: Output, prompt_index: int, first: bool) -> dict[str, Any]:
        content, calls = self._parse(index, output)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": to_api(calls)}
        return {"index": index, "message": message, **self._rest(index, output)}

    def chunk_choice(self, index: int, output: Output, prompt_index: int, first: bool) -> dict[str, Any]:
        num_before = self._num_calls.get(index, 0)
        content, calls = self._parse(index, output)
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        delta |= {"content": content}
        if calls:
            delta |= {"content": content or None, "tool_calls": to_api(calls, num_before)}
        return {"index": index, "delta": delta, **self._rest(index, output)}

    def _parse(self, index: int, output: Output) -> tuple[str, list[ToolCall]]:
        """The text that is no tool call, and the calls."""
        if self._make_parser is None:
            return output.text, []
        parser = self._parsers.setdefault(index, self._make_parser())
        content, calls = parser.add(output.text)
        if output.finish_reason is not None:
            rest, more = parser.finish()
            content, calls = content + rest, calls + more
        if self._repeats:
            calls = [replace(call, id=self._call_id(index, i, output)) for i, call in enumerate(calls)]
        self._num_calls[index] = self._num_calls.get(index, 0) + len(calls)
        return content, calls

    def _call_id(self, index: int, i: int, output: Output) -> str:
        """Nine letters and digits, as Mistral's templates require."""
        said = repr((self.prompt_ids, index, i, output.token_ids))
        return hashlib.blake2b(said.encode(), digest_size=8).hexdigest()[:9]

    def _rest(self, index: int, output: Output) -> dict[str, Any]:
        has_calls = self._reports_calls and output.finish_reason == "stop" and self._num_calls.get(index)
        rest: dict[str, Any] = {
            "logprobs": {"content": self._content(output)} if self.logprobs else None,
            "finish_reason": "tool_calls" if has_calls else output.finish_reason,
            "stop_reason": output.stop_reason,
        }
        return rest | ({"token_ids": output.token_ids, "versions": output.versions} if self.token_ids else {})

    def _extra(self) -> dict[str, Any]:
        return super()._extra() | ({"prompt_token_ids": self.prompt_ids[0]} if self.token_ids else {})

    def _content(self, output: Output) -> list[dict[str, Any]]:
        tops = output.top_logprobs or [{} for _ in output.token_ids]
        return [
            self._entry(token, value) | {"top_logprobs": [self._entry(*each) for each in top.items()]}
            for token, value, top in zip(output.token_ids, output.raw_logprobs, tops, strict=True)
        ]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self.token_text(token_id)
        is_part = "\ufffd" in token  # of a character: its bytes are not in the text
        return {"token": token, "logprob": logprob, "bytes": None if is_part else list(token.encode())}


class GenerateFormat(Format):
    """vLLM's `/inference/v1/generate`: token ids and no text. `logprobs` are those of the sampling distribution, which
    a trainer needs."""

    prefix = "gen"

    def __init__(self, request_id: str | None, *args: Any) -> None:
        super().__init__(*args)
        self._request_id = request_id

    def choice(self, index: int, output: Output, prompt_index: int, first: bool) -> dict[str, Any]:
        content = [
            {"token": f"token_id:{token}", "logprob": logprob}
            for token, logprob in zip(output.token_ids, output.logprobs, strict=True)
        ]
        return {
            "index": index,
            "token_ids": output.token_ids,
            "versions": output.versions,
            "logprobs": {"content": content} if self.logprobs else None,
            "finish_reason": output.finish_reason,
        }

    def response(self, outputs: list[list[CompletionOutput]]) -> dict[str, Any]:
        body = super().response(outputs)
        return body | {"request_id": self._request_id or body["id"], "prompt_token_ids": self.prompt_ids[0]}
