"""Logprobs of given tokens from hidden states, with gradients, in chunks: the full logits never exist.

A float32 log-softmax over 50,000 entries has an error of 4e-5, because it sums in float32. Here the sum is in float64
and everything else in the model's precision; this costs little time. Shapes: P positions, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.hf_decoder import HFDecoder
from paceline.model.ops import upcast

CHUNK = 512  # positions per chunk of logits
KEEP_BYTES = 1 << 29  # of probabilities kept for the backward pass; further chunks are recomputed


def token_logprobs(
    decoder: Decoder | HFDecoder,
    hidden_PD: Tensor,
    target_P: Tensor,
    temperature: float = 1.0,
    keep_bytes: int = KEEP_BYTES,
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p (without gradient), float64 [P]; p is the softmax of logits / temperature."""
    weight = (decoder.lm_head or decoder.embed).weight
    assert weight is not None, "a packed decoder is only for inference"
    keep_bytes = keep_bytes if torch.is_grad_enabled() else 0
    return _Logprobs.apply(hidden_PD, weight, target_P, decoder, temperature, keep_bytes)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        target_P: Tensor,
        decoder: Decoder | HFDecoder,
        temperature: float,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_PD, weight_VD, target_P)
        ctx.decoder, ctx.temperature, ctx.kept = decoder, temperature, []
        logprobs, entropies = [], []
        for hidden, target in zip(hidden_PD.split(CHUNK), target_P.split(CHUNK), strict=True):
            logits = _logits(decoder, hidden, temperature)
            chosen = logits.gather(1, target[:, None]).squeeze(1).double()
            p, total = _weights(logits)
            logprobs.append(chosen - total.log())
            entropies.append(total.log() - _sum(logits.mul_(p)) / total)
            keep_bytes -= p.nbytes
            ctx.kept.append(p.div_(total[:, None]) if keep_bytes >= 0 else None)
        none = hidden_PD.new_empty(0, dtype=torch.float64)
        entropy_P = torch.cat([none, *entropies])
        ctx.mark_non_differentiable(entropy_P)
        return torch.cat([none, *logprobs]), entropy_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """d log p(t) / d logits = (1[t] - p) / temperature."""
        hidden_PD, weight_VD, target_P = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.empty_like(hidden_PD)
        weight_grad = None
        for i, hidden in enumerate(hidden_PD.split(CHUNK)):
            at = slice(i * CHUNK, i * CHUNK + len(hidden))
            p, ctx.kept[i] = ctx.kept[i], None  # changed in place below
            if p is None:
                p, total = _weights(_logits(ctx.decoder, hidden, ctx.temperature))
                p.div_(total[:, None])
            scale = (grads[0][at] / ctx.temperature).to(p.dtype)[:, None]
            logits_grad = p.mul_(-scale).scatter_add_(1, target_P[at, None], scale).to(hidden.dtype)
            if wants_hidden:
                torch.mm(logits_grad, weight_VD, out=hidden_grad[at])
            if wants_weight:
                part = logits_grad.T @ hidden
                weight_grad = upcast(part) if weight_grad is None else weight_grad.add_(part)
        if wants_weight:
            weight_grad = torch.zeros_like(weight_VD) if weight_grad is None else weight_grad.to(weight_VD.dtype)
        return hidden_grad if wants_hidden else None, weight_grad, None, None, None, None


def _logits(decoder: Decoder | HFDecoder, hidden: Tensor, temperature: float) -> Tensor:
    """logits / temperature minus the maximum of each row, in float32 or better."""
    logits = upcast(decoder.logits(hidden))
    if temperature != 1:
        logits /= temperature
    return logits.sub_(logits.amax(1, keepdim=True))


def _weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    """exp(logits) and its row sums in float64."""
    weights = logits.exp()
    return weights, _sum(weights)


def _sum(x_PV: Tensor) -> Tensor:
    """Row sums, float64. A GPU sums as a tree: accurate in float32, while float64 would need a copy of twice the
    size."""
    return x_PV.sum(1).double() if x_PV.is_cuda else x_PV.sum(1, dtype=torch.float64)
