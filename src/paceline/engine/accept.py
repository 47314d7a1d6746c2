"""The acceptance rules decide which draft tokens are accepted. Each rule emits exact samples of the target.

`coupled` (default): the target samples its own token at every position, with noise keyed by the position. A draft token
is accepted if it is that token, so the output cannot depend on the drafter.
`rejection`: accept x ~ q with probability min(1, p/q), otherwise sample the residual (p - q)+.
`block` (arXiv 2403.10444): decides on the draft as a whole; accepts at least as many tokens as `rejection`.

p is the target's distribution, q the drafter's. B rows; row i has 1 + num[i] positions; P positions in all, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.model.sample import Sampler, Stream, process, with_round
from paceline.model.sampling_arrays import SamplingArrays
from paceline.types import TopLogprobs


@dataclass(slots=True)
class VerificationInput:
    """One step's positions and draft tokens."""

    logits_PV: Tensor
    drafts: list[np.ndarray]  # B x int32
    q: list[Tensor | None]  # B x [num, V], that drafts were sampled from; None: deterministic, q is one-hot
    noise_keys: np.ndarray  # uint64 [B]
    lengths: np.ndarray  # int64 [B], tokens before the first position
    params: SamplingArrays  # of the P positions
    starts: np.ndarray  # int64 [B + 1], where each row's positions begin


@dataclass(slots=True)
class VerificationResult:
    """Row i emits tokens[i, : num_accepted[i] + 1], all but the last of them from its draft. Logprobs are the target's.
    Later elements of a row have no meaning."""

    tokens: np.ndarray  # int32 [B, W]
    num_accepted: np.ndarray  # int32 [B]
    logprobs: np.ndarray  # float64 [B, W]
    raw_logprobs: np.ndarray  # float64 [B, W]
    top_logprobs: dict[int, TopLogprobs] = field(default_factory=dict)  # by row, of rows that report them
    # By row: it emits so many tokens and ends, because the sampling parameters leave none after them; and why.
    dead_ends: dict[int, tuple[int, str]] = field(default_factory=dict)

    @staticmethod
    def empty(num_rows: int, width: int) -> VerificationResult:
        return VerificationResult(
            np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int32),
            np.zeros((num_rows, width)), np.zeros((num_rows, width)),
        )  # fmt: skip

    @property
    def emitted(self) -> np.ndarray:
        """bool [B, W]"""
        return np.arange(self.tokens.shape[1]) <= self.num_accepted[:, None]

    def pick(self, which: np.ndarray) -> VerificationResult:
        """The rows that a mask selects."""
        kept = list(enumerate(np.flatnonzero(which).tolist()))
        return VerificationResult(
            self.tokens[which], self.num_accepted[which], self.logprobs[which], self.raw_logprobs[which],
            {new: self.top_logprobs[old] for new, old in kept if old in self.top_logprobs},
            {new: self.dead_ends[old] for new, old in kept if old in self.dead_ends},
        )  # fmt: skip

    def put(self, row: int, tokens: np.ndarray, logprobs: np.ndarray, raw_logprobs: np.ndarray) -> None:
        """Set what this row emits."""
        num = len(tokens)
        self.tokens[row, :num], self.num_accepted[row] = tokens, num - 1
        self.logprobs[row, :num], self.raw_logprobs[row, :num] = logprobs, raw_logprobs


Rule = Callable[[VerificationInput, Sampler], VerificationResult]


def coupled(inputs: VerificationInput, sampler: Sampler) -> VerificationResult:
    starts = inputs.starts
    sizes = np.diff(starts)
    positions = np.arange(starts[-1]) + np.repeat(inputs.lengths - starts[:-1], sizes)
    draws = sampler.draw(inputs.logits_PV, np.repeat(inputs.noise_keys, sizes), positions, inputs.params)
    result = VerificationResult.empty(len(sizes), int(sizes.max()))
    for row, draft in enumerate(inputs.drafts):
        start = starts[row]
        num_accepted = 0
        if len(draft):
            wrong = np.flatnonzero(draws.tokens[start : start + len(draft)] != draft)
            num_accepted = int(wrong[0]) if len(wrong) else len(draft)
        emitted = slice(start, start + num_accepted + 1)
        result.put(row, draws.tokens[emitted], draws.logprobs[emitted], draws.raw_logprobs[emitted])
    return result


def rejection(inputs: VerificationInput, sampler: Sampler) -> VerificationResult:
    def decide(draft: np.ndarray, p: Tensor, q: Tensor, accept: Accept) -> tuple[int, Tensor | None]:
        for j, x in enumerate(draft.tolist()):
            if not accept(j, min(1.0, _ratio(p[j, x], q[j, x]))):
                return j, (p[j] - q[j]).clamp_min(0)
        return len(draft), None

    return _by_row(inputs, sampler, decide)


def block(inputs: VerificationInput, sampler: Sampler) -> VerificationResult:
    def decide(draft: np.ndarray, p: Tensor, q: Tensor, accept: Accept) -> tuple[int, Tensor | None]:
        num = len(draft)
        coverage = [1.0]  # the paper's p_i: the share of the target's probability of the draft so far that q covers
        num_accepted = 0
        for i, x in enumerate(draft.tolist(), start=1):
            coverage.append(min(1.0, coverage[-1] * _ratio(p[i - 1, x], q[i - 1, x])))
            if i == num:
                probability = coverage[i]
            else:
                left = float((coverage[i] * p[i] - q[i]).clamp_min(0).sum())
                whole = left + 1 - coverage[i]
                probability = left / whole if whole > 0 else 1.0  # p = q and nothing lost: a later one is accepted
            if accept(i - 1, probability):
                num_accepted = i
        if num_accepted == num:
            return num, None
        return num_accepted, (coverage[num_accepted] * p[num_accepted] - q[num_accepted]).clamp_min(0)

    return _by_row(inputs, sampler, decide)


RULES: dict[str, Rule] = {"coupled": coupled, "rejection": rejection, "block": block}

Accept = Callable[[int, float], bool]
Decide = Callable[[np.ndarray, Tensor, Tensor, Accept], tuple[int, Tensor | None]]


def _ratio(p: Tensor, q: Tensor) -> float:
    probability = float(q)  # x was sampled from q, so q(x) > 0
    if not 0 < probability < 1.0001:
        raise ValueError(
            f"the drafter's distribution is invalid (q = {probability}): its weights have diverged or are damaged; use "
            "another speculation.head, lower draft.online_learning_rate, or use speculation.rule = 'coupled'"
        )
    return float(p) / probability


def _by_row(inputs: VerificationInput, sampler: Sampler, decide: Decide) -> VerificationResult:
    """For both rejection rules. `decide` returns how many draft tokens are accepted, and the weights of the corrected
    token (None: all are accepted, and the bonus token is sampled from p). Not vectorised: plain rather than fast."""
    processed_PV = process(inputs.logits_PV, inputs.params)
    emitted = []
    for row, draft in enumerate(inputs.drafts):
        last, num = _one_row(inputs, sampler, decide, row, processed_PV)
        emitted.append(np.concatenate([draft[:num], last]).astype(np.int32))
    counts = [len(tokens) for tokens in emitted]
    at = np.concatenate([start + np.arange(n) for start, n in zip(inputs.starts[:-1], counts, strict=True)])
    scored = sampler.score(inputs.logits_PV[at], processed_PV[at], np.concatenate(emitted))
    by_row = (np.split(part, np.cumsum(counts)[:-1]) for part in scored)
    result = VerificationResult.empty(len(emitted), max(counts))
    for row, (logprobs, raw) in enumerate(zip(*by_row, strict=True)):
        result.put(row, emitted[row], logprobs, raw)
    return result


def _one_row(
    inputs: VerificationInput, sampler: Sampler, decide: Decide, row: int, processed_PV: Tensor
) -> tuple[np.ndarray, int]:
    """The target's own token [1], and how many draft tokens are accepted before it."""
    draft, q, length = inputs.drafts[row], inputs.q[row], int(inputs.lengths[row])
    key = inputs.noise_keys[row : row + 1]
    p = processed_PV[int(inputs.starts[row]) : int(inputs.starts[row + 1])].exp()
    if q is None:
        q = torch.zeros_like(p[: len(draft)])
        q[torch.arange(len(draft)), torch.as_tensor(draft).long()] = 1

    def at_round(j: int) -> np.ndarray:
        return with_round(np.array([length + j]), np.array([length]))

    def accept(j: int, probability: float) -> bool:
        return bool(sampler.noise.bernoulli(np.array([probability]), key, at_round(j), Stream.ACCEPT)[0])

    num_accepted, residual = decide(draft, p, q.to(p.device, p.dtype), accept)
    if residual is None:
        weights, where, stream = p[num_accepted], np.array([length + num_accepted]), Stream.SAMPLE
    else:
        weights, where, stream = residual, at_round(num_accepted), Stream.RESIDUAL
    return sampler.noise.race(weights.unsqueeze(0), key, where, stream), num_accepted
