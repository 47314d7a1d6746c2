"""Level 1: the exact distribution of whole sequences from the real engine, against brute force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from paceline.drafters import draft_model, head_drafter
from paceline.drafters.draft_model import DraftModelDrafter
from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine import accept
from paceline.engine.accept import VerificationInput, VerificationResult
from paceline.engine.engine import LocalEngine
from paceline.engine.sequence import Sequence
from paceline.model import sample
from paceline.model.sample import Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.speculation.acceptance import SCORES
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams
from paceline.verify.cases import RULES, TableCase
from paceline.verify.enumeration import brute_force, enumerate_engine, total_variation
from paceline.verify.known import CASES, OTHER_REQUEST, TRUNCATIONS, Case, settings
from paceline.verify.table import TableDecoder

EXACT = 1e-12  # float64 products of a few dozen factors


def distance(case: TableCase, make: Callable[[Sampler], LocalEngine], sampling: SamplingParams) -> float:
    request = Request(0, (0, 1, 0), sampling, 0, "problem")
    found = enumerate_engine(make, request, (OTHER_REQUEST,))
    assert sum(found.distribution.values()) == pytest.approx(1, abs=1e-12)
    assert found.num_reused == 0, "draws are not independent"
    return total_variation(found.distribution, brute_force(case.decoder(), request))


def name_of(case: Case) -> str:
    return f"{case.rule}-{case.policy}-{case.drafter}-{settings(case.sampling)}-{case.sampling.max_tokens}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_rule_with_every_policy_and_drafter(case: Case) -> None:
    """The cases of `paceline verify`, which also have truncation and positions that are drafted twice."""
    found, difference = case.enumerate()
    assert sum(found.distribution.values()) == pytest.approx(1, abs=1e-12)
    assert difference < EXACT
    assert found.num_reused == 0, "draws are not independent"
    if case.policy == "static":  # other policies may decide not to draft
        assert found.num_draft_tokens > found.num_accepted_tokens > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_policy_that_reads_drafts_biases_a_rejection_rule_and_is_refused(rule: str) -> None:
    case = TableCase(3, 2, seed=2)
    with pytest.raises(ValueError, match="biased by a policy"):
        case.engine(rule, "draft_model", Sampler(), 4, "auto")

    def make(sampler: Sampler) -> LocalEngine:
        engine = case.engine(rule, "draft_model", sampler, 4)
        auto = case.engine("coupled", "draft_model", sampler, 4, "auto").policy
        engine.drafting.policy = auto  # without the check
        return engine

    assert distance(case, make, SamplingParams(max_tokens=3)) > 1e-3


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=4, temperature=0.6, top_k=2),
        SamplingParams(max_tokens=3, temperature=1.4, top_p=0.7),
        SamplingParams(max_tokens=3, min_p=0.3, stop_token_ids=(0,)),
        SamplingParams(max_tokens=2, ignore_eos=True),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_truncation_and_stops(rule: str, sampling: SamplingParams) -> None:
    case = TableCase(5 if sampling.truncates and sampling.max_tokens == 3 else 4, 2, seed=7)
    drafter = "adversarial" if rule == "coupled" else "draft_model"
    assert distance(case, lambda s: case.engine(rule, drafter, s, 4), sampling) < EXACT


# -- broken implementations: each must be caught ----------------------------------------------------------------------


def accepts_likely_drafts(inputs: VerificationInput, sampler: Sampler) -> VerificationResult:
    """Broken: "typical acceptance" accepts a draft token if its target probability is high enough."""
    kept = [
        draft if len(draft) and inputs.logits_PV[at].softmax(-1)[draft[0]] > 0.3 else draft[:0]
        for draft, at in zip(inputs.drafts, inputs.starts[:-1], strict=True)
    ]
    result = accept.coupled(inputs, sampler)
    for row, draft in enumerate(kept):
        if len(draft):
            result.tokens[row, 0] = draft[0]
    return result


def resamples_from_p(inputs: VerificationInput, sampler: Sampler) -> VerificationResult:
    """Broken: the corrected token is drawn from p, not from the residual (p - q)+."""

    def decide(draft: np.ndarray, p: torch.Tensor, q: torch.Tensor, coins: accept.Coins) -> tuple:
        for j, x in enumerate(draft.tolist()):
            if not coins(j, min(1.0, float(p[j, x] / q[j, x]))):
                return j, p[j]
        return len(draft), None

    return accept._by_row(inputs, sampler, decide)


def clamps_each_ratio(inputs: VerificationInput, sampler: Sampler) -> VerificationResult:
    """Broken: block verification that limits each p/q to 1 before multiplying, as is correct only for `rejection`."""
    ratio = accept._ratio
    accept._ratio = lambda p, q: min(1.0, ratio(p, q))
    try:
        return accept.block(inputs, sampler)
    finally:
        accept._ratio = ratio


@pytest.mark.parametrize("broken", [accepts_likely_drafts, resamples_from_p, clamps_each_ratio])
def test_a_wrong_rule_is_caught(broken: accept.Rule) -> None:
    case = TableCase(3, 2)

    def make(sampler: Sampler) -> LocalEngine:
        rule = "coupled" if broken is accepts_likely_drafts else "block"
        engine = case.engine(rule, "adversarial" if rule == "coupled" else "draft_model", sampler, 4)
        engine.runner.rule = broken
        return engine

    assert distance(case, make, SamplingParams(max_tokens=3)) > 1e-3


def with_policy(case: TableCase, rule: str, policy: StaticPolicy) -> Callable[[Sampler], LocalEngine]:
    def make(sampler: Sampler) -> LocalEngine:
        drafter = DraftModelDrafter(TableDecoder(case.draft, 16), sampler, coupled=rule == "coupled")
        return LocalEngine(case.decoder(16), sampler=sampler, drafter=drafter, policy=policy, rule=rule)

    return make


def test_a_policy_that_reads_drafts_is_harmless_under_coupled_and_refused_elsewhere() -> None:
    case, policy = TableCase(3, 1), StaticPolicy(1, min_confidence=0.4)
    assert distance(case, with_policy(case, "coupled", policy), SamplingParams(max_tokens=3)) < EXACT
    with pytest.raises(ValueError, match="biased by a policy"):
        with_policy(case, "rejection", policy)(Sampler())
    unchecked = StaticPolicy(1, min_confidence=0.4)
    unchecked.reads_drafts = False  # passes the engine's check
    assert distance(case, with_policy(case, "rejection", unchecked), SamplingParams(max_tokens=3)) > 1e-3


def test_a_hybrid_that_chooses_after_sampling_is_harmless_under_coupled_and_refused_elsewhere() -> None:
    def make(rule: str, choice: str) -> Callable[[Sampler], LocalEngine]:
        def engine(sampler: Sampler) -> LocalEngine:
            made = case.engine(rule, "hybrid", sampler, 4)
            assert isinstance(made.drafter, HybridDrafter)
            made.set_drafter(HybridDrafter(SuffixDrafter(), made.drafter.head, 0.0, choice))
            # Of history, 70% of the draft tokens are accepted: between the head's likely and its unlikely tokens.
            scores = SCORES.repeat(1000)[:, None].astype(np.float32)
            drafts = DraftBatch(np.zeros(scores.shape, np.int32), np.ones(len(scores), np.int32), scores)
            made.drafting.acceptance.rate(drafts, "suffix")
            accepted = np.arange(len(scores)) % 10 < 7
            made.drafting.acceptance.observe(drafts, "suffix", None, accepted, np.ones_like(accepted))
            return made

        return engine

    case, sampling = TableCase(3, 1), SamplingParams(max_tokens=3)
    assert distance(case, make("coupled", "after"), sampling) < EXACT
    assert distance(case, make("rejection", "before"), sampling) < EXACT
    with pytest.raises(ValueError, match="chooses among drafts by what it sampled"):
        make("rejection", "after")(Sampler())

    def unchecked(sampler: Sampler) -> LocalEngine:
        made = make("rejection", "before")(sampler)
        made.drafter.chooses_after = True  # set after the engine's check
        return made

    assert distance(case, unchecked, sampling) > 1e-3


def test_running_past_a_stop_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: only the last emitted token is checked for a stop."""
    find_stop = Sequence.find_stop

    def last_only(self: Sequence, tokens: list[int], start: int, detokenize: Any) -> tuple[int, int | str | None]:
        before = len(tokens) - 1
        num, reason = find_stop(self, tokens[before:], start + before, detokenize)
        return before + num, reason

    case = TableCase(3, 2)
    make = lambda s: case.engine("rejection", "draft_model", s, 4)  # noqa: E731
    request = Request(0, (0, 1, 0), SamplingParams(max_tokens=3), 0)
    exact = brute_force(case.decoder(), request)
    monkeypatch.setattr(Sequence, "find_stop", last_only)
    found = enumerate_engine(make, request)
    assert total_variation(found.distribution, exact) > 1e-3


@pytest.mark.parametrize(
    ("module", "rule", "drafter"),
    [
        (accept, "block", "draft_model"),  # `rejection` draws nothing after the first rejected token, so nothing twice
        (accept, "block", "eagle3"),
        (draft_model, "rejection", "draft_model"),
        (draft_model, "block", "draft_model"),
        (head_drafter, "rejection", "eagle3"),
        (head_drafter, "rejection", "dspark"),
        (head_drafter, "block", "hybrid"),
    ],
)
def test_noise_without_its_round_is_caught(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, rule: str, drafter: str
) -> None:
    """Broken: a call site leaves the round out of the noise, so that a position that is drafted again uses the noise
    that accepted or rejected its first draft. A sample of 1000 sequences is too small to show the bias."""
    monkeypatch.setattr(module, "with_round", lambda positions, rounds: positions)
    every = [c for c in CASES if (c.rule, c.policy, c.drafter) == (rule, "static", drafter) and c.vocab_size == 3]
    found, _ = max(every, key=lambda case: case.sampling.max_tokens).enumerate()
    assert found.num_reused > 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("drafter", ["eagle3", "dspark"])
def test_a_head_that_peeks_at_the_targets_token_is_caught(
    monkeypatch: pytest.MonkeyPatch, rule: str, drafter: str
) -> None:
    """Broken: the head drafts the target's most probable token, and hands over its own distribution."""
    case = next(c for c in CASES if (c.rule, c.policy, c.drafter) == (rule, "static", drafter))
    table = TableCase(case.vocab_size, case.num_speculative_tokens, case.seed).target
    draw = head_drafter.HeadDrafter.draw

    def peeks(self, rows, active, logits, step, drafts, distributions):
        draw(self, rows, active, logits, step, drafts, distributions)
        for i in (i for i in active if rows.sampling[i].temperature):
            context = np.concatenate([rows.tokens[i], drafts.tokens[i, :step]])
            drafts.tokens[i, step] = 1 + table.logits_after(context)[1:].argmax()  # of the head's vocabulary

    monkeypatch.setattr(head_drafter.HeadDrafter, "draw", peeks)
    assert case.enumerate()[1] > 1e-2


def test_truncation_before_temperature_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: top-p and min-p are applied at temperature 1."""

    def truncates_first(logits_PV: torch.Tensor, params: SamplingArrays) -> torch.Tensor:
        kept = process(logits_PV, replace(params, temperature=np.where(params.temperature == 0, 0.0, 1.0)))
        divisor = np.where(params.temperature == 0, 1.0, params.temperature)
        return (kept / torch.as_tensor(divisor).unsqueeze(-1)).log_softmax(-1)

    process = sample.process
    for module in (sample, accept):
        monkeypatch.setattr(module, "process", truncates_first)
    truncated = [case for case in CASES if case.sampling.truncates]
    assert len(truncated) == 9
    assert all(case.enumerate()[1] > 1e-2 for case in truncated if case.sampling != TRUNCATIONS[1])
