"""Level 3: the same seed gives the same tokens with speculation on or off, with every drafter, in any batch, after
preemption and weight updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_dspark, tiny_head
from torch.nn import functional as F

from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.dspark import DSparkDrafter
from paceline.drafters.eagle3 import Eagle3Drafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder, first_layers
from paceline.model.kernels import NativeOps, pack_for_inference, unpack
from paceline.model.kv import BlockPool
from paceline.model.layer import Linear
from paceline.model.paged import PagedDecoder
from paceline.model.sample import PhiloxNoise, Sampler
from paceline.model.weights import hf_state
from paceline.speculation.batch import Drafter, Rows
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy
from paceline.types import Completion, Provenance, Receipt, Request, SamplingParams
from paceline.verify.cases import make_policy
from paceline.verify.drafters import AdversarialDrafter
from paceline.verify.updates import clone_weights

PRECISIONS = {"float64": torch.float64, "float32 kernels": torch.float32}
DRAFTERS: dict[str, Callable[[Decoder, Sampler], Drafter]] = {
    "adversarial": lambda decoder, sampler: AdversarialDrafter(61),
    "ngram": lambda decoder, sampler: NgramDrafter(1, 3),
    "suffix": lambda decoder, sampler: SuffixDrafter(),
    "draft_model": lambda decoder, sampler: DraftModelDrafter(PagedDecoder(first_layers(decoder, 2), 200), sampler),
    "eagle3": lambda decoder, sampler: eagle3(decoder, sampler),
    "dspark": lambda decoder, sampler: DSparkDrafter(tiny_dspark(decoder), decoder.embed, sampler, 200),
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


def make(
    decoder: Decoder,
    drafter: str | None = None,
    policy: SpeculationPolicy | None = None,
    blocks: int = 200,
    seqs: int = 16,
) -> LocalEngine:
    sampler = Sampler(native=decoder.embed.panels is not None)
    return LocalEngine(
        PagedDecoder(decoder, blocks),
        sampler=sampler,
        drafter=DRAFTERS[drafter](decoder, sampler) if drafter else None,
        policy=policy,
        max_num_seqs=seqs,
        max_num_batched_tokens=48,
    )


def run(
    decoder: Decoder,
    wanted: list[Request],
    drafter: str | None = None,
    k: int = 4,
    blocks: int = 200,
    seqs: int = 16,
    policy: str = "static",
) -> list[Completion]:
    """History drafters with the static policy run the requests twice, so that there is a history to draft from. With
    other policies the first pass would lower the measured acceptance, and nothing would be drafted."""
    chosen = make_policy(policy, k, drafter.split(",")[0] if drafter else "none")
    engine = make(decoder, drafter, chosen, blocks, seqs)
    if drafter is not None and policy == "static" and drafter.split(",")[0] in ("suffix", "hybrid"):
        engine.generate(wanted)
    found = engine.generate(wanted)
    if drafter is not None and policy == "static":  # other policies may decide not to draft
        assert sum(c.num_accepted_tokens for c in found) > 0, "no draft token was accepted"
    return found


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
def test_batch_and_preemption_change_no_token(precision: str) -> None:
    decoder = decoder_of(precision)
    plain = tokens(run(decoder, requests(), seqs=1))
    for drafter in ("suffix", "hybrid"):
        assert tokens(run(decoder, list(reversed(requests())), drafter))[::-1] == plain
        preempted = run(decoder, requests(), drafter, blocks=12)
        assert sum(c.num_preemptions for c in preempted) > 0
        assert tokens(preempted) == plain


class UpTo(StaticPolicy):
    """Drafts no further than `position`, so that a step of each sequence ends exactly there."""

    position = 2**31

    def plan(self, rows: Rows) -> np.ndarray:
        limits = np.array([self.position - len(tokens) - 1 for tokens in rows.tokens])
        return np.clip(limits, 0, super().plan(rows)).astype(np.int32)


AT = 12  # emitted tokens, after which the weights change


@dataclass
class Updated:
    completions: list[Completion]

    @property
    def tokens(self) -> list[list[int]]:
        return tokens(self.completions)

    def accepted(self, since: bool) -> int:
        """Accepted draft tokens, before or since the update."""
        return sum(int((c.provenance == Provenance.ACCEPTED)[slice(AT, None) if since else slice(AT)].sum())
                   for c in self.completions)  # fmt: skip


def run_through_updates(precision: str, drafter: str | None, inflight: str, exactly: bool = True) -> Updated:
    """Run one request after another in one engine. Each has a weight update after its 12th token; the engine switches
    between two sets of weights. `exactly`: drafts end at that token; else the update waits for the end of the step that
    emits it."""
    weights = [clone_weights(hf_state(decoder_of(precision, seed))) for seed in (0, 1)]
    policy = UpTo(4)
    engine = make(decoder_of(precision), drafter, policy)
    found = []
    for request in (replace(r, sampling=replace(r.sampling, ignore_eos=True)) for r in requests(30)):
        handle, emitted = engine.submit(request), 0
        policy.position = len(request.prompt_ids) + AT if exactly else 2**31
        while emitted < AT:
            engine.step()
            emitted += sum(trace.num_emitted for trace in engine.drain_trace())
        assert emitted == AT or not exactly
        version = engine.version + 1
        engine.update_weights(weights[version % 2], version, inflight)
        policy.position = 2**31
        while engine.has_work:
            engine.step()
        engine.drain_trace()
        assert handle.completion is not None
        found.append(handle.completion)
        assert handle.completion.versions.tolist() == [version - 1] * emitted + [version] * (30 - emitted)
    return Updated(found)


@pytest.fixture(scope="module")
def plain_updated() -> dict[tuple[str, str], Updated]:
    return {
        (precision, inflight): run_through_updates(precision, None, inflight)
        for precision in PRECISIONS
        for inflight in ("keep", "recompute")
    }


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_weight_update_at_a_token_position(plain_updated: Any, drafter: str, precision: str, inflight: str) -> None:
    found = run_through_updates(precision, drafter, inflight)
    assert found.tokens == plain_updated[precision, inflight].tokens
    if drafter not in ("adversarial", "ngram"):  # few of their drafts are accepted here
        assert found.accepted(since=False) > 0 and found.accepted(since=True) > 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tokens_since_an_update_are_those_of_the_new_weights(plain_updated: Any, precision: str) -> None:
    """With `recompute`, a request continues as one with a longer prompt does under the new weights alone."""
    for i, c in enumerate(plain_updated[precision, "recompute"].completions):
        prompt = (*c.request.prompt_ids, *c.token_ids[:AT].tolist())
        sampling = replace(c.request.sampling, max_tokens=30 - AT)
        fresh = make(decoder_of(precision, seed=(i + 1) % 2))
        assert tokens(fresh.generate([replace(c.request, prompt_ids=prompt, sampling=sampling)])) == [
            c.token_ids[AT:].tolist()
        ]
    assert plain_updated[precision, "recompute"].tokens != plain_updated[precision, "keep"].tokens


# -- broken implementations: each must be caught ----------------------------------------------------------------------


class _NoiseByDraw(PhiloxNoise):
    """Broken: noise from a running counter, as from an ordinary generator, instead of the position."""

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
    """Broken: a matmul that rounds differently if the batch is large (coarsely, so that a small model shows it)."""

    def linear(self, x_TK: torch.Tensor, linear: Linear) -> torch.Tensor:
        out = F.linear(x_TK, unpack(linear.panels, linear.num_out))
        return out.bfloat16().float() if len(x_TK) > 4 else out


def test_a_kernel_that_depends_on_the_batch_is_caught() -> None:
    decoder = decoder_of("float32 kernels")
    decoder.ops = _VaryingOps()
    assert tokens(run(decoder, requests(), seqs=1)) != tokens(run(decoder, requests(), "adversarial"))


def test_stale_weights_after_an_update_are_caught() -> None:
    """Broken: the LM head is not updated, the most reported weight transfer bug."""
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


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
def test_an_update_at_a_step_is_no_update_at_a_position(plain_updated: Any, inflight: str) -> None:
    """Broken: the position of the update depends on how many draft tokens were accepted."""
    found = run_through_updates("float64", "draft_model", inflight, exactly=False)
    assert found.tokens != plain_updated["float64", inflight].tokens


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
def test_a_tensor_that_an_update_leaves_out_is_caught(
    plain_updated: Any, monkeypatch: pytest.MonkeyPatch, inflight: str
) -> None:
    update = PagedDecoder.update

    def broken(self: PagedDecoder, weights: Any, version: int) -> Receipt:
        held = dict(hf_state(self.decoder))
        skipped = "model.layers.1.mlp.down_proj.weight"
        return update(self, [(name, held[name].clone() if name == skipped else t) for name, t in weights], version)

    monkeypatch.setattr(PagedDecoder, "update", broken)
    found = run_through_updates("float64", "eagle3", inflight)
    assert found.tokens != plain_updated["float64", inflight].tokens


def test_kv_that_outlives_an_update_is_caught(plain_updated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the prefix cache is kept across versions."""
    monkeypatch.setattr(BlockPool, "reset_prefix_cache", lambda self: None)
    found = run_through_updates("float64", "eagle3", "recompute")
    assert found.tokens != plain_updated["float64", "recompute"].tokens
