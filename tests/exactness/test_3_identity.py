"""Rung 3: the same seed gives the same tokens, speculation on or off, whatever drafts, whoever else is in the batch,
through preemption and weight updates."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_head
from torch.nn import functional as F

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder, first_layers
from paceline.model.kernels import NativeOps, pack_for_inference, unpack
from paceline.model.layer import Linear
from paceline.model.paged import PagedDecoder
from paceline.model.sample import PhiloxNoise, Sampler
from paceline.model.weights import hf_state
from paceline.speculation.batch import Drafter
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, SamplingParams
from paceline.verify.cases import policy_of
from paceline.verify.drafters import AdversarialDrafter

PRECISIONS = {"float64": torch.float64, "float32 kernels": torch.float32}
DRAFTERS: dict[str, Callable[[Decoder, Sampler], Drafter]] = {
    "adversarial": lambda decoder, sampler: AdversarialDrafter(61),
    "ngram": lambda decoder, sampler: NgramDrafter(1, 3),
    "suffix": lambda decoder, sampler: SuffixDrafter(),
    "draft_model": lambda decoder, sampler: DraftModelDrafter(PagedDecoder(first_layers(decoder, 2), 200), sampler),
    "eagle3": lambda decoder, sampler: eagle3(decoder, sampler),
    "hybrid": lambda decoder, sampler: HybridDrafter(SuffixDrafter(), eagle3(decoder, sampler), 0.1),
    "hybrid, after": lambda decoder, sampler: HybridDrafter(SuffixDrafter(), eagle3(decoder, sampler), 0.1, "after"),
}


def eagle3(decoder: Decoder, sampler: Sampler) -> Eagle3Drafter:
    return Eagle3Drafter(tiny_head(decoder), decoder.embed, sampler, 200)


def decoder_of(precision: str, seed: int = 0) -> Decoder:
    decoder = tiny_decoder(PRECISIONS[precision], seed)
    if precision == "float32 kernels":
        pack_for_inference(decoder)
    return decoder


def requests(max_tokens: int = 40) -> list[Request]:
    rng = np.random.default_rng(2)
    prompts = [tuple(rng.integers(0, 60, n).tolist()) for n in (3, 17, 33)]
    kinds = [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 0.6, "top_k": 10}]
    return [
        Request(i, prompts[i % 3], SamplingParams(max_tokens=max_tokens, **kinds[i % 3]), 31 * i, f"p{i % 3}")
        for i in range(9)
    ]


def run(
    decoder: Decoder,
    wanted: list[Request],
    drafter: str | None = None,
    k: int = 4,
    blocks: int = 200,
    seqs: int = 16,
    policy: str = "static",
) -> list[Completion]:
    sampler = Sampler(native=decoder.embed.panels is not None)
    return LocalEngine(
        PagedDecoder(decoder, blocks),
        sampler=sampler,
        drafter=DRAFTERS[drafter](decoder, sampler) if drafter else None,
        policy=policy_of(policy, k, drafter.split(",")[0] if drafter else "none"),
        max_num_seqs=seqs,
        max_num_batched_tokens=48,
    ).generate(wanted)


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [c.token_ids.tolist() for c in completions]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_speculation_changes_no_token(precision: str, drafter: str) -> None:
    decoder = decoder_of(precision)
    plain = run(decoder, requests())
    for k in (1, 4):
        found = run(decoder, requests(), drafter, k)
        assert tokens(found) == tokens(plain)
        if precision == "float32 kernels":  # to the bit, logprobs too
            assert all((a.raw_logprobs == b.raw_logprobs).all() for a, b in zip(found, plain, strict=True))
    for policy in ("das", "auto"):
        found = run(decoder, requests(), drafter, policy=policy)
        assert tokens(found) == tokens(plain)
        assert sum(c.num_drafts for c in found) > 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_company_and_preemption_change_no_token(precision: str) -> None:
    decoder = decoder_of(precision)
    plain = tokens(run(decoder, requests(), seqs=1))
    for drafter in ("suffix", "hybrid"):
        assert tokens(run(decoder, list(reversed(requests())), drafter))[::-1] == plain
        crowded = run(decoder, requests(), drafter, blocks=12)
        assert sum(c.num_preemptions for c in crowded) > 0
        assert tokens(crowded) == plain


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_weight_update_at_a_token_position(precision: str) -> None:
    """Every sequence gets the new weights after its 12th token, whenever that falls: the same with any drafter."""
    found = {}
    for drafter in (None, *DRAFTERS):
        first = run(decoder_of(precision), requests(12), drafter)
        second = decoder_of(precision, seed=1)
        going_on = [
            Request(r.request_id, (*r.prompt_ids, *c.token_ids.tolist()), r.sampling, r.noise_key, r.problem)
            for r, c in zip(requests(12), first, strict=True)
            if c.finish_reason == "length"
        ]
        found[drafter] = tokens(first) + tokens(run(second, going_on, drafter))
    assert len(found[None]) > 12
    assert all(tokens_ == found[None] for tokens_ in found.values())


# -- broken twins -----------------------------------------------------------------------------------------------------


class _NoiseByDraw(PhiloxNoise):
    """Broken: noise from a running counter, as with an ordinary generator, instead of the position."""

    count = 0

    def race(self, weights_PV: torch.Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        at = self.count + np.arange(len(positions))
        self.count += len(positions)
        return super().race(weights_PV, keys, at, stream)


def test_noise_by_draw_is_caught() -> None:
    def generate(k: int) -> list[list[int]]:
        engine = LocalEngine(
            PagedDecoder(tiny_decoder(), 200),
            sampler=Sampler(_NoiseByDraw()),
            drafter=AdversarialDrafter(61),
            policy=StaticPolicy(k),
        )
        return tokens(engine.generate(requests()))

    assert generate(0) == generate(0)
    assert generate(0) != generate(4)


class _VaryingOps(NativeOps):
    """Broken: a matmul that rounds differently when the batch grows (coarsely, so that a small model shows it)."""

    def linear(self, x_TK: torch.Tensor, linear: Linear) -> torch.Tensor:
        out = F.linear(x_TK, unpack(linear.panels, linear.num_out))
        return out.bfloat16().float() if len(x_TK) > 4 else out


def test_a_kernel_that_depends_on_the_batch_is_caught() -> None:
    decoder = decoder_of("float32 kernels")
    decoder.ops = _VaryingOps()
    assert tokens(run(decoder, requests(), seqs=1)) != tokens(run(decoder, requests(), "adversarial"))


def test_stale_weights_after_an_update_are_caught() -> None:
    """Broken: the LM head of a tied model stays behind, the field's most reported transfer bug."""
    engine = LocalEngine(PagedDecoder(tiny_decoder(tie_embeddings=False), 64))
    sent = list(hf_state(tiny_decoder(seed=1, tie_embeddings=False)))
    receipt = engine.update_weights(sent, 1)
    stale = [(n, t) for n, t in sent if n != "lm_head.weight"]
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        engine.update_weights(stale, 2)
    engine.paged.decoder.lm_head.weight.data.mul_(1.001)
    assert engine.update_weights(sent, 3).checksum == receipt.checksum
    engine.paged.decoder.lm_head.weight.data.mul_(1.001)
    from paceline.model.weights import checksum

    assert checksum(hf_state(engine.paged.decoder)) != receipt.checksum
