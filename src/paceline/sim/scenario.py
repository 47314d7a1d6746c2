"""A whole simulation: settings in, figures out. Presets are scenarios in TOML, those that were published among them."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import ConfigError, apply_override
from paceline.sim.cards import Efficiency, Hardware, Model, Software, card
from paceline.sim.pipeline import Pipeline, Stages, Step, stages_of, steady_step
from paceline.sim.rollout import Rollout, plans_of, rollout
from paceline.sim.schedule import Schedule
from paceline.sim.settings import of_tree, read_toml
from paceline.sim.speculation import PLAIN, Speculation
from paceline.sim.step import Engine, StepModel
from paceline.sim.table import TabledStepModel
from paceline.sim.workload import Workload, lengths_of
from paceline.speculation.cost_files import cost_table_of

PRESETS = Path(__file__).parent / "cards" / "presets"


@dataclass(frozen=True, slots=True)
class Scenario:
    hardware: str
    model: str
    workload: Workload
    pipeline: Pipeline
    about: str = ""
    software: str = "device"
    efficiency: str = "published"
    engine: Engine = field(default_factory=Engine)
    speculation: Speculation = field(default_factory=lambda: PLAIN)


def presets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRESETS.glob("*.toml")))


def load(name: str, overrides: Sequence[str] = ()) -> Scenario:
    """A preset by its name, or any scenario by its path, with `a.b=c` applied. A key without a section is the only one
    of that name: `k=5` is `speculation.k=5`. Where k is changed and acceptance is not, positions keep their chances; an
    acceptance takes the place of chances and the other way round."""
    path = PRESETS / f"{name}.toml" if name in presets() else Path(name).expanduser()
    if path.suffix != ".toml":
        raise ConfigError(f"{name!r} is no preset; there are {', '.join(presets())}, or give a .toml file")
    tree = read_toml(path)
    keys = [whole_key(override.partition("=")[0].strip()) for override in overrides]
    drafts = tree.get("speculation", {})
    if isinstance(drafts, dict):  # else it is refused below
        if "speculation.k" in keys and not {"speculation.acceptance", "speculation.chances"} & set(keys):
            drafts.setdefault("acceptance_at", drafts.get("k", Speculation().k))
            tree["speculation"] = drafts
        for given, other in (("acceptance", "chances"), ("chances", "acceptance")):
            if f"speculation.{given}" in keys and f"speculation.{other}" not in keys:
                drafts.pop(other, None)
    for key, override in zip(keys, overrides, strict=True):
        apply_override(tree, key + "=" + override.partition("=")[2] if "=" in override else override)
    return of_tree(Scenario, tree)


def whole_key(key: str) -> str:
    """The dotted key that a short one means."""
    if "." in key or key in {each.name for each in dataclasses.fields(Scenario)}:
        return key
    sections = {"workload": Workload, "pipeline": Pipeline, "engine": Engine, "speculation": Speculation}
    found = [f"{name}.{key}" for name, kind in sections.items() if key in {f.name for f in dataclasses.fields(kind)}]
    if len(found) > 1:
        raise ConfigError(f"{key}: which of {', '.join(found)}?")
    if found:
        return found[0]
    known = {each.name: f"{name}.{each.name}" for name, kind in sections.items() for each in dataclasses.fields(kind)}
    known |= {each.name: each.name for each in dataclasses.fields(Scenario)}
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
    scenario: Scenario
    run: Run
    ar: Run  # the same without speculation
    hardware: Hardware

    @property
    def rollout_speedup(self) -> float:
        return self.ar.stages.generation / self.run.stages.generation

    @property
    def step_speedup(self) -> float:
        return self.ar.step.seconds / self.run.step.seconds

    def figures(self) -> dict[str, Any]:
        """The speculative run, with the plain one under `ar`."""
        return {
            "about": self.scenario.about,
            **self._figures(self.run),
            "rollout_speedup": self.rollout_speedup,
            "step_speedup": self.step_speedup,
            "step_cost": self.run.rollout.step_s / self.ar.rollout.step_s,
            "ar": self._figures(self.ar),
            "settings": dataclasses.asdict(self.scenario),
        }

    def _figures(self, run: Run) -> dict[str, Any]:
        gpu_hours = run.step.seconds * self.scenario.pipeline.gpus / 3600
        return {
            "generation_s": run.stages.generation,
            "step_s": run.step.seconds,
            "exposed_generation_s": run.step.exposed_s,
            "generation_share": run.stages.generation / (run.stages.generation + run.stages.learning_s),
            "stages": dataclasses.asdict(run.stages),
            "generation_idle": run.step.generation_idle,
            "training_idle": run.step.training_idle,
            "gpu_hours_per_step": gpu_hours,
            "usd_per_step": gpu_hours * self.hardware.usd_per_hour,
            "tokens": run.rollout.num_tokens,
            "tokens_per_s": run.rollout.num_tokens / run.rollout.seconds,
            "engine_steps": run.rollout.num_steps,
            "engine_step_ms": 1e3 * run.rollout.step_s,
            "mean_rows": run.rollout.mean_rows,
            "acceptance_length": run.rollout.acceptance,
        }


class Simulator:
    """A scenario's cards and schedules, made once. `efficiency` and `software` may be given in the place of its own."""

    def __init__(
        self, scenario: Scenario, efficiency: Efficiency | None = None, software: Software | None = None
    ) -> None:
        s = scenario
        self.scenario = s
        self.hardware = card(Hardware, s.hardware, "hardware")
        self.model = card(Model, s.model, "model")
        self.software = software or card(Software, s.software, "software")
        self.efficiency = efficiency or card(Efficiency, s.efficiency, "efficiency")
        if s.pipeline.rollout_gpus % s.engine.gpus:
            raise ConfigError(
                f"engine.gpus = {s.engine.gpus}: does not divide the {s.pipeline.rollout_gpus} devices that generate"
            )
        self.num_engines = s.pipeline.rollout_gpus // s.engine.gpus
        longest = s.workload.max_tokens + s.workload.prompt_tokens
        if longest > self.model.max_positions:
            raise ConfigError(
                f"workload.max_tokens = {s.workload.max_tokens} with workload.prompt_tokens = "
                f"{s.workload.prompt_tokens}: together beyond the {self.model.max_positions} positions of "
                f"{self.model.name}"
            )

    @cached_property
    def plans(self) -> list[Schedule]:
        s = self.scenario
        return plans_of(self.step_model(PLAIN), s.workload, self.num_engines, s.pipeline.lag)

    @cached_property
    def lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Of a batch that is trained on: tokens, prompt tokens."""
        lengths, prompts = lengths_of(self.scenario.workload)
        return lengths[0], prompts[0]

    def step_model(self, speculation: Speculation) -> StepModel:
        s = speculation
        drafts = card(Model, s.draft_model, "speculation.draft_model") if s.draft_model else None
        table = self.scenario.engine.table
        made = (StepModel if table is None else TabledStepModel)(
            self.hardware, self.model, self.software, self.efficiency, self.scenario.engine, s.method, drafts,
            s.head_precision, s.head_tp, s.free_row_us,
        )  # fmt: skip
        if isinstance(made, TabledStepModel) and table is not None:
            made.table = cost_table_of(table, "engine.table")
        return made

    def run(self, speculation: Speculation) -> Run:
        s = self.scenario
        rolled = rollout(
            self.step_model(speculation), speculation, s.workload, self.num_engines, s.pipeline.lag, self.plans
        )
        stages = stages_of(
            s.pipeline, self.hardware, self.model, self.software, self.efficiency, rolled.seconds, *self.lengths
        )
        return Run(rolled, stages, steady_step(s.pipeline, stages))

    def result(self) -> Result:
        return Result(self.scenario, self.run(self.scenario.speculation), self.run(PLAIN), self.hardware)


def simulate(scenario: Scenario) -> Result:
    return Simulator(scenario).result()


def varied(scenario: Scenario, **sections: dict[str, Any]) -> Scenario:
    """The same with some settings of some sections changed."""
    return replace(
        scenario, **{name: replace(getattr(scenario, name), **changes) for name, changes in sections.items()}
    )
