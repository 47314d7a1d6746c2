"""Weight updates while requests run: with every drafter, tokens are those of plain decoding, and drafts are those of a
drafter that never had the old weights. State that a drafter keeps of the old weights lowers acceptance and changes no
token, so the drafts are compared too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_decoder, tiny_dspark, tiny_head

from paceline.build.config import load_config
from paceline.build.drafter import build_drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.head_drafter import HeadDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.weights import hf_state
from paceline.speculation.batch import Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Provenance, Request, SamplingParams
from paceline.verify.updates import clone_weights

K, NUM_TOKENS, BEFORE = 3, 48, 60  # BEFORE: tokens of all requests together, after which the weights change
INFLIGHT = ("keep", "recompute")


def built(*settings: str, make_head: Callable[[Decoder], Any] = tiny_head) -> Callable[[Decoder], Drafter]:
    """Builds a drafter from config settings, as a run does."""

    def make(decoder: Decoder) -> Drafter:
        drafter = build_drafter(
            load_config(None, ["engine.kv_tokens=4096", *settings]), decoder, None, make_head(decoder)
        )
        assert drafter is not None
        return drafter

    return make


DRAFTERS: dict[str, Callable[[Decoder], Drafter]] = {
    "ngram": built("speculation.method=ngram", "speculation.prompt_lookup_min=1"),
    "suffix": built("speculation.method=suffix"),
    "draft_model": lambda decoder: DraftModelDrafter(PagedDecoder(tiny_decoder(seed=1), 256), Sampler()),
    "layers:2": built("speculation.method=draft_model", "speculation.draft_model=layers:2"),
    "eagle3": built("speculation.method=eagle3"),
    "dspark": built("speculation.method=dspark", make_head=tiny_dspark),
    "hybrid": built("speculation.method=hybrid"),
    "hybrid, after": built("speculation.method=hybrid", "speculation.hybrid_choice=after"),
}


def requests() -> list[Request]:
    """Half of them are greedy: their completions repeat themselves, so history drafters find matches."""
    rng = np.random.default_rng(2)
    found = []
    for i in range(6):
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=[0.7, 0.0][i % 2])
        found.append(Request(i, tuple(rng.integers(0, 60, 5 + i).tolist()), sampling, 31 * i, f"problem {i % 3}"))
    return found


@dataclass
class Recorder:
    """Records drafts by request and position while `on`."""

    drafts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    on: bool = False

    def attach(self, drafter: Drafter) -> Drafter:
        propose = drafter.propose

        def recorded(rows: Rows, caps: np.ndarray) -> DraftBatch:
            found = propose(rows, caps)
            for i in np.flatnonzero(found.num) if self.on else ():
                at = int(rows.request_ids[i]), len(rows.tokens[i])
                self.drafts[at] = found.tokens[i, : found.num[i]].tolist()
            return found

        drafter.propose = recorded  # type: ignore[method-assign]
        return drafter


@dataclass
class Run:
    completions: list[Completion]
    drafts: dict[tuple[int, int], list[int]]  # since the update
    num_emitted: list[int]  # tokens of each request before the update

    @property
    def tokens(self) -> list[list[int]]:
        return [c.token_ids.tolist() for c in self.completions]

    @property
    def accepted(self) -> int:
        """Draft tokens that were accepted under the new version."""
        return sum(int(((c.versions == 1) & (c.provenance == Provenance.ACCEPTED)).sum()) for c in self.completions)

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / len(self.drafts)


def new_weights() -> list[tuple[str, torch.Tensor]]:
    return clone_weights(hf_state(tiny_decoder(seed=1)))


def run(make: Callable[[Decoder], Drafter] | None, inflight: str, new_drafter: bool = False) -> Run:
    """Run the requests with a weight update. `new_drafter`: the update also replaces the drafter by a new one."""
    decoder, recorder = tiny_decoder(), Recorder()
    drafter = recorder.attach(make(decoder)) if make is not None else None
    engine = LocalEngine(
        PagedDecoder(decoder, 256), drafter=drafter, policy=StaticPolicy(K), max_num_batched_tokens=4096
    )
    handles = [engine.submit(request) for request in requests()]
    emitted = 0
    while emitted < BEFORE:
        engine.step()
        emitted += sum(t.num_emitted for t in engine.drain_trace())
    engine.update_weights(new_weights(), 1, inflight)
    if new_drafter and make is not None:
        engine.set_drafter(recorder.attach(make(decoder)))
    recorder.on = True
    while engine.has_work:
        engine.step()
    completions = [h.completion for h in handles if h.completion is not None]
    num_before = [int((c.versions == 0).sum()) for c in completions]
    assert len(completions) == 6 and all(0 < n < NUM_TOKENS for n in num_before), "a request has only one version"
    return Run(completions, recorder.drafts, num_before)


def fresh(make: Callable[[Decoder], Drafter] | None, before: Run) -> Run:
    """Continue the completions from the update on, in an engine that never had other weights."""
    decoder, recorder = tiny_decoder(seed=1), Recorder(on=True)
    engine = LocalEngine(
        PagedDecoder(decoder, 256),
        drafter=recorder.attach(make(decoder)) if make is not None else None,
        policy=StaticPolicy(K),
        max_num_batched_tokens=4096,
        version=1,
    )
    continued = []
    for c, num in zip(before.completions, before.num_emitted, strict=True):
        r = c.request
        sampling = SamplingParams(max_tokens=NUM_TOKENS - num, ignore_eos=True, temperature=r.sampling.temperature)
        continued.append(
            Request(r.request_id, (*r.prompt_ids, *c.token_ids[:num].tolist()), sampling, r.noise_key, r.problem)
        )
    return Run(engine.generate(continued), recorder.drafts, before.num_emitted)


def tokens_after_update(run: Run) -> list[list[int]]:
    return [tokens[num:] for tokens, num in zip(run.tokens, run.num_emitted, strict=True)]


@pytest.mark.parametrize("inflight", INFLIGHT)
@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_after_an_update_are_those_of_a_new_drafter(name: str, inflight: str) -> None:
    found, expected = run(DRAFTERS[name], inflight), run(DRAFTERS[name], inflight, new_drafter=True)
    assert found.tokens == expected.tokens
    assert found.num_emitted == expected.num_emitted
    assert found.accepted > 0 and expected.accepted > 0
    if name in ("suffix", "hybrid", "hybrid, after"):  # their history from before the update is still useful
        assert found.acceptance_length > 0.9 * expected.acceptance_length
    else:
        assert found.drafts == expected.drafts
        assert found.acceptance_length == expected.acceptance_length


@pytest.mark.parametrize("name", DRAFTERS)
def test_with_recompute_an_engine_equals_a_new_one_with_the_new_weights(name: str) -> None:
    found = run(DRAFTERS[name], "recompute")
    plain, other = fresh(None, found), fresh(DRAFTERS[name], found)
    assert tokens_after_update(found) == plain.tokens == other.tokens
    assert found.accepted > 0 and other.accepted > 0
    if name in ("suffix", "hybrid", "hybrid, after"):
        assert found.acceptance_length > 0.9 * other.acceptance_length
    else:
        assert found.drafts == other.drafts
        assert found.acceptance_length == other.acceptance_length


@pytest.mark.parametrize(
    ("name", "inflight"),
    # With "keep" DSpark's states stay the same: they depend on nothing but the target's states, which are kept.
    [("eagle3", "keep"), ("eagle3", "recompute"), ("dspark", "recompute")],
)
def test_a_head_that_keeps_old_states_is_caught(monkeypatch: pytest.MonkeyPatch, name: str, inflight: str) -> None:
    expected = run(DRAFTERS[name], inflight, new_drafter=True)
    monkeypatch.setattr(HeadDrafter, "_drop_kv", lambda self: None)
    found = run(DRAFTERS[name], inflight)
    assert found.tokens == expected.tokens  # tokens do not reveal it
    assert found.drafts != expected.drafts


def test_weights_that_are_not_updated_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: LocalEngine, weights: Any, version: int, inflight: str = "recompute") -> None:
        self.version = version

    monkeypatch.setattr(LocalEngine, "update_weights", broken)
    found = run(DRAFTERS["eagle3"], "recompute")
    assert tokens_after_update(found) != fresh(None, found).tokens
