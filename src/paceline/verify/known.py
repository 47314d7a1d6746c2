"""Rungs 1 and 2 on targets whose exact distribution is known: the engine, scheduler, rules, policies and drafters are
the real ones, the target is a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.engine.engine import LocalEngine
from paceline.model.sample import Sampler
from paceline.speculation.metrics import summarise
from paceline.types import Request, SamplingParams
from paceline.verify import chance
from paceline.verify.cases import DRAFTERS, POLICIES, RULES, SAMPLING_DRAFTERS, TableCase
from paceline.verify.enumeration import Enumeration, Enumerator, brute_force, enumerate_engine, total_variation
from paceline.verify.rung import Progress, Rung, undrafted

ENUMERATION_TOLERANCE = 1e-12  # float64 products of a few dozen factors
PROMPT = (0, 1, 0)
# A second row, greedy, so that it adds no forks; its noise key is its own.
BESIDE = Request(1, (1, 0, 1, 1), SamplingParams(max_tokens=4, temperature=0), 1)
# Truncation after temperature: each of these keeps other tokens where it is applied before.
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
    """One engine whose distribution is enumerated."""

    rule: str
    policy: str
    drafter: str
    sampling: SamplingParams = SAMPLINGS[0]
    vocab_size: int = 3
    num_speculative_tokens: int = 2
    seed: int = 1

    def enumerate(self, noise: Enumerator | None = None) -> tuple[Enumeration, float]:
        """What was found, and its total variation to brute force."""
        table = TableCase(self.vocab_size, self.num_speculative_tokens, self.seed)  # once: it remembers its logits

        def engine(sampler: Sampler) -> LocalEngine:
            return table.engine(self.rule, self.drafter, sampler, 4, self.policy)

        request = Request(0, PROMPT, self.sampling, 0)
        found = enumerate_engine(engine, request, (BESIDE,), noise)
        return found, total_variation(found.distribution, brute_force(table.decoder(), request))


def _every_combination() -> Iterator[Case]:
    """Every rule with every policy and drafter."""
    for rule, policy, drafter in ((r, p, d) for r in RULES for p in POLICIES[r] for d in DRAFTERS):
        # One token ahead keeps the tree small where the drafter's own draws are forks too.
        one_ahead = rule == "coupled" and drafter in SAMPLING_DRAFTERS
        yield Case(rule, policy, drafter, num_speculative_tokens=1 if one_ahead else 2)


def _truncated() -> Iterator[Case]:
    for rule, sampling in ((r, s) for r in RULES for s in TRUNCATIONS):
        yield Case(rule, "static", "ngram" if rule == "coupled" else "draft_model", sampling, vocab_size=4, seed=5)


def _redrafting() -> Iterator[Case]:
    """Sequences long enough that a head drafts a position again after a rejection, where a rule that leaves the round
    out of its noise meets that noise again. A head cannot draft before the prompt is computed, so it needs one token
    more for that than others."""
    for rule, drafter in ((r, d) for r in ("rejection", "block") for d in ("eagle3", "hybrid")):
        yield Case(rule, "static", drafter, SamplingParams(max_tokens=4))


CASES = (*_every_combination(), *_truncated(), *_redrafting())
# Without those of many paths that others resemble.
QUICK_CASES = tuple(
    case
    for case in CASES
    if case.sampling != TRUNCATIONS[1]
    and (case.rule, case.policy, case.drafter)
    not in {("coupled", "auto", "draft_model"), ("coupled", "static", "suffix")}
    and (case.drafter, case.sampling.max_tokens) != ("hybrid", 4)
)


def enumeration(cases: Sequence[Case], progress: Progress) -> Rung:
    """Rung 1: every path of chance, through the real engine, against brute force."""
    figures: list[dict[str, Any]] = []
    problems: list[str] = []
    for i, case in enumerate(cases):
        if i % 10 == 0:
            progress(f"1 enumeration: {i}/{len(cases)}")
        found, distance = case.enumerate()
        name = f"{case.rule}, {case.policy}, {case.drafter}, {settings(case.sampling)}"
        if not distance <= ENUMERATION_TOLERANCE:
            problems.append(f"{name}: total variation {distance:.2g} to the exact distribution")
        if found.num_reused:
            problems.append(f"{name}: noise was used twice ({found.num_reused} times), so draws are not independent")
        if case.policy == "static":  # the others may find that no draft pays
            problems += undrafted(name, found.num_draft_tokens, found.num_accepted_tokens)
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
    problems += _idle_policies(figures)
    worst = max(f["total_variation"] for f in figures)
    return {"problems": problems, "max_total_variation": worst, "cases": figures}


def chi_square(num_samples: int, num_samplings: int, native: bool, progress: Progress) -> Rung:
    """Rung 2: sampled sequences against the exact distribution, beside a null without speculation."""
    figures: list[dict[str, Any]] = []
    problems: list[str] = []
    case, sampler = TableCase(5, 3), Sampler(native=native)
    arms: list[tuple[str, str, str | None]] = [("coupled", "static", None)]
    arms += [(r, p, d) for r in RULES for p in POLICIES[r] for d in DRAFTERS]
    for i, sampling in enumerate(SAMPLINGS[:num_samplings]):
        progress(f"2 chi-square, known distribution: {i + 1}/{num_samplings}")
        exact = brute_force(case.decoder(), Request(0, PROMPT, sampling, 0))
        for j, (rule, policy, drafter) in enumerate(arms):
            engine = case.engine(rule, drafter, sampler, 64, policy)
            sample = case.sample(engine, sampling, num_samples, first_key=(1 + len(arms) * i + j) << 32)
            test = chance.against_exact(sample, exact)
            drafts = summarise([], engine.drain_trace())
            drafted, accepted = drafts["num_draft_tokens"], drafts["num_accepted_tokens"]
            figures.append(
                {
                    "rule": rule,
                    "policy": policy,
                    "drafter": drafter or "none (null)",
                    "sampling": settings(sampling),
                    "drafted": drafted,
                    "accepted": accepted,
                    "p_value": test.p_value,
                    "total_variation": test.total_variation,
                }
            )
    problems += _idle_policies(figures)
    for rule, drafter in ((r, d) for r in RULES for d in DRAFTERS):  # over all samplings: some accept very little
        own = [f for f in figures if (f["rule"], f["policy"], f["drafter"]) == (rule, "static", drafter)]
        counts = (sum(f[key] for f in own) for key in ("drafted", "accepted"))
        problems += undrafted(f"{rule}, {drafter}", *counts)
    problems += judge(figures)
    lowest = min(f["holm_p_value"] for f in figures)
    return {"problems": problems, "min_holm_p_value": lowest, "cases": figures, "num_samples": num_samples}


def judge(figures: list[dict[str, Any]]) -> list[str]:
    """Put Holm-corrected p-values beside the p-values; the problems are those below the level."""
    for figure, p in zip(figures, chance.holm([f["p_value"] for f in figures]), strict=True):
        figure["holm_p_value"] = p
    return [
        f"{f['rule']}, {f['drafter']}: p = {f['holm_p_value']:.2g} (Holm) that this is the exact distribution"
        for f in figures
        if f["holm_p_value"] < chance.SIGNIFICANCE
    ]


def _idle_policies(figures: list[dict[str, Any]]) -> list[str]:
    """A policy may draft nothing in one case, but not in all of them."""
    total: dict[str, list[int]] = {}
    for figure in figures:
        counts = total.setdefault(figure["policy"], [0, 0])
        counts[0] += figure["drafted"]
        counts[1] += figure["accepted"]
    return [problem for policy, counts in total.items() for problem in undrafted(f"policy {policy}", *counts)]


def settings(sampling: SamplingParams) -> str:
    return f"T={sampling.temperature} top_k={sampling.top_k} top_p={sampling.top_p} min_p={sampling.min_p}"
