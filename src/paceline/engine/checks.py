"""Checks of requests and of results, with errors that name the request and the remedy."""

from __future__ import annotations

import numpy as np

from paceline.engine.accept import VerificationResult
from paceline.engine.scheduled_batch import ScheduledBatch
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
    if request.sampling.stop and not has_tokenizer:
        raise ValueError(f"{name}: stop strings need a tokenizer, and this engine has none; use stop_token_ids")


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
