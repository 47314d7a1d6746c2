"""Logprobs of chosen tokens, entropies and their gradients from float32 logits on a CUDA device.

A row of logits is read twice: for the maximum and the sums, then for the probabilities. The probabilities are kept in
16 bits. The gradient of the chosen token needs 1 - p, which 16 bits cannot hold if p is close to 1: it is computed
from the logprob instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


def logprobs_and_entropy(
    logits_PV: Tensor, target_P: Tensor, temperature: float, p_PV: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """log p(target) and the entropy of p, float64 [P], with p the softmax of logits / temperature. Writes p to `p_PV`,
    if there is one."""
    num, vocab_size = logits_PV.shape
    stats = logits_PV.new_empty(3, num)
    _softmax[(num,)](
        logits_PV, target_P, stats, logits_PV if p_PV is None else p_PV, 1 / temperature, num, vocab_size,
        WANTS_P=p_PV is not None, BLOCK=BLOCK, num_warps=16,
    )  # fmt: skip
    chosen, total, mean = stats.double()  # relative to the maximum
    return chosen - total.log(), total.log() - mean


def logits_grad_(p_PV: Tensor, target_P: Tensor, logprob_P: Tensor, grad_P: Tensor) -> Tensor:
    """Overwrite p with the gradient of the logits (before the division by the temperature, which is part of `grad_P`):
    grad · (1[target] - p)."""
    num, vocab_size = p_PV.shape
    one_minus_p = -torch.expm1(logprob_P).float()  # of the target
    grid = num, triton.cdiv(vocab_size, BLOCK)
    _logits_grad[grid](p_PV, target_P, one_minus_p, grad_P.float(), vocab_size, BLOCK=BLOCK, num_warps=8)
    return p_PV


@triton.jit
def _softmax(
    logits, target, stats, p, inverse_temperature, num_rows, vocab_size, WANTS_P: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row per program. `maximum` is the maximum so far; `total` and `weighted` are the sums of exp(x) and of
    x · exp(x), for x = logit / temperature - maximum."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocab_size
    # Finite: 0 · -inf would be NaN.
    maximum, total, weighted = -1e30, 0.0, 0.0
    for first in range(0, vocab_size, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < vocab_size
        x = tl.load(start + at, mask=inside, other=-1e30) * inverse_temperature
        new = tl.maximum(maximum, tl.max(x))
        x -= new
        weight = tl.where(inside, tl.exp(x), 0.0)
        scale = tl.exp(maximum - new)
        weighted = scale * (weighted + (maximum - new) * total) + tl.sum(tl.where(inside, x * weight, 0.0))
        total = scale * total + tl.sum(weight)
        maximum = new
    chosen = tl.load(start + tl.load(target + row)) * inverse_temperature - maximum
    tl.store(stats + row, chosen)
    tl.store(stats + num_rows + row, total)
    tl.store(stats + 2 * num_rows + row, weighted / total)
    if WANTS_P:
        for first in range(0, vocab_size, BLOCK):
            at = first + tl.arange(0, BLOCK)
            inside = at < vocab_size
            x = tl.load(start + at, mask=inside, other=-1e30) * inverse_temperature - maximum
            tl.store(p + row * vocab_size + at, (tl.exp(x) / total).to(p.dtype.element_ty), mask=inside)


@triton.jit
def _logits_grad(p, target, one_minus_p, grad, vocab_size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    scale = tl.load(grad + row)
    value = -tl.load(p + row * vocab_size + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.where(at == tl.load(target + row), tl.load(one_minus_p + row), value)
    tl.store(p + row * vocab_size + at, (value * scale).to(p.dtype.element_ty), mask=inside)
