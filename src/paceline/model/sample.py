"""Sample tokens from logits: temperature, top-k, top-p and min-p are applied only here.

Every draw is an exponential race: token v has the arrival time E_v / w_v, with exponential noise E_v and its weight w_v
in the processed distribution, and the token with the earliest arrival is drawn. This is an exact sample, equivalent to
the Gumbel-max trick. The noise depends only on (noise key, position, stream): Philox4x32-10, word v mod 4 of counter
(v div 4, position, stream, round). This is the reference implementation in plain torch. On a CPU `kernels.draw`
computes the same race lazily, without the noise of tokens that cannot arrive first. P positions, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.model.sampling_arrays import SamplingArrays


class Stream(IntEnum):
    """Independent noise for one position. SAMPLE draws emitted tokens and, under `coupled`, a model drafter's tokens.
    The others are for the rejection rules, and include the round (the sequence's length when the draft began): whether
    a round accepted its draft depends on its noise, so no later round may use that noise again."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@dataclass(slots=True)
class Draws:
    tokens: np.ndarray  # int32 [P]
    logprobs: np.ndarray  # float64 [P], processed
    raw_logprobs: np.ndarray  # float64 [P]
    # float64 [P], if requested: how much lower its logit could be for the same token to be drawn.
    margins: np.ndarray | None = None


class Noise(Protocol):
    """The source of random numbers: PhiloxNoise, or the enumerator of the exactness tests."""

    def race(self, weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray: ...
    def log_margins(
        self, weights_PV: Tensor, tokens: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int
    ) -> np.ndarray: ...
    def bernoulli(
        self, probabilities: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int
    ) -> np.ndarray: ...


class PhiloxNoise:
    """`native`: use the CPU kernels for weights on a CPU. The noise is the same."""

    def __init__(self, native: bool = False) -> None:
        self.native = native

    def race(self, weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        """Draw one token per row from non-negative weights: int32 [P]."""
        if self.native and weights_PV.device.type == "cpu":
            return _kernels().race(weights_PV.float(), keys, positions, stream)
        return _arrivals(weights_PV, keys, positions, stream).argmin(-1).to("cpu", torch.int32).numpy()

    def log_margins(
        self, weights_PV: Tensor, tokens: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int
    ) -> np.ndarray:
        """log(second arrival / first arrival), float64 [P]. `tokens` are the first to arrive."""
        arrival = _arrivals(weights_PV, keys, positions, stream)
        first, others = _separate(arrival, torch.as_tensor(tokens, device=arrival.device), torch.inf)
        return (others.amin(-1) / first).log().cpu().numpy()

    def bernoulli(self, probabilities: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        """True with the given probabilities: bool [P]."""
        if self.native:
            return _kernels().uniform(keys, positions, stream) < probabilities
        words = philox_words(keys, positions, stream, 1, torch.device("cpu"))[:, 0]
        return ((words.double() + 0.5) / 2**32).numpy() < probabilities


def _arrivals(weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> Tensor:
    words = philox_words(keys, positions, stream, weights_PV.shape[-1], weights_PV.device)
    return -torch.log1p(-(words.double() + 0.5) / 2**32) / weights_PV.double()


def _separate(values_PV: Tensor, tokens_P: Tensor, fill: float) -> tuple[Tensor, Tensor]:
    """The values of the tokens [P], and all values with the tokens' replaced by `fill` [P, V]."""
    at = tokens_P.long().unsqueeze(-1)
    return values_PV.gather(-1, at)[:, 0], values_PV.scatter(-1, at, fill)


def _kernels() -> Any:
    from paceline.model import kernels  # imported late: plain torch needs no compiler

    return kernels


class Sampler:
    """`draw` samples tokens; `distribution` returns the probabilities that it samples from. `native`: use the CPU
    kernels for float32 logits on a CPU."""

    def __init__(self, noise: Noise | None = None, native: bool = False) -> None:
        self.noise: Noise = noise or PhiloxNoise(native)
        self.native = native

    def draw(
        self,
        logits_PV: Tensor,
        keys: np.ndarray,
        positions: np.ndarray,
        params: SamplingArrays,
        stream: int = Stream.SAMPLE,
        margins: bool = False,
    ) -> Draws:
        """`margins`: compute them too."""
        if self.native and logits_PV.dtype == torch.float32 and logits_PV.device.type == "cpu":
            return Draws(*_kernels().draw(logits_PV, keys, positions, params, stream, margins))
        processed = process(logits_PV, params)
        weights = processed.exp()
        raced = self.noise.race(weights, keys, positions, stream)
        greedy = logits_PV.argmax(-1).cpu().numpy().astype(np.int32)
        tokens = np.where(params.temperature == 0, greedy, raced)
        logprobs, raw_logprobs = self.score(logits_PV, processed, tokens)
        if not margins:
            return Draws(tokens, logprobs, raw_logprobs)
        drawn, others = _separate(logits_PV.double(), torch.as_tensor(tokens, device=logits_PV.device), -torch.inf)
        logit_gap = (drawn - others.amax(-1)).cpu().numpy()
        log_margins = self.noise.log_margins(weights, tokens, keys, positions, stream)
        # If no other token has any weight, the margin is the gap to the next highest logit.
        is_only = (params.temperature == 0) | np.isinf(log_margins)
        found = np.where(is_only, logit_gap, np.where(is_only, 0, log_margins) * params.temperature)
        return Draws(tokens, logprobs, raw_logprobs, found)

    def distribution(self, logits_PV: Tensor, params: SamplingArrays) -> Tensor:
        return process(logits_PV, params).exp()

    def score(self, logits_PV: Tensor, processed_PV: Tensor, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The logprobs of given tokens, processed and raw."""
        at = torch.as_tensor(tokens, device=logits_PV.device).long().unsqueeze(-1)
        logits = logits_PV.double()
        raw = logits.gather(-1, at).squeeze(-1) - logits.logsumexp(-1)
        logprobs = processed_PV.gather(-1, at).squeeze(-1)
        return logprobs.cpu().numpy(), raw.cpu().numpy()


def process(logits_PV: Tensor, params: SamplingArrays) -> Tensor:
    """Log-probabilities of the processed distribution: -inf where truncated, one-hot where greedy. In float64: a
    float32 sum over a vocabulary has an error of about 1e-5, too much for an importance ratio."""
    device = logits_PV.device
    z = logits_PV.double()
    greedy = torch.as_tensor(params.temperature == 0, device=device).unsqueeze(-1)
    temperature = torch.as_tensor(np.where(params.temperature == 0, 1, params.temperature), device=device)
    z = z / temperature.unsqueeze(-1)
    if (params.top_k > 0).any() or (params.top_p < 1).any():
        size = z.shape[-1]
        ordered, order = z.sort(dim=-1, descending=True, stable=True)
        top_k = torch.as_tensor(np.where(params.top_k > 0, np.minimum(params.top_k, size), size), device=device)
        ordered = ordered.masked_fill(ordered < ordered.gather(-1, top_k.long().unsqueeze(-1) - 1), -torch.inf)
        units = _units(ordered.softmax(-1))
        top_p = torch.as_tensor(params.top_p, device=device).unsqueeze(-1)
        limit = _units(top_p) - size  # up to a unit of each token is rounded off
        beyond = (units.cumsum(-1) - units >= limit) & (top_p < 1)  # the token that crosses top_p stays
        z = torch.full_like(z, -torch.inf).scatter(-1, order, ordered.masked_fill(beyond, -torch.inf))
    if (params.min_p > 0).any():
        floor = torch.as_tensor(params.min_p, device=device).unsqueeze(-1).log()
        z = z.masked_fill(z - z.amax(-1, keepdim=True) < floor, -torch.inf)
    z = z.log_softmax(-1)
    if greedy.any():
        best = torch.full_like(z, -torch.inf).scatter(-1, logits_PV.argmax(-1, keepdim=True), 0.0)
        z = torch.where(greedy, best, z)
    return z


def _units(probabilities: Tensor) -> Tensor:
    """In units of 2^-62, int64: their sums are exact. A GPU sums floats in any order, and torch refuses that while the
    learner's backward pass asks for determinism (`flash.py`), also in the thread that generates."""
    return (probabilities * 2.0**62).long()


def with_round(positions: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Positions for a stream that includes the round: it is the last word of the counter."""
    return positions + (rounds.astype(np.int64) << 32)


def philox_words(keys: np.ndarray, positions: np.ndarray, stream: int, num: int, device: torch.device) -> Tensor:
    """The first `num` noise words of each (key, position, stream): int64 [P, num] in [0, 2^32). Integer arithmetic:
    bit-identical on every device."""
    mask = 0xFFFFFFFF
    key = torch.as_tensor(keys.view(np.int64), device=device).unsqueeze(-1)
    at = torch.as_tensor(positions, device=device).unsqueeze(-1)
    k0, k1 = key & mask, (key >> 32) & mask
    c0 = torch.arange(-(-num // 4), device=device).expand(len(keys), -1)
    c1, c2, c3 = (at & mask).expand_as(c0), torch.full_like(c0, stream), ((at >> 32) & mask).expand_as(c0)
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((second >> 32) & mask) ^ c1 ^ k0,
            second & mask,
            ((first >> 32) & mask) ^ c3 ^ k1,
            first & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return torch.stack([c0, c1, c2, c3], -1).flatten(1)[:, :num]
