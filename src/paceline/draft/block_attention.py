"""The attention of draft positions in training, with gradients.

A base is a position from which a draft starts. Its Q draft positions attend causally to the context, which is the
positions up to their base, and to M own keys of the base. This is causal flash attention over the context and a few
more keys per base, combined by their log-sum-exps. The kernel's backward pass gives the gradients of its part if it
gets the combined output and log-sum-exp.

S sequences padded to L positions, H query heads, G key heads, E their size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def block_attention(
    q_SHLQE: Tensor, k_SGLE: Tensor, v_SGLE: Tensor, own_k_SGLME: Tensor, own_v_SGLME: Tensor
) -> Tensor:
    """[S, H, L, Q, E]"""
    if not q_SHLQE.is_cuda:
        flash: Any = CpuFlash()
    else:
        flash = CudaFlash() if q_SHLQE.dtype in (torch.bfloat16, torch.float16) else Dense()
    out: Tensor = _BlockAttention.apply(flash, q_SHLQE, k_SGLE, v_SGLE, own_k_SGLME, own_v_SGLME)
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flash: Any, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor) -> Tensor:
        num = q.shape[3]
        context = _folded(q), _repeated(k, num), _repeated(v, num)
        out, lse, saved = flash.forward(*context)
        out, lse = _unfolded(out, num), _unfolded(lse, num)
        if own_k.shape[3]:
            scores = _own_scores(q, own_k)
            total = torch.logaddexp(lse, scores.logsumexp(-1))
            weights = (scores - total.unsqueeze(-1)).exp()
            own = torch.einsum("sgrlqm,sglme->sgrlqe", _grouped(weights, own_v), own_v.to(weights.dtype)).flatten(1, 2)
            out, lse = (out * (lse - total).exp().unsqueeze(-1) + own).to(q.dtype), total
        ctx.flash, ctx.saved = flash, saved
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, own_k, own_v, out, lse), grad = ctx.saved_tensors, grads[0]
        num = q.shape[3]
        parts = (_folded(grad), _folded(q), _repeated(k, num), _repeated(v, num), _folded(out), _folded(lse))
        q_grad, k_grad, v_grad = ctx.flash.backward(*parts, ctx.saved)
        q_grad = _unfolded(q_grad, num)
        k_grad, v_grad = (x.unflatten(0, (-1, num)).sum(1).to(k.dtype) for x in (k_grad, v_grad))
        if not own_k.shape[3]:
            return None, q_grad, k_grad, v_grad, torch.zeros_like(own_k), torch.zeros_like(own_v)
        weights = (_own_scores(q, own_k) - lse.unsqueeze(-1)).exp()
        wide = weights.dtype
        grad_grouped, q_grouped = _grouped(grad.to(wide), own_v), _grouped(q.to(wide), own_k)
        mean = (grad.to(wide) * out).sum(-1)
        weight_grad = torch.einsum("sgrlqe,sglme->sgrlqm", grad_grouped, own_v.to(wide)).flatten(1, 2)
        score_grad = weights * (weight_grad - mean.unsqueeze(-1)) / math.sqrt(q.shape[-1])
        score_grad = _grouped(score_grad, own_k)
        q_own = torch.einsum("sgrlqm,sglme->sgrlqe", score_grad, own_k.to(wide)).flatten(1, 2)
        own_k_grad = torch.einsum("sgrlqm,sgrlqe->sglme", score_grad, q_grouped)
        own_v_grad = torch.einsum("sgrlqm,sgrlqe->sglme", _grouped(weights, own_v), grad_grouped)
        return None, (q_grad + q_own).to(q.dtype), k_grad, v_grad, own_k_grad.to(k.dtype), own_v_grad.to(v.dtype)


def _own_scores(q_SHLQE: Tensor, own_k_SGLME: Tensor) -> Tensor:
    """In at least float32: [S, H, L, Q, M]."""
    wide = torch.promote_types(q_SHLQE.dtype, torch.float32)
    scores = torch.einsum("sgrlqe,sglme->sgrlqm", _grouped(q_SHLQE.to(wide), own_k_SGLME), own_k_SGLME.to(wide))
    return scores.flatten(1, 2) / math.sqrt(q_SHLQE.shape[-1])


def _grouped(x: Tensor, keys: Tensor) -> Tensor:
    """Query heads by key head: [S, G, H / G, ...]."""
    return x.unflatten(1, (keys.shape[1], -1))


def _folded(x_SHLQ: Tensor) -> Tensor:
    """Each of the Q positions as a sequence of its own: [S * Q, H, L, ...]."""
    return x_SHLQ.movedim(3, 1).flatten(0, 1)


def _unfolded(x: Tensor, num: int) -> Tensor:
    return x.unflatten(0, (-1, num)).movedim(1, 3)


def _repeated(x_SGLE: Tensor, num: int) -> Tensor:
    return x_SGLE if num == 1 else x_SGLE.repeat_interleave(num, 0)


class CudaFlash:
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
            grad, q, k, v, out, lse.contiguous(), None, None, max_q, max_k, 0.0, True, seed, offset
        )


class CpuFlash:
    """The same for CPUs, whose kernel takes as many key heads as query heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        k, v = _for_heads(k, q), _for_heads(v, q)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
        return out, lse, None

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, num = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(num, 1) for x in (k, v))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
        q_grad, k_grad, v_grad = grads
        return q_grad, *(x.unflatten(1, (groups, num)).sum(2) for x in (k_grad, v_grad))


class Dense:
    """The same in plain torch, for a GPU in 32 or 64 bits: tests and evaluations."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
        scores = self._scores(q, k)
        lse = scores.logsumexp(-1)
        return (scores - lse.unsqueeze(-1)).exp() @ _for_heads(v, q), lse, None

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, saved: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = (self._scores(q, k) - lse.unsqueeze(-1)).exp()
        mean = (grad * out).sum(-1, keepdim=True)
        score_grad = weights * (grad @ _for_heads(v, q).mT - mean) / math.sqrt(q.shape[-1])
        k_grad, v_grad = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (score_grad.mT @ q, weights.mT @ grad))
        return score_grad @ _for_heads(k, q), k_grad, v_grad

    def _scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ _for_heads(k, q).mT / math.sqrt(q.shape[-1])
        return scores.masked_fill(scores.new_ones(scores.shape[-2:]).tril() == 0, -torch.inf)


def _for_heads(x_SGLE: Tensor, q_SHLE: Tensor) -> Tensor:
    """A key head for each query head."""
    return x_SGLE.repeat_interleave(q_SHLE.shape[1] // x_SGLE.shape[1], 1)
