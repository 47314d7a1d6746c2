"""Tokens drawn on a CUDA device, by the same noise as on a CPU.

Token v of a position arrives at E_v / w_v (see `model/sample.py`); here with E and w in float32, which is right to some
1e-7 of an arrival: two tokens must come that close before the devices may disagree. A program looks at a part of the
vocabulary: who arrives first there, and the sum of its weights, also at temperature 1; a second kernel compares the
parts, in float64. P positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from paceline.model.cuda.cut import Cut
from paceline.model.cuda.early import early, wait

PART = 2048  # tokens that a program looks at; a multiple of 4, the words of one noise counter
WARPS = 4
STRIDE = 256  # at once, where it must look twice


@dataclass(slots=True)
class Draws:
    """On the device: nobody has waited for them yet."""

    tokens: Tensor  # int32 [P]
    logprobs: Tensor  # float64 [P], at the position's temperature
    raw_logprobs: Tensor  # float64 [P]


def draw(
    logits_PV: Tensor,
    keys_P: Tensor,
    positions_P: Tensor,
    temperature_P: Tensor,
    stream: int,
    ids_V: Tensor | None = None,
    cut: Cut | None = None,
) -> Draws:
    """keys and positions int64; temperature float64, 0: the likeliest token. `ids`: which tokens the logits are of,
    ascending, if not of all: the noise is that of the tokens."""
    num, vocab = logits_PV.shape
    parts = triton.cdiv(vocab, PART)
    device = logits_PV.device
    found = torch.empty(num, parts, 4, dtype=torch.float32, device=device)
    first = torch.empty(num, parts, dtype=torch.int32, device=device)
    draws = Draws(
        torch.empty(num, dtype=torch.int32, device=device),
        torch.empty(num, dtype=torch.float64, device=device),
        torch.empty(num, dtype=torch.float64, device=device),
    )
    ids = first if ids_V is None else ids_V
    limits = (first, first) if cut is None else (cut.logit, cut.place)
    _race[(num, parts)](
        logits_PV, ids, keys_P, positions_P, temperature_P, *limits, found, first, logits_PV.stride(0), vocab, stream,
        PART=PART, STRIDE=STRIDE, SOME=ids_V is not None, CUT=cut is not None, num_warps=WARPS,
        **early(device),
    )  # fmt: skip
    _finish[(num,)](
        logits_PV, ids, keys_P, positions_P, temperature_P, found, first, draws.tokens, draws.logprobs,
        draws.raw_logprobs, logits_PV.stride(0), parts, stream,
        WIDTH=triton.next_power_of_2(parts), SOME=ids_V is not None, num_warps=1, **early(device),
    )  # fmt: skip
    return draws


@triton.jit
def _uniform(word):
    return (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def exponential(word):
    """-log(1 - u) of u = (word + 1/2) / 2^32, to two ulp at both ends: the logarithm of 1 - u = m 2^e by a polynomial
    in m - 1, which for u < 1/2 is -u itself (e = 0)."""
    low = _uniform(word)
    high = ((~word).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u
    bits = high.to(tl.int32, bitcast=True)
    e = (bits - 0x3F2AAAAB) >> 23  # so that m is from 2/3 to 4/3
    m = (bits - (e << 23)).to(tl.float32, bitcast=True)
    small = word < 2147483648
    x = tl.where(small, -low, m - 1.0)
    y = -0.3925960063934326 * x + 0.02021307311952114  # log(1 + x) = x - x^2/2 + x^3 y; least error for -1/2 to 1/3
    y = y * x - 0.01497752033174038
    y = y * x + 0.1358652263879776
    y = y * x - 0.1337062567472458
    y = y * x + 0.14028550684452057
    y = y * x - 0.16628247499465942
    y = y * x + 0.20010019838809967
    y = y * x - 0.2500060796737671
    y = y * x + 0.3333321809768677
    y = (y * x - 0.5) * (x * x) + x
    return -(tl.where(small, 0, e).to(tl.float32) * 0.6931471805599453 + y)


@triton.jit
def _words(key, position, stream, counter, zero):
    """The four noise words of each counter, as in `model/sample.py`."""
    low, high = position.to(tl.uint32), (position >> 32).to(tl.uint32)
    return tl.philox(key.to(tl.uint64), counter, zero + low, zero + stream.to(tl.uint32), zero + high)


@triton.jit
def _words_of(key, position, stream, token, zero):
    """Each token's own word."""
    w0, w1, w2, w3 = _words(key, position, stream, (token >> 2).to(tl.uint32), zero)
    word = token & 3
    return tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))


@triton.jit
def _stays(logit, v, at, cut_logit, cut_place):
    limit = tl.load(cut_logit + at)
    return (logit > limit) | ((logit == limit) & (v <= tl.load(cut_place + at)))


@triton.jit
def _race(
    logits, ids, keys, positions, temperatures, cut_logit, cut_place, found, first, stride, vocab, stream,
    PART: tl.constexpr, STRIDE: tl.constexpr, SOME: tl.constexpr, CUT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """With u < -log(1 - u) < u (1 - u/2) / (1 - u) there is no need of logarithms, unless the one who is first by the
    lower bound may come after another: then of all, in strides that need few registers."""
    at, part = tl.program_id(0), tl.program_id(1)
    key, position = tl.load(keys + at), tl.load(positions + at)
    temperature = tl.load(temperatures + at)
    greedy = temperature == 0
    scale = tl.where(greedy, 1.0, 1.0 / temperature).to(tl.float32) * 1.4426950408889634  # for powers of two
    begin = part * PART
    v = begin + tl.arange(0, PART)
    inside = v < vocab
    if SOME:
        token = tl.load(ids + v, mask=inside, other=0).to(tl.int32)
        words = _words_of(key, position, stream, token, tl.zeros([PART], tl.uint32))
    else:
        counter = part * (PART // 4) + tl.arange(0, PART // 4)
        w0, w1, w2, w3 = _words(key, position, stream, counter.to(tl.uint32), tl.zeros([PART // 4], tl.uint32))
        words = tl.reshape(tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 2, 1)), [PART])
    row = logits + at.to(tl.int64) * stride
    wait(EARLY)
    raw = tl.load(row + v, mask=inside, other=-float("inf")).to(tl.float32)
    peak = tl.max(raw)
    base = tl.where(peak == -float("inf"), 0.0, peak)  # a part may be all -inf
    z = (raw - base) * scale
    weight = tl.exp2(z)
    bound = tl.where(greedy, -raw, _uniform(words) * tl.exp2(-z))
    if CUT:
        stays = _stays(raw, v, at, cut_logit, cut_place)
        weight = tl.where(stays, weight, 0.0)
        bound = tl.where(stays, bound, float("inf"))
    least, winner = tl.min(bound, 0, return_indices=True)  # the first of equals
    if (temperature != 0) & (least < float("inf")):
        u = least * tl.exp2((tl.load(row + begin + winner).to(tl.float32) - base) * scale)
        late = least * (1 - 0.5 * u) / tl.maximum(1 - u, 1e-10)
        if tl.sum((bound <= late * 1.00001).to(tl.int32)) > 1:  # roundings are less than that
            least = float("inf")
            for start in range(0, PART, STRIDE):
                some = begin + start + tl.arange(0, STRIDE)
                logit = tl.load(row + some, mask=some < vocab, other=-float("inf")).to(tl.float32)
                weights = tl.exp2((logit - base) * scale)
                if CUT:
                    weights = tl.where(_stays(logit, some, at, cut_logit, cut_place), weights, 0.0)
                own = some
                if SOME:
                    own = tl.load(ids + some, mask=some < vocab, other=0).to(tl.int32)
                arrival = exponential(_words_of(key, position, stream, own, tl.zeros([STRIDE], tl.uint32))) / weights
                here, place = tl.min(arrival, 0, return_indices=True)
                if here < least:
                    least = here
                    winner = start + place
    out = found + (at * tl.num_programs(1) + part) * 4
    tl.store(out, peak)
    total = tl.sum(weight)
    tl.store(out + 1, total)
    if CUT or temperature != 1:
        total = tl.sum(tl.exp(raw - base))
    tl.store(out + 2, total)
    tl.store(first + at * tl.num_programs(1) + part, tl.where(least < float("inf"), begin + winner, -1))


@triton.jit
def _finish(
    logits, ids, keys, positions, temperatures, found, first, tokens, logprobs, raw_logprobs, stride, parts,
    stream, WIDTH: tl.constexpr, SOME: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of the parts' first the very first, in float64."""
    at = tl.program_id(0)
    key, position = tl.load(keys + at), tl.load(positions + at)
    temperature = tl.load(temperatures + at)
    greedy = temperature == 0
    scale = tl.where(greedy, 1.0, 1.0 / temperature)
    i = tl.arange(0, WIDTH)
    inside = i < parts
    mine = found + (at * parts + i) * 4
    wait(EARLY)
    peaks = tl.load(mine, mask=inside, other=-float("inf")).to(tl.float64)
    sums = tl.load(mine + 1, mask=inside, other=0.0).to(tl.float64)
    raw_sums = tl.load(mine + 2, mask=inside, other=0.0).to(tl.float64)
    places = tl.load(first + at * parts + i, mask=inside, other=-1)
    runs = places >= 0
    row = logits + at.to(tl.int64) * stride
    raw = tl.load(row + places, mask=runs, other=0.0).to(tl.float64)
    token = places
    if SOME:
        token = tl.load(ids + places, mask=runs, other=0).to(tl.int32)
    words = _words_of(key, position, stream, token, tl.zeros([WIDTH], tl.uint32))
    u = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    peak = tl.max(peaks)
    arrival = tl.where(greedy, -raw, libdevice.log(-libdevice.log1p(-u)) - (raw - peak) * scale)
    winner = tl.argmin(tl.where(runs, arrival, float("inf")), 0)
    place = tl.maximum(tl.load(first + at * parts + winner), 0)  # where all is NaN, at least a token
    token = place
    if SOME:
        token = tl.load(ids + place).to(tl.int32)
    total = tl.sum(tl.where(inside, sums * libdevice.exp((peaks - peak) * scale), 0.0))
    raw_total = tl.sum(tl.where(inside, raw_sums * libdevice.exp(peaks - peak), 0.0))
    chosen = tl.load(row + place).to(tl.float64) - peak
    tl.store(tokens + at, token)
    tl.store(logprobs + at, tl.where(greedy, 0.0, chosen * scale - libdevice.log(total)))
    tl.store(raw_logprobs + at, chosen - libdevice.log(raw_total))
