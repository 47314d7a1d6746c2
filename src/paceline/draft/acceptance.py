"""A head's acceptance on sequences that the target has generated before.

Coupled drafts: the target samples argmin_v E_v / p_v with exponential noise (equivalent to Gumbel-max), and a coupled
draft uses the same noise. Given the sampled token w, the posterior of the noise is p_w E for w and E_v + p_v E for
every other v, with new exponential E and E_v. A draft that uses noise from this posterior is correct exactly as often
as in the engine. Sampled drafts (rejection rule) are accepted with probability min(1, q/p) of the recorded token.
Greedy drafts are compared with it.

Acceptance is counted as in the engine: the first token is sampled without a draft, and every draft starts where the
one before it ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.draft.head_batch import HeadBatch
from paceline.draft.unroll import draft_steps
from paceline.model.draft_head import DraftHead
from paceline.model.layer import Linear
from paceline.rl.depth import DEPTHS

KINDS = ("coupled", "greedy", "sampled")


@dataclass(slots=True)
class Acceptance:
    drafted: np.ndarray  # int64 [k], drafts that have this position
    accepted: np.ndarray  # int64 [k], drafts that are accepted up to and including this position
    num_drafts: int = 0
    # Of each range of depths: drafts, accepted tokens.
    by_depth: np.ndarray = field(default_factory=lambda: np.zeros((len(DEPTHS), 2), np.int64))

    @staticmethod
    def zeros(k: int) -> Acceptance:
        return Acceptance(np.zeros(k, np.int64), np.zeros(k, np.int64))

    def add(self, other: Acceptance) -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.num_drafts += other.num_drafts
        self.by_depth += other.by_depth

    @property
    def mean_length(self) -> float:
        """1 + accepted / drafts, as vLLM counts it."""
        return 1 + float(self.accepted.sum()) / self.num_drafts if self.num_drafts else 1.0

    @property
    def per_position(self) -> list[float]:
        """The share of drafts that are accepted up to and including each position."""
        return [float(a) / self.num_drafts if self.num_drafts else 0.0 for a in self.accepted]

    @property
    def length_per_depth(self) -> dict[str, float]:
        """The mean length of the drafts in each range of depths, by where the range starts."""
        ranges = zip(DEPTHS, self.by_depth.tolist(), strict=True)
        return {str(start): 1 + accepted / num for start, (num, accepted) in ranges if num}


def measure(
    head: DraftHead, embed: Linear, head_batch: HeadBatch, k: int, temperature: float, seed: int = 0
) -> dict[str, Acceptance]:
    """Acceptance of drafts with k tokens by kind of draft, summed over the batch's sequences."""
    found = {}
    for kind, correct in correct_drafts(head, embed, head_batch, k, temperature, seed).items():
        found[kind] = total = Acceptance.zeros(k)
        for row, (first, end) in enumerate(completion_spans(head_batch)):
            if first < end:
                total.add(count_acceptance(correct[row], first, end))
    return found


@torch.no_grad()
def correct_drafts(
    head: DraftHead,
    embed: Linear,
    head_batch: HeadBatch,
    k: int,
    temperature: float,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
) -> dict[str, np.ndarray]:
    """By kind of draft, bool [S, k, L]: whether step s of the draft with base b, which predicts token b + s + 2, is
    correct, given that the steps before it are."""
    num_sequences, length = head_batch.tokens_SL.shape
    noise = torch.Generator(head.device).manual_seed(seed)
    correct = {kind: torch.zeros(k, num_sequences * length, dtype=torch.bool, device=head.device) for kind in kinds}
    tokens_T = head_batch.tokens_SL.flatten()
    to_draft = torch.full((head.config.layer.vocab_size,), -1, device=head.device)
    to_draft[head.draft_ids] = torch.arange(len(head.draft_ids), device=head.device)
    weight = head.output_weight()
    for step, (features, base_P, at_P) in enumerate(draft_steps(head, embed, head_batch, k)):
        for rows in torch.arange(len(base_P), device=head.device).split(4096):
            base, at = base_P[rows], at_P[rows]
            token = to_draft[tokens_T[at]]
            z = (features[rows].to(weight.dtype) @ weight.T).float()
            if temperature > 0:
                p = head_batch.logits(head_batch.hidden_SLD.flatten(0, 1)[at - 1]).float()
                p = (p / temperature).softmax(-1)[:, head.draft_ids]
                q = (z / temperature).softmax(-1)
            for kind, flags in correct.items():
                if kind == "greedy" or temperature == 0:
                    flags[step, base] = z.argmax(-1) == token
                else:
                    flags[step, base] = (_coupled if kind == "coupled" else _sampled)(p, q, token, noise)
    return {kind: flags.view(k, num_sequences, length).transpose(0, 1).cpu().numpy() for kind, flags in correct.items()}


def completion_spans(head_batch: HeadBatch) -> list[tuple[int, int]]:
    """(first, end) of each sequence's completion: its first token in the loss mask, and one past its last. first = end
    if it has none."""
    length = head_batch.loss_mask_SL.shape[1]
    first_S = head_batch.loss_mask_SL.int().argmax(1)
    end_S = length - head_batch.loss_mask_SL.flip(1).int().argmax(1)
    end_S = torch.where(head_batch.loss_mask_SL.any(1), end_S, first_S)
    return list(zip(first_S.tolist(), end_S.tolist(), strict=True))


def count_acceptance(correct: np.ndarray, first: int, end: int) -> Acceptance:
    """Acceptance on one sequence with completion tokens first … end-1. correct[s, b]: whether step s of the draft with
    base b is correct."""
    k = len(correct)
    found = Acceptance.zeros(k)
    at = max(first + 1, 2)
    while at < end:
        num = min(k, end - 1 - at)  # the last token is sampled, not drafted
        wrong = np.flatnonzero(~correct[:num, at - 2])
        num_accepted = int(wrong[0]) if len(wrong) else num
        if num:
            found.drafted[:num] += 1
            found.accepted[:num_accepted] += 1
            found.num_drafts += 1
            found.by_depth[bisect_right(DEPTHS, at - first) - 1] += 1, num_accepted
        at += num_accepted + 1
    return found


def _exponential(like: Tensor, noise: torch.Generator) -> Tensor:
    return torch.empty_like(like).exponential_(generator=noise)


def _coupled(p: Tensor, q: Tensor, token: Tensor, noise: torch.Generator) -> Tensor:
    """Whether a coupled draft is the recorded token. p, q: [P, N]; token: [P], -1 if not in the draft vocabulary."""
    known = token >= 0
    at = token.clamp_min(0).unsqueeze(-1)
    shared = _exponential(p[:, :1], noise)
    posterior = _exponential(p, noise) + p * shared
    posterior.scatter_(1, at, torch.where(known[:, None], p.gather(1, at) * shared, posterior.gather(1, at)))
    return ((posterior / q).argmin(-1) == token) & known


def _sampled(p: Tensor, q: Tensor, token: Tensor, noise: torch.Generator) -> Tensor:
    """Whether the rejection rule accepts a sampled draft, given the recorded token. Arguments as in `_coupled`."""
    at = token.clamp_min(0).unsqueeze(-1)
    probability = (q.gather(1, at) / p.gather(1, at)).squeeze(-1)
    return (torch.rand(probability.shape, generator=noise, device=p.device) < probability) & (token >= 0)
