"""Rung 5: learner, prefill, decode and verification give the same logprobs, token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import tiny_decoder

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder
from paceline.model.kernels import pack_for_inference
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, SamplingParams
from paceline.verify import identity

KINDS = {"float64": (torch.float64, 1e-12), "float32": (torch.float32, 1e-4)}


def requests() -> list[Request]:
    rng = np.random.default_rng(3)
    return [
        Request(i, tuple(rng.integers(0, 60, 4 + 5 * i).tolist()), SamplingParams(max_tokens=30), i, "p")
        for i in range(6)
    ]


def engine(decoder: Decoder, k: int, native: bool) -> LocalEngine:
    return LocalEngine(
        PagedDecoder(decoder, 128),
        sampler=Sampler(native=native),
        drafter=SuffixDrafter(),
        policy=StaticPolicy(k),
        max_num_batched_tokens=20,
    )


def gaps(learner: Decoder, decoder: Decoder, native: bool) -> dict[str, float]:
    decode: list[Completion] = engine(decoder, 0, native).generate(requests())
    verify = engine(decoder, 4, native).generate(requests())
    expected = identity.learner_logprobs(learner, decode)
    return {
        "prefill": identity.largest_gap(expected, identity.prefill_logprobs(engine(decoder, 0, native).paged, decode)),
        "decode": identity.largest_gap(expected, identity.raw_logprobs_of(decode)),
        "verify": identity.largest_gap(expected, identity.raw_logprobs_of(verify)),
    }


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_chain(kind: str, native: bool) -> None:
    dtype, tolerance = KINDS[kind]
    if native and dtype != torch.float32:
        pytest.skip("the kernels are float32")
    learner, decoder = tiny_decoder(dtype), tiny_decoder(dtype)
    if native:
        pack_for_inference(decoder)
    found = gaps(learner, decoder, native)
    assert max(found.values()) < tolerance, found


def test_a_learner_of_other_weights_is_caught() -> None:
    learner = tiny_decoder()
    learner.layers[1].down.weight.data[0, 0] += 0.5
    assert min(gaps(learner, tiny_decoder(), False).values()) > 1e-3


def test_a_learner_with_shifted_positions_is_caught() -> None:
    class Shifted(Decoder):
        def forward(self, tokens_T, positions_T, attention, taps=()):
            return super().forward(tokens_T, positions_T * 2, attention, taps)

    learner = tiny_decoder()
    learner.__class__ = Shifted
    assert max(gaps(learner, tiny_decoder(), False).values()) > 1e-3
