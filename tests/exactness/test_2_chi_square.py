"""Level 2: sequences sampled with the real noise, against the exact distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.model.sample import PhiloxNoise, Sampler
from paceline.speculation.metrics import summarise
from paceline.types import Request, SamplingParams
from paceline.verify import chi_square
from paceline.verify.cases import DRAFTERS, POLICIES, RULES, TableCase
from paceline.verify.enumeration import brute_force

NUM = 1000
SAMPLINGS = {
    "T=1": SamplingParams(max_tokens=3),
    "T=0.7 top_k": SamplingParams(max_tokens=3, temperature=0.7, top_k=3),
    "T=1.3 top_p min_p": SamplingParams(max_tokens=3, temperature=1.3, top_p=0.8, min_p=0.05),
}


def p_value(case: TableCase, rule: str, policy: str, drafter: str | None, sampling: SamplingParams, key: int) -> float:
    exact = brute_force(case.decoder(), Request(0, (0, 1, 0), sampling, 0))
    engine = case.engine(rule, drafter, Sampler(native=True), 64, policy)
    sample = case.sample(engine, sampling, NUM, first_key=key << 32)
    if drafter is not None and policy == "static":  # other policies may decide not to draft
        drafts = summarise([], engine.drain_trace())
        assert drafts["num_draft_tokens"] > drafts["num_accepted_tokens"], (rule, drafter)
        if not sampling.truncates:  # truncation may exclude all of a random head's draft tokens
            assert drafts["num_accepted_tokens"] > 0, (rule, drafter)
    return chi_square.goodness_of_fit(sample, exact).p_value


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_rule_policy_and_drafter(name: str) -> None:
    case = TableCase(5, 3)
    arms: list[tuple[str, str, str | None]] = [("coupled", "static", None)]
    arms += [(r, p, d) for r in RULES for p in POLICIES[r] for d in DRAFTERS]
    found = {arm: p_value(case, *arm, SAMPLINGS[name], key=i + 1) for i, arm in enumerate(arms)}
    adjusted = dict(zip(found, chi_square.holm(list(found.values())), strict=True))
    assert min(adjusted.values()) > chi_square.SIGNIFICANCE, adjusted


class _Threshold(PhiloxNoise):
    """Broken: a draft token is accepted if its acceptance probability is above one half, not with that probability."""

    def bernoulli(self, probabilities: np.ndarray, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        return probabilities > 0.5


class _SameAtEveryPosition(PhiloxNoise):
    """Broken: the position is left out of the noise key."""

    def race(self, weights_PV: torch.Tensor, keys: np.ndarray, positions: np.ndarray, stream: int) -> np.ndarray:
        return super().race(weights_PV, keys, np.zeros_like(positions), stream)


@pytest.mark.parametrize(("rule", "noise"), [("rejection", _Threshold), ("coupled", _SameAtEveryPosition)])
def test_bad_noise_is_caught(rule: str, noise: type[PhiloxNoise]) -> None:
    case, sampling = TableCase(5, 3), SAMPLINGS["T=1"]
    exact = brute_force(case.decoder(), Request(0, (0, 1, 0), sampling, 0))
    engine = case.engine(rule, "draft_model", Sampler(noise()), 64)
    test = chi_square.goodness_of_fit(case.sample(engine, sampling, NUM, 1 << 32), exact)
    assert test.p_value < chi_square.SIGNIFICANCE


def test_statistics_equal_those_of_scipy() -> None:
    from scipy import stats

    rng = np.random.default_rng(0)
    exact = {(i,): p for i, p in enumerate(rng.dirichlet(np.full(8, 9.0)))}
    drawn = rng.choice(8, 4000, p=list(exact.values()))
    counts = np.bincount(drawn, minlength=8)
    ours = chi_square.goodness_of_fit([(int(x),) for x in drawn], exact)
    theirs = stats.chisquare(counts, np.array(list(exact.values())) * 4000)
    assert ours.statistic == pytest.approx(theirs.statistic)
    assert ours.p_value == pytest.approx(theirs.pvalue)
    a, b = rng.integers(0, 6, 500), rng.integers(0, 6, 700)
    table = np.array([np.bincount(x, minlength=6) for x in (a, b)])
    assert chi_square.homogeneity(a, b, 6).p_value == pytest.approx(stats.chi2_contingency(table).pvalue)
    assert chi_square.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
