"""Sampling: the noise, the processing of logits, and the kernels against the reference implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from paceline.model.sample import Draws, PhiloxNoise, Sampler, Stream, philox_words, process, with_round
from paceline.model.sampling_arrays import SamplingArrays
from paceline.types import SamplingParams

CPU = torch.device("cpu")


def keys(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def test_philox_known_answers() -> None:
    """The published vectors of Random123's Philox4x32-10, with counter (0, position, stream, round)."""
    zero = philox_words(keys(0), np.array([0]), 0, 4, CPU)[0]
    assert [f"{w:08x}" for w in zero.tolist()] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    # Counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0. Word 0 of the counter is v div 4, too large
    # here, so check against Python's integers instead.
    key, position, stream, count = 0x299F31D0A4093822, 0x0370734485A308D3, 0x13198A2E, 40
    words = philox_words(keys(key), np.array([position]), stream, count, CPU)[0].tolist()
    assert words == [_philox(v // 4, position, stream, key)[v % 4] for v in range(count)]
    assert _philox(0x243F6A88, position, stream, key) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


def _philox(c0: int, position: int, stream: int, key: int) -> list[int]:
    mask = 0xFFFFFFFF
    c = [c0, position & mask, stream, position >> 32]
    k = [key & mask, key >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) ^ c[1] ^ k[0], b & mask, (a >> 32) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c


def test_noise_differs_by_key_position_stream_and_round() -> None:
    at = np.array([5])
    seen = {
        tuple(philox_words(keys(key), position, stream, 4, CPU)[0].tolist())
        for key in (1, 2, 1 << 63)
        for position in (at, at + 1, with_round(at, np.array([9])))
        for stream in Stream
    }
    assert len(seen) == 3 * 3 * 4


def test_processing_equals_transformers() -> None:
    """Against the logits warpers of transformers, in its order."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(8, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    for params in (
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=9),
        SamplingParams(top_p=0.8),
        SamplingParams(temperature=0.9, top_k=30, top_p=0.9),
        SamplingParams(temperature=1.5, top_k=50, top_p=0.95, min_p=0.05),
    ):
        want = TemperatureLogitsWarper(params.temperature)(None, logits)
        if params.top_k:
            want = TopKLogitsWarper(params.top_k)(None, want)
        if params.top_p < 1:
            want = TopPLogitsWarper(params.top_p)(None, want)
        if params.min_p:
            want = MinPLogitsWarper(params.min_p)(None, want)
        found = process(logits, SamplingArrays.of([params] * 8))
        assert torch.allclose(found.exp(), want.softmax(-1), rtol=0, atol=1e-13)


def test_float64_logits_have_float64_logprobs() -> None:
    """Against Python's exact sums. An intermediate float32 would give an error of 1e-7."""
    logits = torch.randn(6, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    params = SamplingArrays.of([SamplingParams(temperature=0.7)] * 6)
    draws = Sampler().draw(logits, keys(*range(6)), np.arange(6), params)
    for row, token, logprob, raw in zip(logits.tolist(), draws.tokens, draws.logprobs, draws.raw_logprobs, strict=True):
        for temperature, found in ((0.7, logprob), (1.0, raw)):
            want = row[token] / temperature - math.log(math.fsum(math.exp(z / temperature) for z in row))
            assert found == pytest.approx(want, rel=0, abs=1e-13)


def test_greedy_sampling() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    draws = Sampler().draw(logits, keys(1), np.array([0]), SamplingArrays.of([SamplingParams(temperature=0.0)]))
    assert draws.tokens.tolist() == [1]
    assert draws.logprobs.tolist() == [0.0]
    assert draws.raw_logprobs[0] == pytest.approx(logits.log_softmax(-1)[0, 1])


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 1.7])
@pytest.mark.parametrize("native", [False, True])
def test_a_margin_is_how_much_lower_the_logit_could_be(temperature: float, native: bool) -> None:
    logits = torch.randn(32, 300, generator=torch.Generator().manual_seed(3)) * 3
    params = SamplingArrays.of([SamplingParams(temperature=temperature)] * 32)
    sampler = Sampler(native=native)

    def draw(logits: torch.Tensor) -> Draws:
        return sampler.draw(logits, keys(*range(32)), np.arange(32), params, margins=True)

    found = draw(logits)
    assert found.margins is not None
    assert (found.margins > 0).all()
    for factor, same in ((0.999, True), (1.001, False)):
        less = logits.clone()
        less[torch.arange(32), torch.as_tensor(found.tokens).long()] -= torch.as_tensor(found.margins * factor).float()
        assert ((draw(less).tokens == found.tokens) == same).all()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", [{"temperature": 1e-5}, {"temperature": 0.01}, {"top_k": 1}, {"top_p": 1e-6}])
def test_without_another_token_the_margin_is_the_gap_to_the_next_logit(kind: dict, native: bool) -> None:
    """One token left after truncation, or a temperature so low that all other weights are zero. This happens at
    different temperatures in float32 and float64, but the noise matters little there."""
    logits = torch.randn(64, 300, generator=torch.Generator().manual_seed(3)) * 3
    params = SamplingArrays.of([SamplingParams(**kind)] * 64)
    found = Sampler(native=native).draw(logits, keys(*range(64)), np.arange(64), params, margins=True)
    best = logits.topk(2).values
    assert found.margins is not None
    assert np.abs(found.margins - (best[:, 0] - best[:, 1]).numpy()).max() < 20 * kind.get("temperature", 1e-7)


def test_a_race_samples_from_the_weights() -> None:
    weights = torch.tensor([0.5, 0.0, 0.3, 0.2]).expand(20000, 4)
    drawn = PhiloxNoise().race(weights, keys(*range(20000)), np.zeros(20000, np.int64), 0)
    share = np.bincount(drawn, minlength=4) / 20000
    assert share[1] == 0
    assert np.abs(share - [0.5, 0, 0.3, 0.2]).max() < 0.015  # four standard deviations
    draws = PhiloxNoise().bernoulli(np.full(20000, 0.3), keys(*range(20000)), np.zeros(20000, np.int64), 2)
    assert abs(draws.mean() - 0.3) < 0.014


@pytest.mark.parametrize("vocab", [5, 61, 1003, 49152])
def test_kernels_equal_the_reference(vocab: int) -> None:
    """The same tokens for every kind of processing. There are no ties within float32's rounding here."""
    num = 64 if vocab < 10_000 else 16
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(num, vocab, generator=generator) * 4
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.6, top_k=40),
        SamplingParams(temperature=1.7, top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.5, min_p=0.01),
        SamplingParams(top_k=1),
        SamplingParams(top_k=10 * vocab, top_p=0.999),
    ]
    params = SamplingArrays.of([kinds[i % len(kinds)] for i in range(num)])
    noise_keys = np.random.default_rng(0).integers(0, 2**64, num, np.uint64)
    positions = np.arange(num) * 1000
    fast = Sampler(native=True).draw(logits, noise_keys, positions, params, margins=True)
    slow = Sampler().draw(logits, noise_keys, positions, params, margins=True)
    assert fast.tokens.tolist() == slow.tokens.tolist()
    assert np.allclose(fast.logprobs, slow.logprobs, atol=2e-5)  # float32 exponentials, summed over the vocabulary
    assert np.allclose(fast.raw_logprobs, slow.raw_logprobs, atol=2e-5)
    assert np.allclose(fast.margins, slow.margins, atol=2e-5)
    assert {array.dtype for d in (fast, slow) for array in (d.logprobs, d.raw_logprobs)} == {np.dtype(np.float64)}
    shifted = Sampler(native=True).draw(logits, noise_keys, positions + 1, params)
    assert shifted.tokens.tolist() != fast.tokens.tolist()
    weights = logits.exp()
    race = PhiloxNoise(native=True).race(weights, noise_keys, positions, Stream.RESIDUAL)
    assert race.tolist() == PhiloxNoise().race(weights, noise_keys, positions, Stream.RESIDUAL).tolist()
    probabilities = np.linspace(0, 1, num)
    draws = PhiloxNoise(native=True).bernoulli(probabilities, noise_keys, positions, Stream.ACCEPT)
    assert draws.tolist() == PhiloxNoise().bernoulli(probabilities, noise_keys, positions, Stream.ACCEPT).tolist()
