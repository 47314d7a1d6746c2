"""Forward passes of heads in training: all drafts of k tokens that start at the positions of a batch.

A base is a position from which a draft starts. Step s of base b predicts token b + s + 2. The tokens before it are the
recorded ones, because a draft only continues after correct tokens. A drafter computes the same, for one base at a time;
tests compare the two.

EAGLE-3 (training-time test): step s of base b is at position b + s and reads token b + s + 1. It attends to the bases
up to b, with the target's features, and to the steps 1 … s of its own base.

DSpark: the steps of base b are one block, whose first token is b + 1. They attend to the context up to b and to each
other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.draft.block_attention import block_attention
from paceline.draft.head_batch import HeadBatch
from paceline.model.draft_head import DraftHead
from paceline.model.dspark import DSparkHead
from paceline.model.eagle3 import Eagle3Head
from paceline.model.layer import Linear

Steps = Iterator[tuple[Tensor, Tensor, Tensor]]


def draft_steps(head: DraftHead, embed: Linear, head_batch: HeadBatch, num_steps: int) -> Steps:
    """For each step: the features [P, K] of the bases with a predicted token in the loss mask, these bases [P], and the
    positions of the predicted tokens [P]. Bases and positions index the flattened batch. `head.output_weight` maps
    features to logits."""
    num_sequences, length = head_batch.tokens_SL.shape
    at = torch.arange(length, device=head_batch.tokens_SL.device)
    flat = torch.arange(num_sequences * length, device=at.device)
    features = _eagle3_steps if isinstance(head, Eagle3Head) else _dspark_steps
    for step, features_TK in enumerate(features(head, embed, head_batch, num_steps)):  # type: ignore[arg-type]
        in_loss = head_batch.loss_mask_SL.roll(-step - 2, 1) & (at + step + 2 < length)
        base_P = flat[in_loss.flatten()]
        yield features_TK[base_P], base_P, base_P + step + 2


def _eagle3_steps(head: Eagle3Head, embed: Linear, head_batch: HeadBatch, num_steps: int) -> Iterator[Tensor]:
    attention = _StepAttention(len(head_batch.tokens_SL))
    x = head.fuse(head_batch.aux_hidden_SLF.flatten(0, 1).to(head.dtype))
    for step in range(num_steps):
        tokens = head_batch.tokens_SL.roll(-step - 1, 1).flatten()  # tokens that wrap around are not in the loss
        x, h = head(x, tokens, _positions(head, head_batch, step), attention, embed)
        yield h


def _dspark_steps(head: DSparkHead, embed: Linear, head_batch: HeadBatch, num_steps: int) -> Iterator[Tensor]:
    fused = head.fuse(head_batch.aux_hidden_SLF.flatten(0, 1).to(head.dtype))
    context = list(head.context(fused, _positions(head, head_batch, 0)))
    attention = _OneBlockAttention(len(head_batch.tokens_SL), num_steps, context)
    tokens = head.block_tokens(head_batch.tokens_SL.roll(-1, 1).flatten(), num_steps)
    positions = torch.stack([_positions(head, head_batch, 1 + step) for step in range(num_steps)], 1)
    h_TQD = head(tokens.flatten(), positions.flatten(), attention, embed).unflatten(0, (-1, num_steps))
    for step, h in enumerate(h_TQD.unbind(1)):
        previous = head.previous(head_batch.tokens_SL.roll(-step - 1, 1).flatten())
        yield torch.cat([h, previous.to(h.dtype)], -1)


def _positions(head: DraftHead, head_batch: HeadBatch, offset: int) -> Tensor:
    """Those after each of the batch's, [T]; positions beyond the model's context are not in the loss."""
    num_sequences, length = head_batch.tokens_SL.shape
    at = torch.arange(length, device=head_batch.tokens_SL.device) + offset
    return at.clamp(max=head.config.layer.max_positions - 1).repeat(num_sequences)


class _StepAttention:
    """Called once per step; keeps the keys and values of all steps."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.num_sequences, -1)).transpose(1, 2) for x in (q_THE, k_TGE, v_TGE))
        self.k.append(k)
        self.v.append(v)
        own_k, own_v = (
            torch.stack(each[1:], 3) if each[1:] else k.unsqueeze(3)[:, :, :, :0] for each in (self.k, self.v)
        )
        out = block_attention(q.unsqueeze(3), self.k[0], self.v[0], own_k, own_v)
        return out.squeeze(3).transpose(1, 2).flatten(0, 1).flatten(1)


class _OneBlockAttention:
    """Of all blocks of `size` positions. `context`: the keys and values of each layer."""

    def __init__(self, num_sequences: int, size: int, context: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.num_sequences, self.size, self.context = num_sequences, size, context

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        # [S, heads, L, Q, E]
        q, k, v = (
            x.unflatten(0, (self.num_sequences, -1, self.size)).permute(0, 3, 1, 2, 4) for x in (q_THE, k_TGE, v_TGE)
        )
        context_k, context_v = (x.unflatten(0, (self.num_sequences, -1)).transpose(1, 2) for x in self.context[layer])
        out = block_attention(q, context_k, context_v, k, v)
        return out.permute(0, 2, 3, 1, 4).flatten(0, 2).flatten(1)
