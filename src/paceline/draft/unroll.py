"""Training-time test: from every position at once, the head goes on from its own states as it does when it drafts.

Step s of base b stands at position b + s, reads token b + s + 1 and predicts token b + s + 2. It sees the bases up to
b with their true features, and of the steps 1 … s only its own base's. Tokens are the true ones: a draft is only ever
continued where it was right. This is what the drafter computes one step after the other, and a test holds the two
against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

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
        elif q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
            out = _Steps.apply(Flash(), q, *self.k, *self.v)
        else:
            length = q.shape[2]
            own = torch.eye(length, dtype=torch.bool, device=q.device)
            seen = torch.cat([own.new_ones(own.shape).tril(), *[own] * (len(self.k) - 1)], 1)
            k, v = torch.cat(self.k, 2), torch.cat(self.v, 2)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


class _Steps(torch.autograd.Function):
    """The same attention without its mask: causal over the true features by a flash kernel, and beside it one key per
    later step, the two joined by their sums of exponentials. The kernel's backward pass is right for its part if it is
    told the joint output and the joint sum."""

    @staticmethod
    def forward(ctx: Any, flash: Flash, q: Tensor, *keys_values: Tensor) -> Tensor:
        num = len(keys_values) // 2
        k, v = keys_values[:num], keys_values[num:]
        first, total, kept = flash.forward(q, k[0], v[0])
        own = torch.stack([_dot(_grouped(q, x), x) for x in k[1:]], -1) / math.sqrt(q.shape[-1])  # [S, H, L, steps]
        joint = torch.logsumexp(torch.cat([total.unsqueeze(-1), own], -1), -1)
        out = first * (total - joint).exp().unsqueeze(-1)
        for share, x in zip((own - joint.unsqueeze(-1)).exp().unbind(-1), v[1:], strict=True):
            out += (_grouped(share.unsqueeze(-1), x) * x.unsqueeze(2)).flatten(1, 2)
        out = out.to(q.dtype)
        ctx.flash, ctx.kept, ctx.num = flash, kept, num
        ctx.save_for_backward(q, *keys_values, out, joint, own)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, *keys_values, out, joint, own), grad = ctx.saved_tensors, grads[0]
        k, v = keys_values[: ctx.num], keys_values[ctx.num :]
        q_grad, k_first, v_first = ctx.flash.backward(grad, q, k[0], v[0], out, joint, ctx.kept)
        k_grads, v_grads, q_grad = [k_first], [v_first], q_grad.float()
        mean = (grad.float() * out).sum(-1)
        shares = (own - joint.unsqueeze(-1)).exp().unbind(-1)
        for share, key, value in zip(shares, k[1:], v[1:], strict=True):
            by_score = share * (_dot(_grouped(grad, value), value) - mean) / math.sqrt(q.shape[-1])
            q_grad += (_grouped(by_score.unsqueeze(-1), key) * key.unsqueeze(2)).flatten(1, 2)
            k_grads.append(_grouped(by_score.unsqueeze(-1) * q, key).sum(2).to(key.dtype))
            v_grads.append(_grouped(share.unsqueeze(-1) * grad, value).sum(2).to(value.dtype))
        return None, q_grad.to(q.dtype), *k_grads, *v_grads


def _grouped(x_SHLE: Tensor, key_SGLE: Tensor) -> Tensor:
    """Query heads by the key head that they share: [S, G, H / G, L, E]."""
    return x_SHLE.unflatten(1, (key_SGLE.shape[1], -1))


def _dot(x_SGRLE: Tensor, key_SGLE: Tensor) -> Tensor:
    return (x_SGRLE.float() * key_SGLE.unsqueeze(2)).sum(-1).flatten(1, 2)


class Flash:
    """Causal attention that gives, beside its output, the logarithm of its sum of exponentials [S, H, L]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        out, total, _, _, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True
        )
        return out, total, (max_q, max_k, seed, offset)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, kept: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        max_q, max_k, seed, offset = kept
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, total, None, None, max_q, max_k, 0.0, True, seed, offset
        )


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
