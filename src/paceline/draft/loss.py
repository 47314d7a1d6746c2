"""Loss between a head's distribution q and the target's p, computed in chunks so that not all logits are in memory.

`kl`: the soft cross-entropy -Σ p log q. `acceptance`: -log Σ min(p, q), the negative logarithm of the rejection rule's
acceptance probability. Both sum over the draft vocabulary, at a temperature. p is normalized over the target's whole
vocabulary, so it sums to less than 1 here. Gradients are computed in the forward pass, while the logits are in memory.
P positions, D hidden size, N draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 8192  # positions per chunk of logits


def draft_loss(h_PD: Tensor, weight_ND: Tensor, p_PN: Tensor, temperature: float, kind: str) -> tuple[Tensor, Tensor]:
    """The mean loss over positions, and the mean Σ min(p, q) (without gradient)."""
    return _Loss.apply(h_PD, weight_ND, p_PN, temperature, kind)


def compare(z_PN: Tensor, p_PN: Tensor, temperature: float, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, the summed overlap Σ min(p, q), and the loss's gradient with respect to z / temperature, for
    logits z and the target's p. Only elementwise operations and sums, so that it can be compiled into one kernel."""
    z = z_PN.to(p_PN.dtype) / temperature
    log_q = z.log_softmax(-1)
    q = log_q.exp()
    overlap = torch.minimum(p_PN, q).sum(-1)
    if kind == "kl":
        loss = -(p_PN * log_q).sum()
        z_grad = q.mul_(p_PN.sum(-1, keepdim=True)).sub_(p_PN)
    else:
        loss = -overlap.clamp_min(1e-6).log().sum()
        below = q * (q < p_PN)
        z_grad = q.mul_(below.sum(-1, keepdim=True)).sub_(below).div_(overlap.clamp_min(1e-6).unsqueeze(-1))
    return loss, overlap.sum(), z_grad


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_PD: Tensor, weight_ND: Tensor, p_PN: Tensor, temperature: float, kind: str
    ) -> tuple[Tensor, Tensor]:
        loss, overlap = h_PD.new_zeros(()), h_PD.new_zeros(())
        h_grad, weight_grad = torch.zeros_like(h_PD), torch.zeros_like(weight_ND)
        dtype = torch.bfloat16 if h_PD.is_cuda and h_PD.dtype == torch.float32 else h_PD.dtype
        weight = weight_ND.to(dtype)
        scale = 1 / max(1, len(h_PD))
        for start in range(0, len(h_PD), CHUNK):
            rows = slice(start, start + CHUNK)
            h, p = h_PD[rows].to(dtype), p_PN[rows]
            chunk_loss, chunk_overlap, z_grad = compare(h @ weight.T, p, temperature, kind)
            loss += chunk_loss * scale
            overlap += chunk_overlap * scale
            z_grad = z_grad.mul_(scale / temperature).to(dtype)
            h_grad[rows] = z_grad @ weight
            weight_grad += z_grad.T @ h
        ctx.save_for_backward(h_grad, weight_grad)
        ctx.mark_non_differentiable(overlap)
        return loss, overlap

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        h_grad, weight_grad = ctx.saved_tensors
        return h_grad * grads[0], weight_grad * grads[0], None, None, None
