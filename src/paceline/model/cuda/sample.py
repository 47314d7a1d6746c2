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

PART = 2048  # tokens that a warp looks at; two do so together where they are many
EACH = tl.constexpr(8)  # of them that a lane looks at together: two noise counters' words
MANY = 65536
COLD = tl.constexpr(0.05)  # a temperature at which noise is worth little, and weights beyond some logits are none
LATEST = tl.constexpr(127.0)  # log2 of an arrival that float32 can hold
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)  # as a greatest logit: there is none


@dataclass(slots=True)
class Draws:
    """On the device: nobody has waited for them yet."""

    tokens: Tensor  # int32 [P]
    logprobs: Tensor  # float64 [P], at the position's temperature
    raw_logprobs: Tensor  # float64 [P]
    leads: Tensor | None  # float32 [P], as on a CPU; at times, where the second is hard to find, a little less


def draw(
    logits_PV: Tensor,
    keys_P: Tensor,
    positions_P: Tensor,
    temperature_P: Tensor,
    stream: int,
    ids_V: Tensor | None = None,
    cut: Cut | None = None,
    leads: bool = False,
    counts_P: Tensor | None = None,
) -> Draws:
    """keys and positions int64; temperature float64, 0: the likeliest token. `ids`: which tokens the logits are of,
    ascending, if not of all: the noise is that of the tokens. `leads`: tell them too. `counts`: int32, 0 where nothing
    need be drawn: the token there is 0, and of the rest nothing is said."""
    num, vocab = logits_PV.shape
    warps = 1 if vocab < MANY else 2
    parts = triton.cdiv(vocab, PART * warps)
    device = logits_PV.device
    found = torch.empty(num, parts, 4, dtype=torch.float32, device=device)
    first = torch.empty(num, parts, dtype=torch.int32, device=device)
    draws = Draws(
        torch.empty(num, dtype=torch.int32, device=device),
        torch.empty(num, dtype=torch.float64, device=device),
        torch.empty(num, dtype=torch.float64, device=device),
        torch.empty(num, dtype=torch.float32, device=device) if leads else None,
    )
    ids = first if ids_V is None else ids_V
    limits = (first, first) if cut is None else (cut.logit, cut.place)
    counts = first if counts_P is None else counts_P
    _race[(num, parts)](
        logits_PV, ids, keys_P, positions_P, temperature_P, *limits, counts, found, first, logits_PV.stride(0), vocab,
        stream, PART=PART * warps, LANES=32 * warps, SOME=ids_V is not None, CUT=cut is not None,
        LEADS=leads, NOT_ALL=counts_P is not None, num_warps=warps, **early(device),
    )  # fmt: skip
    _finish[(num,)](
        logits_PV, ids, keys_P, positions_P, temperature_P, counts, found, first, draws.tokens, draws.logprobs,
        draws.raw_logprobs, found if draws.leads is None else draws.leads, logits_PV.stride(0), vocab, parts, stream,
        WIDTH=triton.next_power_of_2(parts), PART=PART * warps, SOME=ids_V is not None, LEADS=leads,
        NOT_ALL=counts_P is not None, num_warps=1, **early(device),
    )  # fmt: skip
    return draws


@triton.jit
def exponential(word):
    """-log(1 - u) of u = (word + 1/2) / 2^32, to two ulp at both ends: the logarithm of 1 - u = m 2^e by a polynomial
    in m - 1, which for u < 1/2 is -u itself (e = 0)."""
    low = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
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
def _multiply(a, FACTOR: tl.constexpr):
    """The high and the low word of a product: one instruction gives both."""
    product = a.to(tl.uint64) * FACTOR
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def _words(key, position, stream, counter):
    """The four noise words of each counter, as in `model/sample.py`."""
    c0, c1, c2, c3 = counter, position.to(tl.uint32), stream.to(tl.uint32), (position >> 32).to(tl.uint32)
    k0, k1 = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = _multiply(c0, 0xD2511F53)
        high2, low2 = _multiply(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ (c1 ^ k0), low2, high0 ^ (c3 ^ k1), low0
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _in_a_row(key, position, stream, counter):
    """The words of each counter's four tokens: [counters, 4]."""
    w0, w1, w2, w3 = _words(key, position, stream, counter.to(tl.uint32))
    pairs = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 2, 1))
    return tl.reshape(pairs, [counter.shape[0], 4])


@triton.jit
def _words_of(key, position, stream, token):
    """Each token's own word."""
    w0, w1, w2, w3 = _words(key, position, stream, (token >> 2).to(tl.uint32))
    odd = (token & 1) != 0
    return tl.where((token & 2) != 0, tl.where(odd, w3, w2), tl.where(odd, w1, w0))


@triton.jit
def _stays(logit, v, at, cut_logit, cut_place):
    limit = tl.load(cut_logit + at)
    return (logit > limit) | ((logit == limit) & (v <= tl.load(cut_place + at)))


@triton.jit
def _load(pointer, i, end, other, WHOLE: tl.constexpr):
    """What is at i, if that is before the end, as with WHOLE all are."""
    if WHOLE:
        return tl.load(pointer + i)
    return tl.load(pointer + i, mask=i < end, other=other)


@triton.jit
def _look(
    top, total, plain, best, second, place, start, row, ids, vocab, key, position, stream, scale, at, cut_logit,
    cut_place, LANES: tl.constexpr, SOME: tl.constexpr, CUT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A lane's tokens of one chunk are a group. Of each lane, so far: its greatest logit, the sums of its weights
    relative to that, the least and the second least bound of its groups (log2 of u 2^32 / exp(logit / temperature),
    the least of the group's) and where the chunk of the least starts."""
    # [LANES, 4, 2]: four in a row and again four. Put together so, all of it stays in a lane's own registers.
    lane = tl.arange(0, LANES)
    low = start + lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    high = low + 4 * LANES
    raw = tl.join(_load(row, low, vocab, -float("inf"), WHOLE), _load(row, high, vocab, -float("inf"), WHOLE))
    raw = raw.to(tl.float32)
    if SOME:
        tokens = tl.join(_load(ids, low, vocab, 0, WHOLE), _load(ids, high, vocab, 0, WHOLE)).to(tl.int32)
        words = _words_of(key, position, stream, tokens)
    else:
        counter = start // 4 + lane
        words = tl.join(_in_a_row(key, position, stream, counter), _in_a_row(key, position, stream, counter + LANES))
    before = top
    top = tl.maximum(top, tl.max(tl.max(raw, 2), 1))
    z = (raw - top[:, None, None]) * scale
    if CUT:
        z = tl.where(_stays(raw, tl.join(low, high), at, cut_logit, cut_place), z, -float("inf"))
    total = total * tl.exp2((before - top) * scale) + tl.sum(tl.sum(tl.exp2(z), 2), 1)
    if CUT or scale != LOG2E:
        chances = tl.exp2((raw - top[:, None, None]) * LOG2E)
        plain = plain * tl.exp2((before - top) * LOG2E) + tl.sum(tl.sum(chances, 2), 1)
    bound = tl.min(tl.min(libdevice.fast_log2f(words.to(tl.float32) + 0.5) - z, 2), 1) - top * scale
    place = tl.where(bound < best, start, place)
    second = tl.minimum(second, tl.maximum(best, bound))
    best = tl.minimum(best, bound)
    return top, total, plain, best, second, place


@triton.jit
def _first_of(
    v, row, ids, vocab, key, position, stream, peak, scale, at, cut_logit, cut_place, SOME: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """When the first of the places v arrives, and who, of equals the first; and when the second does."""
    raw = tl.load(row + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
    weights = tl.exp2((raw - peak) * scale)
    if CUT:
        weights = tl.where(_stays(raw, v, at, cut_logit, cut_place), weights, 0.0)
    token = v
    if SOME:
        token = tl.load(ids + v, mask=v < vocab, other=0).to(tl.int32)
    arrival = exponential(_words_of(key, position, stream, token)) / weights
    least = tl.min(arrival)
    who = tl.min(tl.where(arrival == least, v, vocab))
    return least, who, tl.min(tl.where(v == who, float("inf"), arrival))


@triton.jit
def _race(
    logits, ids, keys, positions, temperatures, cut_logit, cut_place, counts, found, first, stride, vocab, stream,
    PART: tl.constexpr, LANES: tl.constexpr, SOME: tl.constexpr, CUT: tl.constexpr,
    LEADS: tl.constexpr, NOT_ALL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """With -log(1 - u) > u a token cannot arrive before u / w, which needs few instructions. Arrivals are computed for
    the groups with the least such bounds, until one (with LEADS two) comes before the bound of every group that is
    left. A lane forgets where its second group was: if that one might be first, for all; if it might be second, its
    bound is taken for an arrival."""
    CHUNK: tl.constexpr = EACH * LANES
    at, part = tl.program_id(0), tl.program_id(1)
    row = logits + at.to(tl.int64) * stride
    begin = part * PART
    end = tl.minimum(begin + PART, vocab)
    whole = tl.multiple_of(end - end % CHUNK, CHUNK)
    lane = tl.arange(0, LANES)
    top = tl.full([LANES], LOWEST, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    plain = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES], float("inf"), tl.float32)
    second = tl.full([LANES], float("inf"), tl.float32)
    place = tl.zeros([LANES], tl.int32)
    wait(EARLY)
    if NOT_ALL and tl.load(counts + at) == 0:
        return
    key, position = tl.load(keys + at), tl.load(positions + at)
    temperature = tl.load(temperatures + at)
    scale = tl.where(temperature == 0, 1.0, 1.0 / temperature).to(tl.float32) * LOG2E  # for powers of two
    for start in range(begin, whole, CHUNK):
        top, total, plain, best, second, place = _look(
            top, total, plain, best, second, place, start, row, ids, vocab, key, position, stream, scale, at,
            cut_logit, cut_place, LANES, SOME, CUT, True,
        )  # fmt: skip
    if whole < end:
        top, total, plain, best, second, place = _look(
            top, total, plain, best, second, place, whole, row, ids, vocab, key, position, stream, scale, at,
            cut_logit, cut_place, LANES, SOME, CUT, False,
        )  # fmt: skip
    peak = tl.max(top)
    winner = -1
    if LEADS:
        runner_up = float("inf")
    if temperature == 0:
        if peak > LOWEST:
            winner = vocab
            for start in range(begin, end, CHUNK):
                v = start + tl.arange(0, CHUNK)
                raw = _load(row, v, vocab, -float("inf"), False).to(tl.float32)
                winner = tl.minimum(winner, tl.min(tl.where(raw == peak, v, vocab)))
    else:
        offset = peak * scale - 32
        sure = 1 - (1e-4 + 4e-7 * tl.abs(offset))  # roundings are less than that
        arrival, forgotten = float("inf"), float("inf")
        bound = tl.min(best)
        last = LATEST - offset if LEADS else float("inf")
        while (bound < last) & ((runner_up if LEADS else arrival) >= tl.exp2(bound + offset) * sure):
            its = tl.min(tl.where(best == bound, lane, LANES))
            i = tl.arange(0, EACH)
            group = tl.sum(tl.where(lane == its, place, 0)) + its * 4 + (i // 4) * (4 * LANES) + i % 4
            here, who, then = _first_of(
                group, row, ids, vocab, key, position, stream, peak, scale, at, cut_logit, cut_place, SOME, CUT
            )
            if LEADS:
                runner_up = tl.minimum(tl.minimum(runner_up, then), tl.maximum(here, arrival))
            if (here < arrival) | ((here == arrival) & (who < winner)):
                arrival, winner = here, who
            forgotten = tl.minimum(forgotten, tl.min(tl.where(lane == its, second, float("inf"))))
            best = tl.where(lane == its, float("inf"), best)
            bound = tl.min(best)
        if (forgotten < float("inf")) & (arrival >= tl.exp2(forgotten + offset) * sure):
            arrival = float("inf")
            if LEADS:
                runner_up, forgotten = float("inf"), float("inf")
            for start in range(begin, end, LANES):
                here, who, then = _first_of(
                    start + lane, row, ids, vocab, key, position, stream, peak, scale, at, cut_logit, cut_place, SOME,
                    CUT,
                )  # fmt: skip
                if LEADS:
                    runner_up = tl.minimum(tl.minimum(runner_up, then), tl.maximum(here, arrival))
                if here < arrival:
                    arrival, winner = here, who
        if LEADS:
            runner_up = tl.minimum(runner_up, tl.exp2(forgotten + offset))
    out = found + (at * tl.num_programs(1) + part) * 4
    tl.store(out, tl.where(peak > LOWEST, peak, -float("inf")))
    sums = tl.sum(total * tl.exp2((top - peak) * scale))
    tl.store(out + 1, sums)
    if CUT or scale != LOG2E:
        sums = tl.sum(plain * tl.exp2((top - peak) * LOG2E))
    tl.store(out + 2, sums)
    if LEADS:
        tl.store(out + 3, runner_up)
    tl.store(first + at * tl.num_programs(1) + part, winner)


@triton.jit
def _finish(
    logits, ids, keys, positions, temperatures, counts, found, first, tokens, logprobs, raw_logprobs, leads, stride,
    vocab, parts, stream, WIDTH: tl.constexpr, PART: tl.constexpr, SOME: tl.constexpr, LEADS: tl.constexpr,
    NOT_ALL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of the parts' first the very first, in float64. Its lead is over the first of all others, unless none came (the
    rest is cut away) or it is so cold that logits alone decide: then over the greatest other logit."""
    at = tl.program_id(0)
    key, position = tl.load(keys + at), tl.load(positions + at)
    temperature = tl.load(temperatures + at)
    greedy = temperature == 0
    scale = tl.where(greedy, 1.0, 1.0 / temperature)
    i = tl.arange(0, WIDTH)
    inside = i < parts
    mine = found + (at * parts + i) * 4
    wait(EARLY)
    if NOT_ALL and tl.load(counts + at) == 0:
        tl.store(tokens + at, 0)
        return
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
    words = _words_of(key, position, stream, token)
    u = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    peak = tl.max(peaks)
    arrival = tl.where(greedy, -raw, libdevice.log(-libdevice.log1p(-u)) - (raw - peak) * scale)
    arrival = tl.where(runs, arrival, float("inf"))
    winner = tl.argmin(arrival, 0)
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
    if LEADS:
        runners_up = tl.load(mine + 3, mask=runs, other=float("inf")).to(tl.float64)
        behind = tl.min(tl.where(runs, libdevice.log(runners_up) + (peak - peaks) * scale, float("inf")))
        behind = tl.minimum(behind, tl.min(tl.where(i == winner, float("inf"), arrival)))
        lead = ((behind - tl.min(arrival)) / scale).to(tl.float32)
        if (behind == float("inf")) | (temperature < COLD):
            v = winner * PART + tl.arange(0, PART)  # of its own part all, of another the greatest
            beside = tl.load(row + v, mask=(v < vocab) & (v != place), other=-float("inf")).to(tl.float64)
            other = tl.maximum(tl.max(beside), tl.max(tl.where(i == winner, -float("inf"), peaks)))
            lead = tl.maximum(chosen + peak - other, 0.0).to(tl.float32)
        tl.store(leads + at, lead)
