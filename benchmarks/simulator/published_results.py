"""Published results, compared with simulations that use one set of parameters.

The parameters are the `published` efficiency spec and the software specs in SOFTWARE. They are fitted only to rows
without speculation and with k = 3 (`Row.fitted`), and stored in spec_files/. A checked row must be within TOLERANCE of
the published value; the other rows are only reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config_io import read_toml
from paceline.sim.fit import Fit, Values, fit
from paceline.sim.settings import field_range
from paceline.sim.simulator import Result, Run, SimulationConfig, Simulator, load_simulation_config
from paceline.sim.specs import Efficiency, Hardware, Model, Software, load_spec
from paceline.sim.speculation import NO_SPECULATION, Speculation
from paceline.sim.step import Engine, StepModel

TOLERANCE = 0.10
SOFTWARE = ("nemo-rl-vllm", "vllm-0.25")
FITTED_PARAMETERS = {
    "efficiency": ("bandwidth", "matmul", "knee", "attention", "layer_us", "mfu", "mfu_experts"),
    "nemo-rl-vllm": ("host_step_us", "host_token_us", "host_pass_us", "wake_s", "stage_s"),
    "vllm-0.25": ("host_step_us", "host_row_us", "host_pass_us"),
}
WORKLOADS = {"rl_zero": "nvidia-8b-zero", "rl_think": "nvidia-8b-think"}
CHECKED_STAGES = ("generation", "total")
CONTEXT = 640  # of the measured steps: 512 prompt tokens and half of 256 completion tokens
PRIOR = 0.5
WEIGHTS = {True: 2.0, False: 1.0}  # by `Row.checked`


@dataclass(frozen=True, slots=True)
class Parameters:
    efficiency: Efficiency
    software: dict[str, Software]

    @staticmethod
    def shipped() -> Parameters:
        names = (*SOFTWARE, "device")
        software = {name: load_spec(Software, name, "") for name in names}
        return Parameters(load_spec(Efficiency, "published", ""), software)

    def values(self) -> dict[str, float]:
        """The fitted parameters by dotted name."""
        return {f"{spec}.{key}": float(getattr(self._spec(spec), key)) for spec, key in _fitted_keys()}

    def bounds(self) -> dict[str, tuple[float, float]]:
        return {f"{spec}.{key}": field_range(type(self._spec(spec)), key) for spec, key in _fitted_keys()}

    def with_values(self, values: Values) -> Parameters:
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            spec, _, key = name.rpartition(".")
            changes.setdefault(spec, {})[key] = value
        efficiency = replace(self.efficiency, **changes.pop("efficiency", {}))
        return Parameters(
            efficiency, {name: replace(spec, **changes.get(name, {})) for name, spec in self.software.items()}
        )

    def _spec(self, name: str) -> Efficiency | Software:
        return self.efficiency if name == "efficiency" else self.software[name]


def _fitted_keys() -> Iterator[tuple[str, str]]:
    return ((spec, key) for spec, keys in FITTED_PARAMETERS.items() for key in keys)


@dataclass(frozen=True, slots=True)
class Row:
    table: str
    name: str
    published: float
    simulated: Callable[[Parameters], float]
    fitted: bool = False
    checked: bool = True
    high: float | None = None  # upper end, if a range was published

    def error(self, parameters: Parameters) -> float:
        """Relative; 0 within a published range."""
        simulated = self.simulated(parameters)
        nearest = self.published if self.high is None else min(max(simulated, self.published), self.high)
        return simulated / nearest - 1


class PublishedResults:
    """All rows. Schedules are computed once per config."""

    def __init__(self) -> None:
        self.published = read_toml(Path(__file__).with_name("published_results.toml"))
        self._simulators: dict[SimulationConfig, Simulator] = {}
        self._runs: dict[tuple[SimulationConfig, Speculation], Run] = {}  # with `_parameters`
        self._parameters: Parameters | None = None

    @cached_property
    def rows(self) -> list[Row]:
        return [
            *self._steps(),
            *self._workloads(),
            *self._async(),
            *self._heat_map(),
            *self._scale(),
            *self._unchecked(),
        ]

    def fit(self, parameters: Parameters) -> tuple[Parameters, Fit]:
        """Fit the parameters to the rows with `fitted`, starting from these values."""
        rows = [row for row in self.rows if row.fitted]

        def simulated(values: Values) -> np.ndarray:
            changed = parameters.with_values(values)
            return np.array([row.simulated(changed) for row in rows])

        weights = np.array([WEIGHTS[row.checked] for row in rows])
        measured = np.array([row.published for row in rows])
        found = fit(simulated, measured, parameters.values(), PRIOR, weights, parameters.bounds())
        return parameters.with_values(found.values), found

    def run(self, config: SimulationConfig, parameters: Parameters) -> Result:
        if parameters is not self._parameters:
            self._parameters = parameters
            self._runs.clear()
        baseline = replace(config, speculation=NO_SPECULATION)
        if baseline not in self._simulators:
            self._simulators[baseline] = Simulator(baseline)
        simulator = self._simulators[baseline]
        simulator.efficiency, simulator.software = parameters.efficiency, parameters.software[config.software]
        for speculation in (config.speculation, NO_SPECULATION):
            if (baseline, speculation) not in self._runs:
                self._runs[baseline, speculation] = simulator.run(speculation)
        run, ar = self._runs[baseline, config.speculation], self._runs[baseline, NO_SPECULATION]
        return Result(config, run, ar, simulator.hardware.name, simulator.model.name, simulator.hardware.usd_per_hour)

    # -- rows -------------------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Row]:
        model, hardware = load_spec(Model, "qwen3-8b", ""), load_spec(Hardware, "h200", "")

        def step_model(parameters: Parameters, method: str) -> StepModel:
            software = parameters.software["vllm-0.25"]
            return StepModel(hardware, model, software, parameters.efficiency, Engine(), method)

        for tokens, ms in self.published["h200_linears"]["qwen3_8b"].items():

            def linears(parameters: Parameters, num: int = int(tokens)) -> float:
                return 1e3 * float(matrices_s(step_model(parameters, "none"), num))

            yield Row("H200, Qwen3-8B's matrix products, ms", f"{tokens} tokens", ms, linears, True, checked=False)
        for mode, times in self.published["vllm_h200"].items():
            k = 0 if mode == "plain" else int(mode[1:])
            for batch, ms in times.items():

                def step(parameters: Parameters, rows: int = int(batch), k: int = k) -> float:
                    return 1e3 * float(step_model(parameters, "eagle3" if k else "none").step_s(rows, k, CONTEXT))

                name = f"{'plain' if not k else f'k = {k}'}, batch {batch}"
                yield Row("H200, vLLM's step, ms", name, ms, step, fitted=k in (0, 3), checked=False)

    def _workloads(self) -> Iterator[Row]:
        for workload, preset in WORKLOADS.items():
            config = load_simulation_config(preset)
            for mode in ("ar", "k3"):
                times = self.published[workload][mode]
                for stage in ("generation", "logprob", "training", "total"):

                    def seconds(
                        parameters: Parameters, c: SimulationConfig = config, mode: str = mode, stage: str = stage
                    ) -> float:
                        result = self.run(c, parameters)
                        run = result.ar if mode == "ar" else result.run
                        return run.step.seconds if stage == "total" else float(getattr(run.stages, stage))

                    name = f"{workload} {'plain' if mode == 'ar' else 'k = 3'}: {stage}"
                    fitted, checked = stage != "total", stage in CHECKED_STAGES
                    yield Row("Qwen3-8B on 32 GB200, s", name, times[stage], seconds, fitted, checked)

    def _async(self) -> Iterator[Row]:
        config = load_simulation_config("nvidia-8b-async")
        for mode in ("ar", "k3"):

            def seconds(parameters: Parameters, mode: str = mode) -> float:
                result = self.run(config, parameters)
                return (result.ar if mode == "ar" else result.run).step.seconds

            published = self.published["rl_think_async"][mode]
            name = "plain: step" if mode == "ar" else "k = 3: step"
            yield Row("Qwen3-8B on 64 GB200, one update behind, s", name, published, seconds, fitted=True)

    def _heat_map(self) -> Iterator[Row]:
        base = load_simulation_config("nvidia-235b-512")
        for what in ("rollout", "step"):
            for k, cells in self.published["heat_map"][what].items():
                for length, published in cells.items():
                    config = with_speculation(base, k=int(k), acceptance=float(length))

                    def speedup(parameters: Parameters, c: SimulationConfig = config, what: str = what) -> float:
                        return float(getattr(self.run(c, parameters), f"{what}_speedup"))

                    name = f"{what}, k = {k}, acceptance {length}"
                    yield Row("Qwen3-235B-A22B on 512 GB200, speed-up", name, published, speedup, fitted=k == "3")

    def _scale(self) -> Iterator[Row]:
        published, table = self.published["scale"], "Scale and lag, k = 5, acceptance 4, speed-up"
        at_512 = with_speculation(load_simulation_config("nvidia-235b-512"), k=5, acceptance=4.0)
        at_2048 = load_simulation_config("nvidia-235b-2048")
        for name, config, what in (
            ("rollout_512_lag0", at_512, "rollout"),
            ("rollout_2048_lag0", synchronous(at_2048), "rollout"),
            ("rollout_2048_lag2", at_2048, "rollout"),
            ("step_2048_lag2", at_2048, "step"),
        ):

            def speedup(parameters: Parameters, c: SimulationConfig = config, what: str = what) -> float:
                return float(getattr(self.run(c, parameters), f"{what}_speedup"))

            yield Row(table, f"235B {name.replace('_', ', ')}", published[name], speedup)
        low, high = published["rollout_8b"]
        for config in configs_8b_at_scale():

            def rollout(parameters: Parameters, c: SimulationConfig = config) -> float:
                return self.run(c, parameters).rollout_speedup

            name = f"8B rollout, {config.pipeline.gpus}, lag{config.pipeline.lag}"
            yield Row(table, name, low, rollout, high=high)

    def _unchecked(self) -> Iterator[Row]:
        """Published values that contradict each other, and measurements with other drafters."""
        for workload, preset in WORKLOADS.items():
            base, table = load_simulation_config(preset), f"{workload}, other drafts, speed-up"
            drafters, heads = self.published[workload]["drafters"], self.published[workload]["heads_k3"]
            rows: list[tuple[str, tuple[float, float], dict[str, Any]]] = [
                (f"k = {k}", drafters[f"k{k}"], {"k": k}) for k in (5, 7)
            ]
            rows.append(("n-gram, k = 3", drafters["ngram"], {"method": "free"}))
            rows += [(f"k = 3, head {name}", values, {}) for name, values in heads.items()]
            for name, (length, published), changes in rows:
                config = with_speculation(base, acceptance=length, **changes)

                def speedup(parameters: Parameters, c: SimulationConfig = config) -> float:
                    return self.run(c, parameters).rollout_speedup

                yield Row(table, name, published, speedup, checked=False)


def matrices_s(model: StepModel, num_tokens: int) -> np.ndarray:
    """Time of the matrix products of a dense model, without attention and everything else."""
    m, e, tokens = model.model, model.engine, np.asarray(num_tokens, np.float64)
    assert not m.experts
    mlp = model.matrix_s(3 * m.hidden * m.intermediate / e.tp, e.precision, tokens)
    layer = model.matrix_s(m.attention_params / e.tp, e.precision, tokens) + mlp
    return m.layers * layer + model.matrix_s(m.vocab * m.hidden / e.tp, e.precision, tokens)


def mean_error(found: Fit) -> float:
    """Of the fitted rows, as a ratio: 0.1 is ten per cent."""
    return float(np.expm1(np.abs(found.errors).mean()))


def with_changes(config: SimulationConfig, **sections: dict[str, Any]) -> SimulationConfig:
    """A copy with some keys of some sections changed."""
    return replace(config, **{name: replace(getattr(config, name), **changes) for name, changes in sections.items()})


def with_speculation(config: SimulationConfig, **changes: Any) -> SimulationConfig:
    return with_changes(config, speculation={"acceptance_at": 0, **changes})


def synchronous(config: SimulationConfig) -> SimulationConfig:
    """The same with lag 0 on colocated devices."""
    return with_changes(config, pipeline={"layout": "colocated", "generation_gpus": 0, "lag": 0})


def configs_8b_at_scale() -> Iterator[SimulationConfig]:
    """Qwen3-8B on 32 to 2048 devices with a lag of 0 to 8, with larger engines where rows are few."""
    base = load_simulation_config("nvidia-8b-scale")
    for gpus, per_engine in ((32, 1), (128, 1), (512, 2), (2048, 8)):
        for lag in (0, 1, 2, 8):
            layout = {"layout": "disaggregated", "generation_gpus": gpus // 2} if lag else {}
            engine = {"gpus": per_engine, "tp": per_engine}
            yield with_changes(base, engine=engine, pipeline={"gpus": gpus, "lag": lag, **layout})
