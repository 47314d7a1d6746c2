"""The exactness checks of `paceline verify`: levels 1 to 5, on a user's own model and drafters.

Level 1 and the first half of level 2 use targets with a known distribution, and the real engine, scheduler, rules and
drafters. The second half of level 2 and levels 3 to 5 use the user's weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np

from paceline.build.model import default_kv_tokens
from paceline.config import Config
from paceline.model.kv import BLOCK
from paceline.model.lora import assign_policy, policy_state
from paceline.rl.trainer import torch_threads
from paceline.types import Completion, Request, SamplingParams, noise_key
from paceline.verify import chi_square, identity, known, updates
from paceline.verify.estimate import CheckObserver, Estimate, estimate
from paceline.verify.identity import LogprobPairs, compare_logprobs, wrong_draws
from paceline.verify.model import ALWAYS_DRAFT, CheckedModel, Size
from paceline.verify.result import CheckResult, acceptance, needs_drafts, no_accepted_drafts, num_drafted
from paceline.verify.ties import compare_tokens

# Level 5's sampling. Truncation before temperature, which is wrong, would keep different tokens.
TRUNCATED = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.02, ignore_eos=True)
NUM_TABLE_THREADS = 1  # tables are tiny: more threads only wait for each other, ten times as long on a busy machine
GREEDY_SHARE = 0.5  # of level 4: transformers' part
LARGE_BATCH = 512  # sequences, on a GPU with batch-invariant kernels
MAX_TRUNCATED = 0.02  # share of tokens that rounding to 16 bits may move out of the truncated distribution
FULL = Size(
    num_prompts=32, max_tokens=64, num_scored=8, max_scored_tokens=64, cases=known.CASES, num_samplings=3,
    num_table_samples=1500, num_model_samples=384,
)  # fmt: skip
QUICK = Size(
    num_prompts=6, max_tokens=24, num_scored=2, max_scored_tokens=20, cases=known.QUICK_CASES, num_samplings=1,
    num_table_samples=500, num_model_samples=96,
)  # fmt: skip


def run_checks(
    config: Config,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[str] = ("ngram", "suffix", "draft_model"),
    quick: bool = False,
    observer: CheckObserver | None = None,
    levels: str = "12345",
    results: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Run the checks of these levels. Returns `make_report` of their results. `results`: a list to which the result of
    each check is appended when it ends; after an interrupt it has those so far."""
    observer = observer or _NoObserver()
    model = CheckedModel(config, prompts, drafters, QUICK if quick else FULL)
    for drafter in drafters:
        model.engine(drafter)  # report an error in the settings before minutes of work
    names = [name for name in CHECKS if name[0] in levels]
    observer.begin(lambda: estimate(model, names, quick))
    results = results if results is not None else []
    for name in names:
        model.progress = partial(observer.progress, name)
        model.progress("", 0.0)
        started = time.perf_counter()
        result = CHECKS[name](model)
        seconds = time.perf_counter() - started
        results.append({"name": name, "passed": not result["problems"], "seconds": seconds, **result})
    return make_report(config, drafters, quick, results, [], model.alarms())


def make_report(
    config: Config,
    drafters: Sequence[str],
    quick: bool,
    results: Sequence[dict[str, Any]],
    not_run: Sequence[str],
    alarms: Sequence[str] = (),
) -> dict[str, Any]:
    """{"passed": bool, "partial": bool, "checks": [{"name", "passed", "seconds", "problems", …figures}], "alarms":
    [str], …}. Alarms are about speed, not exactness; they fail no check. A partial report has not `passed`, even if no
    check failed; `not_run` names the checks that are missing."""
    return {
        "passed": not not_run and all(r["passed"] for r in results),
        "partial": bool(not_run),
        "not_run": list(not_run),
        "model": config.model.name,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "drafters": list(drafters),
        "quick": quick,
        "checks": list(results),
        "alarms": list(alarms),
    }


class _NoObserver:
    def begin(self, make_estimate: Callable[[], Estimate]) -> None: ...
    def progress(self, check: str, detail: str, share: float) -> None: ...


def check_enumeration(model: CheckedModel) -> CheckResult:
    with torch_threads(NUM_TABLE_THREADS):
        return known.check_enumeration(model.size.cases, model.progress)


def check_table_samples(model: CheckedModel) -> CheckResult:
    size = model.size
    with torch_threads(NUM_TABLE_THREADS):
        return known.check_samples(size.num_table_samples, size.num_samplings, model.sampler.native, model.progress)


def check_model_samples(model: CheckedModel) -> CheckResult:
    """This model's weights: plain decoding against each rule and drafter, and against plain decoding again."""
    num, prompt = model.size.num_model_samples, tuple(model.prompts[0])
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    arms: list[tuple[str, str | None]] = [("coupled", None), ("coupled", None)]
    arms += [("coupled", d) for d in model.drafters]
    arms += [(r, d) for r in ("rejection", "block") for d in model.sampling_drafters]
    bins, problems = [], []
    for arm, (rule, drafter) in enumerate(arms):
        model.progress(f"{arm} of {len(arms)}", arm / len(arms))
        engine = model.engine(drafter, rule, max_num_seqs=64)
        requests = [Request(i, prompt, sampling, noise_key("chi", arm, i), "chi") for i in range(num)]
        found = engine.generate(requests)
        # Bins: the token ids modulo 3 at each of the three positions.
        bins.append([a % 3 + 3 * (b % 3) + 9 * (c % 3) for a, b, c in identity.tokens_of(found)])
        if drafter in ALWAYS_DRAFT:
            problems += needs_drafts(f"{rule}, {drafter}", found)
    figures: list[dict[str, Any]] = []
    for (rule, drafter), sample in zip(arms[1:], bins[1:], strict=True):
        test = chi_square.homogeneity(bins[0], sample, 27)
        figures.append({"rule": rule, "drafter": drafter or "none (null)", **asdict(test)})
    return known.chi_square_result(problems, figures, num)


def check_seeded_identity(model: CheckedModel) -> CheckResult:
    """T=1, same noise: the same tokens with every drafter and policy, in any batch, and after preemption. With
    batch-invariant kernels on a GPU the same logprobs too."""
    plain, requests = model.coupled(None), model.requests(SamplingParams())
    expected = identity.tokens_of(plain)
    runs: dict[str, list[identity.Difference]] = {}
    problems: list[str] = []
    num_compared = 0

    def compare(run: str, found: Sequence[Completion]) -> None:
        """With as many expected completions."""
        runs[run] = identity.first_differences(expected[: len(found)], identity.tokens_of(found))
        if model.has_gpu_invariance and (num := identity.num_other_logprobs(plain[: len(found)], found)):
            problems.append(f"{run}: {num} tokens have other logprobs")
        nonlocal num_compared
        num_compared += sum(map(len, expected[: len(found)]))

    compare("alone", model.engine(max_num_seqs=1).generate(requests[:4]))
    speculation: dict[str, Any] = {}
    by_policy = {"das": [0, 0], "auto": [0, 0]}
    preemptions = 0
    num_arms = len(model.drafters) * (2 if model.has_gpu_invariance else 1) + 1
    for i, drafter in enumerate(model.drafters):
        model.progress(drafter, i / num_arms)
        found = model.coupled(drafter)
        compare(drafter, found)
        speculation[drafter] = acceptance(found)
        again = model.coupled_with_history.get(drafter, [])
        if again:
            compare(f"{drafter}, again", again)
        for policy, counts in by_policy.items():
            num = len(requests) if model.has_gpu_invariance else model.size.num_scored
            some = model.engine(drafter, policy=policy).generate(requests[:num])
            compare(f"{drafter}, {policy}", some)
            for i, count in enumerate(num_drafted(some)):
                counts[i] += count
        preempted, others = generate_preempted(model, drafter, requests)
        compare(f"{drafter}, preempted", preempted)
        preemptions += sum(c.num_preemptions for c in [*preempted, *others])
        problems += needs_drafts(drafter, [*found, *again, *preempted, *others])
    if model.has_gpu_invariance:
        for i, name in enumerate(("none", *model.drafters), len(model.drafters)):
            model.progress(f"{name}, {LARGE_BATCH} sequences", i / num_arms)
            compare(f"{name}, {LARGE_BATCH} sequences", generate_in_large_batch(model, name, requests))
    compared = compare_tokens(model.own_tie_scorer(), requests, expected, runs)
    if model.always_drafting:
        # A policy may decide not to use one drafter's drafts, but not to use none at all.
        for policy, (drafted, accepted) in by_policy.items():
            problems += no_accepted_drafts(f"policy {policy}", drafted, accepted)
    if model.drafters and not preemptions:
        problems.append("preempted: no sequence was preempted, so this run does not test preemption")
    return {
        "problems": compared.pop("problems") + problems,
        "num_prompts": len(requests),
        "num_tokens": sum(map(len, expected)),
        "num_compared": num_compared,
        "num_preemptions": preemptions,
        "differences": {name: len(found) for name, found in runs.items()},
        **compared,
        "speculation": speculation,
    }


def generate_preempted(
    model: CheckedModel, drafter: str, requests: Sequence[Request]
) -> tuple[list[Completion], list[Completion]]:
    """Completions of the first requests in a different batch (reversed order, with other greedy requests), which has
    too few KV blocks for all of it; and those of the others."""
    first = requests[: max(4, model.size.num_scored)]
    greedy = SamplingParams(0.0, max_tokens=model.size.max_tokens, ignore_eos=True)
    others = [Request(1000 + r.request_id, r.prompt_ids[: 1 + len(r.prompt_ids) // 2], greedy, 0) for r in first]
    lengths = [len(r.prompt_ids) + model.size.max_tokens for r in [*others, *first]]
    num_blocks = max(model.blocks_per_sequence, sum(-(-length // BLOCK) for length in lengths) // 3)
    engine = model.engine(drafter, max_num_seqs=2 * len(first), num_blocks=num_blocks)
    found = engine.generate([*others, *reversed(first)])
    return found[len(first) :][::-1], found[: len(first)]


def generate_in_large_batch(model: CheckedModel, drafter: str, requests: Sequence[Request]) -> list[Completion]:
    """Completions of the requests beside many others, which have the same prompts and other noise."""
    others = [
        replace(requests[i % len(requests)], request_id=len(requests) + i, noise_key=noise_key("others", i))
        for i in range(LARGE_BATCH - len(requests))
    ]
    method = None if drafter == "none" else drafter
    num_fitting = default_kv_tokens(model.config, model.decoder.config) // BLOCK
    engine = model.engine(
        method,
        max_num_seqs=LARGE_BATCH,
        num_blocks=min(LARGE_BATCH * model.blocks_per_sequence, num_fitting),
        max_num_batched_tokens=8 * LARGE_BATCH,
    )
    return engine.generate([*others, *requests])[len(others) :]


def check_weight_update(model: CheckedModel) -> CheckResult:
    """Every tensor changes while requests run. Tokens and logprobs must be those of each token's version, according
    to a learner with the same weights, and drafts must be accepted after the update."""
    requests = model.scored_requests(SamplingParams(ignore_eos=True))
    learner = model.learner(model.decoder.dtype)
    old = updates.WeightUpdate(updates.clone_weights(policy_state(learner)))
    both = (old, updates.WeightUpdate(updates.perturbed(old.weights)))  # runs switch between the two in turn
    problems: list[str] = []
    found: dict[str, list[Completion]] = {}
    try:
        for i, drafter in enumerate((None, *model.drafters)):
            run = drafter or "none"
            model.progress(run, i / (1 + len(model.drafters)))
            engine = model.engine(drafter)
            found[run], wrong = updates.generate_through_update(engine, requests, both[(i + 1) % 2])
            problems += [f"{run}: {problem}" for problem in wrong]
    finally:  # the other checks use this decoder too
        assign_policy(model.decoder, old.weights)
    pairs: LogprobPairs = {}
    for i, (run, completions) in enumerate(found.items()):
        versions = [both[(i + version) % 2].weights for version in range(2)]
        scored = updates.learner_scores(learner, versions, completions)
        pairs[run] = raw_pair(scored, completions)
        if not model.learner_rounds_differently:
            problems += wrong_draws(run, scored)
    accepted = {run: updates.num_accepted_tokens_of(found[run], 1) for run in model.drafters}
    if model.always_drafting and not any(accepted.values()):
        problems.append("no draft of any drafter was accepted after the update")
    compared = compare_logprobs(pairs, model.rounding())
    return {
        "problems": problems + compared.pop("problems"),
        "num_tensors": len(old.weights),
        "num_tokens": sum(len(c.token_ids) for c in found["none"]),
        "accepted_since": accepted,
        **compared,
    }


def check_greedy_identity(model: CheckedModel) -> CheckResult:
    requests, total = model.requests(SamplingParams(0.0)), len(model.prompts)
    plain = model.engine().generate(requests)
    found = identity.tokens_of(plain)
    expected = identity.transformers_greedy(
        model.directory,
        model.prompts,
        model.size.max_tokens,
        lambda done: model.progress(f"transformers, {done} of {total}", GREEDY_SHARE * done / total),
        model.decoder.device,
        model.merged_weights(),
    )
    differences = identity.first_differences(expected, found)
    compared = compare_tokens(model.tie_scorer(), requests, expected, {"plain": differences})
    some = requests if model.has_gpu_invariance else requests[: model.size.num_scored]
    own: dict[str, list[identity.Difference]] = {}
    other_logprobs: list[str] = []
    for i, drafter in enumerate(model.drafters):
        model.progress(drafter, GREEDY_SHARE + (1 - GREEDY_SHARE) * i / len(model.drafters))
        drafted = model.engine(drafter).generate(some)
        own[drafter] = identity.first_differences(found[: len(some)], identity.tokens_of(drafted))
        if model.has_gpu_invariance and (num := identity.num_other_logprobs(plain[: len(some)], drafted)):
            other_logprobs.append(f"{drafter}: {num} tokens have other logprobs")
    with_drafts = compare_tokens(model.own_tie_scorer(), requests, found, own)
    return {
        "problems": compared.pop("problems") + with_drafts["problems"] + other_logprobs,
        "num_prompts": total,
        "num_tokens": sum(map(len, expected)),
        "differences": len(differences),
        "differences_with_drafts": {name: len(each) for name, each in own.items()},
        "near_ties": compared.pop("near_ties", []) + with_drafts.get("near_ties", []),
        **compared,
    }


def check_parity(model: CheckedModel) -> CheckResult:
    """Logprobs of the same tokens from learner, prefill, decode and verification: raw ones at T=1, and both raw and
    processed ones with temperature and truncation, under every rule."""
    learner = model.learner(model.decoder.dtype)
    cache: dict[tuple[Request, bytes], identity.TokenScores] = {}  # under `coupled` most completions are equal

    def learner_scores(completions: Sequence[Completion]) -> list[identity.TokenScores]:
        keys = [(c.request, c.token_ids.tobytes()) for c in completions]
        for key, c in zip(keys, completions, strict=True):
            if key not in cache:
                cache[key] = identity.learner_scores(learner, [c])[0]
        return [cache[key] for key in keys]

    decode = model.coupled(None)[: model.size.num_scored]
    from_learner, from_decode = raw_pair(learner_scores(decode), decode)
    from_prefill, _ = raw_pair(identity.prefill_scores(model.engine().paged, decode), decode)
    pairs: LogprobPairs = {
        "learner_vs_prefill": (from_learner, from_prefill),
        "learner_vs_decode": (from_learner, from_decode),
        "prefill_vs_decode": (from_prefill, from_decode),
    }
    for name in model.drafters:
        verified = model.coupled(name)[: model.size.num_scored]
        pairs[f"learner_vs_verify_{name}"] = raw_pair(learner_scores(verified), verified)
    problems: list[str] = []
    drafted: dict[str, list[Completion]] = {}
    num_excluded = num_tokens = 0
    arms: list[tuple[str, str | None]] = [("coupled", None), *(("coupled", d) for d in model.drafters)]
    arms += [(r, d) for r in ("rejection", "block") for d in (model.sampling_drafters or model.drafters[:1])]
    for i, (rule, drafter) in enumerate(arms):
        run = f"{rule}_{drafter}" if drafter is not None else "decode"
        model.progress(run, i / len(arms))
        found = model.engine(drafter, rule).generate(model.scored_requests(TRUNCATED))
        drafted.setdefault(rule, []).extend(found)
        scored = learner_scores(found)
        kept = [s.processed > identity.EXCLUDED_LOGPROB for s in scored]
        if not model.learner_rounds_differently:
            kept = [np.ones_like(each) for each in kept]
            problems += wrong_draws(run, scored) if rule == "coupled" else []
        num_excluded += sum(int((~each).sum()) for each in kept)
        num_tokens += sum(map(len, kept))
        pairs[f"raw_vs_{run}"] = raw_pair(scored, found)
        pairs[f"processed_vs_{run}"] = (
            [s.processed[k] for s, k in zip(scored, kept, strict=True)],
            [c.logprobs[k] for c, k in zip(found, kept, strict=True)],
        )
    if model.always_drafting:
        problems += [problem for rule, runs in drafted.items() for problem in needs_drafts(rule, runs)]
    if num_excluded > MAX_TRUNCATED * num_tokens:
        problems.append(f"{num_excluded} of {num_tokens} tokens are outside of the truncated distribution")
    compared = compare_logprobs(pairs, model.rounding())
    return {
        "problems": problems + compared.pop("problems"),
        "num_tokens": sum(len(c.token_ids) for c in decode),
        "num_truncated_tokens": num_tokens,
        "num_excluded": num_excluded,
        **compared,
    }


CHECKS: dict[str, Callable[[CheckedModel], CheckResult]] = {  # names start with the level
    "1 enumeration": check_enumeration,
    "2 chi-square, known distribution": check_table_samples,
    "2 chi-square, this model": check_model_samples,
    "3 seeded identity": check_seeded_identity,
    "3 weight update": check_weight_update,
    "4 greedy identity with transformers": check_greedy_identity,
    "5 logprob parity": check_parity,
}


def raw_pair(
    scored: Sequence[identity.TokenScores], completions: Sequence[Completion]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Raw logprobs of a completion's tokens: by a reference, and by the engine."""
    return [s.raw for s in scored], [c.raw_logprobs for c in completions]
