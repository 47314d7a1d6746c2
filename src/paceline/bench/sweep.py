"""`paceline sweep`: which drafter and which draft length pay, for a model, its prompts, a batch size and a temperature.

Always: a setting is measured against plain decoding by the same engine, with the same kernels, prompts and noise, in
the same round. Under the `coupled` rule both emit the same tokens, so the ratio of their times is the speed-up; every
cell is checked for it, and one with other tokens is never recommended. Prompts are computed anew in every run.

A round visits plain decoding and every setting in turn, there and back again from repeat to repeat, so that a machine
that slows down slows down everybody. A new repeat draws new samples. Drafters that learn from history are measured
cold (they know what is said in this run, by the samples of the same prompt) and warm (they have read as many other
samples of each prompt before). Greedy samples of a prompt are all alike: at temperature 0 there is one of each, of more
prompts, and no warm history.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from paceline import __version__
from paceline.config import Config, SpeculationSection
from paceline.speculation.metrics import summarise
from paceline.speculation.policy import StaticPolicy
from paceline.tasks.prompt import encode
from paceline.tasks.task import Prompt
from paceline.types import Completion, Request, StepTrace, noise_key

if TYPE_CHECKING:
    from paceline.engine.engine import LocalEngine
    from paceline.speculation.batch import Drafter

METHODS: tuple[str, ...] = get_args(SpeculationSection.model_fields["method"].annotation)
LEARNING = ("suffix", "hybrid")  # these draft from history
WORTH = 1.02  # a smaller speed-up is not worth a setting
STEADY = 1.15  # plain decoding that is so much faster at one time than at another says: the machine was busy
COLUMNS = {  # short, so that it fits a narrow terminal
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
        for drafter in self.drafters:
            if drafter not in METHODS:
                raise ValueError(f"--drafters {drafter!r}: not one of {', '.join(METHODS)}")
        if "draft_model" in self.drafters and self.config.speculation.draft_model is None:
            raise ValueError("--drafters draft_model: needs a model; set speculation.draft_model=NAME (or layers:N)")
        for option, values in (
            ("drafters", self.drafters),
            ("k", self.draft_lengths),
            ("batch", self.batches),
            ("temperature", self.temperatures),
        ):
            if not values:
                raise ValueError(f"--{option}: give at least one")
        for option, low, needed in (
            ("k", min(self.draft_lengths), "from 1 to 256"),
            ("batch", min(self.batches), "at least 1"),
            ("num-prompts", self.num_prompts, "at least 1"),
            ("samples", self.num_samples, "at least 1"),
            ("max-tokens", self.max_tokens, "at least 1"),
            ("repeats", self.repeats, "at least 1"),
        ):
            if low < 1:
                raise ValueError(f"--{option} {low}: must be {needed}")
        if max(self.draft_lengths) > 256:
            raise ValueError(f"--k {max(self.draft_lengths)}: must be from 1 to 256")
        for temperature in self.temperatures:
            if not (temperature == 0 or 1e-5 <= temperature < float("inf")):
                raise ValueError(f"--temperature {temperature}: must be 0 (greedy) or a finite number >= 1e-5")

    @property
    def drafting(self) -> tuple[str, ...]:
        return tuple(drafter for drafter in self.drafters if drafter != "none")

    @property
    def claims_identity(self) -> bool:
        return self.config.speculation.rule == "coupled"

    @property
    def most_prompts(self) -> int:
        """How many prompts there is use for."""
        return self.num_prompts * (self.num_samples if 0 in self.temperatures else 1)

    def with_method(self, method: str) -> Config:
        speculation = self.config.speculation.model_copy(update={"method": method})
        return self.config.model_copy(update={"speculation": speculation})


@dataclass(frozen=True, slots=True)
class Case:
    temperature: float
    batch: int
    drafter: str = "none"
    k: int = 0
    history: str | None = None  # "cold" or "warm", of drafters that learn

    @property
    def name(self) -> str:
        return f"{self.drafter} {self.history}" if self.history else self.drafter

    def __str__(self) -> str:
        setting = f"{self.name} k={self.k}" if self.k else "plain"
        return f"{setting}, batch {self.batch}, T={self.temperature:g}"


@dataclass(frozen=True, slots=True)
class Run:
    """One case, once."""

    seconds: float
    completions: list[Completion]
    steps: list[StepTrace]

    @property
    def tokens_per_s(self) -> float:
        return sum(len(c.token_ids) for c in self.completions) / self.seconds

    def emits_what(self, other: Run) -> bool:
        pairs = zip(self.completions, other.completions, strict=True)
        return all(np.array_equal(a.token_ids, b.token_ids) for a, b in pairs)

    def decoding(self, batch: int) -> list[StepTrace]:
        """The steps that had all rows and no prefill."""
        return [t for t in self.steps if t.num_rows == batch and t.num_query_tokens == batch + t.num_draft_tokens]


@dataclass(frozen=True, slots=True)
class Round:
    """What became of a case beside plain decoding of the same requests. Of steps: only those with all rows and no
    prefill, where there are any. The speed-up is about tokens_per_step / step_cost."""

    identical: bool
    tokens_per_s: float
    speedup: float
    tokens_per_step: float | None  # what a row gains in a step, drafted for or not
    step_ms: float | None
    step_cost: float | None  # mean time of a step / of a plain step
    draft_share: float | None  # of a step's time
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


Progress = Callable[[str, float, float | None], None]
FIGURES = ("tokens_per_s", "speedup", "tokens_per_step", "step_ms", "step_cost", "draft_share")
COUNTS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def compare(run: Run, plain: Run, batch: int) -> Round:
    steps, plain_steps = run.decoding(batch), plain.decoding(batch)
    step_s = statistics.fmean(t.total_s for t in steps) if steps else None
    plain_step_s = statistics.fmean(t.total_s for t in plain_steps) if plain_steps else None
    metrics = summarise(run.completions, run.steps)
    return Round(
        identical=run.emits_what(plain),
        tokens_per_s=run.tokens_per_s,
        speedup=run.tokens_per_s / plain.tokens_per_s,
        tokens_per_step=sum(t.num_emitted for t in steps) / (len(steps) * batch) if steps else None,
        step_ms=step_s * 1e3 if step_s else None,
        step_cost=step_s / plain_step_s if step_s and plain_step_s else None,
        draft_share=round(sum(t.draft_s for t in steps) / sum(t.total_s for t in steps), 4) if steps else None,
        **{name: metrics[name] for name in COUNTS},
    )


def task_prompts(config: Config, num: int) -> list[Prompt]:
    """The first prompts of the config's task; held-out ones first, which a head trained on that task has not seen. (The
    shipped head has seen most of the quickstart's: there are few one-digit sums.)"""
    from paceline.build import build_task

    task = build_task(config)
    by_name = {problem.name: problem.prompt for problem in [*task.held_out, *task.train]}
    return list(by_name.values())[:num]


def open_sweep(settings: Settings, prompts: Sequence[Prompt]) -> Sweep:
    """One engine for all cells; drafters come and go."""
    from paceline.build import build_drafter, build_engine, build_head, pack_head

    config = settings.with_method("none")
    check_requests(settings, len(prompts))
    rows = config.engine.model_copy(update={"max_num_seqs": max(settings.batches)})
    engine = build_engine(config.model_copy(update={"engine": rows}))
    ids = [encode(engine.tokenizer, prompt, config.task.chat) for prompt in prompts]

    target, head = engine.paged.decoder, None
    if {"eagle3", "hybrid"} & set(settings.drafters):
        head = pack_head(build_head(config, target.config), target)

    def make_drafter(method: str) -> Drafter | None:
        return build_drafter(settings.with_method(method), target, engine.tokenizer, head)

    return Sweep(settings, engine, make_drafter, ids)


def check_requests(settings: Settings, num_prompts: int) -> None:
    """Enough of them to fill the largest batch?"""
    batch, samples = max(settings.batches), settings.num_samples
    for temperature in settings.temperatures:
        num = min(settings.num_prompts, num_prompts) * samples
        why = f"{min(settings.num_prompts, num_prompts)} prompts with {samples} samples each are {num} sequences"
        if temperature == 0:
            num = min(settings.num_prompts * samples, num_prompts)
            why = f"at temperature 0 samples are all alike, so it takes one of each of {num} prompts"
        if num < batch:
            raise ValueError(f"--batch {batch}: {why}; give more prompts (--num-prompts), or lower --batch")


class Sweep:
    """Holds what was measured so far, so that an interrupted sweep still has something to show. `make_drafter` gives
    a fresh drafter of a method: no run profits from what another one drafted."""

    def __init__(
        self,
        settings: Settings,
        engine: LocalEngine,
        make_drafter: Callable[[str], Drafter | None],
        prompts: Sequence[tuple[int, ...]],
    ) -> None:
        self.settings, self.engine, self.make_drafter, self.prompts = settings, engine, make_drafter, list(prompts)
        self.rounds: dict[Case, list[Round]] = {}
        self._warm_runs: dict[Case, Run] = {}  # plain decoding, before anything was measured
        self._known: dict[tuple[str, float], Mapping[str, np.ndarray]] = {}  # warm history

    def cases(self) -> list[Case]:
        return [case for block in self._blocks() for case in block]

    def _blocks(self) -> Iterator[list[Case]]:
        """Cases that are compared with each other, the plain one first."""
        s = self.settings
        for temperature in s.temperatures:
            for batch in s.batches:
                block = [Case(temperature, batch)]
                for drafter in s.drafting:
                    histories = ("cold", "warm") if drafter in LEARNING else (None,)
                    for history in histories if temperature > 0 else histories[:1]:
                        block += [Case(temperature, batch, drafter, k, history) for k in s.draft_lengths]
                yield block

    def _estimate(self) -> float:
        """Seconds for everything, if a setting takes as long as plain decoding; known once warm."""
        return self.settings.repeats * sum(len(b) * self._warm_runs[b[0]].seconds for b in self._blocks())

    def run(self, progress: Progress = lambda what, done_s, total_s: None) -> None:
        """`progress` hears what comes next, how many seconds' worth is done, and of how many: None while warming up."""
        self._warm_up(progress)
        done_s, total_s = 0.0, self._estimate()
        for repeat in range(self.settings.repeats):
            for block in self._blocks():
                runs: dict[Case, Run] = {}
                try:
                    for case in block if repeat % 2 == 0 else reversed(block):
                        progress(f"{case}, repeat {repeat + 1}", done_s, total_s)
                        requests = self._requests(case.temperature, repeat)
                        runs[case] = self._run(case, requests, self._fresh(case))
                        done_s += self._warm_runs[block[0]].seconds
                finally:  # Ctrl-C keeps the cells that can be compared
                    self._file(runs, block[0])

    def _warm_up(self, progress: Progress) -> None:
        """Everything once, unmeasured: memory is touched, mistakes show at once, and histories are written."""
        s = self.settings
        batch, k = max(s.batches), max(s.draft_lengths)
        for name in s.drafting:
            progress(f"warm-up, {name}", 0.0, None)
            case = Case(max(s.temperatures), batch, name, k)
            self._run(case, self._requests(case.temperature, 0)[:batch], self._fresh(case))
        for temperature in s.temperatures:
            for size in s.batches:
                progress(f"warm-up, batch {size}, T={temperature:g}", 0.0, None)
                case = Case(temperature, size)
                self._warm_runs[case] = self._run(case, self._requests(temperature, 0), None)
            for name in s.drafting:
                if name in LEARNING and temperature > 0 and (drafter := self.make_drafter(name)) is not None:
                    progress(f"writing history, {name}, T={temperature:g}", 0.0, None)
                    self._run(Case(temperature, batch, name, k), self._requests(temperature, "history"), drafter)
                    self._known[name, temperature] = drafter.state()

    def _requests(self, temperature: float, repeat: int | str) -> list[Request]:
        s = self.settings
        num_samples = s.num_samples if temperature > 0 else 1
        sampling = replace(s.config.sampling.params(), temperature=temperature, max_tokens=s.max_tokens)
        return [
            Request(i * num_samples + j, ids, sampling, noise_key(s.config.sampling.seed, repeat, i, j), f"prompt {i}")
            for i, ids in enumerate(self.prompts[: s.num_prompts * s.num_samples // num_samples])
            for j in range(num_samples)
        ]

    def _fresh(self, case: Case) -> Drafter | None:
        drafter = self.make_drafter(case.drafter)
        if drafter is not None and case.history == "warm":
            drafter.restore(self._known[case.drafter, case.temperature])
        return drafter

    def _run(self, case: Case, requests: Sequence[Request], drafter: Drafter | None) -> Run:
        engine = self.engine
        engine.set_drafter(drafter, StaticPolicy(case.k, self.settings.config.speculation.min_confidence))
        engine.scheduler.max_num_seqs = case.batch
        engine.paged.pool.forget_all()
        engine.drain_trace()
        started = time.perf_counter()
        completions = engine.generate(requests)
        return Run(time.perf_counter() - started, completions, engine.drain_trace())

    def _file(self, runs: Mapping[Case, Run], plain: Case) -> None:
        if plain in runs:
            for case, run in runs.items():
                self.rounds.setdefault(case, []).append(compare(run, runs[plain], case.batch))

    def close(self) -> None:
        self.engine.set_drafter(None)
        self.engine.close()

    # -- results ------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What was asked for, and of which machine."""
        return {
            **{f.name: getattr(self.settings, f.name) for f in fields(self.settings) if f.name != "config"},
            "config": self.settings.config.model_dump(mode="json"),
            "machine": {"cpu": platform.machine(), "num_cores": os.cpu_count(), "system": platform.system()},
            "version": __version__,
        }

    def differing(self) -> list[Case]:
        """The cells that emitted other tokens than plain decoding although they must not."""
        if not self.settings.claims_identity:
            return []
        return [case for case in self.cases() if not all(r.identical for r in self.rounds.get(case, []))]

    def unsteady(self) -> dict[Case, tuple[float, float]]:
        """Where plain decoding was not equally fast each time: its lowest and highest tokens per second."""
        rates = {
            case: [run.tokens_per_s, *(r.tokens_per_s for r in self.rounds[case])]
            for case, run in self._warm_runs.items()
            if case in self.rounds
        }
        return {case: (min(r), max(r)) for case, r in rates.items() if max(r) > STEADY * min(r)}

    def rows(self) -> list[dict[str, Any]]:
        """One per case, in order; figures are None where nothing was measured."""
        return [self._row(case) for case in self.cases()]

    def _row(self, case: Case) -> dict[str, Any]:
        rounds = self.rounds.get(case, [])
        counts = {name: sum(getattr(r, name) for r in rounds) for name in COUNTS}
        acceptance = 1 + counts["num_accepted_tokens"] / max(counts["num_drafts"], 1)
        return {
            "temperature": case.temperature,
            "batch": case.batch,
            "drafter": case.drafter,
            "history": case.history,
            "name": case.name,
            "num_speculative_tokens": case.k,
            "mean_acceptance_length": acceptance if rounds else None,
            **{name: median([getattr(r, name) for r in rounds]) for name in FIGURES},
            "identical": all(r.identical for r in rounds) if rounds and self.settings.claims_identity else None,
            **counts,
            "num_rounds": len(rounds),
        }


def median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def best_settings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each temperature and batch size the fastest setting, or none where nothing pays."""
    blocks: dict[tuple[float, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["speedup"] is not None:
            blocks.setdefault((row["temperature"], row["batch"]), []).append(row)
    return [_best(*where, block) for where, block in blocks.items()]


def _best(temperature: float, batch: int, block: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rivals = [row for row in block if row["drafter"] != "none" and row["identical"] is not False]
    best: Mapping[str, Any] = {"drafter": "none", "history": None, "name": "none", "num_speculative_tokens": 0}
    speedup = 1.0
    note = "no drafter could be judged"
    if rivals:
        fastest = max(rivals, key=lambda row: row["speedup"])
        if fastest["speedup"] > WORTH:
            best, speedup, note = fastest, fastest["speedup"], ""
        else:
            note = f"nothing gains more than {WORTH - 1:.0%}; nearest: {fastest['name']} "
            note += f"k={fastest['num_speculative_tokens']}, {fastest['speedup']:.2f}x"
    names = ("drafter", "history", "name", "num_speculative_tokens")
    chosen = {name: best[name] for name in names}
    return {"temperature": temperature, "batch": batch, **chosen, "speedup": speedup, "note": note}
