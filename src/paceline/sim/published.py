"""What others have published, beside what is simulated for it with one set of parameters.

The parameters are those of the card `published` and of the software cards that its rows name; they are fitted on the
rows without speculation and with k = 3 alone (`Row.fitted`), and stand in cards/. A row with a bar must come within
BAR of what was published; those without are reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.sim.cards import Efficiency, Hardware, Model, Software, card
from paceline.sim.fit import Fit, Values, fit
from paceline.sim.scenario import Result, Run, Scenario, Simulator, load, varied
from paceline.sim.settings import limits, read_toml
from paceline.sim.speculation import PLAIN, Speculation
from paceline.sim.step import Engine, StepModel

BAR = 0.10
SOFTWARE = ("nemo-rl-vllm", "vllm-0.25")
FITTED = {
    "efficiency": ("bandwidth", "matmul", "knee", "attention", "layer_us", "mfu", "mfu_experts"),
    "nemo-rl-vllm": ("host_step_us", "host_token_us", "host_pass_us", "wake_s", "stage_s"),
    "vllm-0.25": ("host_step_us", "host_row_us", "host_pass_us"),
}
WORKLOADS = {"rl_zero": "nvidia-8b-zero", "rl_think": "nvidia-8b-think"}
BARRED = ("generation", "total")  # the stages whose seconds must come within it
CONTEXT = 640  # of the measured steps: 512 tokens and half of 256


@dataclass(frozen=True, slots=True)
class Cards:
    efficiency: Efficiency
    software: dict[str, Software]

    @staticmethod
    def shipped() -> Cards:
        names = (*SOFTWARE, "device")
        return Cards(card(Efficiency, "published", ""), {name: card(Software, name, "") for name in names})

    def values(self) -> dict[str, float]:
        """Those that are fitted, by dotted name."""
        return {f"{who}.{key}": float(getattr(self._of(who), key)) for who, keys in FITTED.items() for key in keys}

    def bounds(self) -> dict[str, tuple[float, float]]:
        return {f"{who}.{key}": limits(type(self._of(who)), key) for who, keys in FITTED.items() for key in keys}

    def with_values(self, values: Values) -> Cards:
        changes: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            who, _, key = name.rpartition(".")
            changes.setdefault(who, {})[key] = value
        own = changes.pop("efficiency", {})
        software = {name: replace(each, **changes.get(name, {})) for name, each in self.software.items()}
        return Cards(replace(self.efficiency, **own), software)

    def _of(self, who: str) -> Efficiency | Software:
        return self.efficiency if who == "efficiency" else self.software[who]


@dataclass(frozen=True, slots=True)
class Row:
    table: str
    name: str
    published: float
    simulated: Callable[[Cards], float]
    fitted: bool = False
    bar: bool = True
    high: float | None = None  # where a range was published, its other end

    def error(self, cards: Cards) -> float:
        """Relative; 0 within a published range."""
        found = self.simulated(cards)
        nearest = self.published if self.high is None else min(max(found, self.published), self.high)
        return found / nearest - 1


class Published:
    """All rows. Schedules are made once."""

    def __init__(self) -> None:
        self.figures = read_toml(Path(__file__).with_name("published.toml"))
        self._simulators: dict[Scenario, Simulator] = {}
        self._runs: dict[tuple[Scenario, Speculation], Run] = {}  # with the cards that were asked for last
        self._cards: Cards | None = None

    @cached_property
    def rows(self) -> list[Row]:
        return [
            *self._steps(),
            *self._workloads(),
            *self._async(),
            *self._heat_map(),
            *self._scale(),
            *self._unbarred(),
        ]

    def fit(self, cards: Cards) -> tuple[Cards, Fit]:
        """From these values, on the rows that may be fitted on."""
        rows = [row for row in self.rows if row.fitted]

        def simulated(values: Values) -> np.ndarray:
            with_these = cards.with_values(values)
            return np.array([row.simulated(with_these) for row in rows])

        weights = np.array([WEIGHTS[row.bar] for row in rows])
        measured = np.array([row.published for row in rows])
        found = fit(simulated, measured, cards.values(), PRIOR, weights, cards.bounds())
        return cards.with_values(found.values), found

    def run(self, scenario: Scenario, cards: Cards) -> Result:
        if cards is not self._cards:
            self._cards = cards
            self._runs.clear()
        plain = replace(scenario, speculation=PLAIN)
        if plain not in self._simulators:
            self._simulators[plain] = Simulator(plain)
        simulator = self._simulators[plain]
        simulator.efficiency, simulator.software = cards.efficiency, cards.software[scenario.software]
        for speculation in (scenario.speculation, PLAIN):
            if (plain, speculation) not in self._runs:
                self._runs[plain, speculation] = simulator.run(speculation)
        run, ar = self._runs[plain, scenario.speculation], self._runs[plain, PLAIN]
        return Result(scenario, run, ar, simulator.hardware)

    # -- rows -------------------------------------------------------------------------------------------------------

    def _steps(self) -> Iterator[Row]:
        model, hardware = card(Model, "qwen3-8b", ""), card(Hardware, "h200", "")

        def step_model(cards: Cards, method: str) -> StepModel:
            software = cards.software["vllm-0.25"]
            return StepModel(hardware, model, software, cards.efficiency, Engine(), method)

        for tokens, ms in self.figures["h200_linears"]["qwen3_8b"].items():

            def linears(cards: Cards, num: int = int(tokens)) -> float:
                return 1e3 * float(step_model(cards, "none").matrices_s(num))

            yield Row("H200, Qwen3-8B's matrix products, ms", f"{tokens} tokens", ms, linears, True, bar=False)
        for mode, times in self.figures["vllm_h200"].items():
            k = 0 if mode == "plain" else int(mode[1:])
            for batch, ms in times.items():

                def step(cards: Cards, rows: int = int(batch), k: int = k) -> float:
                    return 1e3 * float(step_model(cards, "eagle3" if k else "none").step_s(rows, k, CONTEXT))

                name = f"{'plain' if not k else f'k = {k}'}, batch {batch}"
                yield Row("H200, vLLM's step, ms", name, ms, step, fitted=k in (0, 3), bar=False)

    def _workloads(self) -> Iterator[Row]:
        for workload, preset in WORKLOADS.items():
            scenario = load(preset)
            for mode in ("ar", "k3"):
                times = self.figures[workload][mode]
                for stage in ("generation", "logprob", "training", "total"):

                    def seconds(cards: Cards, s: Scenario = scenario, mode: str = mode, stage: str = stage) -> float:
                        result = self.run(s, cards)
                        run = result.ar if mode == "ar" else result.run
                        return run.step.seconds if stage == "total" else float(getattr(run.stages, stage))

                    name = f"{workload} {'plain' if mode == 'ar' else 'k = 3'}: {stage}"
                    yield Row("Qwen3-8B on 32 GB200, s", name, times[stage], seconds, stage != "total", stage in BARRED)

    def _async(self) -> Iterator[Row]:
        scenario = load("nvidia-8b-async")
        for mode in ("ar", "k3"):

            def seconds(cards: Cards, mode: str = mode) -> float:
                result = self.run(scenario, cards)
                return (result.ar if mode == "ar" else result.run).step.seconds

            published = self.figures["rl_think_async"][mode]
            name = "plain: step" if mode == "ar" else "k = 3: step"
            yield Row("Qwen3-8B on 64 GB200, one update behind, s", name, published, seconds, fitted=True)

    def _heat_map(self) -> Iterator[Row]:
        base = load("nvidia-235b-512")
        for what in ("rollout", "step"):
            for k, cells in self.figures["heat_map"][what].items():
                for length, published in cells.items():
                    s = with_speculation(base, k=int(k), acceptance=float(length))

                    def speedup(cards: Cards, s: Scenario = s, what: str = what) -> float:
                        return float(getattr(self.run(s, cards), f"{what}_speedup"))

                    name = f"{what}, k = {k}, acceptance {length}"
                    yield Row("Qwen3-235B-A22B on 512 GB200, speed-up", name, published, speedup, fitted=k == "3")

    def _scale(self) -> Iterator[Row]:
        figures, table = self.figures["scale"], "Scale and lag, k = 5, acceptance 4, speed-up"
        at_512 = with_speculation(load("nvidia-235b-512"), k=5, acceptance=4.0)
        at_2048 = load("nvidia-235b-2048")
        for name, scenario, what in (
            ("rollout_512_lag0", at_512, "rollout"),
            ("rollout_2048_lag0", synchronous(at_2048), "rollout"),
            ("rollout_2048_lag2", at_2048, "rollout"),
            ("step_2048_lag2", at_2048, "step"),
        ):

            def speedup(cards: Cards, s: Scenario = scenario, what: str = what) -> float:
                return float(getattr(self.run(s, cards), f"{what}_speedup"))

            yield Row(table, f"235B {name.replace('_', ', ')}", figures[name], speedup)
        low, high = figures["rollout_8b"]
        for scenario in small_at_scale():

            def rollout(cards: Cards, s: Scenario = scenario) -> float:
                return self.run(s, cards).rollout_speedup

            name = f"8B rollout, {scenario.pipeline.gpus}, lag{scenario.pipeline.lag}"
            yield Row(table, name, low, rollout, high=high)

    def _unbarred(self) -> Iterator[Row]:
        """Those that contradict each other, and what was measured with other heads."""
        for workload, preset in WORKLOADS.items():
            base, table = load(preset), f"{workload}, other drafts, speed-up"
            rows: list[tuple[str, tuple[float, float], dict[str, Any]]] = [
                (f"k = {k}", self.figures[workload]["drafters"][f"k{k}"], {"k": k}) for k in (5, 7)
            ]
            rows.append(("n-gram, k = 3", self.figures[workload]["drafters"]["ngram"], {"method": "free"}))
            rows += [(f"k = 3, head {name}", each, {}) for name, each in self.figures[workload]["heads_k3"].items()]
            for name, (length, published), changes in rows:
                s = with_speculation(base, acceptance=length, **changes)

                def speedup(cards: Cards, s: Scenario = s) -> float:
                    return self.run(s, cards).rollout_speedup

                yield Row(table, name, published, speedup, bar=False)


PRIOR = 0.5
WEIGHTS = {True: 2.0, False: 1.0}  # rows that have a bar, and others


def with_speculation(scenario: Scenario, **changes: Any) -> Scenario:
    return varied(scenario, speculation={"acceptance_at": 0, **changes})


def synchronous(scenario: Scenario) -> Scenario:
    """The same on all devices, one stage after the other."""
    return varied(scenario, pipeline={"layout": "colocated", "generation_gpus": 0, "lag": 0})


def small_at_scale() -> Iterator[Scenario]:
    """Qwen3-8B from 32 to 2048 devices and 0 to 8 updates behind, larger engines where rows are few."""
    base = load("nvidia-8b-scale")
    for gpus, per_engine in ((32, 1), (128, 1), (512, 2), (2048, 8)):
        for lag in (0, 1, 2, 8):
            layout = {"layout": "disaggregated", "generation_gpus": gpus // 2} if lag else {}
            engine = {"gpus": per_engine, "tp": per_engine}
            yield varied(base, engine=engine, pipeline={"gpus": gpus, "lag": lag, **layout})
