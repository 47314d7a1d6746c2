"""`paceline sweep`: the speed-up of drafters and draft lengths, for a model, its prompts, batch sizes and temperatures.

Each setting is measured against plain decoding in the same round, with the same engine, kernels, prompts and noise.
Under rule `coupled` both emit the same tokens, so the ratio of their times is the speed-up. Every case is checked for
identical tokens, and one with different tokens is never recommended. Every run computes its prompts again.

A round runs plain decoding and every setting once. Every second repeat reverses the order, so that a machine that slows
down affects all settings. Each repeat draws new samples. History drafters are measured cold (the history is the samples
of the same prompt in the same run) and warm (it also has as many other samples of each prompt). Greedy samples of a
prompt are identical: at temperature 0 there is one sample per prompt, of more prompts, and no warm history.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np

from paceline.bench.common import check_choices, check_given, check_numbers, decode_steps
from paceline.build.drafter import build_drafter, build_head, pack_head
from paceline.build.engine import build_engine
from paceline.build.task import build_task
from paceline.chat.messages import Prompt
from paceline.chat.template import encode
from paceline.config import HEAD_METHODS, Config, SpeculationSection
from paceline.engine.engine import LocalEngine
from paceline.speculation.batch import Drafter
from paceline.speculation.metrics import summarise
from paceline.speculation.policy import StaticPolicy
from paceline.types import Completion, Request, StepTrace, noise_key

METHODS: tuple[str, ...] = get_args(SpeculationSection.model_fields["method"].annotation)
HISTORY_DRAFTERS = ("suffix", "hybrid")
MIN_SPEEDUP = 1.02  # no setting with a smaller speed-up is recommended
MAX_VARIATION = 1.15  # fastest over slowest plain decoding; a larger ratio means that the machine was busy
COLUMNS = {  # short, so that the table fits a narrow terminal
    "temperature": "T",
    "batch": "batch",
    "name": "drafter",
    "num_speculative_tokens": "k",
    "mean_acceptance_length": "accept",
    "tokens_per_step": "per step",
    "step_cost": "cost",
    "draft_share": "draft",
    "speedup": "speed-up",
    "identical": "same",
}
BEST_COLUMNS = {
    "temperature": "T",
    "batch": "batch",
    "name": "best",
    "num_speculative_tokens": "k",
    "speedup": "speed-up",
    "note": "",
}


@dataclass(frozen=True, slots=True)
class Settings:
    drafters: tuple[str, ...]
    draft_lengths: tuple[int, ...] = (1, 3, 5, 7)
    batches: tuple[int, ...] = (1, 4, 16)
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    num_prompts: int = 4
    num_samples: int = 4
    max_tokens: int = 64
    repeats: int = 3
    config: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        check_choices(METHODS, drafters=self.drafters)
        if "draft_model" in self.drafters and self.config.speculation.draft_model is None:
            raise ValueError("--drafters draft_model: needs a model; set speculation.draft_model=NAME (or layers:N)")
        check_given(temperature=self.temperatures)
        check_numbers(1, 256, k=self.draft_lengths)
        check_numbers(1, batch=self.batches, num_prompts=self.num_prompts, samples=self.num_samples)
        check_numbers(1, max_tokens=self.max_tokens, repeats=self.repeats)
        for temperature in self.temperatures:
            if not (temperature == 0 or 1e-5 <= temperature < float("inf")):
                raise ValueError(f"--temperature {temperature}: must be 0 (greedy) or a finite number >= 1e-5")

    @property
    def drafting(self) -> tuple[str, ...]:
        return tuple(drafter for drafter in self.drafters if drafter != "none")

    @property
    def claims_identity(self) -> bool:
        return self.config.speculation.rule == "coupled"

    def with_method(self, method: str) -> Config:
        return self.config.changed(speculation={"method": method})


@dataclass(frozen=True, slots=True)
class Case:
    temperature: float
    batch: int
    drafter: str = "none"
    k: int = 0
    history: str | None = None  # "cold" or "warm", for history drafters

    @property
    def name(self) -> str:
        return f"{self.drafter} {self.history}" if self.history else self.drafter

    def __str__(self) -> str:
        setting = f"{self.name} k={self.k}" if self.k else "plain"
        return f"{setting}, batch {self.batch}, T={self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a case."""

    seconds: float
    completions: list[Completion]
    steps: list[StepTrace]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(c.token_ids) for c in self.completions) / self.seconds


Progress = Callable[[str, float, float | None], None]
Round = dict[str, Any]  # figures of one run, see `compare`
FIGURES = ("tokens_per_s", "speedup", "tokens_per_step", "step_ms", "step_cost", "draft_share")
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def compare(run: Run, plain: Run, batch: int) -> Round:
    """A run compared with plain decoding of the same requests. Step figures use only steps with all rows and no
    prefill, and are None if there are none. The speed-up is about tokens_per_step / step_cost."""
    steps, plain_steps = decode_steps(run.steps, batch), decode_steps(plain.steps, batch)
    step_s = statistics.fmean(t.total_s for t in steps) if steps else None
    plain_step_s = statistics.fmean(t.total_s for t in plain_steps) if plain_steps else None
    metrics = summarise(run.completions, run.steps)
    return {
        "identical": all(
            np.array_equal(a.token_ids, b.token_ids) for a, b in zip(run.completions, plain.completions, strict=True)
        ),
        "tokens_per_s": run.tokens_per_s,
        "speedup": run.tokens_per_s / plain.tokens_per_s,
        # Emitted tokens per row and step.
        "tokens_per_step": sum(t.num_emitted for t in steps) / (len(steps) * batch) if steps else None,
        "step_ms": step_s * 1e3 if step_s else None,
        "step_cost": step_s / plain_step_s if step_s and plain_step_s else None,
        "draft_share": round(sum(t.draft_s for t in steps) / sum(t.total_s for t in steps), 4) if steps else None,
        **{name: metrics[name] for name in COUNTS},
    }


def task_prompts(config: Config, num: int) -> list[Prompt]:
    """The first prompts of the config's task, held-out ones first: a head that was trained on the task has not seen
    them. (The shipped head has seen most prompts of the quickstart, because there are few one-digit sums.)"""
    config.only_task("paceline sweep")
    task = build_task(config)
    by_name = {problem.name: problem.prompt for problem in [*task.held_out, *task.train]}
    return list(by_name.values())[:num]


def open_sweep(settings: Settings, prompts: Sequence[Prompt]) -> Sweep:
    """Build the sweep with one engine for all cases; the drafter is replaced for each run."""
    config = settings.with_method("none")
    check_requests(settings, len(prompts))
    engine = build_engine(config.changed(engine={"max_num_seqs": max(settings.batches)}))
    chat = config.only_task("paceline sweep").section.chat
    ids = [encode(engine.tokenizer, prompt, chat) for prompt in prompts]

    target, head = engine.paged.decoder, None
    if set(HEAD_METHODS) & set(settings.drafters):
        head = pack_head(build_head(config, target.config), target)

    def make_drafter(method: str) -> Drafter | None:
        return build_drafter(settings.with_method(method), target, engine.tokenizer, head)

    return Sweep(settings, engine, make_drafter, ids)


def check_requests(settings: Settings, num_prompts: int) -> None:
    """Check that there are enough requests to fill the largest batch."""
    batch, samples = max(settings.batches), settings.num_samples
    for temperature in settings.temperatures:
        num = min(settings.num_prompts, num_prompts) * samples
        why = f"{min(settings.num_prompts, num_prompts)} prompts with {samples} samples each are {num} sequences"
        if temperature == 0:
            num = min(settings.num_prompts * samples, num_prompts)
            why = f"at temperature 0 all samples of a prompt are identical, so there is one of each of {num} prompts"
        if num < batch:
            raise ValueError(f"--batch {batch}: {why}; give more prompts (--num-prompts), or lower --batch")


class Sweep:
    """Keeps the results measured so far, so that an interrupted sweep can report them. `make_drafter` returns a new
    drafter of a method, so that no run uses the history of another."""

    def __init__(
        self,
        settings: Settings,
        engine: LocalEngine,
        make_drafter: Callable[[str], Drafter | None],
        prompts: Sequence[tuple[int, ...]],
    ) -> None:
        self.settings, self.engine, self.make_drafter, self.prompts = settings, engine, make_drafter, list(prompts)
        self.rounds: dict[Case, list[Round]] = {}
        self._warm_runs: dict[Case, Run] = {}  # plain decoding in the warm-up
        self._histories: dict[tuple[str, float], Mapping[str, np.ndarray]] = {}  # state dicts of warm drafters

    def cases(self) -> list[Case]:
        return [case for block in self._blocks() for case in block]

    def _blocks(self) -> Iterator[list[Case]]:
        """Groups of cases that are compared with each other, plain decoding first."""
        s = self.settings
        for temperature in s.temperatures:
            for batch in s.batches:
                block = [Case(temperature, batch)]
                for drafter in s.drafting:
                    histories = ("cold", "warm") if drafter in HISTORY_DRAFTERS else (None,)
                    for history in histories if temperature > 0 else histories[:1]:
                        block += [Case(temperature, batch, drafter, k, history) for k in s.draft_lengths]
                yield block

    def run(self, progress: Progress = lambda what, done_s, total_s: None) -> None:
        """`progress` is called before each run with its name, and with the estimated seconds that are done and that
        all runs take (None during the warm-up)."""
        self._warm_up(progress)
        # If each setting takes as long as plain decoding did in the warm-up.
        round_s = sum(len(block) * self._warm_runs[block[0]].seconds for block in self._blocks())
        done_s, total_s = 0.0, self.settings.repeats * round_s
        for repeat in range(self.settings.repeats):
            for block in self._blocks():
                runs: dict[Case, Run] = {}
                try:
                    for case in block if repeat % 2 == 0 else reversed(block):
                        progress(f"{case}, repeat {repeat + 1}", done_s, total_s)
                        requests = self._requests(case.temperature, repeat)
                        runs[case] = self._run(case, requests, self._new_drafter(case))
                        done_s += self._warm_runs[block[0]].seconds
                finally:  # after Ctrl-C, keep the cases that can be compared
                    self._record(runs, block[0])

    def _warm_up(self, progress: Progress) -> None:
        """Run every setting once without recording results. This allocates memory, shows errors at once, and fills
        the warm histories."""
        s = self.settings
        batch, k = max(s.batches), max(s.draft_lengths)
        for name in s.drafting:
            progress(f"warm-up, {name}", 0.0, None)
            case = Case(max(s.temperatures), batch, name, k)
            self._run(case, self._requests(case.temperature, 0)[:batch], self._new_drafter(case))
        for temperature in s.temperatures:
            for size in s.batches:
                progress(f"warm-up, batch {size}, T={temperature:g}", 0.0, None)
                case = Case(temperature, size)
                self._warm_runs[case] = self._run(case, self._requests(temperature, 0), None)
            for name in s.drafting:
                if name in HISTORY_DRAFTERS and temperature > 0 and (drafter := self.make_drafter(name)) is not None:
                    progress(f"writing history, {name}, T={temperature:g}", 0.0, None)
                    self._run(Case(temperature, batch, name, k), self._requests(temperature, "history"), drafter)
                    self._histories[name, temperature] = drafter.state_dict()

    def _requests(self, temperature: float, repeat: int | str) -> list[Request]:
        s = self.settings
        num_samples = s.num_samples if temperature > 0 else 1
        sampling = replace(s.config.sampling.params(), temperature=temperature, max_tokens=s.max_tokens)
        return [
            Request(i * num_samples + j, ids, sampling, noise_key(s.config.sampling.seed, repeat, i, j), f"prompt {i}")
            for i, ids in enumerate(self.prompts[: s.num_prompts * s.num_samples // num_samples])
            for j in range(num_samples)
        ]

    def _new_drafter(self, case: Case) -> Drafter | None:
        drafter = self.make_drafter(case.drafter)
        if drafter is not None and case.history == "warm":
            drafter.load_state_dict(self._histories[case.drafter, case.temperature])
        return drafter

    def _run(self, case: Case, requests: Sequence[Request], drafter: Drafter | None) -> Run:
        engine = self.engine
        engine.set_drafter(drafter, StaticPolicy(case.k, self.settings.config.speculation.min_confidence))
        engine.scheduler.max_num_seqs = case.batch
        engine.paged.pool.reset_prefix_cache()
        engine.drain_trace()
        started = time.perf_counter()
        completions = engine.generate(requests)
        return Run(time.perf_counter() - started, completions, engine.drain_trace())

    def _record(self, runs: Mapping[Case, Run], plain: Case) -> None:
        if plain in runs:
            for case, run in runs.items():
                self.rounds.setdefault(case, []).append(compare(run, runs[plain], case.batch))

    def close(self) -> None:
        self.engine.set_drafter(None)
        self.engine.close()

    # -- results ------------------------------------------------------------------------------------------------------

    def differing(self) -> list[Case]:
        """The cases that must emit the same tokens as plain decoding, and did not."""
        if not self.settings.claims_identity:
            return []
        return [case for case in self.cases() if not all(r["identical"] for r in self.rounds.get(case, []))]

    def unsteady(self) -> dict[Case, tuple[float, float]]:
        """Cases in which the speed of plain decoding varied: its lowest and highest tokens per second."""
        rates = {
            case: [run.tokens_per_s, *(r["tokens_per_s"] for r in self.rounds[case])]
            for case, run in self._warm_runs.items()
            if case in self.rounds
        }
        return {case: (min(r), max(r)) for case, r in rates.items() if max(r) > MAX_VARIATION * min(r)}

    def rows(self) -> list[dict[str, Any]]:
        """One per case, in order; results are None if the case was not measured."""
        return [self._row(case) for case in self.cases()]

    def _row(self, case: Case) -> dict[str, Any]:
        rounds = self.rounds.get(case, [])
        counts = {name: sum(r[name] for r in rounds) for name in COUNTS}
        acceptance = 1 + counts["num_accepted_tokens"] / max(counts["num_drafts"], 1)
        return {
            "temperature": case.temperature,
            "batch": case.batch,
            "drafter": case.drafter,
            "history": case.history,
            "name": case.name,
            "num_speculative_tokens": case.k,
            "mean_acceptance_length": acceptance if rounds else None,
            **{name: median([r[name] for r in rounds]) for name in FIGURES},
            "identical": all(r["identical"] for r in rounds) if rounds and self.settings.claims_identity else None,
            **counts,
            "num_rounds": len(rounds),
        }


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def best_settings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The fastest setting of each temperature and batch size; drafter "none" if no setting is faster than plain."""
    blocks: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["speedup"] is not None:
            blocks.setdefault((row["temperature"], row["batch"]), []).append(row)
    return [_best(*where, block) for where, block in blocks.items()]


def _best(temperature: float, batch: int, block: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    candidates = [row for row in block if row["drafter"] != "none" and row["identical"] is not False]
    best: Mapping[str, Any] = {"drafter": "none", "history": None, "name": "none", "num_speculative_tokens": 0}
    speedup = 1.0
    note = "no drafter has valid results"
    if candidates:
        fastest = max(candidates, key=lambda row: row["speedup"])
        if fastest["speedup"] > MIN_SPEEDUP:
            best, speedup, note = fastest, fastest["speedup"], ""
        else:
            note = f"nothing gains more than {MIN_SPEEDUP - 1:.0%}; nearest: {fastest['name']} "
            note += f"k={fastest['num_speculative_tokens']}, {fastest['speedup']:.2f}x"
    names = ("drafter", "history", "name", "num_speculative_tokens")
    chosen = {name: best[name] for name in names}
    return {"temperature": temperature, "batch": batch, **chosen, "speedup": speedup, "note": note}
