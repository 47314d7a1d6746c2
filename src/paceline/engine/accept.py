"""Which drafted tokens stand. Three rules, one signature; each emits exact samples of the target.

`coupled` (default): the target draws its own token at every position, with noise keyed by the position; a draft only
decides how many positions are looked at in one forward. The output cannot depend on the drafter.
`rejection`: accept x ~ q with probability min(1, p/q), else sample the residual (p - q)+.
`block` (arXiv 2403.10444): decides on the block as a whole; accepts at least as many tokens as `rejection`.

p is always the target, q always the draft. B rows; row i has 1 + num[i] positions; P positions in all, row by row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.model.sample import Sampler, SamplingArrays, Stream, process, with_round


@dataclass(slots=True)
class Proposal:
    """One step's positions, with what was guessed there."""

    logits_PV: Tensor
    drafts: list[np.ndarray]  # B x int32, the guesses
    q: list[Tensor | None]  # B x [num, V], what they were sampled from; None: a deterministic guess, one-hot q
    noise_keys: np.ndarray  # uint64 [B]
    lengths: np.ndarray  # int64 [B], tokens before the first position
    params: SamplingArrays  # of the P positions
    starts: np.ndarray  # int64 [B + 1], where each row's positions begin


@dataclass(slots=True)
class Verdict:
    """Row i emits tokens[i, : num_accepted[i] + 1], all but the last of them from its draft; logprobs are the target's.
    What lies behind them in a row has no meaning."""

    tokens: np.ndarray  # int32 [B, W]
    num_accepted: np.ndarray  # int32 [B]
    logprobs: np.ndarray  # float64 [B, W]
    raw_logprobs: np.ndarray  # float64 [B, W]

    @staticmethod
    def empty(num_rows: int, width: int) -> Verdict:
        return Verdict(
            np.zeros((num_rows, width), np.int32), np.zeros(num_rows, np.int32),
            np.zeros((num_rows, width)), np.zeros((num_rows, width)),
        )  # fmt: skip

    @property
    def emitted(self) -> np.ndarray:
        """bool [B, W]"""
        return np.arange(self.tokens.shape[1]) <= self.num_accepted[:, None]

    def pick(self, which: np.ndarray) -> Verdict:
        """Of some of the rows."""
        return Verdict(
            self.tokens[which], self.num_accepted[which], self.logprobs[which], self.raw_logprobs[which]
        )  # fmt: skip

    def put(self, row: int, tokens: np.ndarray, logprobs: np.ndarray, raw_logprobs: np.ndarray) -> None:
        """What this row emits."""
        num = len(tokens)
        self.tokens[row, :num], self.num_accepted[row] = tokens, num - 1
        self.logprobs[row, :num], self.raw_logprobs[row, :num] = logprobs, raw_logprobs


Rule = Callable[[Proposal, Sampler], Verdict]


def coupled(proposal: Proposal, sampler: Sampler) -> Verdict:
    starts = proposal.starts
    sizes = np.diff(starts)
    positions = np.arange(starts[-1]) + np.repeat(proposal.lengths - starts[:-1], sizes)
    draws = sampler.draw(proposal.logits_PV, np.repeat(proposal.noise_keys, sizes), positions, proposal.params)
    verdict = Verdict.empty(len(sizes), int(sizes.max()))
    for row, draft in enumerate(proposal.drafts):
        start = starts[row]
        num_accepted = 0
        if len(draft):
            wrong = np.flatnonzero(draws.tokens[start : start + len(draft)] != draft)
            num_accepted = int(wrong[0]) if len(wrong) else len(draft)
        emitted = slice(start, start + num_accepted + 1)
        verdict.put(row, draws.tokens[emitted], draws.logprobs[emitted], draws.raw_logprobs[emitted])
    return verdict


def rejection(proposal: Proposal, sampler: Sampler) -> Verdict:
    def decide(draft: np.ndarray, p: Tensor, q: Tensor, coins: Coins) -> tuple[int, Tensor | None]:
        for j, x in enumerate(draft.tolist()):
            if not coins(j, min(1.0, _ratio(p[j, x], q[j, x]))):
                return j, (p[j] - q[j]).clamp_min(0)
        return len(draft), None

    return _by_row(proposal, sampler, decide)


def block(proposal: Proposal, sampler: Sampler) -> Verdict:
    def decide(draft: np.ndarray, p: Tensor, q: Tensor, coins: Coins) -> tuple[int, Tensor | None]:
        num = len(draft)
        reach = [1.0]  # the paper's p_i: how much of the target's path probability the draft's path still covers
        num_accepted = 0
        for i, x in enumerate(draft.tolist(), start=1):
            reach.append(min(1.0, reach[-1] * _ratio(p[i - 1, x], q[i - 1, x])))
            if i == num:
                chance = reach[i]
            else:
                left = float((reach[i] * p[i] - q[i]).clamp_min(0).sum())
                whole = left + 1 - reach[i]
                chance = left / whole if whole > 0 else 1.0  # p = q ahead and nothing lost: a later one is accepted
            if coins(i - 1, chance):
                num_accepted = i
        if num_accepted == num:
            return num, None
        return num_accepted, (reach[num_accepted] * p[num_accepted] - q[num_accepted]).clamp_min(0)

    return _by_row(proposal, sampler, decide)


RULES: dict[str, Rule] = {"coupled": coupled, "rejection": rejection, "block": block}

Coins = Callable[[int, float], bool]
Decide = Callable[[np.ndarray, Tensor, Tensor, Coins], tuple[int, Tensor | None]]


def _ratio(p: Tensor, q: Tensor) -> float:
    chance = float(q)  # x was drawn from q, so q(x) > 0, unless q is none
    if not 0 < chance < 1.0001:
        raise ValueError(
            f"a draft's distribution is not one (q = {chance}): the drafter's weights have diverged or are damaged; "
            "take another speculation.head, lower draft.online_learning_rate, or use speculation.rule = 'coupled'"
        )
    return float(p) / chance


def _by_row(proposal: Proposal, sampler: Sampler, decide: Decide) -> Verdict:
    """Both rejection rules: `decide` says how many drafted tokens stand and the weights of the token after them
    (None: all stand, and a bonus token comes from p). Row by row: these rules are here to be right."""
    processed_PV = process(proposal.logits_PV, proposal.params)
    emitted = []
    for row, draft in enumerate(proposal.drafts):
        last, num = _one_row(proposal, sampler, decide, row, processed_PV)
        emitted.append(np.concatenate([draft[:num], last]).astype(np.int32))
    counts = [len(tokens) for tokens in emitted]
    at = np.concatenate([start + np.arange(n) for start, n in zip(proposal.starts[:-1], counts, strict=True)])
    scored = sampler.score(proposal.logits_PV[at], processed_PV[at], np.concatenate(emitted))
    by_row = (np.split(part, np.cumsum(counts)[:-1]) for part in scored)
    verdict = Verdict.empty(len(emitted), max(counts))
    for row, (logprobs, raw) in enumerate(zip(*by_row, strict=True)):
        verdict.put(row, emitted[row], logprobs, raw)
    return verdict


def _one_row(
    proposal: Proposal, sampler: Sampler, decide: Decide, row: int, processed_PV: Tensor
) -> tuple[np.ndarray, int]:
    """The target's own token [1], and how many drafted ones stand before it."""
    draft, q, length = proposal.drafts[row], proposal.q[row], int(proposal.lengths[row])
    key = proposal.noise_keys[row : row + 1]
    p = processed_PV[int(proposal.starts[row]) : int(proposal.starts[row + 1])].exp()
    if q is None:
        q = torch.zeros_like(p[: len(draft)])
        q[torch.arange(len(draft)), torch.as_tensor(draft).long()] = 1

    def at_round(j: int) -> np.ndarray:
        return with_round(np.array([length + j]), np.array([length]))

    def coins(j: int, chance: float) -> bool:
        return bool(sampler.noise.coin(np.array([chance]), key, at_round(j), Stream.ACCEPT)[0])

    num_accepted, residual = decide(draft, p, q.to(p.device, p.dtype), coins)
    if residual is None:
        weights, where, stream = p[num_accepted], np.array([length + num_accepted]), Stream.SAMPLE
    else:
        weights, where, stream = residual, at_round(num_accepted), Stream.RESIDUAL
    return sampler.noise.race(weights.unsqueeze(0), key, where, stream), num_accepted
