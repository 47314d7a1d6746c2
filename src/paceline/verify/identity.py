"""Levels 3 to 5: the same tokens with speculation on and off, the same greedy tokens as Hugging Face, the same
logprobs from learner, prefill, decode and verification. P positions, V vocabulary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
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
from paceline.verify.result import CheckResult

LOGPROB_TOLERANCE = 1e-4  # float32, across kernels with different summation orders
# In 16 bits the mean gap is limited, in units of the mean error that rounding causes in the learner's own logprobs
# (0.001 to 0.02, by model). Engine and learner round independently (1.4 times), a temperature of 0.7 enlarges errors
# (1.4 times), and the error is measured on other tokens than those that are compared.
ROUNDING_FACTOR = 3
# How much lower than the reference's best race score that of an emitted token may be. Learner and engine logprobs
# differ by LOGPROB_TOLERANCE at most, and a race score is a logprob divided by the temperature.
DRAW_TOLERANCE = 1e-3
# In place of -inf. A truncated token must not be emitted; its difference to any logprob exceeds every tolerance.
EXCLUDED_LOGPROB = -1000.0
LogprobPairs = dict[str, tuple[list[np.ndarray], list[np.ndarray]]]  # two logprobs of each token, by name


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


def num_other_logprobs(expected: Sequence[Completion], found: Sequence[Completion]) -> int:
    """Tokens that both have, up to the first different one, with other bits of a logprob."""
    num = 0
    for a, b in zip(expected, found, strict=True):
        size = min(len(a.token_ids), len(b.token_ids))
        same = np.logical_and.accumulate(a.token_ids[:size] == b.token_ids[:size])
        other = (a.logprobs[:size] != b.logprobs[:size]) | (a.raw_logprobs[:size] != b.raw_logprobs[:size])
        num += int((same & other).sum())
    return num


def tokens_of(completions: Sequence[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


@torch.inference_mode()
def transformers_greedy(
    directory: Any,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    progress: Callable[[int], None] | None = None,
    device: torch.device | str = "cpu",
    weights: Iterable[tuple[str, Tensor]] = (),
) -> list[list[int]]:
    """Completions of Hugging Face's `generate` in float32, one prompt at a time and so without padding.
    `weights` replace those of the directory."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    with torch.no_grad():
        for name, tensor in weights:
            model.get_parameter(name).copy_(tensor)
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
    """Logits after each of the last `num` tokens, float64 [num, V], from the learner's plain decoder."""
    ids = torch.tensor(tokens, device=decoder.device)
    positions = torch.arange(len(ids), device=decoder.device)
    hidden = decoder(ids, positions, decoder.attention([len(ids)], [None])).hidden
    return decoder.logits(hidden[len(ids) - num :]).double()


def prefill_logits(paged: PagedDecoder, tokens: Sequence[int], num: int) -> Tensor:
    """The same from one forward pass of the engine's model."""
    table = BlockTable()
    if not paged.pool.reserve(table, len(tokens)):
        raise ValueError("the KV cache is too small for one sequence; raise engine.kv_tokens")
    logits = paged.forward([Span(np.array(tokens, np.int32), 0, table, num)])
    paged.pool.truncate(table, 0)
    return logits.double()


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Logprobs and race scores of a completion's tokens, computed by `reference`. One float64 entry per token."""

    raw: np.ndarray  # logprobs before temperature and truncation
    processed: np.ndarray  # logprobs under the processed distribution; EXCLUDED_LOGPROB for a truncated token
    score_gap: np.ndarray  # the highest race score less the token's own: 0 if the noise draws this token


def learner_scores(decoder: Decoder, completions: Sequence[Completion]) -> list[TokenScores]:
    return [score(completion_logits(decoder, c), c) for c in completions]


def completion_logits(decoder: Decoder, c: Completion) -> Tensor:
    """The learner's logits from which a completion's tokens are drawn: float64 [P, V]."""
    tokens = c.token_ids.tolist()
    return learner_logits(decoder, [*c.request.prompt_ids, *tokens[:-1]], len(tokens))


def prefill_scores(paged: PagedDecoder, completions: Sequence[Completion]) -> list[TokenScores]:
    return [
        score(prefill_logits(paged, [*c.request.prompt_ids, *c.token_ids[:-1].tolist()], len(c.token_ids)), c)
        for c in completions
    ]


def score(logits_PV: Tensor, c: Completion) -> TokenScores:
    tokens = c.token_ids.tolist()
    processed_PV = processed_logprobs(logits_PV, c.request.sampling).clamp_min(EXCLUDED_LOGPROB)
    scores_PV = race_scores(processed_PV, c.request, len(c.request.prompt_ids) + np.arange(len(tokens)))
    at = torch.tensor(tokens, device=logits_PV.device)[:, None]

    def of_tokens(values_PV: Tensor) -> np.ndarray:
        return values_PV.gather(-1, at)[:, 0].cpu().numpy()

    score_gap = scores_PV.amax(-1).cpu().numpy() - of_tokens(scores_PV)
    return TokenScores(of_tokens(logits_PV.log_softmax(-1)), of_tokens(processed_PV), score_gap)


def wrong_draws(run: str, scored: Sequence[TokenScores]) -> list[str]:
    """Tokens that the reference would not draw. Not to be used if the learner rounds differently: then a near-tie may
    have either result, and level 3 checks near-ties."""
    num = sum(int((~(s.score_gap <= DRAW_TOLERANCE)).sum()) for s in scored)  # NaN is wrong too
    return [f"{run}: {num} tokens are not those that the noise draws from the processed distribution"] if num else []


def compare_logprobs(pairs: LogprobPairs, rounding: float | None) -> CheckResult:
    """The largest gap is limited, in 16 bits the mean gap, by `rounding`: see `rounding_error`."""
    largest, means = ({name: gap(*pair) for name, pair in pairs.items()} for gap in (largest_gap, mean_gap))
    kind, limited, tolerance = ("largest", largest, LOGPROB_TOLERANCE)
    if rounding is not None:
        kind, limited, tolerance = ("mean", means, ROUNDING_FACTOR * rounding)
    return {
        "problems": [
            f"{name}: the {kind} gap between logprobs is {gap:.2g}, above {tolerance:.2g}"
            for name, gap in limited.items()
            if not gap <= tolerance
        ],
        "tolerance": tolerance,
        **({"mean_gap": max(means.values())} if rounding is not None else {}),
        "max_gap": max(largest.values()),
        "mean_abs": means,
        "max_abs": largest,
    }


def rounding_error(learner: Decoder, completions: Sequence[Completion]) -> float:
    """The mean difference between the logprobs of emitted tokens in the learner's precision and in float32, with the
    same weights."""
    exact = copy.deepcopy(learner).to(torch.float32)
    scored = [[scores.raw for scores in learner_scores(decoder, completions)] for decoder in (learner, exact)]
    return mean_gap(*scored)


def largest_gap(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """NaN where one of them is: no tolerance holds for it."""
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).max(initial=0.0))


def mean_gap(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    return float(np.abs(np.concatenate(a) - np.concatenate(b)).mean())
