"""Levels 1 and 2 on targets with a known distribution. The engine, scheduler, rules, policies and drafters are the real
ones; the target is a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.engine.engine import LocalEngine
from paceline.model.sample import Sampler
from paceline.speculation.metrics import summarise
from paceline.types import Request, SamplingParams
from paceline.verify import chi_square
from paceline.verify.cases import DRAFTERS, POLICIES, RULES, SAMPLING_DRAFTERS, TableCase
from paceline.verify.enumeration import Enumeration, Enumerator, brute_force, enumerate_engine, total_variation
from paceline.verify.result import CheckResult, Progress, no_accepted_drafts

ENUMERATION_TOLERANCE = 1e-12  # float64 products of a few dozen factors
PROMPT = (0, 1, 0)
# A second row. It is greedy, so that it adds no draws, and has its own noise key.
OTHER_REQUEST = Request(1, (1, 0, 1, 1), SamplingParams(max_tokens=4, temperature=0), 1)
# Each of these keeps different tokens if truncation is applied before temperature, which is wrong.
TRUNCATIONS = (
    SamplingParams(max_tokens=3, temperature=0.6, top_p=0.85),
    SamplingParams(max_tokens=3, temperature=1.5, min_p=0.15),
    SamplingParams(max_tokens=3, temperature=1.5, top_k=3, top_p=0.8),
)
SAMPLINGS = (
    SamplingParams(max_tokens=3),
    SamplingParams(max_tokens=3, temperature=0.7, top_k=3),
    SamplingParams(max_tokens=3, temperature=1.3, top_p=0.8, min_p=0.05),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One engine of level 1."""

    rule: str
    policy: str
    drafter: str
    sampling: SamplingParams = SAMPLINGS[0]
    vocab_size: int = 3
    num_speculative_tokens: int = 2
    seed: int = 1

    def enumerate(self, noise: Enumerator | None = None) -> tuple[Enumeration, float]:
        """The engine's distribution, and its total variation distance to brute force."""
        table = TableCase(self.vocab_size, self.num_speculative_tokens, self.seed)  # once, because it caches logits

        def engine(sampler: Sampler) -> LocalEngine:
            return table.engine(self.rule, self.drafter, sampler, 4, self.policy)

        request = Request(0, PROMPT, self.sampling, 0)
        found = enumerate_engine(engine, request, (OTHER_REQUEST,), noise)
        return found, total_variation(found.distribution, brute_force(table.decoder(), request))


def _every_combination() -> Iterator[Case]:
    """Every rule with every policy and drafter."""
    for rule, policy, drafter in ((r, p, d) for r in RULES for p in POLICIES[r] for d in DRAFTERS):
        # If the enumeration branches at the drafter's draws too, a draft length of 1 keeps the tree small.
        one_token = rule == "coupled" and drafter in SAMPLING_DRAFTERS
        yield Case(rule, policy, drafter, num_speculative_tokens=1 if one_token else 2)


def _truncated() -> Iterator[Case]:
    for rule, sampling in ((r, s) for r in RULES for s in TRUNCATIONS):
        yield Case(rule, "static", "ngram" if rule == "coupled" else "draft_model", sampling, vocab_size=4, seed=5)


def _redrafting() -> Iterator[Case]:
    """Sequences long enough for a head to draft a position again after a rejection, with a seed for which `hybrid` uses
    the head both times. A rule that leaves the round out of its noise then uses the same noise twice. A head cannot
    draft before the prompt is computed, so it needs one token more than other drafters."""
    for rule, drafter in ((r, d) for r in ("rejection", "block") for d in ("eagle3", "dspark", "hybrid")):
        yield Case(rule, "static", drafter, SamplingParams(max_tokens=4), seed=7)


CASES = (*_every_combination(), *_truncated(), *_redrafting())
# Without slow cases that are similar to others.
QUICK_CASES = tuple(
    case
    for case in CASES
    if case.sampling != TRUNCATIONS[1]
    and (case.rule, case.policy, case.drafter)
    not in {("coupled", "auto", "draft_model"), ("coupled", "static", "suffix")}
    and (case.drafter, case.sampling.max_tokens) != ("hybrid", 4)
)


def check_enumeration(cases: Sequence[Case], progress: Progress) -> CheckResult:
    """Level 1: the exact distribution of the real engine against brute force."""
    figures: list[dict[str, Any]] = []
    problems: list[str] = []
    for i, case in enumerate(cases):
        if i % 10 == 0:
            progress(f"{i} of {len(cases)}", i / len(cases))
        found, distance = case.enumerate()
        name = f"{case.rule}, {case.policy}, {case.drafter}, {settings(case.sampling)}"
        if not distance <= ENUMERATION_TOLERANCE:
            problems.append(f"{name}: total variation {distance:.2g} to the exact distribution")
        if found.num_reused:
            problems.append(f"{name}: noise was used twice ({found.num_reused} times), so draws are not independent")
        if case.policy == "static":  # other policies may decide not to draft
            problems += no_accepted_drafts(name, found.num_draft_tokens, found.num_accepted_tokens)
        figures.append(
            {
                "rule": case.rule,
                "policy": case.policy,
                "drafter": case.drafter,
                "sampling": settings(case.sampling),
                "paths": found.num_paths,
                "drafted": found.num_draft_tokens,
                "accepted": found.num_accepted_tokens,
                "noise_reused": found.num_reused,
                "total_variation": distance,
            }
        )
    problems += _policies_without_drafts(figures)
    worst = max(f["total_variation"] for f in figures)
    return {"problems": problems, "max_total_variation": worst, "cases": figures}


def check_samples(num_samples: int, num_samplings: int, native: bool, progress: Progress) -> CheckResult:
    """Level 2: sampled sequences against the exact distribution. One sample, the null, is drawn without speculation."""
    figures: list[dict[str, Any]] = []
    problems: list[str] = []
    case, sampler = TableCase(5, 3), Sampler(native=native)
    arms: list[tuple[str, str, str | None]] = [("coupled", "static", None)]
    arms += [(r, p, d) for r in RULES for p in POLICIES[r] for d in DRAFTERS]
    for i, sampling in enumerate(SAMPLINGS[:num_samplings]):
        exact = brute_force(case.decoder(), Request(0, PROMPT, sampling, 0))
        for j, (rule, policy, drafter) in enumerate(arms):
            done = len(arms) * i + j
            progress(f"{done} of {num_samplings * len(arms)}", done / (num_samplings * len(arms)))
            engine = case.engine(rule, drafter, sampler, 64, policy)
            sample = case.sample(engine, sampling, num_samples, first_key=(1 + len(arms) * i + j) << 32)
            drafts = summarise([], engine.drain_trace())
            figures.append({
                "rule": rule,
                "policy": policy,
                "drafter": drafter or "none (null)",
                "sampling": settings(sampling),
                "drafted": drafts["num_draft_tokens"],
                "accepted": drafts["num_accepted_tokens"],
                **asdict(chi_square.goodness_of_fit(sample, exact)),
            })  # fmt: skip
    problems += _policies_without_drafts(figures)
    for rule, drafter in ((r, d) for r in RULES for d in DRAFTERS):  # all samplings together: some accept very little
        own = [f for f in figures if (f["rule"], f["policy"], f["drafter"]) == (rule, "static", drafter)]
        counts = (sum(f[key] for f in own) for key in ("drafted", "accepted"))
        problems += no_accepted_drafts(f"{rule}, {drafter}", *counts)
    return chi_square_result(problems, figures, num_samples)


def chi_square_result(problems: list[str], figures: list[dict[str, Any]], num_samples: int) -> CheckResult:
    """Adds Holm-corrected p-values to the figures. Those below the significance level are problems."""
    for figure, p in zip(figures, chi_square.holm([f["p_value"] for f in figures]), strict=True):
        figure["holm_p_value"] = p
    problems += [
        f"{f['rule']}, {f['drafter']}: p = {f['holm_p_value']:.2g} (Holm) that this is the exact distribution"
        for f in figures
        if f["holm_p_value"] < chi_square.SIGNIFICANCE
    ]
    lowest = min(f["holm_p_value"] for f in figures)
    return {"problems": problems, "min_holm_p_value": lowest, "cases": figures, "num_samples": num_samples}


def _policies_without_drafts(figures: list[dict[str, Any]]) -> list[str]:
    """A policy may draft nothing in one case, but not in all of them."""
    total: dict[str, list[int]] = {}
    for figure in figures:
        counts = total.setdefault(figure["policy"], [0, 0])
        counts[0] += figure["drafted"]
        counts[1] += figure["accepted"]
    return [problem for policy, counts in total.items() for problem in no_accepted_drafts(f"policy {policy}", *counts)]


def settings(sampling: SamplingParams) -> str:
    return f"T={sampling.temperature} top_k={sampling.top_k} top_p={sampling.top_p} min_p={sampling.min_p}"
