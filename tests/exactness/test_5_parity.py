"""Level 5: learner, prefill, decode and verification give the same raw and processed logprobs of each token, under
every rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_dspark, tiny_head

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder, first_layers
from paceline.model.kernels import pack_for_inference
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, SamplingParams
from paceline.verify import identity

KINDS = {"float64": (torch.float64, 1e-12), "float32": (torch.float32, 1e-4)}


PROCESSED = SamplingParams(max_tokens=30, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
DRAFTERS = ("suffix", "draft_model", "eagle3", "dspark")
ARMS = [("coupled", None), *[(rule, drafter) for rule in RULES for drafter in DRAFTERS]]


def requests(sampling: SamplingParams) -> list[Request]:
    rng = np.random.default_rng(3)
    return [Request(i, tuple(rng.integers(0, 60, 4 + 5 * i).tolist()), sampling, i, "p") for i in range(6)]


def engine(decoder: Decoder, rule: str = "coupled", drafter: str | None = None, sampler: Sampler | None = None):
    native = decoder.embed.panels is not None
    sampler, coupled = sampler or Sampler(native=native), rule == "coupled"
    drafters = {
        None: lambda: None,
        "suffix": SuffixDrafter,
        "draft_model": lambda: DraftModelDrafter(PagedDecoder(first_layers(decoder, 2), 128), sampler, coupled),
        "dspark": lambda: DSparkDrafter(tiny_dspark(decoder), decoder.embed, sampler, 128, coupled),
        "eagle3": lambda: Eagle3Drafter(tiny_head(decoder), decoder.embed, sampler, 128, coupled),
    }
    return LocalEngine(
        PagedDecoder(decoder, 128),
        sampler=sampler,
        drafter=drafters[drafter](),
        policy=StaticPolicy(4),
        rule=rule,
        max_num_batched_tokens=48,
    )


def generate(made: LocalEngine, sampling: SamplingParams) -> list[Completion]:
    """Generates twice with a history drafter, so that there is a history to draft from."""
    found = made.generate(requests(sampling))
    if isinstance(made.drafter, SuffixDrafter):
        found = made.generate(requests(sampling))
    if made.drafter is not None:
        assert sum(c.num_accepted_tokens for c in found) > 0, "no draft token was accepted"
    return found


def gaps(learner: Decoder, found: list[Completion]) -> dict[str, float]:
    expected = identity.learner_scores(learner, found)
    return {
        "raw": identity.largest_gap([s.raw for s in expected], [c.raw_logprobs for c in found]),
        "processed": identity.largest_gap([s.processed for s in expected], [c.logprobs for c in found]),
    }


@pytest.fixture(params=["float64", "float32", "float32 kernels"])
def decoders(request: pytest.FixtureRequest) -> tuple[Decoder, Decoder, float]:
    """A learner's decoder, an engine's decoder, and the tolerance between their logprobs."""
    dtype, tolerance = KINDS[request.param.split()[0]]
    learner, decoder = tiny_decoder(dtype), tiny_decoder(dtype)
    if "kernels" in request.param:
        pack_for_inference(decoder)
    return learner, decoder, tolerance


@pytest.mark.parametrize("sampling", [SamplingParams(max_tokens=30), PROCESSED], ids=["T=1", "processed"])
@pytest.mark.parametrize(("rule", "drafter"), ARMS)
def test_logprobs_agree(
    decoders: tuple[Decoder, Decoder, float], rule: str, drafter: str | None, sampling: SamplingParams
) -> None:
    learner, decoder, tolerance = decoders
    found = generate(engine(decoder, rule, drafter), sampling)
    assert max(gaps(learner, found).values()) < tolerance
    if rule == "coupled":  # every token is the one that the noise draws
        assert max(s.score_gap.max() for s in identity.learner_scores(learner, found)) < 1e-3
    if drafter is None:
        prefill = [s.raw for s in identity.prefill_scores(PagedDecoder(decoder, 128), found)]
        assert identity.largest_gap(prefill, [c.raw_logprobs for c in found]) < tolerance


# -- broken implementations: each must be caught ----------------------------------------------------------------------


class _Zeroed(Sampler):
    """Broken: `rejection` and `block` report zeros as logprobs."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.which = which

    def score(self, logits_PV, processed_PV, tokens):
        scored = list(super().score(logits_PV, processed_PV, tokens))
        scored[self.which] = np.zeros(len(tokens))
        return tuple(scored)


@pytest.mark.parametrize(("which", "name"), enumerate(["processed", "raw"]))
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_zeroed_logprobs_are_caught(rule: str, which: int, name: str) -> None:
    found = generate(engine(tiny_decoder(), rule, "draft_model", _Zeroed(which)), PROCESSED)
    assert gaps(tiny_decoder(), found)[name] > 0.1


def test_raw_logprobs_in_place_of_processed_ones_are_caught() -> None:
    found = generate(engine(tiny_decoder(), "coupled", "draft_model"), PROCESSED)
    for c in found:
        c.logprobs = c.raw_logprobs
    assert gaps(tiny_decoder(), found)["processed"] > 0.1


def test_a_learner_of_other_weights_is_caught() -> None:
    learner = tiny_decoder()
    learner.layers[1].down.weight.data[0, 0] += 0.5
    assert min(gaps(learner, generate(engine(tiny_decoder()), PROCESSED)).values()) > 1e-3


def test_a_learner_with_shifted_positions_is_caught() -> None:
    class Shifted(Decoder):
        def forward(self, tokens_T, positions_T, attention, aux_layers=()):
            return super().forward(tokens_T, positions_T * 2, attention, aux_layers)

    learner = tiny_decoder()
    learner.__class__ = Shifted
    assert min(gaps(learner, generate(engine(tiny_decoder()), PROCESSED)).values()) > 1e-3
