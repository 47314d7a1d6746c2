"""Logprobs of given tokens from hidden states, with gradients, in chunks: the full logits never exist.

A float32 log-softmax over 50,000 entries has an error of 4e-5, because it sums in float32. Here the sum is in float64
and everything else in the model's precision; this costs little time. Shapes: P positions, V vocabulary, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.model.decoder import Decoder
from paceline.model.hf_decoder import HFDecoder
from paceline.model.ops import upcast

CHUNK = 512  # positions per chunk of logits
KEEP_BYTES = 1 << 29  # of probabilities kept for the backward pass; further chunks are recomputed
CUDA_CHUNK_BYTES = 1280 << 20  # of float32 logits in a chunk: few, large products on a GPU
CUDA_KEEP_BYTES = 6 << 30  # of 16-bit probabilities: all or none


def token_logprobs(
    decoder: Decoder | HFDecoder,
    hidden_PD: Tensor,
    target_P: Tensor,
    temperature: float = 1.0,
    keep_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log p(target) and the entropy of p (without gradient), float64 [P]; p is the softmax of logits / temperature.
    `keep_bytes`: of probabilities that are kept for the backward pass; others are recomputed. The fused kernels keep
    all or none."""
    weight = (decoder.lm_head or decoder.embed).weight
    assert weight is not None, "a packed decoder is only for inference"
    is_fused = isinstance(decoder, Decoder) and decoder.ops.is_cuda and hidden_PD.itemsize == 2
    if keep_bytes is None:
        keep_bytes = CUDA_KEEP_BYTES if is_fused else KEEP_BYTES
    keep_bytes = keep_bytes if torch.is_grad_enabled() else 0
    function = _FusedLogprobs if is_fused else _Logprobs
    return function.apply(hidden_PD, weight, target_P, decoder.logits, temperature, keep_bytes)


class _Logprobs(torch.autograd.Function):
    """In plain torch, for any device and dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        target_P: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        temperature: float,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden_PD, weight_VD, target_P)
        ctx.logits_of, ctx.temperature, ctx.kept = logits_of, temperature, []
        logprobs, entropies = [], []
        for hidden, target in zip(hidden_PD.split(CHUNK), target_P.split(CHUNK), strict=True):
            logits = _shifted(logits_of(hidden), temperature)
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
        gradients = _Gradients(hidden_PD, weight_VD, *ctx.needs_input_grad[:2])
        for i, hidden in enumerate(hidden_PD.split(CHUNK)):
            at = slice(i * CHUNK, i * CHUNK + len(hidden))
            p, ctx.kept[i] = ctx.kept[i], None  # changed in place below
            if p is None:
                p, total = _weights(_shifted(ctx.logits_of(hidden), ctx.temperature))
                p.div_(total[:, None])
            scale = (grads[0][at] / ctx.temperature).to(p.dtype)[:, None]
            gradients.add(at, p.mul_(-scale).scatter_add_(1, target_P[at, None], scale).to(hidden.dtype))
        return *gradients.results(), None, None, None, None


class _FusedLogprobs(torch.autograd.Function):
    """With Triton kernels, for a GPU in 16 bits. The chunks are larger, and the probabilities have 16 bits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_PD: Tensor,
        weight_VD: Tensor,
        target_P: Tensor,
        logits_of: Callable[[Tensor], Tensor],
        temperature: float,
        keep_bytes: int,
    ) -> tuple[Tensor, Tensor]:
        from paceline.model.cuda.softmax import logprobs_and_entropy

        num, vocab_size = len(hidden_PD), len(weight_VD)
        ctx.logits_of, ctx.temperature = logits_of, temperature
        ctx.chunk = max(128, CUDA_CHUNK_BYTES // (4 * vocab_size) // 128 * 128)
        keep = num * vocab_size * hidden_PD.itemsize <= keep_bytes
        ctx.kept = hidden_PD.new_empty(num, vocab_size) if keep else None
        logprob_P, entropy_P = (hidden_PD.new_empty(num, dtype=torch.float64) for _ in range(2))
        for start in range(0, num, ctx.chunk):
            at = slice(start, start + ctx.chunk)
            p = ctx.kept[at] if keep else None
            logprob_P[at], entropy_P[at] = logprobs_and_entropy(logits_of(hidden_PD[at]), target_P[at], temperature, p)
        ctx.save_for_backward(hidden_PD, weight_VD, target_P, logprob_P)
        ctx.mark_non_differentiable(entropy_P)
        return logprob_P, entropy_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from paceline.model.cuda.softmax import logits_grad_, logprobs_and_entropy

        hidden_PD, weight_VD, target_P, logprob_P = ctx.saved_tensors
        gradients = _Gradients(hidden_PD, weight_VD, *ctx.needs_input_grad[:2])
        scale_P, kept, ctx.kept = grads[0] / ctx.temperature, ctx.kept, None
        chunk = ctx.chunk if kept is None else max(1, len(hidden_PD))
        for start in range(0, len(hidden_PD), chunk):
            at = slice(start, start + chunk)
            p = kept
            if p is None:
                p = hidden_PD.new_empty(len(hidden_PD[at]), len(weight_VD))
                logprobs_and_entropy(ctx.logits_of(hidden_PD[at]), target_P[at], ctx.temperature, p)
            gradients.add(at, logits_grad_(p, target_P[at], logprob_P[at], scale_P[at]))
        return *gradients.results(), None, None, None, None


class _Gradients:
    """The gradients of the hidden states and of the LM head's weight, from those of chunks of logits."""

    def __init__(self, hidden_PD: Tensor, weight_VD: Tensor, wants_hidden: bool, wants_weight: bool) -> None:
        self.hidden_PD, self.weight_VD, self.wants_weight = hidden_PD, weight_VD, wants_weight
        self.hidden_grad = torch.empty_like(hidden_PD) if wants_hidden else None
        self.weight_grad: Tensor | None = None

    def add(self, at: slice, logits_grad: Tensor) -> None:
        if self.hidden_grad is not None:
            torch.mm(logits_grad, self.weight_VD, out=self.hidden_grad[at])
        if self.wants_weight:
            part = logits_grad.T @ self.hidden_PD[at]
            self.weight_grad = part if self.weight_grad is None else upcast(self.weight_grad).add_(part)

    def results(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.wants_weight:
            return self.hidden_grad, None
        weight_grad = torch.zeros_like(self.weight_VD) if self.weight_grad is None else self.weight_grad
        return self.hidden_grad, weight_grad.to(self.weight_VD.dtype)


def _shifted(logits: Tensor, temperature: float) -> Tensor:
    """logits / temperature minus the maximum of each row, in float32 or better."""
    logits = upcast(logits)
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
