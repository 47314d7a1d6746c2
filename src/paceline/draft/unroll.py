"""Training-time test: from every position at once, the head goes on from its own states as it does when it drafts.

Step s of base b stands at position b + s, reads token b + s + 1 and predicts token b + s + 2. It sees the bases up to
b with their true features, and of the steps 1 … s only its own base's. Tokens are the true ones: a draft is only ever
continued where it was right. This is what the drafter computes one step after the other, and a test holds the two
against each other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.lesson import Lesson
from paceline.model.eagle3 import Eagle3Head
from paceline.model.layer import Linear


class UnrollAttention:
    """Called once per step; remembers the keys and values of the steps before."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.num_sequences, -1)).transpose(1, 2) for x in (q_THE, k_TGE, v_TGE))
        self.k.append(k)
        self.v.append(v)
        if len(self.k) == 1:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            length = q.shape[2]
            own = torch.eye(length, dtype=torch.bool, device=q.device)
            seen = torch.cat([own.new_ones(own.shape).tril(), *[own] * (len(self.k) - 1)], 1)
            k, v = torch.cat(self.k, 2), torch.cat(self.v, 2)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


def unroll(head: Eagle3Head, embed: Linear, lesson: Lesson, num_steps: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each step: the normed states [P, D] of the bases whose prediction is worth something, which bases these are
    [P] and where the tokens they predict stand [P], both as flat places in the lesson."""
    num_sequences, length = lesson.tokens_SL.shape
    attention = UnrollAttention(num_sequences)
    at = torch.arange(length, device=lesson.tokens_SL.device)
    flat = torch.arange(num_sequences * length, device=at.device)
    features = lesson.features_SLF.flatten(0, 1)
    x = head.fuse(features.to(head.dtype))
    for step in range(num_steps):
        tokens = lesson.tokens_SL.roll(-step - 1, 1).flatten()  # what wraps around predicts nothing
        positions = (at + step).clamp(max=head.config.layer.max_positions - 1).repeat(num_sequences)
        x, h = head(x, tokens, positions, attention, embed)
        worth = lesson.chosen_SL.roll(-step - 2, 1) & (at + step + 2 < length)
        base_P = flat[worth.flatten()]
        yield h[base_P], base_P, base_P + step + 2
