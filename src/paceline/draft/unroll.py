"""EAGLE-3's training-time test: unroll the head for several draft steps, from all positions at once.

A base is a position from which a draft starts. Step s of base b is at position b + s, reads token b + s + 1 and
predicts token b + s + 2. It attends to the bases up to b, with the target's features, and to the steps 1 … s of its own
base. The input tokens are the recorded ones, because a draft only continues after correct tokens. A drafter computes
the same, one step after the other; tests compare the two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.draft.head_batch import HeadBatch
from paceline.model.eagle3 import Eagle3Head
from paceline.model.layer import Linear


class UnrollAttention:
    """Called once per step; keeps the keys and values of all steps."""

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
            out = _StepsAttention.apply(FlashAttention(), q, *self.k, *self.v)
        else:
            length = q.shape[2]
            own = torch.eye(length, dtype=torch.bool, device=q.device)
            mask = torch.cat([own.new_ones(own.shape).tril(), *[own] * (len(self.k) - 1)], 1)
            k, v = torch.cat(self.k, 2), torch.cat(self.v, 2)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


class _StepsAttention(torch.autograd.Function):
    """The same attention without a dense mask: causal flash attention over the bases and one key per later step,
    combined by their log-sum-exps. The kernel's backward pass gives the gradients of its part if it gets the combined
    output and log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, flash: FlashAttention, q: Tensor, *keys_values: Tensor) -> Tensor:
        num = len(keys_values) // 2
        k, v = keys_values[:num], keys_values[num:]
        base_out, base_lse, saved = flash.forward(q, k[0], v[0])
        # [S, H, L, steps]
        step_scores = torch.stack([_dot(_grouped(q, x), x) for x in k[1:]], -1) / math.sqrt(q.shape[-1])
        lse = torch.logsumexp(torch.cat([base_lse.unsqueeze(-1), step_scores], -1), -1)
        out = base_out * (base_lse - lse).exp().unsqueeze(-1)
        for weight, x in zip((step_scores - lse.unsqueeze(-1)).exp().unbind(-1), v[1:], strict=True):
            out += (_grouped(weight.unsqueeze(-1), x) * x.unsqueeze(2)).flatten(1, 2)
        out = out.to(q.dtype)
        ctx.flash, ctx.saved, ctx.num = flash, saved, num
        ctx.save_for_backward(q, *keys_values, out, lse, step_scores)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, *keys_values, out, lse, step_scores), grad = ctx.saved_tensors, grads[0]
        k, v = keys_values[: ctx.num], keys_values[ctx.num :]
        q_grad, k_first, v_first = ctx.flash.backward(grad, q, k[0], v[0], out, lse, ctx.saved)
        k_grads, v_grads, q_grad = [k_first], [v_first], q_grad.float()
        mean = (grad.float() * out).sum(-1)
        weights = (step_scores - lse.unsqueeze(-1)).exp().unbind(-1)
        for weight, key, value in zip(weights, k[1:], v[1:], strict=True):
            score_grad = weight * (_dot(_grouped(grad, value), value) - mean) / math.sqrt(q.shape[-1])
            q_grad += (_grouped(score_grad.unsqueeze(-1), key) * key.unsqueeze(2)).flatten(1, 2)
            k_grads.append(_grouped(score_grad.unsqueeze(-1) * q, key).sum(2).to(key.dtype))
            v_grads.append(_grouped(weight.unsqueeze(-1) * grad, value).sum(2).to(value.dtype))
        return None, q_grad.to(q.dtype), *k_grads, *v_grads


def _grouped(x_SHLE: Tensor, key_SGLE: Tensor) -> Tensor:
    """Query heads grouped by KV head: [S, G, H / G, L, E]."""
    return x_SHLE.unflatten(1, (key_SGLE.shape[1], -1))


def _dot(x_SGRLE: Tensor, key_SGLE: Tensor) -> Tensor:
    return (x_SGRLE.float() * key_SGLE.unsqueeze(2)).sum(-1).flatten(1, 2)


class FlashAttention:
    """Causal attention that also returns the log-sum-exp of the scores [S, H, L]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        out, lse, _, _, max_q, max_k, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, True
        )
        return out, lse, (max_q, max_k, seed, offset)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        max_q, max_k, seed, offset = saved
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, None, None, max_q, max_k, 0.0, True, seed, offset
        )


def unroll(
    head: Eagle3Head, embed: Linear, head_batch: HeadBatch, num_steps: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """For each step: the normalized hidden states [P, D] of the bases with a predicted token in the loss mask, these
    bases [P], and the positions of the predicted tokens [P]. Bases and positions index the flattened batch."""
    num_sequences, length = head_batch.tokens_SL.shape
    attention = UnrollAttention(num_sequences)
    at = torch.arange(length, device=head_batch.tokens_SL.device)
    flat = torch.arange(num_sequences * length, device=at.device)
    aux_hidden_states = head_batch.aux_hidden_SLF.flatten(0, 1)
    x = head.fuse(aux_hidden_states.to(head.dtype))
    for step in range(num_steps):
        tokens = head_batch.tokens_SL.roll(-step - 1, 1).flatten()  # tokens that wrap around are not in the loss
        positions = (at + step).clamp(max=head.config.layer.max_positions - 1).repeat(num_sequences)
        x, h = head(x, tokens, positions, attention, embed)
        in_loss = head_batch.loss_mask_SL.roll(-step - 2, 1) & (at + step + 2 < length)
        base_P = flat[in_loss.flatten()]
        yield h[base_P], base_P, base_P + step + 2
