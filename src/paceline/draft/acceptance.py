"""What a head would have brought on sequences that the target has already written.

A recorded token tells something about the noise it was drawn with: token v arrives at time E_v / p_v and the first one
wins, so given the winner w, with E ~ exponential, its own noise is p_w E and every other's E_v + p_v E. With noise from
that posterior the head's coupled draft is drawn, and is right with exactly the frequency it has in the engine. Sampled
drafts under the rejection rule are accepted with probability min(1, q/p) of the recorded token; greedy drafts are
compared with it.

The engine is replayed: the first token is drawn plainly, then every draft begins where the one before ended.
"""

from __future__ import annotations

from collections.abc import Sequence
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


def measure(
    head: Eagle3Head, embed: Linear, lesson: Lesson, k: int, temperature: float, seed: int = 0
) -> dict[str, Acceptance]:
    """Acceptance of k drafted tokens by kind of draft, each summed over the lesson's sequences."""
    found = {}
    for kind, right in judge(head, embed, lesson, k, temperature, seed).items():
        found[kind] = total = Acceptance.none(k)
        for row, (first, end) in enumerate(_chosen(lesson)):
            if first < end:
                total.add(walk(right[row], first, end))
    return found


def match_lengths(
    head: Eagle3Head, embed: Linear, lesson: Lesson, k: int, temperature: float, seed: int = 0
) -> list[np.ndarray]:
    """For each sequence and each token that the target chose: how many of the k tokens of a coupled draft that begins
    with it are right. 0 for the first, which is drawn plainly. The sequence's end bounds it, nothing else does: the
    last token counts, though an engine at its length limit does not draft it."""
    right = judge(head, embed, lesson, k, temperature, seed, ("coupled",))["coupled"]
    lengths = np.logical_and.accumulate(right, 1).sum(1)  # by base: [S, L]
    found = []
    for row, (first, end) in enumerate(_chosen(lesson)):
        from_token = np.zeros(max(0, end - first), np.int64)
        drafted = np.arange(max(first + 1, 2), end)
        from_token[drafted - first] = lengths[row, drafted - 2]
        found.append(from_token)
    return found


@torch.no_grad()
def judge(
    head: Eagle3Head,
    embed: Linear,
    lesson: Lesson,
    k: int,
    temperature: float,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
) -> dict[str, np.ndarray]:
    """By kind of draft, bool [S, k, L]: whether step s of a draft begun at base b, which guesses token b + s + 2, is
    right, as far as those before it are."""
    num_sequences, length = lesson.tokens_SL.shape
    noise = torch.Generator(head.device).manual_seed(seed)
    right = {kind: torch.zeros(k, num_sequences * length, dtype=torch.bool, device=head.device) for kind in kinds}
    tokens_T = lesson.tokens_SL.flatten()
    to_draft = torch.full((head.config.layer.vocab_size,), -1, device=head.device)
    to_draft[head.draft_ids] = torch.arange(len(head.draft_ids), device=head.device)
    for step, (h_PD, base_P, at_P) in enumerate(unroll(head, embed, lesson, k)):
        for rows in torch.arange(len(base_P), device=head.device).split(4096):
            base, at = base_P[rows], at_P[rows]
            token = to_draft[tokens_T[at]]
            z = head.logits(h_PD[rows]).float()
            if temperature > 0:
                p = lesson.logits(lesson.hidden_SLD.flatten(0, 1)[at - 1]).float()
                p = (p / temperature).softmax(-1)[:, head.draft_ids]
                q = (z / temperature).softmax(-1)
            for kind, flags in right.items():
                if kind == "greedy" or temperature == 0:
                    flags[step, base] = z.argmax(-1) == token
                else:
                    flags[step, base] = (_coupled if kind == "coupled" else _sampled)(p, q, token, noise)
    return {kind: flags.view(k, num_sequences, length).transpose(0, 1).cpu().numpy() for kind, flags in right.items()}


def _chosen(lesson: Lesson) -> list[tuple[int, int]]:
    """Each sequence's first token that the target chose and what comes after its last; equal where it chose none."""
    length = lesson.chosen_SL.shape[1]
    first_S = lesson.chosen_SL.int().argmax(1)
    end_S = length - lesson.chosen_SL.flip(1).int().argmax(1)
    end_S = torch.where(lesson.chosen_SL.any(1), end_S, first_S)
    return list(zip(first_S.tolist(), end_S.tolist(), strict=True))


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
