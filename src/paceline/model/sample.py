"""From logits to tokens: the only place where temperature, top-k, top-p and min-p live.

Every draw is a race: token v arrives at time E_v / w_v, with E_v exponential noise and w_v its weight under the
processed distribution, and the first one wins. That is an exact sample (the Gumbel-max trick, in other clothes),
and the noise depends on nothing but (noise key, position, stream): Philox4x32-10, word v mod 4 of
counter (v div 4, position, stream, round). Here stands the plain torch twin; on a CPU `kernels.draw` runs the same
race lazily, without touching the noise of tokens that cannot win. P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.types import SamplingParams


class Stream(IntEnum):
    """Independent noises of one position. SAMPLE is what an emitted token is drawn with; a drafter with
    probabilities draws with it too under `coupled`. The others serve the rejection rules and carry the round (the
    sequence's length when the draft began): whether a round kept its draft may have depended on its noise, so no
    later round may see that noise again."""

    SAMPLE = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@dataclass(slots=True)
class SamplingArrays:
    """The sampling parameters of P positions."""

    temperature: np.ndarray  # float64, as are top_p and min_p: a logprob must not hang on how 0.7 was rounded
    top_k: np.ndarray  # int32
    top_p: np.ndarray
    min_p: np.ndarray

    @staticmethod
    def of(params: Sequence[SamplingParams], repeats: np.ndarray | None = None) -> SamplingArrays:
        table = np.array([(s.temperature, s.top_k, s.top_p, s.min_p) for s in params], np.float64).reshape(-1, 4)
        if repeats is not None:
            table = np.repeat(table, repeats, axis=0)
        temperature, top_k, top_p, min_p = np.ascontiguousarray(table.T)
        return SamplingArrays(temperature, top_k.astype(np.int32), top_p, min_p)


@dataclass(slots=True)
class Draws:
    tokens: np.ndarray  # int32 [P]
    logprobs: np.ndarray  # float64 [P], processed
    raw_logprobs: np.ndarray  # float64 [P]
    # float64 [P], if they were asked for: how much less its logit could have been, and it still would have been first.
    leads: np.ndarray | None = None


class Noise(Protocol):
    """The source of chance. PhiloxNoise is the real one; the exactness ladder puts an enumerator in its place."""

    def race(self, weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray: ...
    def ahead(
        self, weights_PV: Tensor, tokens: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int
    ) -> np.ndarray: ...
    def coin(self, chances: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray: ...


class PhiloxNoise:
    """`native`: the CPU kernels run the race where the weights are on a CPU; the words are the same."""

    def __init__(self, native: bool = False) -> None:
        self.native = native

    def race(self, weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        """Draw one token per row from non-negative weights: int32 [P]."""
        if self.native and weights_PV.device.type == "cpu":
            return _kernels().race(weights_PV.float(), keys, positions, stream)
        return _arrivals(weights_PV, keys, positions, stream).argmin(-1).to("cpu", torch.int32).numpy()

    def ahead(
        self, weights_PV: Tensor, tokens: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int
    ) -> np.ndarray:
        """By how much these were first, float64 [P]: the logarithm of the second's arrival by their own."""
        arrival = _arrivals(weights_PV, keys, positions, stream)
        mine, others = _apart(arrival, torch.as_tensor(tokens, device=arrival.device), torch.inf)
        return (others.amin(-1) / mine).log().cpu().numpy()

    def coin(self, chances: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        """True with the given chances: bool [P]."""
        if self.native:
            return _kernels().uniform(keys, positions, stream) < chances
        words = philox_words(keys, positions, stream, 1, torch.device("cpu"))[:, 0]
        return ((words.double() + 0.5) / 2**32).numpy() < chances


def _arrivals(weights_PV: Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> Tensor:
    words = philox_words(keys, positions, stream, weights_PV.shape[-1], weights_PV.device)
    return -torch.log1p(-(words.double() + 0.5) / 2**32) / weights_PV.double()


def _apart(values_PV: Tensor, tokens_P: Tensor, instead: float) -> tuple[Tensor, Tensor]:
    """Those of the tokens [P], and all, with something else in the tokens' places."""
    at = tokens_P.long().unsqueeze(-1)
    return values_PV.gather(-1, at)[:, 0], values_PV.scatter(-1, at, instead)


def _kernels() -> Any:
    from paceline.model import kernels  # late: plain torch needs no compiler

    return kernels


class Sampler:
    """`draw` decides tokens; `distribution` gives the probabilities it draws from. `native` draws float32 logits on a
    CPU with the kernels."""

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
        leads: bool = False,
    ) -> Draws:
        """`leads`: tell them too."""
        if self.native and logits_PV.dtype == torch.float32 and logits_PV.device.type == "cpu":
            given = params.temperature, params.top_k, params.top_p, params.min_p
            return Draws(*_kernels().draw(logits_PV, keys, positions, *given, stream, leads))
        processed = process(logits_PV, params)
        weights = processed.exp()
        raced = self.noise.race(weights, keys, positions, stream)
        greedy = logits_PV.argmax(-1).cpu().numpy().astype(np.int32)
        tokens = np.where(params.temperature == 0, greedy, raced)
        logprobs, raw_logprobs = self.score(logits_PV, processed, tokens)
        if not leads:
            return Draws(tokens, logprobs, raw_logprobs)
        mine, others = _apart(logits_PV.double(), torch.as_tensor(tokens, device=logits_PV.device), -torch.inf)
        gap = (mine - others.amax(-1)).cpu().numpy()
        ahead = self.noise.ahead(weights, tokens, keys, positions, stream)
        alone = (params.temperature == 0) | np.isinf(ahead)  # nobody else ran: what others lack to come near
        found = np.where(alone, gap, np.where(alone, 0, ahead) * params.temperature)
        return Draws(tokens, logprobs, raw_logprobs, found)

    def distribution(self, logits_PV: Tensor, params: SamplingArrays) -> Tensor:
        return process(logits_PV, params).exp()

    def score(self, logits_PV: Tensor, processed_PV: Tensor, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The logprobs of given tokens, processed and raw."""
        at = torch.as_tensor(tokens, device=logits_PV.device).long().unsqueeze(-1)
        wide = logits_PV.double()
        raw = wide.gather(-1, at).squeeze(-1) - wide.logsumexp(-1)
        logprobs = processed_PV.gather(-1, at).squeeze(-1)
        return logprobs.cpu().numpy(), raw.cpu().numpy()


def process(logits_PV: Tensor, params: SamplingArrays) -> Tensor:
    """Log-probabilities of the processed distribution; -inf where truncated; one-hot where greedy. In float64: a
    float32 sum over a vocabulary is off by some 1e-5, which is a lot in an importance ratio."""
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
        chance = ordered.softmax(-1)
        top_p = torch.as_tensor(params.top_p, device=device).unsqueeze(-1)
        beyond = (chance.cumsum(-1) - chance >= top_p) & (top_p < 1)  # the token that crosses top_p stays
        z = torch.full_like(z, -torch.inf).scatter(-1, order, ordered.masked_fill(beyond, -torch.inf))
    if (params.min_p > 0).any():
        floor = torch.as_tensor(params.min_p, device=device).unsqueeze(-1).log()
        z = z.masked_fill(z - z.amax(-1, keepdim=True) < floor, -torch.inf)
    z = z.log_softmax(-1)
    if greedy.any():
        best = torch.full_like(z, -torch.inf).scatter(-1, logits_PV.argmax(-1, keepdim=True), 0.0)
        z = torch.where(greedy, best, z)
    return z


def with_round(positions: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Positions for a stream that carries its round: the counter's last word."""
    return positions + (rounds.astype(np.int64) << 32)


def philox_words(keys: np.ndarray, positions: np.ndarray, stream: int, num: int, device: torch.device) -> Tensor:
    """The first `num` noise words of each (key, position, stream): int64 [P, num] in [0, 2^32). Integer arithmetic,
    so the same on every device."""
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
