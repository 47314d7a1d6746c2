"""Checks of requests and of results, with errors that name the request and the remedy."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from paceline.engine.accept import VerificationResult
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import Sequence
from paceline.types import Request


def check_request(request: Request, max_positions: int, vocab_size: int, kv_tokens: int, has_tokenizer: bool) -> None:
    num_prompt, name = len(request.prompt_ids), f"request {request.request_id}"
    if num_prompt >= max_positions:
        raise ValueError(
            f"{name}: its prompt has {num_prompt} tokens, but the model's context is {max_positions} and must "
            "hold at least one more; shorten the prompt"
        )
    bad = [t for t in (min(request.prompt_ids), max(request.prompt_ids)) if not 0 <= t < vocab_size]
    if bad:
        raise ValueError(f"{name}: token id {bad[0]} is not in the vocabulary (0 to {vocab_size - 1})")
    longest = min(num_prompt + request.sampling.max_tokens, max_positions)
    if longest > kv_tokens:
        raise ValueError(
            f"{name}: prompt and max_tokens may reach {longest} tokens, but engine.kv_tokens = {kv_tokens}; raise it "
            "or lower max_tokens"
        )
    sampling = request.sampling
    if sampling.stop and not has_tokenizer:
        raise ValueError(f"{name}: stop strings need a tokenizer, and this engine has none; use stop_token_ids")
    if sampling.n != 1:
        raise ValueError(f"{name}: sampling.n = {sampling.n}: a request is one sample; submit n requests, or use LLM")
    if sampling.logprobs > vocab_size:
        raise ValueError(f"{name}: sampling.logprobs = {sampling.logprobs}: the vocabulary has {vocab_size} tokens")
    for key, ids in (
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("stop_token_ids", sampling.stop_token_ids),
        ("bad_words", [token for word in sampling.bad_words if not isinstance(word, str) for token in word]),
    ):
        for token in ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name}: sampling.{key}: token id {token} is not in the vocabulary (0 to {vocab_size - 1})"
                )


def check_sampling(request: Request, engine: str) -> None:
    """Raise ValueError for sampling parameters that `engine` does not have."""
    sampling = request.sampling
    for key in (*sampling.logits_parameters, *(("logprobs",) if sampling.logprobs else ())):
        raise ValueError(
            f"request {request.request_id}: sampling.{key} = {getattr(sampling, key)!r}: {engine} can't apply it yet; "
            "leave it out"
        )


def bad_word_ids(words: Seq[str | tuple[int, ...]], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """The bad words as token ids. A string has two forms: at the start of a text, and after a space."""
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(tuple(map(int, word)))
        elif tokenizer is None:
            raise ValueError(
                "sampling.bad_words with strings needs a tokenizer, and this engine has none; give token ids"
            )
        else:
            forms = (word, " " + word.lstrip(" "))
            found += [tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms]
    return tuple(word for word in dict.fromkeys(found) if word)


def check_tokens_left(sequence: Sequence, vocab_size: int) -> None:
    """Raise ValueError if sampling.allowed_token_ids, bad_words and min_tokens might leave no token to sample."""
    sampling = sequence.request.sampling
    excluded = {word[-1] for word in sequence.bad_words} | (sequence.stop_ids if sampling.min_tokens else set())
    allowed = sampling.allowed_token_ids
    if len(excluded) >= vocab_size if allowed is None else excluded.issuperset(allowed):
        raise ValueError(
            f"request {sequence.request.request_id}: sampling.allowed_token_ids, bad_words and min_tokens leave no "
            "token to sample; allow a token that ends no bad word and no sequence"
        )


def check_finite(batch: ScheduledBatch, result: VerificationResult, version: int) -> None:
    if np.isfinite(result.raw_logprobs).all():
        return
    wrong = np.flatnonzero((~np.isfinite(result.raw_logprobs) & result.emitted).any(1))
    if len(wrong):
        sequence = batch.sequences[int(wrong[0])]
        raise ValueError(
            f"request {sequence.request.request_id}: the model's logits at position {sequence.num_tokens} are not "
            f"finite: the weights of version {version} have diverged"
        )
