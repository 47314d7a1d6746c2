"""A whole simulation: config in, metrics out. Presets are configs in TOML files, among them published setups."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config_io import ConfigError, apply_override, read_toml
from paceline.sim.pipeline import Pipeline, Stages, Step, stage_times, steady_step
from paceline.sim.rollout import Rollout, make_schedules, rollout
from paceline.sim.run_simulation import PLACEHOLDER, RunStepModel, run_simulation
from paceline.sim.schedule import Schedule
from paceline.sim.settings import parse_settings
from paceline.sim.specs import SPEC_FILES, Efficiency, Hardware, Model, Software, load_spec
from paceline.sim.speculation import NO_SPECULATION, Speculation
from paceline.sim.step import Engine, StepModel
from paceline.sim.table import CostTableStepModel
from paceline.sim.workload import Workload, sample_lengths
from paceline.speculation.cost_files import cost_table_of

PRESETS = SPEC_FILES / "presets"
# Keys that several sections have.
AMBIGUOUS = {"pipeline.gpus": "all devices of the RL step", "engine.gpus": "devices of one engine"}


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    hardware: str
    model: str
    workload: Workload
    pipeline: Pipeline
    about: str = ""
    software: str = "device"
    efficiency: str = "published"
    run: str | None = None  # the folder of a run whose step times and stages are used instead of specs
    engine: Engine = field(default_factory=Engine)
    speculation: Speculation = field(default_factory=lambda: NO_SPECULATION)


def presets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def load_simulation_config(name: str, overrides: Sequence[str] = ()) -> SimulationConfig:
    """Load a preset by name, a config file by path, or what a run's folder gives, and apply overrides `a.b=c`.

    The section can be left out when only one section has the key: `k=5` is `speculation.k=5`. Overriding k alone keeps
    the acceptance probability of each position. Overriding `acceptance` removes
    `acceptance_probabilities`, and the other way round.
    """
    path = PRESETS / f"{name}.toml" if name in presets() else Path(name).expanduser()
    if path.suffix != ".toml" and not path.is_dir():
        raise ConfigError(
            f"{name!r} is not a preset; choose one of {', '.join(presets())}, or give a .toml file or a run's folder"
        )
    tree = run_simulation(str(path)).tree() if path.is_dir() else read_toml(path)
    keys = [full_key(override.partition("=")[0].strip()) for override in overrides]
    section = tree.get("speculation", {})
    if isinstance(section, dict):  # else parse_settings raises an error
        pair = "acceptance", "acceptance_probabilities"
        given = [key for key in pair if f"speculation.{key}" in keys]
        if "speculation.k" in keys and not given:
            section.setdefault("acceptance_at", section.get("k", Speculation().k))
            tree["speculation"] = section
        if len(given) == 1:
            section.pop(pair[1 - pair.index(given[0])], None)
    for key, override in zip(keys, overrides, strict=True):
        apply_override(tree, key + "=" + override.partition("=")[2] if "=" in override else override)
    return parse_settings(SimulationConfig, tree)


def full_key(key: str) -> str:
    """The dotted key of a key without its section."""
    if "." in key or key in {each.name for each in dataclasses.fields(SimulationConfig)}:
        return key
    sections = {"workload": Workload, "pipeline": Pipeline, "engine": Engine, "speculation": Speculation}
    found = [f"{name}.{key}" for name, kind in sections.items() if key in {f.name for f in dataclasses.fields(kind)}]
    if len(found) > 1:
        meanings = (f"{each} ({AMBIGUOUS[each]})" for each in found)
        raise ConfigError(f"{key}: ambiguous; give one of {', '.join(meanings)}")
    if found:
        return found[0]
    known = {each.name: f"{name}.{each.name}" for name, kind in sections.items() for each in dataclasses.fields(kind)}
    known |= {each.name: each.name for each in dataclasses.fields(SimulationConfig)}
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    if close:
        raise ConfigError(f"unknown key {key}: did you mean {known[close[0]]}?")
    return key


@dataclass(frozen=True, slots=True)
class Run:
    rollout: Rollout
    stages: Stages
    step: Step


@dataclass(frozen=True, slots=True)
class Result:
    config: SimulationConfig
    run: Run
    ar: Run  # autoregressive: without speculation
    hardware_name: str
    model_name: str
    usd_per_hour: float = 0.0  # of one device; 0 if unknown
    free_drafter: str | None = None  # a drafter whose drafts take no time, because the run has no times of it

    @property
    def title(self) -> str:
        """Hardware, model, workload and speculation, after all overrides."""
        c, s = self.config, self.config.speculation
        where = self.hardware_name if c.run is not None else f"{c.pipeline.gpus} × {self.hardware_name}"
        if c.pipeline.layout == "disaggregated":
            where += f" ({c.pipeline.generation_gpus} generate, lag {c.pipeline.lag})"
        mean_tokens = self.run.rollout.num_tokens / c.workload.batch
        per_gpu = f" ({c.workload.batch / num:.3g} per GPU)" if (num := c.pipeline.rollout_gpus) > 1 else ""
        workload = f"{c.workload.batch} requests per RL step{per_gpu}, {mean_tokens:.0f} tokens on average"
        if s.method == "none":
            return f"{self.model_name} on {where}; {workload}; no drafts"
        length = s.length(s.k)
        return (
            f"{self.model_name} on {where}; {workload}; drafts: {s.method}, policy {s.policy}, k = {s.k}, "
            f"acceptance length {length:.2f} if all k are verified"
        )

    @property
    def rollout_speedup(self) -> float:
        return self.ar.stages.generation / self.run.stages.generation

    @property
    def step_speedup(self) -> float:
        return self.ar.step.seconds / self.run.step.seconds

    def summary(self) -> dict[str, Any]:
        """Metrics of the run with speculation, and of the run without it under `ar`."""
        return {
            "about": self.config.about,
            "title": self.title,
            **self._run_summary(self.run),
            "rollout_speedup": self.rollout_speedup,
            "step_speedup": self.step_speedup,
            "step_cost": self.run.rollout.step_s / self.ar.rollout.step_s,
            "ar": self._run_summary(self.ar),
            "settings": dataclasses.asdict(self.config),
        }

    def _run_summary(self, run: Run) -> dict[str, Any]:
        gpu_hours = run.step.seconds * self.config.pipeline.gpus / 3600
        return {
            "generation_s": run.stages.generation,
            "step_s": run.step.seconds,
            "exposed_generation_s": run.step.exposed_s,
            "generation_share": run.stages.generation / (run.stages.generation + run.stages.learning_s),
            "stages": dataclasses.asdict(run.stages),
            "generation_idle": run.step.generation_idle,
            "training_idle": run.step.training_idle,
            "gpu_hours_per_step": gpu_hours,
            "usd_per_step": gpu_hours * self.usd_per_hour,
            "num_tokens": run.rollout.num_tokens,
            "tokens_per_s": run.rollout.num_tokens / run.rollout.seconds,
            "num_engine_steps": run.rollout.num_steps,
            "engine_step_ms": 1e3 * run.rollout.step_s,
            "mean_rows": run.rollout.mean_rows,
            "mean_acceptance_length": run.rollout.acceptance,
        }


class Simulator:
    """Loads a config's specs and computes its schedules once."""

    def __init__(self, config: SimulationConfig) -> None:
        s = config
        self.config = s
        self.recorded = run_simulation(s.run) if s.run is not None else None
        if self.recorded is not None:
            _check_run_settings(s)
        else:
            _check_positions(s.workload, self.model)
        self.software = load_spec(Software, s.software, "software")
        self.efficiency = load_spec(Efficiency, s.efficiency, "efficiency")
        if s.pipeline.rollout_gpus % s.engine.gpus:
            raise ConfigError(
                f"engine.gpus = {s.engine.gpus}: does not divide the {s.pipeline.rollout_gpus} devices that generate"
            )
        self.num_engines = s.pipeline.rollout_gpus // s.engine.gpus

    @cached_property
    def hardware(self) -> Hardware:
        """A recorded run has no spec of it."""
        return load_spec(Hardware, self.config.hardware, "hardware")

    @cached_property
    def model(self) -> Model:
        """A recorded run has no spec of it."""
        return load_spec(Model, self.config.model, "model")

    @cached_property
    def schedules(self) -> list[Schedule]:
        s = self.config
        return make_schedules(self.step_model(NO_SPECULATION), s.workload, self.num_engines, s.pipeline.lag)

    @cached_property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Completion and prompt tokens of each request of a batch."""
        lengths, prompts = sample_lengths(self.config.workload)
        return lengths[0], prompts[0]

    def step_model(self, speculation: Speculation) -> StepModel:
        s = speculation
        if self.recorded is not None:
            return RunStepModel(self.recorded.costs, self.config.engine.max_rows, s.method)
        draft_model = load_spec(Model, s.draft_model, "speculation.draft_model") if s.draft_model else None
        table = self.config.engine.table
        model = (StepModel if table is None else CostTableStepModel)(
            self.hardware, self.model, self.software, self.efficiency, self.config.engine, s.method, draft_model,
            s.head_precision, s.head_tp, s.free_row_us,
        )  # fmt: skip
        if isinstance(model, CostTableStepModel) and table is not None:
            model.table = cost_table_of(table, "engine.table")
        return model

    def run(self, speculation: Speculation) -> Run:
        s = self.config
        simulated = rollout(
            self.step_model(speculation), speculation, s.workload, self.num_engines, s.pipeline.lag, self.schedules
        )
        if self.recorded is not None:
            stages = self.recorded.stages(simulated.seconds, simulated.num_tokens)
        else:
            stages = stage_times(
                s.pipeline, self.hardware, self.model, self.software, self.efficiency, simulated.seconds, *self.lengths
            )
        return Run(simulated, stages, steady_step(s.pipeline, stages))

    def result(self) -> Result:
        s = self.config.speculation
        step_model = self.step_model(s)
        run, ar = self.run(s), self.run(NO_SPECULATION)
        if self.recorded is not None:
            names = self.recorded.run.hardware, self.recorded.run.model
            free_drafter = step_model.free_drafter if isinstance(step_model, RunStepModel) else None
            return Result(self.config, run, ar, *names, free_drafter=free_drafter)
        return Result(self.config, run, ar, self.hardware.name, self.model.name, self.hardware.usd_per_hour)


def _check_positions(workload: Workload, model: Model) -> None:
    if workload.max_tokens + workload.prompt_tokens > model.max_positions:
        raise ConfigError(
            f"workload.max_tokens = {workload.max_tokens} with workload.prompt_tokens = {workload.prompt_tokens}: the "
            f"sum exceeds the {model.max_positions} positions of {model.name}"
        )


def _check_run_settings(config: SimulationConfig) -> None:
    """Raise an error for settings that the simulation of a run does not have."""
    for key in ("hardware", "model"):
        if getattr(config, key) != PLACEHOLDER:
            raise ConfigError(
                f"{key} = {getattr(config, key)!r}: the step times are those of the run; leave it out, or simulate a "
                "preset"
            )
    if config.pipeline != Pipeline(gpus=1):
        raise ConfigError("pipeline: the simulation of a run has one engine and no overlap; leave out pipeline keys")
    if config.engine != Engine(max_rows=config.engine.max_rows):
        raise ConfigError("engine: the simulation of a run has engine.max_rows only; leave out other engine keys")


def simulate(config: SimulationConfig) -> Result:
    return Simulator(config).result()
