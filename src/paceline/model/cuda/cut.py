"""Where top-k, top-p and min-p cut a distribution, on a CUDA device.

A cut is a place in the order of tokens by (logit, the greater first; id, the smaller first), which is the order that
`model/sample.py` sorts by. It is found without sorting: a logit's bits, read as a number that grows with it, are fixed
from the highest to the lowest, each by one look at all tokens (how many, or how much weight, lie at it or above). One
program per position. P positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096  # tokens that are looked at together


class Params(Protocol):
    """How each of some slots samples: float64, top_k int32."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


@dataclass(slots=True)
class Cut:
    """A token stays if its logit is above `logit`, or the same and its place in the vocabulary at most `place`."""

    logit: Tensor  # float32 [P]
    place: Tensor  # int32 [P]


def cut(logits_PV: Tensor, places_P: Tensor, slots: Params) -> Cut:
    """places: the slot whose sampling parameters count, int32; -1: none."""
    num, vocab = logits_PV.shape
    device = logits_PV.device
    found = Cut(torch.empty(num, device=device), torch.empty(num, dtype=torch.int32, device=device))
    _cut[(num,)](
        logits_PV, places_P, slots.temperature, slots.top_k, slots.top_p, slots.min_p, found.logit, found.place,
        logits_PV.stride(0), vocab, BITS=16 if logits_PV.dtype == torch.bfloat16 else 32, PART=PART, num_warps=8,
    )  # fmt: skip
    return found


@triton.jit
def _key(logit):
    """A number that grows with it."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _logit(key):
    bits = key.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ -2147483648, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _at_or_above(row, vocab, lowest, least, peak, scale, WEIGH: tl.constexpr, PART: tl.constexpr):
    """Of the tokens whose key is at least `least` and `lowest`: their weight, or how many they are."""
    total = tl.zeros([PART], tl.float64)
    for start in range(0, vocab, PART):
        v = start + tl.arange(0, PART)
        logit = tl.load(row + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
        key = _key(logit)
        here = (key >= least) & (key >= lowest) & (v < vocab)
        if WEIGH:
            total += tl.where(here, tl.exp((logit - peak) * scale), 0.0).to(tl.float64)
        else:
            total += here.to(tl.float64)
    return tl.sum(total)


@triton.jit
def _descend(row, vocab, lowest, wanted, peak, scale, WEIGH: tl.constexpr, BITS: tl.constexpr, PART: tl.constexpr):
    """The greatest key that so much lies at or above."""
    found = tl.zeros([], tl.uint32)
    bit = tl.full([], 2147483648, tl.uint32)
    for _ in range(BITS):
        if _at_or_above(row, vocab, lowest, found | bit, peak, scale, WEIGH, PART) >= wanted:
            found = found | bit
        bit = bit >> 1
    if BITS < 32:  # a bfloat16's other bits are zeros, which in a negative one's key are ones
        found = tl.where(found >= 2147483648, found, found | ((1 << (32 - BITS)) - 1))
    return found


@triton.jit
def _count_ties(row, vocab, key, last, PART: tl.constexpr):
    """Tokens with this key, up to the place `last`."""
    total = tl.zeros([PART], tl.int32)
    for start in range(0, vocab, PART):
        v = start + tl.arange(0, PART)
        logit = tl.load(row + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
        total += ((_key(logit) == key) & (v < vocab) & (v <= last)).to(tl.int32)
    return tl.sum(total)


@triton.jit
def _cut(
    logits, places, temperatures, top_ks, top_ps, min_ps, cut_logit, cut_place, stride, vocab,
    BITS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    slot = tl.load(places + at)
    real = slot >= 0
    temperature = tl.load(temperatures + slot, mask=real, other=0.0)
    top_k = tl.load(top_ks + slot, mask=real, other=0)
    top_p = tl.load(top_ps + slot, mask=real, other=1.0)
    min_p = tl.load(min_ps + slot, mask=real, other=0.0)
    logit = tl.full([], -float("inf"), tl.float32)
    place = tl.full([], 2147483647, tl.int32)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        row = logits + at.to(tl.int64) * stride
        scale = (1.0 / temperature).to(tl.float32)
        highest = tl.full([PART], -float("inf"), tl.float32)
        for start in range(0, vocab, PART):
            v = start + tl.arange(0, PART)
            highest = tl.maximum(highest, tl.load(row + v, mask=v < vocab, other=-float("inf")).to(tl.float32))
        peak = tl.max(highest)
        zero = tl.zeros([], tl.uint32)
        lowest = zero
        if (top_k > 0) & (top_k < vocab):
            lowest = _descend(row, vocab, zero, top_k.to(tl.float64), peak, scale, False, BITS, PART)
            logit = _logit(lowest)
        if top_p < 1:
            wanted = top_p * _at_or_above(row, vocab, lowest, zero, peak, scale, True, PART)
            last = _descend(row, vocab, lowest, wanted, peak, scale, True, BITS, PART)
            logit = _logit(last)
            above = _at_or_above(row, vocab, lowest, last + 1, peak, scale, True, PART)
            each = tl.exp((logit - peak) * scale).to(tl.float64)
            num = tl.maximum(tl.ceil((wanted - above) / each), 1.0).to(tl.int32)
            if num < _count_ties(row, vocab, last, vocab, PART):
                place = tl.full([], -1, tl.int32)  # the furthest up to which too few stay; then one more
                jump = tl.full([], 1 << 20, tl.int32)
                while jump > 0:
                    if _count_ties(row, vocab, last, place + jump, PART) < num:
                        place = place + jump
                    jump = jump >> 1
                place = place + 1
        if min_p > 0:
            floor = (peak.to(tl.float64) + temperature * tl.log(min_p)).to(tl.float32)
            if floor > logit:
                logit = floor
                place = tl.full([], 2147483647, tl.int32)
    tl.store(cut_logit + at, logit)
    tl.store(cut_place + at, place)
