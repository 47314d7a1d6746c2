"""Top-k, top-p and min-p truncation of a distribution, on a CUDA device.

Tokens are ordered by (logit descending, id ascending), the order that `model/sample.py` sorts by. A truncation is a
position in that order. It is found without sorting, by a binary search over the bits of a logit, from the highest bit
to the lowest: each step reads all logits and computes the number, or the total weight, of those at or above a
threshold. One program per position. P positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096  # tokens that a program reads at once


class SlotSamplingParams(Protocol):
    """Sampling parameters of each slot: float64, top_k int32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(slots=True)
class Truncation:
    """A token is kept if its logit is above `logit`, or equal to it and its vocabulary index at most `index`."""

    logit: Tensor  # float32 [P]
    index: Tensor  # int32 [P]


def truncate(logits_PV: Tensor, slots_P: Tensor, params: SlotSamplingParams) -> Truncation:
    """`slots_P`: the slot of each position, int32; -1: the position is padding."""
    num, vocab = logits_PV.shape
    device = logits_PV.device
    truncation = Truncation(torch.empty(num, device=device), torch.empty(num, dtype=torch.int32, device=device))
    _truncate[(num,)](
        logits_PV, slots_P, params.temperature, params.top_k, params.top_p, params.min_p, truncation.logit,
        truncation.index, logits_PV.stride(0), vocab, BITS=16 if logits_PV.dtype == torch.bfloat16 else 32, CHUNK=CHUNK,
        num_warps=8,
    )  # fmt: skip
    return truncation


@triton.jit
def _key(logit):
    """An unsigned integer with the same order as the logit."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _logit(key):
    """The inverse of `_key`."""
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _at_or_above(row, vocab, min_key, threshold, peak, scale, WEIGHTED: tl.constexpr, CHUNK: tl.constexpr):
    """The total weight (if WEIGHTED) or number of the tokens with keys of at least `threshold` and `min_key`."""
    total = tl.zeros([CHUNK], tl.float64)
    for start in range(0, vocab, CHUNK):
        v = start + tl.arange(0, CHUNK)
        logit = tl.load(row + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
        key = _key(logit)
        included = (key >= threshold) & (key >= min_key) & (v < vocab)
        if WEIGHTED:
            total += tl.where(included, tl.exp((logit - peak) * scale), 0.0).to(tl.float64)
        else:
            total += included.to(tl.float64)
    return tl.sum(total)


@triton.jit
def _find_threshold(
    row, vocab, min_key, target, peak, scale, WEIGHTED: tl.constexpr, BITS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The greatest key that has at least `target` at or above it."""
    threshold = tl.zeros([], tl.uint32)
    bit = tl.full([], 2147483648, tl.uint32)
    for _ in range(BITS):
        if _at_or_above(row, vocab, min_key, threshold | bit, peak, scale, WEIGHTED, CHUNK) >= target:
            threshold = threshold | bit
        bit = bit >> 1
    if BITS < 32:  # the low bits of a bfloat16 are zeros; in the key of a negative number they are ones
        threshold = tl.where(threshold >= 2147483648, threshold, threshold | ((1 << (32 - BITS)) - 1))
    return threshold


@triton.jit
def _count_ties(row, vocab, key, last, CHUNK: tl.constexpr):
    """The number of tokens with this key and an index of at most `last`."""
    total = tl.zeros([CHUNK], tl.int32)
    for start in range(0, vocab, CHUNK):
        v = start + tl.arange(0, CHUNK)
        logit = tl.load(row + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
        total += ((_key(logit) == key) & (v < vocab) & (v <= last)).to(tl.int32)
    return tl.sum(total)


@triton.jit
def _truncate(
    logits, slots, temperatures, top_ks, top_ps, min_ps, out_logit, out_index, stride, vocab,
    BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    slot = tl.load(slots + at)
    valid = slot >= 0
    temperature = tl.load(temperatures + slot, mask=valid, other=0.0)
    top_k = tl.load(top_ks + slot, mask=valid, other=0)
    top_p = tl.load(top_ps + slot, mask=valid, other=1.0)
    min_p = tl.load(min_ps + slot, mask=valid, other=0.0)
    logit = tl.full([], -float("inf"), tl.float32)
    index = tl.full([], 2147483647, tl.int32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        row = logits + at.to(tl.int64) * stride
        scale = (1.0 / temperature).to(tl.float32)
        highest = tl.full([CHUNK], -float("inf"), tl.float32)
        for start in range(0, vocab, CHUNK):
            v = start + tl.arange(0, CHUNK)
            highest = tl.maximum(highest, tl.load(row + v, mask=v < vocab, other=-float("inf")).to(tl.float32))
        peak = tl.max(highest)
        zero = tl.zeros([], tl.uint32)
        min_key = zero
        if (top_k > 0) & (top_k < vocab):
            min_key = _find_threshold(row, vocab, zero, top_k.to(tl.float64), peak, scale, False, BITS, CHUNK)
            logit = _logit(min_key)
        if top_p < 1:
            target = top_p * _at_or_above(row, vocab, min_key, zero, peak, scale, True, CHUNK)
            key = _find_threshold(row, vocab, min_key, target, peak, scale, True, BITS, CHUNK)
            logit = _logit(key)
            above = _at_or_above(row, vocab, min_key, key + 1, peak, scale, True, CHUNK)
            weight = tl.exp((logit - peak) * scale).to(tl.float64)
            num_ties = tl.maximum(tl.ceil((target - above) / weight), 1.0).to(tl.int32)  # that are kept
            if num_ties < _count_ties(row, vocab, key, vocab, CHUNK):
                index = tl.full([], -1, tl.int32)  # binary search for the last index with too few ties; then one more
                step = tl.full([], 1 << 20, tl.int32)
                while step > 0:
                    if _count_ties(row, vocab, key, index + step, CHUNK) < num_ties:
                        index = index + step
                    step = step >> 1
                index = index + 1
        if min_p > 0:
            floor = (peak.to(tl.float64) + temperature * tl.log(min_p)).to(tl.float32)
            if floor > logit:
                logit = floor
                index = tl.full([], 2147483647, tl.int32)
    tl.store(out_logit + at, logit)
    tl.store(out_index + at, index)
