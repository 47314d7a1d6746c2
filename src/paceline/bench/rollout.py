"""`paceline bench rollout`: tokens per second of models × engines × modes × batch sizes, under equal conditions.

Each engine runs in a child process with the same number of threads. All engines get the same token ids at the same
temperature and generate exactly max_tokens tokens (EOS is ignored). A repeat runs every case once. Each repeat starts
with a different case, so that a machine that slows down affects all cases. Results are medians over repeats, after one
warm-up. Prefix caching is off in every engine and every repeat has new prompts, so no engine has a cached prefill or a
history to draft from. A policy's cost table is measured when its engine is loaded, before any timed round. With
num_generations > 1 a round has groups of samples of one prompt, as in RL: then drafters see the tokens of their own
group (never of an earlier round), and prefix caching is on in engines that have it.
"""

from __future__ import annotations

import statistics
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

from paceline.bench.common import check_choices, check_given, check_numbers, describe
from paceline.bench.process import WorkerError, WorkerProcess, available_memory
from paceline.build.config import make_config
from paceline.chat.messages import Prompt
from paceline.chat.template import encode
from paceline.cluster import vllm_python
from paceline.config import HEAD_METHODS, Config, SpeculationSection
from paceline.model.head_files import resolve_head
from paceline.model.store import load_tokenizer, resolve
from paceline.model.weights import read_config

ENGINES = ("paceline", "hf", "vllm")
METHODS = tuple(
    "plain" if name == "none" else name for name in get_args(SpeculationSection.model_fields["method"].annotation)
)
POLICIES: tuple[str, ...] = get_args(SpeculationSection.model_fields["policy"].annotation)
COLUMNS = {
    "model": "model",
    "engine": "engine",
    "mode": "mode",
    "batch": "batch",
    "num_speculative_tokens": "k",
    "tokens_per_s": "tokens/s",
    "speedup": "speed-up",
    "mean_acceptance_length": "accept len",
    "step_ms": "step ms",
    "step_cost": "step cost",
}


@dataclass(frozen=True, slots=True)
class Settings:
    models: tuple[str, ...]
    engines: tuple[str, ...] = ENGINES
    modes: tuple[str, ...] = ("plain",)
    draft_lengths: tuple[int, ...] = (4,)
    batches: tuple[int, ...] = (1, 4, 16)
    max_tokens: int = 64
    temperature: float = 1.0
    repeats: int = 3
    threads: int = 2
    num_generations: int = 1
    seed: int = 0
    config: Config = field(default_factory=Config)  # dtype, device and paceline's own settings

    def __post_init__(self) -> None:
        check_given(model=self.models, modes=self.modes)
        check_choices(ENGINES, engines=self.engines)
        for mode in self.modes:
            _check_mode(mode)
        check_numbers(1, 256, k=self.draft_lengths)
        check_numbers(1, batch=self.batches, max_tokens=self.max_tokens, repeats=self.repeats, threads=self.threads)
        check_numbers(1, num_generations=self.num_generations)
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"--temperature {self.temperature}: must be a finite number >= 0 (0 is greedy)")
        if self.num_generations > 1 and any(batch % self.num_generations for batch in self.batches):
            raise ValueError(
                f"--num-generations {self.num_generations}: every batch size of {self.batches} must be a multiple of it"
            )
        if "paceline" in self.engines:
            for mode in self.modes:
                self.with_mode(mode, self.draft_lengths[0])

    def with_mode(self, mode: str, k: int) -> Config:
        """The config of a mode. A mode without a policy uses that of `config`."""
        method, _, policy = mode.partition("+")
        tree = self.config.model_dump()
        tree["speculation"] |= {"method": "none" if method == "plain" else method, "num_speculative_tokens": k}
        if policy:
            tree["speculation"]["policy"] = policy
        try:
            return make_config(tree)
        except ValueError as error:
            raise ValueError(f"--modes {mode}: {error}") from None


def _check_mode(mode: str) -> None:
    method, plus, policy = mode.partition("+")
    if method in METHODS and (not plus or (policy in POLICIES and method != "plain")):
        return
    example = f"a policy needs a method, such as suffix+{method}. " if method in POLICIES else ""
    raise ValueError(
        f"--modes {mode!r}: {example}A mode is one of {', '.join(METHODS)}; all but plain also with a policy of "
        f"{', '.join(POLICIES)}, such as suffix+auto or hybrid+das"
    )


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    engine: str
    mode: str  # a method, or "method+policy"
    k: int  # 0 in plain mode
    batch: int

    @property
    def method(self) -> str:
        return self.mode.partition("+")[0]

    @property
    def policy(self) -> str:
        """The mode's policy, or ""."""
        return self.mode.partition("+")[2]


class Bench:
    """Keeps the results measured so far, so that an interrupted bench can report them."""

    def __init__(self, settings: Settings, prompts: Sequence[Prompt]) -> None:
        self.settings, self.prompts = settings, list(prompts)
        self.rounds: dict[Case, list[dict[str, Any]]] = {}
        self.notes: dict[Case, str] = {}
        self._pool: OrderedDict[Case, WorkerProcess] = OrderedDict()  # least recently used first

    def cases(self) -> list[Case]:
        s = self.settings
        modes = [(mode, k) for mode in s.modes for k in ((0,) if mode == "plain" else s.draft_lengths)]
        return [
            Case(model, engine, mode, k, batch)
            for model in s.models
            for batch in s.batches
            for mode, k in modes
            for engine in s.engines
        ]

    def run(self, progress: Callable[[Case, str], None] = lambda case, what: None) -> None:
        opened = {model: self._open(model) for model in self.settings.models}  # all errors come before any work
        for model, (directory, ids) in opened.items():
            cases = [case for case in self.cases() if case.model == model]
            for repeat in range(-1, self.settings.repeats):  # -1 is the warm-up
                first = max(repeat, 0) % len(cases)
                for case in cases[first:] + cases[:first]:
                    progress(case, "warm-up" if repeat < 0 else f"repeat {repeat + 1}")
                    if case not in self.notes:
                        self._round(case, repeat, directory, ids)
            self.close()

    def _open(self, model: str) -> tuple[Path, list[tuple[int, ...]]]:
        directory = resolve(model)
        tokenizer = load_tokenizer(directory)
        ids = [encode(tokenizer, prompt) for prompt in self.prompts]
        longest, context = max(map(len, ids)), read_config(directory).max_positions
        if longest + self.settings.max_tokens > context:
            raise ValueError(
                f"--max-tokens {self.settings.max_tokens}: the longest prompt has {longest} tokens and the context of "
                f"{model} is {context}; every engine must be able to emit that many"
            )
        for case in self.cases():
            if case.model == model and case.method in HEAD_METHODS and case.engine != "hf":
                self._head(case)
        return directory, ids

    def _head(self, case: Case) -> Path:
        try:
            return resolve_head(self.settings.config.speculation.head, case.model)
        except ValueError as error:
            raise ValueError(f"--modes {case.mode}: {error}") from None

    def _round(self, case: Case, repeat: int, directory: Path, ids: list[tuple[int, ...]]) -> None:
        s = self.settings
        group = s.num_generations
        first = (repeat + 1) * max(s.batches)
        chosen = [(first + i // group) % len(ids) for i in range(case.batch)]
        try:
            _check_engine(case)
            worker = self._worker(case, directory, max(map(len, ids)))
            reply = worker.call(
                "run",
                prompts=[ids[i] for i in chosen],
                problems=[f"{repeat}/{case.batch}/{i}" for i in chosen],
                max_tokens=s.max_tokens if repeat >= 0 else min(s.max_tokens, 8),
                temperature=s.temperature,
                seed=s.seed + repeat + 1,
                mode=case.method,
                k=case.k,
            )
        except (WorkerError, ValueError) as error:
            self.notes[case] = str(error)
            return
        if repeat >= 0 and reply["num_tokens"] != case.batch * s.max_tokens:
            self.notes[case] = "stopped before max_tokens: its tokens/s cannot be compared"
        elif repeat >= 0:
            self.rounds.setdefault(case, []).append(reply)

    # -- workers ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _key(case: Case) -> Case:
        """Cases with the same key share a process. Speculation is fixed when an engine is built, so each mode has its
        own process, except with transformers. Batch sizes always share one."""
        return replace(case, mode="", k=0, batch=0) if case.engine == "hf" else replace(case, batch=0)

    def _worker(self, case: Case, directory: Path, longest: int) -> WorkerProcess:
        key = self._key(case)
        if key in self._pool:
            self._pool.move_to_end(key)
            return self._pool[key]
        self._close_idle_workers(directory)
        worker = self._start(case.engine)
        try:
            worker.call("load", **self._load_settings(case, directory, longest))
        except BaseException as error:
            worker.close()
            if isinstance(error, WorkerError):  # loading would fail for the other batch sizes too
                self.notes |= {other: str(error) for other in self.cases() if self._key(other) == key}
            raise
        self._pool[key] = worker
        return worker

    def _start(self, engine: str) -> WorkerProcess:
        threads = self.settings.threads
        env = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if engine == "vllm":
            python = vllm_python.find_python()
            return WorkerProcess(vllm_python.WORKER, python, env | vllm_python.environment(threads))
        return WorkerProcess(Path(__file__).with_name(f"{engine}_worker.py"), sys.executable, env)

    def _load_settings(self, case: Case, directory: Path, longest: int) -> dict[str, Any]:
        s = self.settings
        common = {"model": str(directory), "dtype": s.config.model.dtype, "device": s.config.model.device}
        if case.engine == "hf":
            return {**common, "threads": s.threads}
        if case.engine == "paceline":
            return {"config": self._paceline_config(case, directory).model_dump(mode="json")}
        speculation: dict[str, Any] = {}
        if case.method == "ngram":
            chosen = s.config.speculation
            speculation = {"prompt_lookup_min": chosen.prompt_lookup_min, "prompt_lookup_max": chosen.prompt_lookup_max}
        elif case.method == "draft_model":
            speculation = {"model": s.config.speculation.draft_model}
        elif case.method == "eagle3":
            speculation = {"model": str(self._head(case))}
        return {
            **common,
            "mode": case.method,
            "k": case.k,
            "speculation": speculation,
            "max_num_seqs": max(s.batches),
            # A multiple of 256: vLLM compiles again for each new length, and caches the compiled code.
            "max_model_len": -(-(longest + s.max_tokens + case.k + 1) // 256) * 256,
            "prefix_caching": s.num_generations > 1,
        }

    def _paceline_config(self, case: Case, directory: Path) -> Config:
        s = self.settings
        config = s.with_mode(case.mode, case.k)
        engine = {"max_num_seqs": max(s.batches), "threads": s.threads, "prefix_sharing": s.num_generations > 1}
        speculation = {"head": str(self._head(case))} if case.method in HEAD_METHODS else {}
        return config.changed(model={"name": str(directory)}, engine=engine, speculation=speculation)

    def _close_idle_workers(self, directory: Path) -> None:
        """Close the least recently used workers until there is memory for one more. They are started again if
        needed."""
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        while self._pool and (free := available_memory()) is not None and free < 3 * weights + (1 << 30):
            self._pool.popitem(last=False)[1].close()

    def close(self) -> None:
        while self._pool:
            self._pool.popitem()[1].close()

    # -- results ------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        return {**describe(self.settings), "num_prompts": len(self.prompts)}

    def describe_notes(self) -> list[str]:
        """Why some cases have no results; one line per reason."""
        cases: dict[str, list[str]] = {}
        for case, note in self.notes.items():
            cases.setdefault(note, []).append(f"{case.engine} {case.mode} at batch {case.batch}")
        return [f"– {', '.join(names)}: {' '.join(note.split())}" for note, names in cases.items()]

    def rows(self) -> list[dict[str, Any]]:
        """One per case, in order. Results are None if the case was not measured; `note` has the reason."""
        return [self._row(case) for case in self.cases()]

    def _row(self, case: Case) -> dict[str, Any]:
        rounds = self.rounds.get(case, [])
        plain = self.rounds.get(replace(case, mode="plain", k=0), [])
        rates = [r["num_tokens"] / r["seconds"] for r in rounds]
        plain_rates = [r["num_tokens"] / r["seconds"] for r in plain]
        step, plain_step = median_step(rounds), median_step(plain)
        counts = {
            name: sum(r[name] for r in rounds) if rounds and name in rounds[0] else None
            for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        }
        acceptance = None
        if counts["num_drafts"]:
            acceptance = 1 + counts["num_accepted_tokens"] / counts["num_drafts"]
        elif rounds and (case.method == "plain" or counts["num_drafts"] == 0):
            acceptance = 1.0  # nothing was drafted
        median = statistics.median(rates) if rates else None
        return {
            "model": case.model,
            "engine": case.engine,
            "mode": case.mode,
            "method": case.method,
            "policy": self._policy(case),
            "batch": case.batch,
            "num_speculative_tokens": case.k,
            "tokens_per_s": median,
            "best_tokens_per_s": max(rates, default=None),
            "speedup": median / statistics.median(plain_rates) if median and plain_rates else None,
            "mean_acceptance_length": acceptance,
            "acceptance_rate_per_position": _rate_per_position(rounds, counts["num_drafts"]),
            "step_ms": step * 1e3 if step else None,
            "step_cost": step / plain_step if step and plain_step else None,
            **counts,
            "num_rounds": len(rounds),
            "note": self.notes.get(case),
        }

    def _policy(self, case: Case) -> str | None:
        """The speculation policy; None in plain mode."""
        if case.method == "plain":
            return None
        if case.engine != "paceline":
            return case.policy or "static"
        return self.settings.with_mode(case.mode, case.k).speculation.policy


def _check_engine(case: Case) -> None:
    """Only Paceline has policies, `hybrid` and `dspark`. (The transformers worker checks its methods itself.)"""
    if case.engine != "paceline" and case.policy not in ("", "static"):
        raise ValueError(f"{case.engine} has no policies: its draft length is fixed")
    if case.engine == "vllm" and case.method in ("hybrid", "dspark"):
        raise ValueError(f"paceline runs no {case.method} drafter with vllm")


def _rate_per_position(rounds: Sequence[dict[str, Any]], num_drafts: int | None) -> list[float] | None:
    """Share of all drafts that were accepted up to each position, as in vLLM; None if the engine does not report it."""
    if not num_drafts or "accepted_per_position" not in rounds[0]:
        return None
    counts = zip_longest(*(r["accepted_per_position"] for r in rounds), fillvalue=0)
    return [sum(position) / num_drafts for position in counts]


def median_step(rounds: Sequence[dict[str, Any]]) -> float | None:
    steps = [second for r in rounds for second in r["step_s"]]
    return statistics.median(steps) if steps else None
