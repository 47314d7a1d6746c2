"""Losses between a head's distribution q and the target's p, computed in chunks so that not all logits are in memory.

  - `kl`: the soft cross-entropy -Σ p log q.
  - `acceptance`: -log Σ min(p, q), of the rejection rule's acceptance probability.
  - `tv`: 1 - Σ min(p, q), the total variation, plus a tenth of `kl`.
  - `coupled`: -log of the probability that draft and target agree under the rule `coupled`. Both run the race
    argmin E / weight with the same exponential noise E; they both choose i if E_j / E_i > max(p_j / p_i, q_j / q_i) for
    all other j, so the probability is Σ_i 1 / Σ_j max(p_j / p_i, q_j / q_i).

They sum over the draft vocabulary, at a temperature. p is normalized over the target's whole vocabulary, so it sums to
less than 1 here. Gradients are computed in the forward pass, while the logits are in memory. P positions, K features
(EAGLE-3: the hidden size), N draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK = 8192  # positions per chunk of logits
CROSS_ENTROPY = 0.1  # its share in `tv`
SMALLEST = 1e-6  # probability whose logarithm is taken
TINY = 1e-20  # weight in a race


def draft_loss(h_PD: Tensor, weight_ND: Tensor, p_PN: Tensor, temperature: float, kind: str) -> tuple[Tensor, Tensor]:
    """The mean loss over positions, and each position's Σ min(p, q) (without gradient): [P]."""
    return _Loss.apply(h_PD, weight_ND, p_PN, temperature, kind)


def compare(z_PN: Tensor, p_PN: Tensor, temperature: float, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """The summed loss, the overlap Σ min(p, q) of each position, and the loss's gradient with respect to
    z / temperature, for logits z and the target's p."""
    log_q = (z_PN.to(p_PN.dtype) / temperature).log_softmax(-1)
    q = log_q.exp()
    overlap = torch.minimum(p_PN, q).sum(-1)
    if kind == "coupled":
        agreement, q_grad = agreement_probability(p_PN, q)
        agreement = agreement.clamp_min(SMALLEST)
        z_grad = _through_softmax(q, q_grad.div_(-agreement.unsqueeze(-1)))
        return -agreement.log().sum(), overlap, z_grad
    if kind == "acceptance":
        least = overlap.clamp_min(SMALLEST)
        return -least.log().sum(), overlap, _through_softmax(q, (q < p_PN) / -least.unsqueeze(-1))
    loss = -(p_PN * log_q).sum()
    z_grad = q * p_PN.sum(-1, keepdim=True) - p_PN
    if kind == "tv":
        z_grad = z_grad.mul_(CROSS_ENTROPY).add_(_through_softmax(q, -(q < p_PN).to(q.dtype)))
        loss = CROSS_ENTROPY * loss + (1 - overlap).sum()
    return loss, overlap, z_grad


def agreement_probability(p_PN: Tensor, q_PN: Tensor) -> tuple[Tensor, Tensor]:
    """The probability that the races of p and q choose the same of the draft vocabulary's tokens: [P], and its gradient
    with respect to q. In descending order of p / q, max(p_j / p_i, q_j / q_i) is the first for j up to i, and the
    second after it; target tokens outside of the draft vocabulary have q = 0, so they come first."""
    p, q = p_PN.clamp_min(TINY), q_PN.clamp_min(TINY)
    order = (p / q).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    outside = (1 - p_PN.sum(-1, keepdim=True)).clamp_min(0)
    before = outside + p.cumsum(-1)  # of p, up to and including each
    after = (q.flip(-1).cumsum(-1).flip(-1) - q).clamp_min(0)  # of q
    size = before / p + after / q
    each = 1 / size
    # The size of i grows by 1 / q_i for each q_j after it, and by -after / q_i² for its own.
    smaller = (each.square() / q).cumsum(-1) - each.square() / q
    sorted_grad = each.square() * after / q.square() - smaller
    return each.sum(-1), torch.empty_like(sorted_grad).scatter_(-1, order, sorted_grad)


def _through_softmax(q: Tensor, q_grad: Tensor) -> Tensor:
    """The gradient with respect to the logits of q."""
    return q * (q_grad - (q * q_grad).sum(-1, keepdim=True))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_PD: Tensor, weight_ND: Tensor, p_PN: Tensor, temperature: float, kind: str
    ) -> tuple[Tensor, Tensor]:
        loss, overlap = h_PD.new_zeros(()), h_PD.new_zeros(len(h_PD))
        h_grad, weight_grad = torch.zeros_like(h_PD), torch.zeros_like(weight_ND)
        dtype = torch.bfloat16 if h_PD.is_cuda and h_PD.dtype == torch.float32 else h_PD.dtype
        weight = weight_ND.to(dtype)
        scale = 1 / max(1, len(h_PD))
        for start in range(0, len(h_PD), CHUNK):
            rows = slice(start, start + CHUNK)
            h, p = h_PD[rows].to(dtype), p_PN[rows]
            chunk_loss, chunk_overlap, z_grad = compare(h @ weight.T, p, temperature, kind)
            loss += chunk_loss * scale
            overlap[rows] = chunk_overlap
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
