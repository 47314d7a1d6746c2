"""The certificate: rungs 1 to 5 on a user's own model and drafters, every figure written down.

Rungs 1 and 2 start on targets whose exact distribution is known (the engine, scheduler, rules and drafters are the real
ones); rung 2 goes on with the user's weights, and rungs 3 to 5 are the user's weights throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.build import build_decoder, build_drafter, build_runner, build_sampler
from paceline.config import Config
from paceline.engine.engine import LocalEngine
from paceline.model.decoder import Decoder
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.store import load_tokenizer, resolve
from paceline.model.weights import load
from paceline.speculation.metrics import summarise
from paceline.types import Completion, Request, SamplingParams, noise_key
from paceline.verify import chance, identity
from paceline.verify.cases import DRAFTERS, POLICIES, RULES, SAMPLING_DRAFTERS, TableCase, policy_of
from paceline.verify.enumeration import brute_force, enumerate_engine, total_variation
from paceline.verify.ties import Referee

LOGPROB_TOLERANCE = 1e-4  # float32, across kernels with different summation orders
# In 16 bits the mean: bfloat16 has 8 bits, so a logit of 10 is known to 0.03, and learner and engine each round on
# their own way. What is beyond is not rounding, and would bend importance ratios by two percent.
MEAN_LOGPROB_TOLERANCE = 0.02
ENUMERATION_TOLERANCE = 1e-12  # float64 products of a few dozen factors
SAMPLINGS = (
    SamplingParams(max_tokens=3),
    SamplingParams(max_tokens=3, temperature=0.7, top_k=3),
    SamplingParams(max_tokens=3, temperature=1.3, top_p=0.8, min_p=0.05),
)
Progress = Callable[[str], None]
Rung = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is run."""

    num_prompts: int
    max_tokens: int
    num_samplings: int  # of SAMPLINGS
    num_table_samples: int
    num_model_samples: int


FULL = Size(num_prompts=32, max_tokens=64, num_samplings=3, num_table_samples=1500, num_model_samples=384)
QUICK = Size(num_prompts=6, max_tokens=32, num_samplings=1, num_table_samples=500, num_model_samples=128)


def run_ladder(
    config: Config,
    prompts: Sequence[Sequence[int]],
    drafters: Sequence[str] = ("ngram", "suffix", "draft_model"),
    quick: bool = False,
    progress: Progress = lambda message: None,
    rungs: str = "12345",
) -> dict[str, Any]:
    """Climb; returns {"passed": bool, "rungs": [{"name", "passed", "seconds", …figures}]}."""
    size = QUICK if quick else FULL
    ladder = _Ladder(config, list(prompts[: size.num_prompts]), tuple(drafters), size, progress)
    climbed = []
    for name, climb in ladder.rungs():
        if name[0] not in rungs:
            continue
        progress(name)
        started = time.perf_counter()
        rung = climb()
        climbed.append({"name": name, "passed": rung.pop("passed"), "seconds": time.perf_counter() - started, **rung})
    return {
        "passed": all(r["passed"] for r in climbed),
        "model": config.model.name,
        "dtype": config.model.dtype,
        "device": config.model.device,
        "drafters": list(drafters),
        "quick": quick,
        "rungs": climbed,
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
        self._plain: list[Completion] | None = None
        self._referee: Referee | None = None

    def rungs(self) -> list[tuple[str, Callable[[], Rung]]]:
        return [
            ("1 enumeration", self.enumeration),
            ("2 chi-square, known distribution", self.chi_square_table),
            ("2 chi-square, this model", self.chi_square_model),
            ("3 seeded identity", self.seeded_identity),
            ("4 greedy identity with transformers", self.greedy_identity),
            ("5 logprob parity", self.parity),
        ]

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
            drafter=build_drafter(config, self.decoder, self.tokenizer),
            policy=policy_of(policy, self.k, drafter or "none"),
            rule=rule,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=256,
            tokenizer=self.tokenizer,
        )

    def requests(self, temperature: float, max_tokens: int | None = None) -> list[Request]:
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens or self.size.max_tokens)
        return [
            Request(i, tuple(prompt), sampling, noise_key("verify", i), f"prompt {i}")
            for i, prompt in enumerate(self.prompts)
        ]

    def plain(self) -> list[Completion]:
        """The reference of rungs 3 and 5: no drafter, T=1, once."""
        if self._plain is None:
            self._plain = self.engine().generate(self.requests(1.0))
        return self._plain

    def weights(self, dtype: torch.dtype) -> Decoder:
        """The model as a learner has it: plain torch, unpacked."""
        return load(self.directory, dtype, self.decoder.device, self.config.model.yarn_factor).requires_grad_(False)

    def referee(self) -> Referee:
        if self._referee is None:
            paged = PagedDecoder(self.decoder, self.blocks_each)
            self._referee = Referee(self.weights(torch.float32), paged, self.plain())
        return self._referee

    def compare(
        self, requests: list[Request], expected: list[list[int]], runs: dict[str, list[identity.Difference]]
    ) -> Rung:
        """Any difference fails; but near-ties may differ where rounding depends on the batch."""
        if not rounds_by_batch(self.decoder):
            told = [str(d) for parted in runs.values() for d in parted[:2]]
            return {"passed": not told, "first_differences": told}
        referee = self.referee()
        ties = [t for run, parted in runs.items() for t in referee.judge(run, requests, expected, parted)]
        wide = [t for t in ties if not t.near]
        return {
            "passed": not wide,
            "rounding": referee.rounding,
            "near_ties": [asdict(t) for t in ties if t.near],
            "not_near_ties": len(wide),
            "first_differences": [str(t) for t in wide[:8]],
        }

    # -- rungs --------------------------------------------------------------------------------------------------------

    def enumeration(self) -> Rung:
        """Every path of chance, through the real engine, against brute force."""
        beside = Request(1, (1, 0, 1, 1), SamplingParams(max_tokens=4, temperature=0), 0)
        figures: list[dict[str, Any]] = []
        for rule, policy in ((r, p) for r in RULES for p in POLICIES[r]):
            for drafter in DRAFTERS:
                # One token ahead keeps the tree small where the drafter's own draws are forks too.
                case = TableCase(3, 1 if rule == "coupled" and drafter in SAMPLING_DRAFTERS else 2)
                request = Request(0, (0, 1, 0), SamplingParams(max_tokens=3), 0)
                exact = brute_force(case.decoder(), request)
                found, paths = enumerate_engine(
                    lambda s, case=case, rule=rule, drafter=drafter, policy=policy: case.engine(  # type: ignore[misc]
                        rule, drafter, s, 4, policy
                    ),
                    request,
                    (beside,),
                )
                distance = total_variation(found, exact)
                figures.append(
                    {"rule": rule, "policy": policy, "drafter": drafter, "paths": paths, "total_variation": distance}
                )
        worst = max(f["total_variation"] for f in figures)
        return {"passed": worst <= ENUMERATION_TOLERANCE, "max_total_variation": worst, "cases": figures}

    def chi_square_table(self) -> Rung:
        """Sampled sequences against the exact distribution, beside a null without speculation."""
        num, figures = self.size.num_table_samples, []
        case = TableCase(5, 3)
        sampler = Sampler(native=self.sampler.native)
        for i, sampling in enumerate(SAMPLINGS[: self.size.num_samplings]):
            exact = brute_force(case.decoder(), Request(0, (0, 1, 0), sampling, 0))
            settings = f"T={sampling.temperature} top_k={sampling.top_k} top_p={sampling.top_p} min_p={sampling.min_p}"
            arms: list[tuple[str, str, str | None]] = [("coupled", "static", None)]
            arms += [(r, p, d) for r in RULES for p in POLICIES[r] for d in DRAFTERS]
            for j, (rule, policy, drafter) in enumerate(arms):
                engine = case.engine(rule, drafter, sampler, 64, policy)
                sample = case.sample(engine, sampling, num, first_key=(1 + len(arms) * i + j) << 32)
                test = chance.against_exact(sample, exact)
                figures.append(
                    {
                        "rule": rule,
                        "policy": policy,
                        "drafter": drafter or "none (null)",
                        "sampling": settings,
                        "p_value": test.p_value,
                        "total_variation": test.total_variation,
                    }
                )
        return {**_judge(figures), "num_samples": num}

    def chi_square_model(self) -> Rung:
        """This model's weights: speculation against plain decoding, beside plain against plain."""
        num = self.size.num_model_samples
        prompt = tuple(self.prompts[0])
        arms: list[tuple[str, str | None]] = [("coupled", None), ("coupled", None)]
        arms += [("coupled", d) for d in self.drafters]
        arms += [(r, d) for r in ("rejection", "block") for d in SAMPLING_DRAFTERS if d in self.drafters]
        samples = []
        for arm, (rule, drafter) in enumerate(arms):
            engine = self.engine(drafter, rule, max_num_seqs=64, num_blocks=64 * self.blocks_each)
            sampling = SamplingParams(max_tokens=3, ignore_eos=True)
            requests = [Request(i, prompt, sampling, noise_key("chi", arm, i), "chi") for i in range(num)]
            samples.append([c.token_ids.tolist() for c in engine.generate(requests)])
        # Bins, fixed by the prompt alone: the token ids' remainders at each of the three positions.
        bins = [[a % 3 + 3 * (b % 3) + 9 * (c % 3) for a, b, c in sample] for sample in samples]
        figures = []
        for (rule, drafter), found in zip(arms[1:], bins[1:], strict=True):
            test = chance.against_sample(bins[0], found, 27)
            figures.append(
                {
                    "rule": rule,
                    "drafter": drafter or "none (null)",
                    "p_value": test.p_value,
                    "total_variation": test.total_variation,
                }
            )
        return {**_judge(figures), "num_samples": num}

    def seeded_identity(self) -> Rung:
        """T=1, same noise: the same tokens with every drafter, alone or in company, through preemption."""
        plain = self.plain()
        expected = identity.tokens_of(plain)
        requests = self.requests(1.0)
        alone = self.engine(max_num_seqs=1).generate(requests[:4])
        runs = {"alone": identity.first_differences(expected[:4], identity.tokens_of(alone))}
        speculation: dict[str, Any] = {}
        preemptions = 0
        for drafter in self.drafters:
            self.progress(f"3 seeded identity: {drafter}")
            engine = self.engine(drafter)
            found = engine.generate(requests)
            summary = summarise(found, engine.drain_trace())
            speculation[drafter] = {key: summary[key] for key in ("mean_acceptance_length", "draft_acceptance_rate")}
            runs[drafter] = identity.first_differences(expected, identity.tokens_of(found))
            for policy in ("das", "auto"):
                found = self.engine(drafter, policy=policy).generate(requests)
                runs[f"{drafter}, {policy}"] = identity.first_differences(expected, identity.tokens_of(found))
            # Other company (foreign greedy rows, reversed order) and too little memory for all of it.
            count = min(8, len(requests))
            crowd = [
                Request(1000 + r.request_id, r.prompt_ids[: 1 + len(r.prompt_ids) // 2], SamplingParams(0.0), 0)
                for r in requests[:count]
            ]
            engine = self.engine(drafter, max_num_seqs=2 * count, num_blocks=2 + self.blocks_each * max(2, count // 2))
            found = engine.generate([*crowd, *reversed(requests[:count])])
            preemptions += sum(c.num_preemptions for c in found)
            runs[f"{drafter}, crowded"] = identity.first_differences(
                expected[:count], identity.tokens_of(list(reversed(found[count:])))
            )
        compared = self.compare(requests, expected, runs)
        return {
            "passed": compared.pop("passed") and (preemptions > 0 or not self.drafters),
            "num_prompts": len(requests),
            "num_tokens": int(sum(map(len, expected))),
            "num_preemptions": preemptions,
            "differences": {name: len(found) for name, found in runs.items()},
            **compared,
            "speculation": speculation,
        }

    def greedy_identity(self) -> Rung:
        requests = self.requests(0.0)
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
        """Raw logprobs of the same tokens: learner, prefill, decode, verify."""
        count = min(8, len(self.prompts))
        decode, decoder = self.plain()[:count], self.weights(self.decoder.dtype)
        learner = identity.learner_logprobs(decoder, decode)
        prefill = identity.prefill_logprobs(self.engine().paged, decode)
        decoded = identity.raw_logprobs_of(decode)
        pairs = {
            "learner_vs_prefill": (learner, prefill),
            "learner_vs_decode": (learner, decoded),
            "prefill_vs_decode": (prefill, decoded),
        }
        for drafter in self.drafters:
            verify = self.engine(drafter).generate(self.requests(1.0)[:count])
            same = identity.tokens_of(verify) == identity.tokens_of(decode)  # else the learner is asked for these
            own = learner if same else identity.learner_logprobs(decoder, verify)
            pairs[f"learner_vs_verify_{drafter}"] = own, identity.raw_logprobs_of(verify)
        largest = {f"max_abs_{name}": identity.largest_gap(*pair) for name, pair in pairs.items()}
        means = {f"mean_abs_{name}": identity.mean_gap(*pair) for name, pair in pairs.items()}
        in_16_bits = self.decoder.dtype.itemsize == 2
        judged, tolerance = (means, MEAN_LOGPROB_TOLERANCE) if in_16_bits else (largest, LOGPROB_TOLERANCE)
        return {
            "passed": bool(np.max(list(judged.values())) <= tolerance),
            "tolerance": tolerance,
            "num_tokens": sum(len(c.token_ids) for c in decode),
            **(means if in_16_bits else {}),
            **largest,
        }


def rounds_by_batch(decoder: Decoder) -> bool:
    """Whether a token's logits may hang on its company: not in the CPU's kernels, and in float64 too little to tell."""
    return decoder.dtype.itemsize == 2 or (decoder.device.type == "cuda" and decoder.dtype != torch.float64)


def _judge(figures: list[dict[str, Any]]) -> Rung:
    adjusted = chance.holm([f["p_value"] for f in figures])
    for figure, p in zip(figures, adjusted, strict=True):
        figure["holm_p_value"] = p
    return {"passed": min(adjusted) >= chance.SIGNIFICANCE, "min_holm_p_value": min(adjusted), "cases": figures}
