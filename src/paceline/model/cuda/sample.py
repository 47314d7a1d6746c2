"""Sampling on a CUDA device, with the same noise as on a CPU.

Sampling is an exponential race: token v arrives at E_v / w_v and the first one is the sample (see `model/sample.py`).
Here E and w are float32, so arrival times have a relative error of about 1e-7. CPU and GPU can differ only if two
tokens arrive that close together. A program of the first kernel handles a part of the vocabulary: it finds the first
arrival and the sum of the weights, also at temperature 1. A second kernel combines the parts in float64. P positions, V
vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import libdevice

from paceline.model.cuda.pdl import pdl_options, pdl_wait
from paceline.model.cuda.truncate import Truncation

TOKENS_PER_WARP = 2048  # programs have one warp, or two for a large vocabulary
LARGE_VOCAB = 65536
TOKENS_PER_LANE = tl.constexpr(8)  # at once: the words of two Philox counters
LOW_TEMPERATURE = tl.constexpr(0.05)  # below it noise hardly matters, and most weights are 0 in float32
MAX_LOG2_ARRIVAL = tl.constexpr(127.0)  # of a float32
LOG2E = tl.constexpr(1.4426950408889634)
NO_LOGIT = tl.constexpr(-1e30)  # initial value of a maximum of logits


@dataclass(slots=True)
class Draws:
    """Sampled tokens, on the device. Reading them on the host waits for the kernels."""

    tokens: Tensor  # int32 [P]
    logprobs: Tensor  # float64 [P], at the position's temperature
    raw_logprobs: Tensor  # float64 [P]
    margins: Tensor | None  # float32 [P], as on a CPU, or a little less if the second arrival is not known exactly


def draw(
    logits_PV: Tensor,
    keys_P: Tensor,
    positions_P: Tensor,
    temperature_P: Tensor,
    stream: int,
    ids_V: Tensor | None = None,
    truncation: Truncation | None = None,
    margins: bool = False,
    active_P: Tensor | None = None,
    fp_fusion: bool = True,
) -> Draws:
    """Sample one token per position. keys and positions are int64, temperature float64 (0: greedy). `ids`: token ids of
    the logits, ascending, if they are a subset of the vocabulary; the noise is that of the ids. `margins`: compute them
    too. `active`: int32; where it is 0 the token is 0 and the other outputs are undefined. `fp_fusion`: the compiler
    may fuse operations, perhaps others with truncation than without, so that logprobs differ in the last bit."""
    num, vocab = logits_PV.shape
    warps = 1 if vocab < LARGE_VOCAB else 2
    num_parts = triton.cdiv(vocab, TOKENS_PER_WARP * warps)
    device = logits_PV.device
    part_stats = torch.empty(num, num_parts, 4, dtype=torch.float32, device=device)
    part_winners = torch.empty(num, num_parts, dtype=torch.int32, device=device)
    draws = Draws(
        torch.empty(num, dtype=torch.int32, device=device),
        torch.empty(num, dtype=torch.float64, device=device),
        torch.empty(num, dtype=torch.float64, device=device),
        torch.empty(num, dtype=torch.float32, device=device) if margins else None,
    )
    ids = part_winners if ids_V is None else ids_V
    limits = (part_winners, part_winners) if truncation is None else (truncation.logit, truncation.index)
    active = part_winners if active_P is None else active_P
    _sample_part[(num, num_parts)](
        logits_PV, ids, keys_P, positions_P, temperature_P, *limits, active, part_stats, part_winners,
        logits_PV.stride(0), vocab, stream, PART_SIZE=TOKENS_PER_WARP * warps, LANES=32 * warps,
        HAS_IDS=ids_V is not None, TRUNCATED=truncation is not None, MARGINS=margins, HAS_ACTIVE=active_P is not None,
        num_warps=warps, enable_fp_fusion=fp_fusion, **pdl_options(device),
    )  # fmt: skip
    _combine_parts[(num,)](
        logits_PV, ids, keys_P, positions_P, temperature_P, active, part_stats, part_winners, draws.tokens,
        draws.logprobs, draws.raw_logprobs, part_stats if draws.margins is None else draws.margins, logits_PV.stride(0),
        vocab, num_parts, stream, WIDTH=triton.next_power_of_2(num_parts), PART_SIZE=TOKENS_PER_WARP * warps,
        HAS_IDS=ids_V is not None, MARGINS=margins, HAS_ACTIVE=active_P is not None, num_warps=1,
        enable_fp_fusion=fp_fusion, **pdl_options(device),
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
def _philox(key, position, stream, counter):
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
def _counter_words(key, position, stream, counter):
    """The words of each counter's four tokens: [counters, 4]."""
    w0, w1, w2, w3 = _philox(key, position, stream, counter.to(tl.uint32))
    pairs = tl.permute(tl.join(tl.join(w0, w1), tl.join(w2, w3)), (0, 2, 1))
    return tl.reshape(pairs, [counter.shape[0], 4])


@triton.jit
def _token_words(key, position, stream, token):
    """The word of each token."""
    w0, w1, w2, w3 = _philox(key, position, stream, (token >> 2).to(tl.uint32))
    odd = (token & 1) != 0
    return tl.where((token & 2) != 0, tl.where(odd, w3, w2), tl.where(odd, w1, w0))


@triton.jit
def _is_kept(logit, v, p, min_logit, max_index):
    """Whether truncation keeps the token."""
    limit = tl.load(min_logit + p)
    return (logit > limit) | ((logit == limit) & (v <= tl.load(max_index + p)))


@triton.jit
def _load(pointer, i, end, other, IS_FULL: tl.constexpr):
    """Elements i; `other` from `end` on. IS_FULL: all are before the end."""
    if IS_FULL:
        return tl.load(pointer + i)
    return tl.load(pointer + i, mask=i < end, other=other)


@triton.jit
def _scan_chunk(
    lane_max, total, raw_total, best, second, best_start, start, row, ids, vocab, key, position, stream, scale, p,
    min_logit, max_index, LANES: tl.constexpr, HAS_IDS: tl.constexpr, TRUNCATED: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """Adds a chunk to the lanes' statistics. The tokens of a lane in one chunk are a group. A lane keeps: its maximum
    logit; the sums of its weights relative to it (at the position's temperature and at 1); the least and the second
    least bound of its groups; the start of the chunk of the least. The bound of a group is the least
    log2(u 2^32 / exp(logit / temperature)) of its tokens."""
    # [LANES, 4, 2]: four consecutive tokens, twice. Joined this way, everything stays in the lane's own registers.
    lane = tl.arange(0, LANES)
    low = start + lane[:, None] * 4 + tl.arange(0, 4)[None, :]
    high = low + 4 * LANES
    raw = tl.join(_load(row, low, vocab, -float("inf"), IS_FULL), _load(row, high, vocab, -float("inf"), IS_FULL))
    raw = raw.to(tl.float32)
    if HAS_IDS:
        tokens = tl.join(_load(ids, low, vocab, 0, IS_FULL), _load(ids, high, vocab, 0, IS_FULL)).to(tl.int32)
        words = _token_words(key, position, stream, tokens)
    else:
        counter = start // 4 + lane
        words = tl.join(
            _counter_words(key, position, stream, counter), _counter_words(key, position, stream, counter + LANES)
        )
    old_max = lane_max
    lane_max = tl.maximum(lane_max, tl.max(tl.max(raw, 2), 1))
    z = (raw - lane_max[:, None, None]) * scale
    if TRUNCATED:
        z = tl.where(_is_kept(raw, tl.join(low, high), p, min_logit, max_index), z, -float("inf"))
    total = total * tl.exp2((old_max - lane_max) * scale) + tl.sum(tl.sum(tl.exp2(z), 2), 1)
    if TRUNCATED or scale != LOG2E:
        raw_weights = tl.exp2((raw - lane_max[:, None, None]) * LOG2E)
        raw_total = raw_total * tl.exp2((old_max - lane_max) * LOG2E) + tl.sum(tl.sum(raw_weights, 2), 1)
    bound = tl.min(tl.min(libdevice.fast_log2f(words.to(tl.float32) + 0.5) - z, 2), 1) - lane_max * scale
    best_start = tl.where(bound < best, start, best_start)
    second = tl.minimum(second, tl.maximum(best, bound))
    best = tl.minimum(best, bound)
    return lane_max, total, raw_total, best, second, best_start


@triton.jit
def _first_arrival(
    v, row, ids, vocab, key, position, stream, peak, scale, p, min_logit, max_index, HAS_IDS: tl.constexpr,
    TRUNCATED: tl.constexpr,
):  # fmt: skip
    """Of the vocabulary indices v: the first arrival, its index (the lowest on ties), and the second arrival."""
    raw = tl.load(row + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
    weights = tl.exp2((raw - peak) * scale)
    if TRUNCATED:
        weights = tl.where(_is_kept(raw, v, p, min_logit, max_index), weights, 0.0)
    token = v
    if HAS_IDS:
        token = tl.load(ids + v, mask=v < vocab, other=0).to(tl.int32)
    arrival = exponential(_token_words(key, position, stream, token)) / weights
    first = tl.min(arrival)
    index = tl.min(tl.where(arrival == first, v, vocab))
    return first, index, tl.min(tl.where(v == index, float("inf"), arrival))


@triton.jit
def _sample_part(
    logits, ids, keys, positions, temperatures, min_logit, max_index, active, part_stats, part_winners, stride, vocab,
    stream, PART_SIZE: tl.constexpr, LANES: tl.constexpr, HAS_IDS: tl.constexpr, TRUNCATED: tl.constexpr,
    MARGINS: tl.constexpr, HAS_ACTIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Since -log(1 - u) > u, a token cannot arrive before u / w, which is cheap to compute. Exact arrivals are computed
    for the groups with the least bounds, until one arrival (with MARGINS two) is before the bounds of all remaining
    groups. A lane remembers only its best group. If its second group could be the first arrival, all arrivals are
    computed. If it could be the second arrival, its bound is used instead."""
    CHUNK: tl.constexpr = TOKENS_PER_LANE * LANES
    p, part = tl.program_id(0), tl.program_id(1)
    row = logits + p.to(tl.int64) * stride
    begin = part * PART_SIZE
    end = tl.minimum(begin + PART_SIZE, vocab)
    full_end = tl.multiple_of(end - end % CHUNK, CHUNK)  # of the full chunks
    lane = tl.arange(0, LANES)
    lane_max = tl.full([LANES], NO_LOGIT, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    raw_total = tl.zeros([LANES], tl.float32)
    best = tl.full([LANES], float("inf"), tl.float32)
    second = tl.full([LANES], float("inf"), tl.float32)
    best_start = tl.zeros([LANES], tl.int32)
    pdl_wait(PDL)
    if HAS_ACTIVE and tl.load(active + p) == 0:
        return
    key, position = tl.load(keys + p), tl.load(positions + p)
    temperature = tl.load(temperatures + p)
    scale = tl.where(temperature == 0, 1.0, 1.0 / temperature).to(tl.float32) * LOG2E  # for powers of two
    for start in range(begin, full_end, CHUNK):
        lane_max, total, raw_total, best, second, best_start = _scan_chunk(
            lane_max, total, raw_total, best, second, best_start, start, row, ids, vocab, key, position, stream, scale,
            p, min_logit, max_index, LANES, HAS_IDS, TRUNCATED, True,
        )  # fmt: skip
    if full_end < end:
        lane_max, total, raw_total, best, second, best_start = _scan_chunk(
            lane_max, total, raw_total, best, second, best_start, full_end, row, ids, vocab, key, position, stream,
            scale, p, min_logit, max_index, LANES, HAS_IDS, TRUNCATED, False,
        )  # fmt: skip
    peak = tl.max(lane_max)
    winner = -1
    if MARGINS:
        second_arrival = float("inf")
    if temperature == 0:
        if peak > NO_LOGIT:
            winner = vocab
            for start in range(begin, end, CHUNK):
                v = start + tl.arange(0, CHUNK)
                raw = _load(row, v, vocab, -float("inf"), False).to(tl.float32)
                winner = tl.minimum(winner, tl.min(tl.where(raw == peak, v, vocab)))
    else:
        offset = peak * scale - 32
        safety = 1 - (1e-4 + 4e-7 * tl.abs(offset))  # more than the rounding errors
        arrival, untracked = float("inf"), float("inf")  # untracked: least bound of the groups that no lane remembers
        bound = tl.min(best)
        max_bound = MAX_LOG2_ARRIVAL - offset if MARGINS else float("inf")
        while (bound < max_bound) & ((second_arrival if MARGINS else arrival) >= tl.exp2(bound + offset) * safety):
            best_lane = tl.min(tl.where(best == bound, lane, LANES))
            i = tl.arange(0, TOKENS_PER_LANE)
            group = tl.sum(tl.where(lane == best_lane, best_start, 0)) + best_lane * 4 + (i // 4) * (4 * LANES) + i % 4
            group_first, group_index, group_second = _first_arrival(
                group, row, ids, vocab, key, position, stream, peak, scale, p, min_logit, max_index, HAS_IDS, TRUNCATED
            )
            if MARGINS:
                second_arrival = tl.minimum(
                    tl.minimum(second_arrival, group_second), tl.maximum(group_first, arrival)
                )  # fmt: skip
            if (group_first < arrival) | ((group_first == arrival) & (group_index < winner)):
                arrival, winner = group_first, group_index
            untracked = tl.minimum(untracked, tl.min(tl.where(lane == best_lane, second, float("inf"))))
            best = tl.where(lane == best_lane, float("inf"), best)
            bound = tl.min(best)
        if (untracked < float("inf")) & (arrival >= tl.exp2(untracked + offset) * safety):
            arrival = float("inf")
            if MARGINS:
                second_arrival, untracked = float("inf"), float("inf")
            for start in range(begin, end, LANES):
                group_first, group_index, group_second = _first_arrival(
                    start + lane, row, ids, vocab, key, position, stream, peak, scale, p, min_logit, max_index, HAS_IDS,
                    TRUNCATED,
                )  # fmt: skip
                if MARGINS:
                    second_arrival = tl.minimum(
                        tl.minimum(second_arrival, group_second), tl.maximum(group_first, arrival)
                    )  # fmt: skip
                if group_first < arrival:
                    arrival, winner = group_first, group_index
        if MARGINS:
            second_arrival = tl.minimum(second_arrival, tl.exp2(untracked + offset))
    out = part_stats + (p * tl.num_programs(1) + part) * 4
    tl.store(out, tl.where(peak > NO_LOGIT, peak, -float("inf")))
    weight_sum = tl.sum(total * tl.exp2((lane_max - peak) * scale))
    tl.store(out + 1, weight_sum)
    if TRUNCATED or scale != LOG2E:
        weight_sum = tl.sum(raw_total * tl.exp2((lane_max - peak) * LOG2E))
    tl.store(out + 2, weight_sum)
    if MARGINS:
        tl.store(out + 3, second_arrival)
    tl.store(part_winners + p * tl.num_programs(1) + part, winner)


@triton.jit
def _combine_parts(
    logits, ids, keys, positions, temperatures, active, part_stats, part_winners, tokens, logprobs, raw_logprobs,
    margins, stride, vocab, num_parts, stream, WIDTH: tl.constexpr, PART_SIZE: tl.constexpr, HAS_IDS: tl.constexpr,
    MARGINS: tl.constexpr, HAS_ACTIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first arrival of all parts' winners, in float64. Its margin is over the second arrival. If there is none (all
    other tokens are truncated) or the temperature is so low that only logits matter, the margin is over the greatest
    other logit."""
    p = tl.program_id(0)
    key, position = tl.load(keys + p), tl.load(positions + p)
    temperature = tl.load(temperatures + p)
    greedy = temperature == 0
    scale = tl.where(greedy, 1.0, 1.0 / temperature)
    i = tl.arange(0, WIDTH)
    inside = i < num_parts
    stats = part_stats + (p * num_parts + i) * 4
    pdl_wait(PDL)
    if HAS_ACTIVE and tl.load(active + p) == 0:
        tl.store(tokens + p, 0)
        return
    peaks = tl.load(stats, mask=inside, other=-float("inf")).to(tl.float64)
    sums = tl.load(stats + 1, mask=inside, other=0.0).to(tl.float64)
    raw_sums = tl.load(stats + 2, mask=inside, other=0.0).to(tl.float64)
    indices = tl.load(part_winners + p * num_parts + i, mask=inside, other=-1)
    has_winner = indices >= 0
    row = logits + p.to(tl.int64) * stride
    raw = tl.load(row + indices, mask=has_winner, other=0.0).to(tl.float64)
    token = indices
    if HAS_IDS:
        token = tl.load(ids + indices, mask=has_winner, other=0).to(tl.int32)
    words = _token_words(key, position, stream, token)
    u = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    peak = tl.max(peaks)
    arrival = tl.where(greedy, -raw, libdevice.log(-libdevice.log1p(-u)) - (raw - peak) * scale)
    arrival = tl.where(has_winner, arrival, float("inf"))
    winner = tl.argmin(arrival, 0)
    index = tl.maximum(tl.load(part_winners + p * num_parts + winner), 0)  # a valid token even if all logits are NaN
    token = index
    if HAS_IDS:
        token = tl.load(ids + index).to(tl.int32)
    total = tl.sum(tl.where(inside, sums * libdevice.exp((peaks - peak) * scale), 0.0))
    raw_total = tl.sum(tl.where(inside, raw_sums * libdevice.exp(peaks - peak), 0.0))
    logit = tl.load(row + index).to(tl.float64) - peak  # relative to the greatest
    tl.store(tokens + p, token)
    tl.store(logprobs + p, tl.where(greedy, 0.0, logit * scale - libdevice.log(total)))
    tl.store(raw_logprobs + p, logit - libdevice.log(raw_total))
    if MARGINS:
        seconds = tl.load(stats + 3, mask=has_winner, other=float("inf")).to(tl.float64)
        second = tl.min(tl.where(has_winner, libdevice.log(seconds) + (peak - peaks) * scale, float("inf")))
        second = tl.minimum(second, tl.min(tl.where(i == winner, float("inf"), arrival)))
        margin = ((second - tl.min(arrival)) / scale).to(tl.float32)
        if (second == float("inf")) | (temperature < LOW_TEMPERATURE):
            v = winner * PART_SIZE + tl.arange(0, PART_SIZE)  # the winner's part; of other parts the peak is enough
            others = tl.load(row + v, mask=(v < vocab) & (v != index), other=-float("inf")).to(tl.float64)
            best_other = tl.maximum(tl.max(others), tl.max(tl.where(i == winner, -float("inf"), peaks)))
            margin = tl.maximum(logit + peak - best_other, 0.0).to(tl.float32)
        tl.store(margins + p, margin)
