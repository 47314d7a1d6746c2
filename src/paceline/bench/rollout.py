"""`paceline bench rollout`: models × engines × modes × batch sizes, measured so that nobody has an advantage.

Every engine lives in a child process with the same number of threads, and all of them are given the same token ids,
at the same temperature, for exactly max_tokens tokens (EOS is ignored). A repeat visits every cell once, starting at
another cell each time, so that a machine that slows down slows down everybody; the figure is the median over
repeats, after one warm-up each. Prefix caching is off in every engine, and a new repeat takes new prompts: nobody gets
a free prefill or a history to copy from. A policy's cost table is measured when an engine is loaded, before any round
is timed. With num_generations > 1 a round holds groups of samples of one prompt, as in RL; samples then see their
siblings (never an earlier round), and prompt sharing is on where an engine has it.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

from paceline import __version__
from paceline.bench.process import WorkerError, WorkerProcess
from paceline.cluster import vllm_python
from paceline.config import ADAPTABLE, Config, SpeculationSection, make_config
from paceline.tasks.prompt import encode
from paceline.tasks.task import Prompt

ENGINES = ("paceline", "hf", "vllm")
METHODS = (
    "plain",
    *(name for name in get_args(SpeculationSection.model_fields["method"].annotation) if name != "none"),
)
POLICIES: tuple[str, ...] = get_args(SpeculationSection.model_fields["policy"].annotation)
WITH_HEAD = ADAPTABLE  # methods that need an EAGLE-3 head
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
        for engine in self.engines:
            if engine not in ENGINES:
                raise ValueError(f"--engines {engine!r}: not one of {', '.join(ENGINES)}")
        for mode in self.modes:
            _check_mode(mode)
        for name in ("models", "engines", "modes", "draft_lengths", "batches"):
            if not getattr(self, name):
                raise ValueError(f"--{name}: give at least one")
        for name in ("max_tokens", "repeats", "threads", "num_generations"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least 1")
        if min(self.batches) < 1 or min(self.draft_lengths) < 1:
            raise ValueError("--batch and --k: must be at least 1")
        if max(self.draft_lengths) > 256:
            raise ValueError(f"--k {max(self.draft_lengths)}: must be at most 256")
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
        """The config of a mode. A mode that names no policy has the one of `config`."""
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
        """ "" where the mode names none."""
        return self.mode.partition("+")[2]


class Bench:
    """Holds what was measured so far, so that an interrupted bench still has something to show."""

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

    @property
    def num_rounds(self) -> int:
        return len(self.cases()) * (1 + self.settings.repeats)

    def run(self, progress: Callable[[Case, str], None] = lambda case, what: None) -> None:
        opened = {model: self._open(model) for model in self.settings.models}  # mistakes are told before any work
        for model, (directory, ids) in opened.items():
            mine = [case for case in self.cases() if case.model == model]
            for repeat in range(-1, self.settings.repeats):  # -1 is the warm-up
                turn = max(repeat, 0) % len(mine)
                for case in mine[turn:] + mine[:turn]:
                    progress(case, "warm-up" if repeat < 0 else f"repeat {repeat + 1}")
                    if case not in self.notes:
                        self._round(case, repeat, directory, ids)
            self.close()

    def _open(self, model: str) -> tuple[Path, list[tuple[int, ...]]]:
        from paceline.model.store import load_tokenizer, resolve
        from paceline.model.weights import read_config

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
            if case.model == model and case.method in WITH_HEAD and case.engine != "hf":
                self._head(case)
        return directory, ids

    def _head(self, case: Case) -> Path:
        from paceline.model.head_files import resolve_head

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
            self.notes[case] = "stopped before max_tokens: its tokens/s would not compare"
        elif repeat >= 0:
            self.rounds.setdefault(case, []).append(reply)

    # -- workers ------------------------------------------------------------------------------------------------------

    @staticmethod
    def _key(case: Case) -> Case:
        """Cases with the same key share a process. Speculation is fixed when an engine is built, so modes do not share
        one; but transformers builds nothing, and batch sizes always share."""
        return replace(case, mode="", k=0, batch=0) if case.engine == "hf" else replace(case, batch=0)

    def _worker(self, case: Case, directory: Path, longest: int) -> WorkerProcess:
        key = self._key(case)
        if key in self._pool:
            self._pool.move_to_end(key)
            return self._pool[key]
        self._make_room(directory)
        worker = self._start(case.engine)
        try:
            worker.call("load", **self._load_settings(case, directory, longest))
        except BaseException as error:
            worker.close()
            if isinstance(
                error, WorkerError
            ):  # what can't be loaded now can't be loaded for the next batch size either
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
            # In steps of 256: vLLM compiles anew for every other length, and its compiled code is cached.
            "max_model_len": -(-(longest + s.max_tokens + case.k + 1) // 256) * 256,
            "prefix_caching": s.num_generations > 1,
        }

    def _paceline_config(self, case: Case, directory: Path) -> Config:
        s = self.settings
        config = s.with_mode(case.mode, case.k)
        engine = {
            "max_num_seqs": max(s.batches),
            "threads": s.threads,
            "prefix_sharing": s.num_generations > 1,
        }
        speculation = {"head": str(self._head(case))} if case.method in WITH_HEAD else {}
        return config.model_copy(
            update={
                "model": config.model.model_copy(update={"name": str(directory)}),
                "engine": config.engine.model_copy(update=engine),
                "speculation": config.speculation.model_copy(update=speculation),
            }
        )

    def _make_room(self, directory: Path) -> None:
        """Close the workers that waited longest while memory would not hold one more (they come back when needed)."""
        weights = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        while self._pool and (free := available_memory()) is not None and free < 3 * weights + (1 << 30):
            self._pool.popitem(last=False)[1].close()

    def close(self) -> None:
        while self._pool:
            self._pool.popitem()[1].close()

    # -- results ------------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        """What was asked for, and of which machine."""
        return {
            **{f.name: getattr(self.settings, f.name) for f in fields(self.settings) if f.name != "config"},
            "config": self.settings.config.model_dump(mode="json"),
            "num_prompts": len(self.prompts),
            "machine": {"cpu": platform.machine(), "num_cores": os.cpu_count(), "system": platform.system()},
            "version": __version__,
        }

    def describe_notes(self) -> list[str]:
        """Why some cells are empty; one line per reason."""
        cases: dict[str, list[str]] = {}
        for case, note in self.notes.items():
            cases.setdefault(note, []).append(f"{case.engine} {case.mode} at batch {case.batch}")
        return [f"– {', '.join(names)}: {' '.join(note.split())}" for note, names in cases.items()]

    def rows(self) -> list[dict[str, Any]]:
        """One per case, in order; figures are None where nothing was measured, and the note says why."""
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
        """Who decides how much is drafted; None where nothing is."""
        if case.method == "plain":
            return None
        return case.policy or (self.settings.config.speculation.policy if case.engine == "paceline" else "static")


def _check_engine(case: Case) -> None:
    """Policies and `hybrid` are our own engine's. (Which methods transformers has, its worker says.)"""
    if case.engine != "paceline" and case.policy not in ("", "static"):
        raise ValueError(f"{case.engine} has no policies: it drafts the same length always")
    if case.engine == "vllm" and case.method == "hybrid":
        raise ValueError("vllm has no hybrid drafter")


def _rate_per_position(rounds: Sequence[dict[str, Any]], num_drafts: int | None) -> list[float] | None:
    """Of all drafts, the share that was accepted up to each position, as in vLLM; None where an engine does not say."""
    if not num_drafts or "accepted_per_position" not in rounds[0]:
        return None
    counts = zip_longest(*(r["accepted_per_position"] for r in rounds), fillvalue=0)
    return [sum(position) / num_drafts for position in counts]


def median_step(rounds: Sequence[dict[str, Any]]) -> float | None:
    steps = [second for r in rounds for second in r["step_s"]]
    return statistics.median(steps) if steps else None


def available_memory() -> int | None:
    """Bytes that a new process could use; None where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
