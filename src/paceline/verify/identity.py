"""Rungs 3 to 5: the same tokens with speculation on and off, the same greedy tokens as Hugging Face, the same
logprobs from learner, prefill, decode and verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.kv import BlockTable
from paceline.model.paged import PagedDecoder, Span
from paceline.types import Completion
from paceline.verify.reference import processed_logprobs, race_scores


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token in which two runs of a request differ."""

    request: int
    position: int
    expected: int | None
    found: int | None


def first_differences(expected: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> list[Difference]:
    differences = []
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if list(a) != list(b):
            at = next((j for j, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            differences.append(
                Difference(i, at, int(a[at]) if at < len(a) else None, int(b[at]) if at < len(b) else None)
            )
    return differences


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


@torch.inference_mode()
def transformers_greedy(
    directory: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    progress: Callable[[int], None] | None = None,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """What Hugging Face's generate says, prompt by prompt (no padding, so no doubt about it), float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # our own progress is enough
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    outs = []
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([list(prompt)], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            temperature=None,
            top_k=None,
            top_p=None,
            repetition_penalty=1.0,
            max_new_tokens=max_tokens,
            pad_token_id=0,
        )
        outs.append(out[0, len(prompt) :].tolist())
        if progress is not None:
            progress(i + 1)
    return outs


@torch.inference_mode()
def learner_logits(decoder: Decoder, tokens: Sequence[int], num: int) -> Tensor:
    """After each of the last `num` tokens, float64, as a learner computes them: the plain decoder over all of them."""
    ids = torch.tensor(tokens, device=decoder.device)
    positions = torch.arange(len(ids), device=decoder.device)
    hidden = decoder(ids, positions, decoder.attention([len(ids)], [None])).hidden
    return decoder.logits(hidden[len(ids) - num :]).double()


def prefill_logits(paged: PagedDecoder, tokens: Sequence[int], num: int) -> Tensor:
    """The same from one forward of the engine's own model."""
    table = BlockTable()
    if not paged.pool.reserve(table, len(tokens)):
        raise ValueError("the KV memory is too small for one sequence; raise engine.kv_tokens")
    logits = paged.forward([Span(np.array(tokens, np.int32), 0, table, num)])
    paged.pool.truncate(table, 0)
    return logits.double()


@dataclass(frozen=True, slots=True)
class Scored:
    """What a model says of a completion's tokens, by `reference`'s definitions. One entry per token."""

    raw: np.ndarray  # float64, logprobs before temperature and truncation
    processed: np.ndarray  # float64, logprobs under the processed distribution; NEVER where that excludes the token
    behind: np.ndarray  # float64, the highest race score less the token's own: 0 where the noise draws this very token


NEVER = -1000.0  # for -inf: such a token may not be emitted, and its gap to any logprob is far beyond every tolerance


def learner_scores(decoder: Decoder, completions: Sequence[Completion]) -> list[Scored]:
    return [score(completion_logits(decoder, c), c) for c in completions]


def completion_logits(decoder: Decoder, c: Completion) -> Tensor:
    """Those that a completion's tokens were drawn from, by a learner: float64 [P, V]."""
    tokens = c.token_ids.tolist()
    return learner_logits(decoder, [*c.request.prompt_ids, *tokens[:-1]], len(tokens))


def prefill_scores(paged: PagedDecoder, completions: Sequence[Completion]) -> list[Scored]:
    return [
        score(prefill_logits(paged, [*c.request.prompt_ids, *c.token_ids[:-1].tolist()], len(c.token_ids)), c)
        for c in completions
    ]


def score(logits_PV: Tensor, c: Completion) -> Scored:
    tokens = c.token_ids.tolist()
    processed_PV = processed_logprobs(logits_PV, c.request.sampling).clamp_min(NEVER)
    scores_PV = race_scores(processed_PV, c.request, len(c.request.prompt_ids) + np.arange(len(tokens)))
    at = torch.tensor(tokens, device=logits_PV.device)[:, None]

    def of_tokens(values_PV: Tensor) -> np.ndarray:
        return values_PV.gather(-1, at)[:, 0].cpu().numpy()

    behind = scores_PV.amax(-1).cpu().numpy() - of_tokens(scores_PV)
    return Scored(of_tokens(logits_PV.log_softmax(-1)), of_tokens(processed_PV), behind)


def largest_gap(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """NaN where one of them is: no tolerance holds for it."""
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).max(initial=0.0))


def mean_gap(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).mean())
