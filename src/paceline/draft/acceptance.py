"""What a head would have brought on sequences that the target has already written.

A recorded token tells something about the noise it was drawn with: token v arrives at time E_v / p_v and the first one
wins, so given the winner w, with E ~ exponential, its own noise is p_w E and every other's E_v + p_v E. With noise from
that posterior the head's coupled draft is drawn, and is right with exactly the frequency it has in the engine. Sampled
drafts under the rejection rule are accepted with probability min(1, q/p) of the recorded token; greedy drafts are
compared with it.

The engine is replayed: the first token is drawn plainly, then every draft begins where the one before ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.draft.lesson import Lesson
from paceline.draft.unroll import unroll
from paceline.model.eagle3 import Eagle3Head
from paceline.model.layer import Linear

KINDS = ("coupled", "greedy", "sampled")


@dataclass(slots=True)
class Acceptance:
    drafted: np.ndarray  # int64 [k], how often a position was drafted
    accepted: np.ndarray  # int64 [k], and accepted with all before it
    num_drafts: int = 0
    num_tokens: int = 0  # emitted by steps that drafted

    @staticmethod
    def none(k: int) -> Acceptance:
        return Acceptance(np.zeros(k, np.int64), np.zeros(k, np.int64))

    def add(self, other: Acceptance) -> None:
        self.drafted += other.drafted
        self.accepted += other.accepted
        self.num_drafts += other.num_drafts
        self.num_tokens += other.num_tokens

    @property
    def mean_length(self) -> float:
        """1 + accepted / drafts, as vLLM counts it."""
        return 1 + float(self.accepted.sum()) / self.num_drafts if self.num_drafts else 1.0

    @property
    def per_position(self) -> list[float]:
        """The share of drafts that were right up to each position."""
        return [float(a) / self.num_drafts if self.num_drafts else 0.0 for a in self.accepted]


@torch.no_grad()
def measure(
    head: Eagle3Head, embed: Linear, lesson: Lesson, k: int, temperature: float, seed: int = 0
) -> dict[str, Acceptance]:
    """Acceptance of k drafted tokens by kind of draft, each summed over the lesson's sequences."""
    num_sequences, length = lesson.tokens_SL.shape
    noise = torch.Generator(head.device).manual_seed(seed)
    right = {kind: torch.zeros(k, num_sequences * length, dtype=torch.bool, device=head.device) for kind in KINDS}
    tokens_T = lesson.tokens_SL.flatten()
    to_draft = torch.full((head.config.layer.vocab_size,), -1, device=head.device)
    to_draft[head.draft_ids] = torch.arange(len(head.draft_ids), device=head.device)
    for step, (h_PD, base_P, at_P) in enumerate(unroll(head, embed, lesson, k)):
        for rows in torch.arange(len(base_P), device=head.device).split(4096):
            base, at = base_P[rows], at_P[rows]
            token = to_draft[tokens_T[at]]
            p = lesson.logits(lesson.hidden_SLD.flatten(0, 1)[at - 1]).float()
            z = head.logits(h_PD[rows]).float()
            greedy = z.argmax(-1) == token
            right["greedy"][step, base] = greedy
            if temperature == 0:
                right["coupled"][step, base] = right["sampled"][step, base] = greedy
                continue
            p = (p / temperature).softmax(-1)[:, head.draft_ids]
            q = (z / temperature).softmax(-1)
            right["coupled"][step, base] = _coupled(p, q, token, noise)
            right["sampled"][step, base] = _sampled(p, q, token, noise)
    first = lesson.chosen_SL.int().argmax(1).tolist()
    ends = (length - lesson.chosen_SL.flip(1).int().argmax(1)).tolist()
    found = {}
    for kind, flags in right.items():
        grid = flags.view(k, num_sequences, length).cpu().numpy()
        found[kind] = total = Acceptance.none(k)
        for row in range(num_sequences):
            if lesson.chosen_SL[row].any():
                total.add(walk(grid[:, row], first[row], ends[row]))
    return found


def walk(right: np.ndarray, first: int, end: int) -> Acceptance:
    """One sequence through the engine: tokens first … end-1 are the target's, the first of them drawn plainly.
    right[s, b]: whether step s of a draft begun at base b is right."""
    k = len(right)
    found = Acceptance.none(k)
    at = max(first + 1, 2)
    while at < end:
        num = min(k, end - 1 - at)  # the last token is drawn, not drafted
        wrong = np.flatnonzero(~right[:num, at - 2])
        num_accepted = int(wrong[0]) if len(wrong) else num
        if num:
            found.drafted[:num] += 1
            found.accepted[:num_accepted] += 1
            found.num_drafts += 1
            found.num_tokens += num_accepted + 1
        at += num_accepted + 1
    return found


def _exponential(like: Tensor, noise: torch.Generator) -> Tensor:
    return torch.empty_like(like).exponential_(generator=noise)


def _coupled(p: Tensor, q: Tensor, token: Tensor, noise: torch.Generator) -> Tensor:
    known = token >= 0
    at = token.clamp_min(0).unsqueeze(-1)
    winner = _exponential(p[:, :1], noise)
    arrival = _exponential(p, noise) + p * winner
    arrival.scatter_(1, at, torch.where(known[:, None], p.gather(1, at) * winner, arrival.gather(1, at)))
    return ((arrival / q).argmin(-1) == token) & known


def _sampled(p: Tensor, q: Tensor, token: Tensor, noise: torch.Generator) -> Tensor:
    at = token.clamp_min(0).unsqueeze(-1)
    chance = (q.gather(1, at) / p.gather(1, at)).squeeze(-1)
    return (torch.rand(chance.shape, generator=noise, device=p.device) < chance) & (token >= 0)
