"""The certificate: rungs 1 to 5 on a user's own model and drafters, every figure written down.

Rungs 1 and 2 start on targets whose exact distribution is known (the engine, scheduler, rules and drafters are the real
ones); rung 2 goes on with the user's weights, and rungs 3 to 5 are the user's weights throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.build import build_decoder, build_drafter, build_runner, build_sampler
from paceline.build.drafter import build_head, pack_head, recorded_acceptance
from paceline.config import ADAPTABLE, Config
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder
from paceline.model.eagle3 import Eagle3Head
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.store import load_tokenizer, resolve
from paceline.model.weights import assign, hf_state, load
from paceline.rl.alarms import FirstPositions
from paceline.types import Completion, Request, SamplingParams, noise_key
from paceline.verify import chance, identity, known, updates
from paceline.verify.cases import SAMPLING_DRAFTERS, policy_of
from paceline.verify.rung import Progress, Rung, undrafted
from paceline.verify.ties import Referee

LOGPROB_TOLERANCE = 1e-4  # float32, across kernels with different summation orders
# In 16 bits the mean: bfloat16 has 8 bits, so a logit of 10 is known to 0.03, and learner and engine each round on
# their own way. What is beyond is not rounding, and would bend importance ratios by two percent.
MEAN_LOGPROB_TOLERANCE = 0.02
# How far behind the reference's winner an emitted token may race. Learner and engine logprobs differ by
# LOGPROB_TOLERANCE at most, and a race score is a logprob divided by the temperature.
DRAW_TOLERANCE = 1e-3
# Rung 5's sampling: where truncated before the temperature is applied, both of these keep other tokens.
TRUNCATED = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.02, ignore_eos=True)
HISTORY = ("suffix", "hybrid")  # drafters that learn from finished requests
ALWAYS_DRAFT = ("draft_model", "eagle3")  # drafters that need not find anything in a history first
MAX_TRUNCATED = 0.02  # share of tokens that 16 bits may move across the border of a truncation


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    num_prompts: int
    max_tokens: int
    num_scored: int  # prompts and tokens of the weight update, logprob parity and the policies other than static
    max_scored_tokens: int
    cases: Sequence[known.Case]  # whose distributions are enumerated
    num_samplings: int  # of known.SAMPLINGS
    num_table_samples: int
    num_model_samples: int


FULL = Size(
    num_prompts=32, max_tokens=64, num_scored=8, max_scored_tokens=64, cases=known.CASES, num_samplings=3,
    num_table_samples=1500, num_model_samples=384,
)  # fmt: skip
QUICK = Size(
    num_prompts=6, max_tokens=24, num_scored=2, max_scored_tokens=20, cases=known.QUICK_CASES, num_samplings=1,
    num_table_samples=500, num_model_samples=96,
)  # fmt: skip


def run_ladder(
    config: Config,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[str] = ("ngram", "suffix", "draft_model"),
    quick: bool = False,
    progress: Progress = lambda message: None,
    rungs: str = "12345",
) -> dict[str, Any]:
    """Climb; returns {"passed": bool, "rungs": [{"name", "passed", "seconds", "problems", …figures}], "alarms": [str]}.
    Alarms are about speed, not exactness: they fail nothing."""
    size = QUICK if quick else FULL
    ladder = _Ladder(config, list(prompts[: size.num_prompts]), tuple(drafters), size, progress)
    if not ladder.k:
        raise ValueError("speculation.num_speculative_tokens = 0: nothing would be drafted, so nothing would be shown")
    for drafter in drafters:
        ladder.engine(drafter)  # an error in the settings shows here, before minutes of work
    climbed = []
    for name, climb in ladder.rungs():
        if name[0] not in rungs:
            continue
        progress(name)
        started = time.perf_counter()
        rung = climb()
        climbed.append({"name": name, "passed": not rung["problems"], "seconds": time.perf_counter() - started, **rung})
    return {
        "passed": all(r["passed"] for r in climbed),
        "model": config.model.name,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "drafters": list(drafters),
        "quick": quick,
        "rungs": climbed,
        "alarms": ladder.alarms(),
    }


class _Ladder:
    def __init__(
        self, config: Config, prompts: list[Sequence[int]], drafters: tuple[str, ...], size: Size, progress: Progress
    ) -> None:
        self.config, self.drafters, self.size, self.progress = config, drafters, size, progress
        self.directory: Path = resolve(config.model.name)
        self.tokenizer = load_tokenizer(self.directory)
        self.decoder = build_decoder(config, self.directory)
        self.sampler = build_sampler(self.decoder)
        context = self.decoder.config.max_positions
        self.prompts = [prompt for prompt in prompts if len(prompt) + size.max_tokens <= context]
        if not self.prompts:
            raise ValueError(
                f"no prompt leaves room for {size.max_tokens} tokens in this model's context of {context}; give "
                "shorter ones with --prompts"
            )
        longest = max(map(len, self.prompts)) + size.max_tokens
        self.blocks_each = -(-longest // BLOCK) + 1
        lengths = config.speculation.num_speculative_tokens
        self.k = lengths if isinstance(lengths, int) else max(lengths.values())
        self._coupled: dict[str | None, list[Completion]] = {}
        self._again: dict[str, list[Completion]] = {}  # the same once more, with what was generated first as history
        self._referee: Referee | None = None
        self._head: Eagle3Head | None = None

    def rungs(self) -> list[tuple[str, Callable[[], Rung]]]:
        return [
            ("1 enumeration", self.enumeration),
            ("2 chi-square, known distribution", self.chi_square_table),
            ("2 chi-square, this model", self.chi_square_model),
            ("3 seeded identity", self.seeded_identity),
            ("3 weight update", self.weight_update),
            ("4 greedy identity with transformers", self.greedy_identity),
            ("5 logprob parity", self.parity),
        ]

    def alarms(self) -> list[str]:
        """Whether the head accepts far less than its provenance file records, where rung 3 has run it."""
        found = self._coupled.get("eagle3")
        if found is None:
            return []
        section = self.config.speculation.model_copy(update={"method": "eagle3", "rule": "coupled"})
        config = self.config.model_copy(update={"speculation": section})
        recorded = recorded_acceptance(config, 1.0)
        if recorded is None:
            return []
        said = FirstPositions.of(found).below(recorded, config.draft.alarm_record, 1.0)
        return [said] if said is not None else []

    @property
    def always_drafting(self) -> bool:
        """Whether drafts can be asked for in every part of the ladder, however short and little repetitive."""
        return any(drafter in ALWAYS_DRAFT for drafter in self.drafters)

    # -- engines over the user's model --------------------------------------------------------------------------------

    def engine(
        self,
        drafter: str | None = None,
        rule: str = "coupled",
        max_num_seqs: int = 16,
        num_blocks: int | None = None,
        policy: str = "static",
    ) -> LocalEngine:
        speculation = {"method": drafter or "none", "rule": rule}
        if drafter == "draft_model" and self.config.speculation.draft_model is None:
            speculation["draft_model"] = f"layers:{max(1, self.decoder.config.num_layers // 6)}"
        section = self.config.speculation.model_copy(update=speculation)
        engine_section = self.config.engine.model_copy(
            update={"kv_tokens": 4 * self.blocks_each * max_num_seqs * BLOCK, "max_num_seqs": max_num_seqs}
        )
        config = self.config.model_copy(update={"speculation": section, "engine": engine_section})
        paged = PagedDecoder(self.decoder, num_blocks or self.blocks_each * max_num_seqs)
        return LocalEngine(
            paged,
            sampler=self.sampler,
            runner=build_runner(config, paged, self.sampler),
            drafter=build_drafter(config, self.decoder, self.tokenizer, self.head(drafter)),
            policy=policy_of(policy, self.k, drafter or "none"),
            rule=rule,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            tokenizer=self.tokenizer,
        )

    def head(self, drafter: str | None) -> Eagle3Head | None:
        """The EAGLE-3 head, loaded once."""
        if drafter not in ADAPTABLE:
            return None
        if self._head is None:
            self._head = pack_head(build_head(self.config, self.decoder.config), self.decoder)
        return self._head

    def requests(self, sampling: SamplingParams) -> list[Request]:
        sampling = replace(sampling, max_tokens=self.size.max_tokens)
        return [
            Request(i, tuple(prompt), sampling, noise_key("verify", i), f"prompt {i}")
            for i, prompt in enumerate(self.prompts)
        ]

    def scored_requests(self, sampling: SamplingParams) -> list[Request]:
        """Fewer and shorter."""
        sampling = replace(sampling, max_tokens=self.size.max_scored_tokens)
        return [replace(r, sampling=sampling) for r in self.requests(sampling)[: self.size.num_scored]]

    def coupled(self, drafter: str | None) -> list[Completion]:
        """All prompts at T=1, once for each drafter; None is the reference of rungs 3 and 5."""
        if drafter not in self._coupled:
            engine, requests = self.engine(drafter), self.requests(SamplingParams())
            self._coupled[drafter] = engine.generate(requests)
            if drafter in HISTORY:
                self._again[drafter] = engine.generate(requests)
        return self._coupled[drafter]

    def weights(self, dtype: torch.dtype) -> Decoder:
        """The model as a learner has it: plain torch, unpacked."""
        return load(self.directory, dtype, self.decoder.device, self.config.model.yarn_factor).requires_grad_(False)

    def referee(self) -> Referee:
        if self._referee is None:
            paged = PagedDecoder(self.decoder, self.blocks_each)
            self._referee = Referee(self.weights(torch.float32), paged, self.coupled(None))
        return self._referee

    def compare(
        self, requests: list[Request], expected: list[list[int]], runs: dict[str, list[identity.Difference]]
    ) -> Rung:
        """Any difference is a problem; but near-ties may differ where rounding depends on the batch."""
        if not rounds_by_batch(self.decoder):
            told = [f"{run}: {d}" for run, parted in runs.items() for d in parted[:2]]
            return {"problems": told, "first_differences": told}
        referee = self.referee()
        ties = [t for run, parted in runs.items() for t in referee.judge(run, requests, expected, parted)]
        wide = [t for t in ties if not t.near]
        return {
            "problems": [str(t) for t in wide[:8]],
            "rounding": referee.rounding,
            "near_ties": [asdict(t) for t in ties if t.near],
            "not_near_ties": len(wide),
            "first_differences": [str(t) for t in wide[:8]],
        }

    def judge_gaps(self, pairs: Mapping[str, tuple[list[np.ndarray], list[np.ndarray]]]) -> Rung:
        """Logprobs of the same tokens from two sources: the largest gap is judged, in 16 bits the mean."""
        largest = {name: identity.largest_gap(*pair) for name, pair in pairs.items()}
        means = {name: identity.mean_gap(*pair) for name, pair in pairs.items()}
        in_16_bits = self.decoder.dtype.itemsize == 2
        kind, judged, tolerance = ("largest", largest, LOGPROB_TOLERANCE)
        if in_16_bits:
            kind, judged, tolerance = ("mean", means, MEAN_LOGPROB_TOLERANCE)
        return {
            "problems": [
                f"{name}: the {kind} gap between logprobs is {gap:.2g}, above {tolerance:g}"
                for name, gap in judged.items()
                if not gap <= tolerance
            ],
            "tolerance": tolerance,
            **({"mean_gap": max(means.values())} if in_16_bits else {}),
            "max_gap": max(largest.values()),
            "mean_abs": means,
            "max_abs": largest,
        }

    def wrong_draws(self, run: str, behind: Sequence[np.ndarray]) -> list[str]:
        """`behind`: of the reference's winner, token by token. Not judged where rounding depends on the batch: there a
        near-tie may go either way, and rung 3 looks at these."""
        num = sum(int((~(each <= DRAW_TOLERANCE)).sum()) for each in behind)  # NaN is wrong too
        if not num or rounds_by_batch(self.decoder):
            return []
        return [f"{run}: {num} tokens are not those that the noise draws from the processed distribution"]

    # -- rungs --------------------------------------------------------------------------------------------------------

    def enumeration(self) -> Rung:
        with single_thread():
            return known.enumeration(self.size.cases, self.progress)

    def chi_square_table(self) -> Rung:
        size = self.size
        with single_thread():
            return known.chi_square(size.num_table_samples, size.num_samplings, self.sampler.native, self.progress)

    def chi_square_model(self) -> Rung:
        """This model's weights: speculation against plain decoding, beside plain against plain."""
        num = self.size.num_model_samples
        prompt = tuple(self.prompts[0])
        arms: list[tuple[str, str | None]] = [("coupled", None), ("coupled", None)]
        arms += [("coupled", d) for d in self.drafters]
        arms += [(r, d) for r in ("rejection", "block") for d in SAMPLING_DRAFTERS if d in self.drafters]
        samples, problems = [], []
        for arm, (rule, drafter) in enumerate(arms):
            self.progress(f"2 chi-square, this model: {arm + 1}/{len(arms)}")
            engine = self.engine(drafter, rule, max_num_seqs=64, num_blocks=64 * self.blocks_each)
            sampling = SamplingParams(max_tokens=3, ignore_eos=True)
            requests = [Request(i, prompt, sampling, noise_key("chi", arm, i), "chi") for i in range(num)]
            found = engine.generate(requests)
            samples.append([c.token_ids.tolist() for c in found])
            if drafter in ALWAYS_DRAFT:
                problems += needs_drafts(f"{rule}, {drafter}", found)
        # Bins, fixed by the prompt alone: the token ids' remainders at each of the three positions.
        bins = [[a % 3 + 3 * (b % 3) + 9 * (c % 3) for a, b, c in sample] for sample in samples]
        figures: list[dict[str, Any]] = []
        for (rule, drafter), sample in zip(arms[1:], bins[1:], strict=True):
            test = chance.against_sample(bins[0], sample, 27)
            figures.append(
                {
                    "rule": rule,
                    "drafter": drafter or "none (null)",
                    "p_value": test.p_value,
                    "total_variation": test.total_variation,
                }
            )
        problems += known.judge(figures)
        lowest = min(f["holm_p_value"] for f in figures)
        return {"problems": problems, "min_holm_p_value": lowest, "cases": figures, "num_samples": num}

    def seeded_identity(self) -> Rung:
        """T=1, same noise: the same tokens with every drafter, alone or in company, through preemption."""
        expected = identity.tokens_of(self.coupled(None))
        requests = self.requests(SamplingParams())
        alone = self.engine(max_num_seqs=1).generate(requests[:4])
        runs = {"alone": identity.first_differences(expected[:4], identity.tokens_of(alone))}
        speculation: dict[str, Any] = {}
        by_policy = {"das": [0, 0], "auto": [0, 0]}
        problems: list[str] = []
        preemptions = 0
        for drafter in self.drafters:
            self.progress(f"3 seeded identity: {drafter}")
            found = self.coupled(drafter)
            runs[drafter] = identity.first_differences(expected, identity.tokens_of(found))
            speculation[drafter] = acceptance(found)
            static = [*found, *(again := self._again.get(drafter, []))]
            if again:
                runs[f"{drafter}, again"] = identity.first_differences(expected, identity.tokens_of(again))
            some = self.size.num_scored
            for policy, counts in by_policy.items():
                found = self.engine(drafter, policy=policy).generate(requests[:some])
                runs[f"{drafter}, {policy}"] = identity.first_differences(expected[:some], identity.tokens_of(found))
                for i, count in enumerate(num_drafted(found)):
                    counts[i] += count
            # Other company (foreign greedy rows, reversed order) and too little memory for all of it.
            count = min(max(4, self.size.num_scored), len(requests))
            greedy = SamplingParams(0.0, max_tokens=self.size.max_tokens, ignore_eos=True)
            crowd = [
                Request(1000 + r.request_id, r.prompt_ids[: 1 + len(r.prompt_ids) // 2], greedy, 0)
                for r in requests[:count]
            ]
            longest = [len(r.prompt_ids) + self.size.max_tokens for r in [*crowd, *requests[:count]]]
            num_wanted = sum(-(-length // BLOCK) for length in longest)
            engine = self.engine(drafter, max_num_seqs=2 * count, num_blocks=max(self.blocks_each, num_wanted // 3))
            found = engine.generate([*crowd, *reversed(requests[:count])])
            preemptions += sum(c.num_preemptions for c in found)
            problems += needs_drafts(drafter, [*static, *found])
            runs[f"{drafter}, crowded"] = identity.first_differences(
                expected[:count], identity.tokens_of(list(reversed(found[count:])))
            )
        compared = self.compare(requests, expected, runs)
        if self.always_drafting:
            # A policy may find that one drafter's drafts do not pay, but not all of them.
            for policy, (drafted, accepted) in by_policy.items():
                problems += undrafted(f"policy {policy}", drafted, accepted)
        if self.drafters and not preemptions:
            problems.append("crowded: no sequence was preempted, so this shows nothing about preemption")
        return {
            "problems": compared.pop("problems") + problems,
            "num_prompts": len(requests),
            "num_tokens": int(sum(map(len, expected))),
            "num_preemptions": preemptions,
            "differences": {name: len(found) for name, found in runs.items()},
            **compared,
            "speculation": speculation,
        }

    def weight_update(self) -> Rung:
        """Every tensor changes while requests run: tokens and logprobs are those of the version that each token names,
        by a learner that has the same weights, and accepted drafts are among the new version's tokens."""
        requests = self.scored_requests(SamplingParams(ignore_eos=True))
        learner = self.weights(self.decoder.dtype)
        old = updates.Sent(updates.copied(hf_state(learner)))
        both = (old, updates.Sent(updates.changed(old.weights)))  # the runs go from one to the other, and back
        problems: list[str] = []
        found: dict[str, list[Completion]] = {}
        try:
            for i, drafter in enumerate((None, *self.drafters)):
                run = drafter or "none"
                self.progress(f"3 weight update: {run}")
                engine = self.engine(drafter)
                found[run], wrong = updates.generate_through_update(engine, requests, both[(i + 1) % 2])
                problems += [f"{run}: {problem}" for problem in wrong]
        finally:  # the other rungs run on this decoder too
            assign(self.decoder, old.weights)
        pairs: dict[str, tuple[list[np.ndarray], list[np.ndarray]]] = {}
        for i, (run, completions) in enumerate(found.items()):
            versions = [both[(i + version) % 2].weights for version in range(2)]
            scored = updates.learner_scores(learner, versions, completions)
            pairs[run] = raw_of(scored), [c.raw_logprobs for c in completions]
            problems += self.wrong_draws(run, [s.behind for s in scored])
        accepted = {run: updates.num_accepted_since(found[run], 1) for run in self.drafters}
        if self.always_drafting and not any(accepted.values()):
            problems.append("no draft of any drafter was accepted after the update")
        judged = self.judge_gaps(pairs)
        return {
            "problems": problems + judged.pop("problems"),
            "num_tensors": len(old.weights),
            "num_tokens": sum(len(c.token_ids) for c in found["none"]),
            "accepted_since": accepted,
            **judged,
        }

    def greedy_identity(self) -> Rung:
        requests = self.requests(SamplingParams(0.0))
        found = identity.tokens_of(self.engine().generate(requests))
        total = len(self.prompts)
        expected = identity.transformers_greedy(
            self.directory,
            self.prompts,
            self.size.max_tokens,
            lambda done: self.progress(f"4 greedy identity with transformers: {done}/{total}"),
            self.decoder.device,
        )
        differences = identity.first_differences(expected, found)
        return {
            "num_prompts": total,
            "num_tokens": sum(map(len, expected)),
            "differences": len(differences),
            **self.compare(requests, expected, {"plain": differences}),
        }

    def parity(self) -> Rung:
        """Logprobs of the same tokens: learner, prefill, decode, verify; raw ones at T=1, and both raw and processed
        ones with temperature and truncation, under every rule."""
        count = self.size.num_scored
        learner = _CachedLearner(self.weights(self.decoder.dtype))
        decode = self.coupled(None)[:count]
        expected, prefill = raw_of(learner.score(decode)), raw_of(identity.prefill_scores(self.engine().paged, decode))
        decoded = [c.raw_logprobs for c in decode]
        pairs = {
            "learner_vs_prefill": (expected, prefill),
            "learner_vs_decode": (expected, decoded),
            "prefill_vs_decode": (prefill, decoded),
        }
        for name in self.drafters:
            verify = self.coupled(name)[:count]
            pairs[f"learner_vs_verify_{name}"] = raw_of(learner.score(verify)), [c.raw_logprobs for c in verify]
        problems: list[str] = []
        drafted: dict[str, list[Completion]] = {}
        num_excluded = num_tokens = 0
        for rule, drafter in self.parity_arms():
            run = f"{rule}_{drafter}" if drafter is not None else "decode"
            self.progress(f"5 logprob parity: {run}")
            found = self.engine(drafter, rule).generate(self.scored_requests(TRUNCATED))
            drafted[rule] = [*drafted.get(rule, []), *found]
            scored = learner.score(found)
            if rule == "coupled":
                problems += self.wrong_draws(run, [s.behind for s in scored])
            kept = [s.processed > identity.NEVER for s in scored]
            if not rounds_by_batch(self.decoder):
                kept = [np.ones_like(each) for each in kept]
            num_excluded += sum(int((~each).sum()) for each in kept)
            num_tokens += sum(map(len, kept))
            pairs[f"raw_vs_{run}"] = raw_of(scored), [c.raw_logprobs for c in found]
            pairs[f"processed_vs_{run}"] = (
                [s.processed[k] for s, k in zip(scored, kept, strict=True)],
                [c.logprobs[k] for c, k in zip(found, kept, strict=True)],
            )
        if self.always_drafting:
            problems += [problem for rule, runs in drafted.items() for problem in needs_drafts(rule, runs)]
        if num_excluded > MAX_TRUNCATED * num_tokens:
            problems.append(f"{num_excluded} of {num_tokens} tokens are outside of the truncated distribution")
        judged = self.judge_gaps(pairs)
        return {
            "problems": problems + judged.pop("problems"),
            "num_tokens": sum(len(c.token_ids) for c in decode),
            "num_truncated_tokens": num_tokens,
            "num_excluded": num_excluded,
            **judged,
        }

    def parity_arms(self) -> list[tuple[str, str | None]]:
        sampling = [d for d in SAMPLING_DRAFTERS if d in self.drafters]
        arms: list[tuple[str, str | None]] = [("coupled", None), *(("coupled", d) for d in self.drafters)]
        return arms + [(rule, d) for rule in ("rejection", "block") for d in (sampling or self.drafters[:1])]


class _CachedLearner:
    """Scores by the plain decoder. Runs with the same tokens, as those under `coupled` are, are computed once."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._known: dict[tuple[Request, bytes], identity.Scored] = {}

    def score(self, completions: Sequence[Completion]) -> list[identity.Scored]:
        return [self._score(c) for c in completions]

    def _score(self, c: Completion) -> identity.Scored:
        key = c.request, c.token_ids.tobytes()
        if key not in self._known:
            self._known[key] = identity.learner_scores(self.decoder, [c])[0]
        return self._known[key]


@contextmanager
def single_thread() -> Iterator[None]:
    """Tables are tiny: more threads wait for each other, on a busy machine for ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def raw_of(scored: Sequence[identity.Scored]) -> list[np.ndarray]:
    return [s.raw for s in scored]


def needs_drafts(run: str, completions: Sequence[Completion]) -> list[str]:
    found = undrafted(run, *num_drafted(completions))
    remedy = "give prompts that repeat themselves with --prompts, or leave this drafter out of --drafters"
    return [f"{problem}; {remedy}" for problem in found]


def num_drafted(completions: Sequence[Completion]) -> tuple[int, int]:
    """Drafted tokens, and those of them that were accepted."""
    return sum(c.num_draft_tokens for c in completions), sum(c.num_accepted_tokens for c in completions)


def acceptance(completions: Sequence[Completion]) -> dict[str, float]:
    num_drafts = sum(c.num_drafts for c in completions)
    drafted, accepted = num_drafted(completions)
    return {
        "mean_acceptance_length": 1 + accepted / max(1, num_drafts),
        "draft_acceptance_rate": accepted / max(1, drafted),
        "num_draft_tokens": drafted,
        "num_accepted_tokens": accepted,
    }


def rounds_by_batch(decoder: Decoder) -> bool:
    """Whether a token's logits may hang on its company: not in the CPU's kernels, and in float64 too little to tell."""
    return decoder.dtype.itemsize == 2 or (decoder.device.type == "cuda" and decoder.dtype != torch.float64)
