"""Audits: the same samples generated without drafts and with them, by one engine with the same kernels and weights.

A cell is an RL step's weights and samples, a batch size, a drafter and a draft length or policy.
Before a cell is measured, other samples of the same prompts are generated with it. That compiles kernels and captures
CUDA graphs (its time is recorded as a cold start), and gives the acceptance statistics that every audit starts from. A
run in which a CUDA graph is captured is repeated. In a round, every generation with drafts has one without next to it,
and the order alternates. The drafter `plain` is plain decoding against plain decoding: the noise.

With batch-invariant kernels every generation must have the same tokens, in `audit` those of the recorded run. Otherwise
the part fails: the audit is recorded with `failed`, and measured again at the next start.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from results import Row, measured_rows
from runs import rows_of, weights_file
from safetensors.torch import load_file
from settings import NUM_AUDITS, Study

from paceline.build.config import load_config
from paceline.build.cost import measured_costs
from paceline.build.drafter import build_drafter, build_head, drafting_model, pack_head, relative_draft_cost
from paceline.build.engine import build_engine
from paceline.build.policy import build_policy
from paceline.build.task import build_task
from paceline.chat.template import encode
from paceline.config import Config
from paceline.engine.captures import without_captures
from paceline.rl.folder import read_stream
from paceline.rl.trainer import gc_frozen
from paceline.speculation.batch import Commits, Drafter
from paceline.speculation.metrics import summarise
from paceline.speculation.policy import SpeculationPolicy
from paceline.types import Completion, Request, StepTrace, noise_key

# Method and head by name.
DRAFTERS: dict[str, tuple[str, str | None]] = {
    "plain": ("none", None),
    "ngram": ("ngram", None),
    "suffix": ("suffix", None),
    "eagle3-general": ("eagle3", "general"),
    "eagle3-in-domain": ("eagle3", "in-domain"),
    "hybrid": ("hybrid", "in-domain"),
    "eagle3-random": ("eagle3", "random"),
}
WITH_HISTORY = ("suffix", "hybrid")
LENGTHS = ("auto", "1", "3", "5", "7")
LONGEST = 7  # draft tokens of the policies that choose
BATCH_SIZES = (8, 16, 64, 128, 512)
RESERVE_S = 20  # on a GPU: for the first round
LONG_TEMPLATE = (
    "{prompt}\nWrite a detailed solution. First restate what is given and what is asked. Then solve the problem step "
    "by step and explain every step in full sentences. Then solve it again in a different way, check all calculations, "
    "and compare both results. End with the final number in \\boxed{}."
)
LONG_TOKENS = 4  # times sampling.max_tokens: 2048
LONG_BATCH = 64
LONG_REQUESTS = 4  # times --requests: 128
LONG_LENGTHS = {"suffix": ("auto", "das", "3"), "eagle3-in-domain": ("auto", "3"), "hybrid": ("auto",)}
QUANTILES = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1)

Key = dict[str, Any]  # what a cell's rows have in common, besides drafter and length
State = Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Variant:
    drafter: str
    length: str  # a draft length, or the policy that chooses it

    def settings(self, study: Study) -> list[str]:
        method, head = DRAFTERS[self.drafter]
        k = int(self.length) if self.length.isdecimal() else LONGEST
        policy = "static" if self.length.isdecimal() else self.length
        found = [f"speculation.{key}={value}" for key, value in
                 {"method": method, "policy": policy, "num_speculative_tokens": k}.items()]  # fmt: skip
        return found if head is None else [*found, f"speculation.head={str(study.head(head))!r}"]


PLAIN = Variant("plain", "0")


@dataclass
class Work:
    """What is generated in a cell. `warm_up`: other samples of the same prompts."""

    key: Key
    batch_size: int
    batches: list[list[Request]]
    warm_up: list[list[Request]]
    expected: list[np.ndarray] | None = None  # tokens; None: those of the first plain generation
    # The history before these samples; None: that of the warm-up.
    history: Callable[[], Mapping[str, np.ndarray]] | None = None


@dataclass
class Generated:
    seconds: float
    completions: list[Completion]
    traces: list[StepTrace]
    num_captured: int


# ---- parts ----


def audit(study: Study) -> None:
    run = study.folder("runs-record", "plain")
    batch_sizes = study.args.batch or list(BATCH_SIZES)
    variants = chosen_variants(study, dict.fromkeys(DRAFTERS, LENGTHS) | {"plain": ("0",)})
    samples = read_samples(study, study.args.steps)
    check_batch_sizes(batch_sizes, {step: len(samples[step]) for step in study.args.steps})
    done = measured(study)
    cells = [
        (step, n) for step in study.args.steps for n in batch_sizes
        if missing_rounds(study, done, {"step": step, "batch_size": n}, variants)
    ]  # fmt: skip
    if not cells:
        return
    settings = ["speculation.method=none", f"engine.max_num_seqs={max(batch_sizes)}"]
    bench = Bench(study, lambda *more: load_config(run / "config.toml", [*settings, *more]))
    steps = rows_of(study.results.rows("record", "step"), "plain")
    checksums = {row["step"] + 1: row["weights_checksum"] for row in steps}  # by version
    for step in dict.fromkeys(step for step, _ in cells):
        bench.load_weights(step - 1, checksums)
        before = [sample for earlier in range(1, step) for sample in samples[earlier]]
        for n in (n for other, n in cells if other == step):
            measure(study, bench, audit_work(study, bench, step, n, samples[step], before), variants, done)


def check_batch_sizes(batch_sizes: Sequence[int], num_samples: Mapping[int, int]) -> None:
    """`num_samples`: of the recorded steps that are audited."""
    for step, num in num_samples.items():
        if wrong := [n for n in batch_sizes if not 0 < n <= num]:
            raise ValueError(
                f"--batch {', '.join(map(str, wrong))}: step {step} was recorded with {num} samples; give sizes from "
                f"1 to {num}"
            )


def long(study: Study) -> None:
    """Long solutions of held-out problems, by the model that the runs start with."""
    batch_sizes = study.args.batch or [LONG_BATCH]
    if len(batch_sizes) != 1:
        raise ValueError(f"--batch {','.join(map(str, batch_sizes))}: the part `long` measures one size; give only one")
    batch_size = batch_sizes[0]
    variants, done = chosen_variants(study, LONG_LENGTHS | {"plain": ("0",)}), measured(study)
    if not missing_rounds(study, done, {"step": 1, "batch_size": batch_size}, variants):
        return
    settings = [
        "speculation.method=none", f"engine.max_num_seqs={batch_size}", f"task.template={json.dumps(LONG_TEMPLATE)}",
        f"sampling.max_tokens={LONG_TOKENS * study.config().sampling.max_tokens}",
    ]  # fmt: skip
    bench = Bench(study, lambda *more: study.config(*settings, *more))
    work = long_work(study, bench, batch_size)
    measure(study, bench, work, variants, done)


def chosen_variants(study: Study, default: Mapping[str, Sequence[str]]) -> list[Variant]:
    args = study.args
    drafters = args.drafters.split(",") if args.drafters else list(default)
    if unknown := set(drafters) - set(default):
        raise ValueError(f"--drafters {', '.join(sorted(unknown))}: not one of {', '.join(default)}")
    wanted = args.lengths.split(",") if args.lengths else None
    return [
        Variant(drafter, length) for drafter in drafters
        for length in (default[drafter] if wanted is None or drafter == "plain" else wanted)
    ]  # fmt: skip


def read_samples(study: Study, steps: Sequence[int]) -> dict[int, list[Sample]]:
    """Of the recorded run up to the last of these, by RL step, counted from 1."""
    found: dict[int, list[Sample]] = {}
    for record in read_stream(study.folder("runs-record", "plain"), "rollouts"):
        if record["step"] >= max(steps):
            break
        found.setdefault(record["step"] + 1, []).append(Sample.of(record))
    if missing := sorted(set(steps) - set(found)):
        raise ValueError(
            f"--steps {', '.join(map(str, missing))}: the recorded run has {len(found)} steps; run `record` with the "
            "same --work, or choose others"
        )
    return found


@dataclass
class Sample:
    version: int
    group: int
    number: int
    problem: str
    prompt_ids: tuple[int, ...]
    tokens: np.ndarray  # int32

    @staticmethod
    def of(record: Mapping[str, Any]) -> Sample:
        tokens = np.array(record["token_ids"], np.int32)
        ids = tuple(record["prompt_ids"])
        return Sample(record["step"], record["group"], record["sample"], record["problem"], ids, tokens)


def audit_work(
    study: Study, bench: Bench, step: int, batch_size: int, samples: list[Sample], before: list[Sample]
) -> Work:
    num = min(-(-study.args.requests // batch_size) * batch_size or batch_size, len(samples) // batch_size * batch_size)
    chosen, config = samples[:num], bench.config

    def requests(*seed: object) -> list[list[Request]]:
        found = [
            Request(i, s.prompt_ids, config.sampling.params(), noise_key(*seed, s.group, s.number, 0), s.problem)
            for i, s in enumerate(chosen)
        ]
        return [found[i : i + batch_size] for i in range(0, num, batch_size)]

    problems = {sample.problem for sample in chosen}
    related = [sample for sample in before if sample.problem in problems]
    return Work(
        {"step": step, "batch_size": batch_size}, batch_size, requests(config.train.seed), requests("warm-up", step),
        [sample.tokens for sample in chosen], lambda: history_of(bench, related),
    )  # fmt: skip


def history_of(bench: Bench, samples: Sequence[Sample]) -> Mapping[str, np.ndarray]:
    """The state of a suffix drafter that has observed these samples."""
    drafter, none = bench.drafter(Variant("suffix", "auto")), np.zeros(1, np.int32)
    assert drafter is not None
    for i, sample in enumerate(samples):
        drafter.begin(Request(i, sample.prompt_ids, bench.config.sampling.params(), 0, sample.problem), sample.version)
        num = np.array([len(sample.tokens)], np.int32)
        drafter.observe(Commits(np.array([i]), sample.tokens[None], num, none, none))
        drafter.end(i)
    return drafter.state_dict()


def long_work(study: Study, bench: Bench, batch_size: int) -> Work:
    config, tokenizer = bench.config, bench.engine.tokenizer
    num = config.algorithm.num_generations
    problems = build_task(config).held_out[: max(1, LONG_REQUESTS * study.args.requests // num)]
    prompts = [(problem.name, encode(tokenizer, problem.prompt, config.task.chat)) for problem in problems]

    def requests(epoch: int) -> list[list[Request]]:
        return [[
            Request(i * num + j, ids, config.sampling.params(), noise_key("long", epoch, name, j), name)
            for i, (name, ids) in enumerate(prompts) for j in range(num)
        ]]  # fmt: skip

    return Work({"step": 1, "batch_size": batch_size}, batch_size, requests(1), requests(0))


# ---- measuring ----


class Bench:
    """One engine that generates requests with one drafter after another. `config_of` takes more settings."""

    def __init__(self, study: Study, config_of: Callable[..., Config]) -> None:
        self.study, self.config_of, self.config = study, config_of, config_of()
        self.engine = build_engine(self.config)
        self.heads: dict[str, Any] = {}
        self.policies: dict[Variant, SpeculationPolicy] = {}

    def load_weights(self, version: int, checksums: Mapping[int, str]) -> None:
        """Those that the recorded run kept. Version 0 is the model's own."""
        if version == 0:
            return
        receipt = self.engine.update_weights(load_file(weights_file(self.study, version)).items(), version)
        if receipt.checksum != checksums[version]:
            raise ValueError(
                f"the kept weights of version {version} are not those of the recorded run: record it again"
            )

    def drafter(self, variant: Variant) -> Drafter | None:
        """A new one, with a head that is loaded once."""
        config, target = self.config_of(*variant.settings(self.study)), self.engine.paged.decoder
        head = DRAFTERS[variant.drafter][1]
        if head is not None and head not in self.heads:
            self.heads[head] = pack_head(build_head(config, target.config), target)
        return build_drafter(config, target, self.engine.tokenizer, self.heads[head] if head is not None else None)

    def use(self, variant: Variant) -> None:
        """A new drafter, and the variant's policy: it keeps what it has learned about step times."""
        drafter = self.drafter(variant)
        self.engine.set_drafter(drafter)
        if variant not in self.policies:
            self.policies[variant] = self._make_policy(self.config_of(*variant.settings(self.study)), drafter)
        self.engine.policy = self.policies[variant]

    def _make_policy(self, config: Config, drafter: Drafter | None) -> SpeculationPolicy:
        paged, runner, method = self.engine.paged, self.engine.runner, config.speculation.method
        cost = relative_draft_cost(config, drafter, paged.decoder.config) if drafter is not None else 0.0
        model = drafting_model(config, drafter) if drafter is not None else None
        draft_costs = {model or method: cost} if cost or runner.drafts_on_device else {}
        return build_policy(config.speculation, lambda: measured_costs(paged, runner, config, draft_costs), model)

    def generate(self, variant: Variant, batches: list[list[Request]], batch_size: int, state: State) -> Generated:
        """One batch after another, with at most `batch_size` samples at a time."""
        engine, max_num_seqs = self.engine, self.engine.scheduler.max_num_seqs
        self.use(variant)
        engine.load_state_dict(state)
        engine.reset_prefix_cache()
        engine.drain_trace()
        engine.scheduler.max_num_seqs = batch_size
        before = engine.runner.num_captured
        try:
            self._synchronize()
            started = time.perf_counter()
            completions = [completion for batch in batches for completion in engine.generate(batch)]
            self._synchronize()
            seconds = time.perf_counter() - started
        finally:
            engine.scheduler.max_num_seqs = max_num_seqs
        return Generated(seconds, completions, engine.drain_trace(), engine.runner.num_captured - before)

    def timed(self, variant: Variant, work: Work, state: State) -> Generated:
        """Without captures, if possible."""
        found, _ = without_captures(
            self.engine.runner, lambda: self.generate(variant, work.batches, work.batch_size, state)
        )
        return found

    def _synchronize(self) -> None:
        if self.engine.paged.decoder.device.type == "cuda":
            torch.cuda.synchronize()

    @property
    def must_be_identical(self) -> bool:
        return self.engine.paged.decoder.ops.is_batch_invariant


def measure(study: Study, bench: Bench, work: Work, variants: list[Variant], done: set[tuple]) -> None:
    """The missing rounds of a cell, drafter by drafter: CUDA graphs are kept for a few drafters only."""
    longest_s, is_cold = study.reserve_s(RESERVE_S), True
    history = work.history() if work.history and any(v.drafter in WITH_HISTORY for v in variants) else None
    for drafter in dict.fromkeys(variant.drafter for variant in variants):
        own = [variant for variant in variants if variant.drafter == drafter]
        missing = missing_rounds(study, done, work.key, own)
        if not missing:
            continue
        study.check_time(longest_s)
        if is_cold:
            warm_up(study, bench, work, PLAIN, None)
            is_cold = False
        states = {
            variant: warm_up(study, bench, work, variant, history if drafter in WITH_HISTORY else None)
            for variant in dict.fromkeys(variant for _, variant in missing)
            if variant != PLAIN
        }
        with gc_frozen():
            for number in range(num_rounds(study)):
                todo = [variant for i, variant in missing if i == number]
                for pair in (todo[i : i + 2] for i in range(0, len(todo), 2)):
                    study.check_time(longest_s)
                    started = time.monotonic()
                    for row in audit_round(bench, work, pair, states, number):
                        save(study, bench, row)
                        done.add(identity(row))
                    longest_s = max(longest_s, 1.2 * (time.monotonic() - started))


def measured(study: Study) -> set[tuple]:
    return {identity(row) for row in measured_rows(study.results, study.part)}


def identity(row: Mapping[str, Any]) -> tuple:
    return tuple(row[key] for key in ("step", "batch_size", "drafter", "length", "round"))


def missing_rounds(study: Study, done: set[tuple], key: Key, variants: Sequence[Variant]) -> list[tuple[int, Variant]]:
    return [
        (number, variant) for number in range(num_rounds(study)) for variant in variants
        if identity(key | {"drafter": variant.drafter, "length": variant.length, "round": number}) not in done
    ]  # fmt: skip


def num_rounds(study: Study) -> int:
    return study.args.rounds or NUM_AUDITS


def warm_up(
    study: Study, bench: Bench, work: Work, variant: Variant, history: Mapping[str, np.ndarray] | None
) -> State:
    """Returns the speculation state that audits start from."""
    before = {} if history is None else {"drafter": history}
    started = time.perf_counter()
    found = bench.generate(variant, work.warm_up, work.batch_size, before)
    setup_s = time.perf_counter() - started - found.seconds  # to load a head, and to measure a cost table
    row = {"drafter": variant.drafter, "length": variant.length, "seconds": found.seconds, "setup_s": setup_s}
    study.append("cold", work.key | row | {"num_captured": found.num_captured})
    return {**bench.engine.state_dict(), **before}


def audit_round(
    bench: Bench, work: Work, pair: list[Variant], states: Mapping[Variant, State], number: int
) -> list[Row]:
    """Each of the pair next to plain decoding."""
    order = [pair[0], PLAIN, *pair[1:]]
    plain_at = 1
    if number % 2:
        order, plain_at = order[::-1], len(order) - 2
    found = [bench.timed(variant, work, states.get(variant, {})) for variant in order]
    plain = found[plain_at]
    if work.expected is None:
        work.expected = [completion.token_ids for completion in plain.completions]
    return [
        work.key | {"drafter": variant.drafter, "length": variant.length, "round": number, "is_first": at < plain_at}
        | compare(plain, found[at], work.expected)
        for at, variant in enumerate(order) if at != plain_at
    ]  # fmt: skip


def compare(plain: Generated, other: Generated, expected: Sequence[np.ndarray]) -> Row:
    drafts = summarise(other.completions, other.traces)
    both = [plain.completions, other.completions]
    return {
        "plain_s": plain.seconds,
        "speculative_s": other.seconds,
        "speedup": plain.seconds / other.seconds,
        "num_captured": plain.num_captured + other.num_captured,
        "num_samples": len(expected),
        "num_tokens": sum(map(len, expected)),
        "num_plain_steps": len(plain.traces),
        "identical": all(
            np.array_equal(completion.token_ids, tokens)
            for completions in both for completion, tokens in zip(completions, expected, strict=True)
        ),
        "same_logprobs": all(np.array_equal(a.logprobs, b.logprobs) for a, b in zip(*both, strict=True)),
        "tokens": digest(expected),
        "lengths": quantiles([len(tokens) for tokens in expected]),
        "truncated": statistics.mean(c.finish_reason == "length" for c in plain.completions),
        **{key: drafts[key] for key in ("num_steps", "mean_acceptance_length", "acceptance_rate_per_position",
                                        "num_drafts", "num_draft_tokens", "num_accepted_tokens")},
        "by_rows": by_rows(other.traces),
    }  # fmt: skip


def by_rows(traces: Sequence[StepTrace]) -> dict[str, dict[str, float]]:
    """Of steps that only decode, by number of rows (the next power of two): draft tokens per row, emitted tokens per
    row, median time and the time of all, whose mean says whether some steps take much longer."""
    parts: dict[int, list[StepTrace]] = {}
    for trace in traces:
        if trace.num_query_tokens - trace.num_draft_tokens == trace.num_rows:
            parts.setdefault(1 << (trace.num_rows - 1).bit_length(), []).append(trace)
    return {
        str(rows): {
            "steps": len(part),
            "drafted": round(sum(t.num_draft_tokens for t in part) / sum(t.num_rows for t in part), 3),
            "emitted": round(sum(t.num_emitted for t in part) / sum(t.num_rows for t in part), 3),
            "step_ms": round(1e3 * statistics.median(t.total_s for t in part), 3),
            "total_ms": round(1e3 * sum(t.total_s for t in part), 1),
        }
        for rows, part in sorted(parts.items())
    }


def quantiles(lengths: Sequence[int]) -> list[int]:
    return [round(x) for x in np.quantile(lengths, QUANTILES)]


def digest(tokens: Sequence[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(each.astype(np.int32).tobytes() + b"|" for each in tokens)).hexdigest()[:16]


def save(study: Study, bench: Bench, row: Row) -> None:
    failed = bench.must_be_identical and not row["identical"]
    study.append("audit", row | {"failed": failed})
    print(
        f"step {row['step']}, batch size {row['batch_size']}, {row['drafter']} {row['length']}: {row['speedup']:.2f}x, "
        f"acceptance length {row['mean_acceptance_length']:.2f}, identical {row['identical']}",
        flush=True,
    )
    if failed:
        raise ValueError(
            f"{row['drafter']} {row['length']}: other tokens than expected, though the kernels are batch-invariant. "
            "This is a bug, or the device is faulty"
        )
    other = {each["tokens"] for each in measured_rows(study.results, study.part) if same_work(each, row)}
    if len(other) > 1:
        raise ValueError(f"step {row['step']}: other samples than in earlier audits of this cell; choose another --out")


def same_work(a: Row, b: Row) -> bool:
    return all(a[key] == b[key] for key in ("step", "batch_size", "num_samples"))
