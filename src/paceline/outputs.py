"""What `LLM` returns: text and tokens of every sample of every prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.types import Completion, NewTokens, Provenance


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample. Lists have one entry per token."""

    index: int  # among the samples of its prompt
    text: str  # without special tokens and without the stop string
    token_ids: list[int]  # with the stop token, if one ended it
    logprobs: list[float]  # after all sampling parameters: of the distribution that was sampled from
    raw_logprobs: list[float]  # of the model, before any sampling parameter; vLLM's `logprobs`
    top_logprobs: list[dict[int, float]] | None  # token id -> raw logprob, best first, if sampling.logprobs > 0
    drafted: list[bool]  # whether the token is an accepted draft token
    versions: list[int]  # the policy version that emitted the token
    finish_reason: str  # "stop" | "length" | "abort" | "error": the sampling parameters left no token to sample
    stop_reason: int | str | None  # the stop token or stop string; why there was an error


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """What a step adds to a sample: see `CompletionOutput`. A token's text may come in a later chunk."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top_logprobs: list[dict[int, float]] | None
    drafted: list[bool]
    versions: list[int]
    finish_reason: str | None  # of the last chunk
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All samples of one prompt."""

    prompt: str | None  # with the chat template; None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


def completion_output(completion: Completion, index: int, tokenizer: Any) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=completion_text(completion, tokenizer),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        **_columns(completion),
    )


def completion_chunk(new: NewTokens, index: int, text: TextStream) -> CompletionChunk:
    """`text` is the sample's, and continues here."""
    columns, completion = _columns(new), new.completion
    return CompletionChunk(
        index=index,
        text=text.add(columns["token_ids"], completion),
        finish_reason=completion.finish_reason if completion is not None else None,
        stop_reason=completion.stop_reason if completion is not None else None,
        **columns,
    )


def _columns(tokens: Completion | NewTokens) -> dict[str, Any]:
    """What there is for each token, as lists."""
    top = tokens.top_logprobs
    return {
        "token_ids": tokens.token_ids.tolist(),
        "logprobs": tokens.logprobs.tolist(),
        "raw_logprobs": tokens.raw_logprobs.tolist(),
        "top_logprobs": None
        if top is None
        else [
            dict(zip(ids, logprobs, strict=True))
            for ids, logprobs in zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
        ],
        "drafted": (tokens.provenance == Provenance.ACCEPTED).tolist(),
        "versions": tokens.versions.tolist(),
    }


MAX_HELD = 8  # tokens without new text, before the window moves on


class TextStream:
    """The text of a growing list of tokens, piece by piece. It holds back what may be part of a character of several
    tokens, or of a stop string. All pieces together are `completion_text`."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._first = self._next = 0  # the window that is decoded begins at `_first`; the text before `_next` is known
        self._text = ""  # known
        self._num_given = 0  # characters
        self._num_held = max((len(each) for each in stop), default=1) - 1

    def add(self, token_ids: Sequence[int], completion: Completion | None) -> str:
        """The next piece. `completion`: if it has finished with these tokens."""
        self._token_ids += token_ids
        if completion is not None:
            end, text = None, completion_text(completion, self._tokenizer)
        else:
            text = self._extend()
            end = max(0, len(text) - self._num_held)
        piece = text[self._num_given : end]
        self._num_given += len(piece)
        return piece

    def _extend(self) -> str:
        """Decode only the last tokens: a token's text may depend on the token before it, not on more."""
        before, end = self._decode(self._first, self._next), len(self._token_ids)
        window = self._decode(self._first, end)
        if len(window) > len(before) and not window.endswith("\ufffd"):
            self._text += window[len(before) :]
            self._first, self._next = self._next, end
        elif end - self._next > MAX_HELD:  # tokens without text, or bytes that are no text
            middle = end - MAX_HELD // 2  # no character has more tokens
            head = self._decode(self._first, middle)
            if head + self._decode(middle, end) == window:
                self._text += head[len(before) :]
                self._first = self._next = middle
        return self._text

    def _decode(self, start: int, end: int) -> str:
        text: str = self._tokenizer.decode(self._token_ids[start:end], skip_special_tokens=True)
        return text


def completion_text(completion: Completion, tokenizer: Any) -> str:
    """The text without special tokens, up to the stop string if one ended it."""
    token_ids = completion.token_ids.tolist()
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    stop = completion.stop_reason
    if isinstance(stop, str) and completion.finish_reason == "stop":  # it ends in the last token
        before = len(tokenizer.decode(token_ids[:-1], skip_special_tokens=True).rstrip("\ufffd"))
        at = text.find(stop, max(0, before - len(stop) + 1))
        if at >= 0:  # not in the text if it contains a special token
            text = text[:at]
    return text
