"""What `LLM` returns: text and tokens of every sample of every prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.types import Completion, Provenance


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
    finish_reason: str  # "stop" | "length" | "abort"
    stop_reason: int | str | None  # the stop token or stop string


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All samples of one prompt."""

    prompt: str | None  # with the chat template; None if token ids were given
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]


def completion_output(completion: Completion, index: int, tokenizer: Any) -> CompletionOutput:
    top = completion.top_logprobs
    return CompletionOutput(
        index=index,
        text=completion_text(completion, tokenizer),
        token_ids=completion.token_ids.tolist(),
        logprobs=completion.logprobs.tolist(),
        raw_logprobs=completion.raw_logprobs.tolist(),
        top_logprobs=None
        if top is None
        else [
            dict(zip(ids, logprobs, strict=True))
            for ids, logprobs in zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True)
        ],
        drafted=(completion.provenance == Provenance.ACCEPTED).tolist(),
        versions=completion.versions.tolist(),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )


def completion_text(completion: Completion, tokenizer: Any) -> str:
    """The text without special tokens, up to the stop string if one ended it."""
    token_ids = completion.token_ids.tolist()
    text: str = tokenizer.decode(token_ids, skip_special_tokens=True)
    stop = completion.stop_reason
    if isinstance(stop, str):  # it ends in the last token
        before = len(tokenizer.decode(token_ids[:-1], skip_special_tokens=True))
        at = text.find(stop, max(0, before - len(stop) + 1))
        if at >= 0:  # not in the text if it contains a special token
            text = text[:at]
    return text
