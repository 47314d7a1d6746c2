"""Changes logits by the sampling parameters that depend on single tokens or on the tokens before a position.

The order is vLLM's: structured_outputs, allowed_token_ids, bad_words, min_tokens, logit_bias, repetition_penalty,
frequency_penalty and presence_penalty. Temperature and truncation follow in `model.sample`. At a drafted position the
tokens before it include the draft up to it, so that an accepted token has the distribution that it would have without
drafts. A sequence ends where these parameters leave no token to sample.
P positions, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from paceline.engine.accept import VerificationResult
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import Sequence
from paceline.types import TopLogprobs

NO_TOKEN_LEFT = "structured_outputs and the other sampling parameters leave no token to sample"


def process_logits(logits_PV: Tensor, batch: ScheduledBatch) -> Tensor:
    """The logits of the batch's emitting rows with these parameters applied. The same tensor, if no row uses them."""
    processed_PV, start = logits_PV, 0
    for i, sequence in enumerate(batch.sequences):
        draft = batch.draft(i)
        if sequence.changes_logits:
            if processed_PV is logits_PV:
                processed_PV = logits_PV.clone()
            output_ids = np.concatenate([sequence.emitted, draft])
            sequence.dead_end = None
            for j in range(1 + len(draft)):
                if not _process(processed_PV[start + j], sequence, output_ids[: len(output_ids) - len(draft) + j]):
                    sequence.dead_end = j  # nothing after it is emitted, so the logits there don't matter
                    break
        start += 1 + len(draft)
    return processed_PV


def _process(logits_V: Tensor, sequence: Sequence, output_ids: np.ndarray) -> bool:
    """In place, for one position. `output_ids`: the request's tokens before it, without the prompt. False: no token is
    left, and the logits are as they were."""
    sampling = sequence.request.sampling
    if sequence.grammar is not None:
        allowed_V = sequence.grammar.allowed(output_ids)
        if allowed_V is None:  # the draft before it is not allowed, so it is rejected and nothing is emitted here
            return len(output_ids) > len(sequence.emitted)
        if not _is_any_left(allowed_V, sequence, output_ids):
            return False
        is_allowed_V = torch.from_numpy(allowed_V).to(logits_V.device)
        torch.where(is_allowed_V, logits_V, logits_V.new_tensor(-torch.inf), out=logits_V)  # twice masked_fill_'s speed
    if sampling.allowed_token_ids is not None:
        allowed = _index(logits_V, sampling.allowed_token_ids)
        kept = logits_V[allowed]
        logits_V.fill_(-torch.inf)
        logits_V[allowed] = kept
    if excluded := _excluded(sequence, output_ids):
        logits_V[_index(logits_V, sorted(excluded))] = -torch.inf
    if sampling.logit_bias:
        tokens, bias = zip(*sampling.logit_bias, strict=True)
        logits_V[_index(logits_V, tokens)] += torch.tensor(bias, dtype=logits_V.dtype, device=logits_V.device)
    if sampling.repetition_penalty != 1:
        prompt_ids = sequence.record.tokens[: sequence.num_prompt]
        seen = _index(logits_V, np.unique(np.concatenate([prompt_ids, output_ids])))
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        seen_output, counts = np.unique(output_ids, return_counts=True)
        amounts = torch.as_tensor(sampling.frequency_penalty * counts + sampling.presence_penalty)
        logits_V[_index(logits_V, seen_output)] -= amounts.to(logits_V.device, logits_V.dtype)
    return True


def _is_any_left(allowed_V: np.ndarray, sequence: Sequence, output_ids: np.ndarray) -> bool:
    """Of the tokens that the grammar allows, after the other parameters."""
    left_V = allowed_V.copy()
    if (allowed := sequence.request.sampling.allowed_token_ids) is not None:
        left_V[:] = False
        left_V[list(allowed)] = allowed_V[list(allowed)]
    left_V[list(_excluded(sequence, output_ids))] = False
    return bool(left_V.any())


def _excluded(sequence: Sequence, output_ids: np.ndarray) -> set[int]:
    """Tokens that would complete a bad word, or end the sequence before `min_tokens`."""
    excluded = set(sequence.stop_ids) if len(output_ids) < sequence.request.sampling.min_tokens else set[int]()
    for word in sequence.bad_words:
        before = word[:-1]
        if not before or tuple(output_ids[-len(before) :].tolist()) == before:
            excluded.add(word[-1])
    return excluded


def _index(logits_V: Tensor, tokens: object) -> Tensor:
    return torch.as_tensor(np.asarray(tokens, np.int64), device=logits_V.device)


def report_dead_ends(result: VerificationResult, batch: ScheduledBatch) -> None:
    """Of rows whose draft is accepted up to where no token is left."""
    for i, sequence in enumerate(batch.sequences):
        if sequence.dead_end is not None and sequence.dead_end <= result.num_accepted[i]:
            grammar = sequence.grammar
            reason = grammar.error if grammar is not None and grammar.error else NO_TOKEN_LEFT
            result.dead_ends[i] = sequence.dead_end, reason


def report_logprobs(result: VerificationResult, batch: ScheduledBatch, logits_PV: Tensor) -> None:
    """Set what depends on the logits before any parameter: `raw_logprobs` of rows whose logits were processed, and the
    most probable tokens of rows that report them."""
    start = 0
    for i, sequence in enumerate(batch.sequences):
        num_top = sequence.request.sampling.logprobs
        if sequence.changes_logits or num_top:
            num = int(result.num_accepted[i]) + 1
            raw = logits_PV[start : start + num].double().log_softmax(-1)
            tokens = torch.as_tensor(result.tokens[i, :num], device=raw.device).long()
            result.raw_logprobs[i, :num] = raw.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).cpu().numpy()
            if num_top:
                top = raw.topk(num_top)
                result.top_logprobs[i] = TopLogprobs(top.indices.int().cpu().numpy(), top.values.cpu().numpy())
        start += 1 + int(batch.num_draft[i])
