"""The simulation of a recorded run: workload and step times from the run's folder instead of specs.

Completion and prompt lengths are drawn from its rollouts, step times are those of its trace (run_costs.py), and the
times of all other stages are means of its metrics; logprob and training time are proportional to tokens. So the
simulation answers what another batch size, draft length or acceptance would bring on the same machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from paceline.config_io import ConfigError
from paceline.files import number, read_metrics
from paceline.replay.reader import Reader
from paceline.sim.pipeline import Stages
from paceline.sim.recorded_run import RecordedRun
from paceline.sim.run_costs import RunCosts
from paceline.sim.step import DRAFTER_NAMES, Engine
from paceline.sim.table import CostTableStepModel
from paceline.speculation.cost import CostTable

METHODS = {"none": "none", "ngram": "free", "suffix": "free"}  # speculation.method of a run -> of a simulation
MEASURED_STAGES = ("data", "reward", "logprob", "training", "sync")
PLACEHOLDER = "this run"  # `hardware` and `model` of such a simulation


@dataclass(frozen=True, slots=True)
class RecordedMeans:
    """Means over the RL steps of a run."""

    stages: dict[str, float]  # seconds, of MEASURED_STAGES
    num_tokens: float


class RunStepModel(CostTableStepModel):
    """All times are those of the run. Memory does not limit the number of rows: engine.max_rows does."""

    def __init__(self, costs: RunCosts, max_rows: int, method: str) -> None:
        self.table, self.method, self.engine = costs.table, method, Engine(max_rows=max_rows)

    @property
    def kv_tokens(self) -> int:
        return 1 << 40

    def host_s(self, rows: np.ndarray, k: np.ndarray, emitted: np.ndarray) -> np.ndarray:
        return np.zeros(np.broadcast(rows, k, emitted).shape)  # in the step times

    def prefill_s(self, tokens: ArrayLike) -> np.ndarray:
        """Each prompt token takes as long as in the largest recorded step."""
        largest = max(self.table.points, key=lambda point: (point.num_query_tokens, -point.num_rows))
        smallest = min(self.table.points, key=lambda point: (point.num_query_tokens, point.num_rows))
        num = max(1, largest.num_query_tokens - smallest.num_query_tokens)
        return np.asarray(tokens, np.float64) * max(0.0, largest.seconds - smallest.seconds) / num

    def cost_table(self, max_rows: int, max_k: int, context: float) -> CostTable:
        return self.table

    @property
    def free_drafter(self) -> str | None:
        """The drafter if the run has no draft times of it, so that its drafts take no time here."""
        name = DRAFTER_NAMES.get(self.method, self.method)
        return None if self.method == "none" or name in self.table.drafts else name


class RunSimulation:
    def __init__(self, run: RecordedRun) -> None:
        self.run = run
        try:
            self.costs = run.costs()
        except ValueError as error:
            raise ConfigError(f"{run.folder}: its step times can't be used: {error}") from None
        self.means = _means(run.folder / "metrics.jsonl")

    def tree(self) -> dict[str, Any]:
        """The settings of the simulation."""
        c = self.run.config
        speculation = c.speculation
        k = speculation.num_speculative_tokens
        group = c.algorithm.num_generations
        num_prompt = round(self._mean_prompt())
        shared = num_prompt * (group - 1) // group if c.engine.prefix_sharing else 0
        tree: dict[str, Any] = {
            "about": f"{self.run.name}, a recorded run",
            "run": str(self.run.folder),
            "hardware": PLACEHOLDER,
            "model": PLACEHOLDER,
            "engine": {"max_rows": c.engine.max_num_seqs},
            "workload": {
                "batch": c.train.groups_per_step * group, "group": group, "prompt_tokens": num_prompt,
                "cached_tokens": shared, "max_tokens": c.sampling.max_tokens,
                "rollouts": str(self.run.folder / "rollouts.jsonl"),
            },
            "pipeline": {"gpus": 1},
            "speculation": {"method": "none", "k": 0},
        }  # fmt: skip
        if "dspark" in self.costs.table.drafts:
            raise ConfigError(f"{self.run.folder}: it drafted with a DSpark head, which is not simulated yet")
        rates = self.costs.acceptance_rates
        if speculation.method != "none" and rates:
            tree["speculation"] = {
                "method": METHODS.get(speculation.method, speculation.method),
                "policy": speculation.policy,
                "k": k if isinstance(k, int) else max(k.values()),
                "acceptance_probabilities": rates,
            }
        return tree

    def _mean_prompt(self) -> float:
        return float(np.mean([len(record.prompt_ids) for record in Reader([str(self.run.folder / "rollouts.jsonl")])]))

    def stages(self, rollout_s: float, num_tokens: float) -> Stages:
        scale = num_tokens / self.means.num_tokens
        seconds = {name: value * (scale if name in ("logprob", "training") else 1.0)
                   for name, value in self.means.stages.items()}  # fmt: skip
        return Stages(prepare=0.0, generation=rollout_s, **seconds)


@lru_cache(maxsize=1)
def run_simulation(folder: str) -> RunSimulation:
    """Read once, also if a sweep simulates it many times."""
    run = RecordedRun.open(Path(folder))
    if run is None:
        raise ConfigError(f"{folder} is not the folder of a run: run.json or config.toml is missing")
    return RunSimulation(run)


def _means(path: Path) -> RecordedMeans:
    try:
        steps = read_metrics(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read ({error}); give a run of `paceline train`") from None
    usable = [step for step in steps if isinstance(step.get("stages"), Mapping) and number(step, "num_tokens")]
    if not usable:
        raise ConfigError(f"{path}: has no RL step yet")

    def mean(*keys: str) -> float:
        return sum(number(step, *keys) or 0.0 for step in usable) / len(usable)

    return RecordedMeans({name: mean("stages", name) for name in MEASURED_STAGES}, mean("num_tokens"))
