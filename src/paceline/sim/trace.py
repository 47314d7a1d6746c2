"""Calibration of the step model with measured steps: `paceline simulate --fit TRACE`.

A trace is the output of `paceline bench step --json` (one row per batch size and draft length, with `step_ms`,
`context` and `verified`), or a jsonl of engine steps (`StepTrace`, as in a run's trace.jsonl). A random half of the
rows (fixed seed) is fitted; the other half is held out to measure the error.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config_io import ConfigError
from paceline.files import parse_json
from paceline.sim.fit import Fit, Values, fit
from paceline.sim.settings import field_range
from paceline.sim.specs import Efficiency, Hardware, Model, Software
from paceline.sim.step import Engine, StepModel

EFFICIENCY_PARAMETERS = ("bandwidth", "matmul", "knee", "attention", "layer_us", "pass_us")
HOST_PARAMETERS = ("host_step_us", "host_row_us")
HOST_START = {"host_step_us": 20.0, "host_row_us": 1.0}
MIN_STEP_KINDS = 4
SPLIT_SEED = 0
TINY = 1e-9  # the smallest value that counts as above zero
REQUIRED_KEYS = ("num_rows", "num_query_tokens", "num_context_tokens", "total_s")


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The time of one kind of step."""

    rows: int
    k: float  # draft tokens per row
    context: float  # tokens per row
    seconds: float
    drafted: bool = False  # the time includes drafting by a head

    @property
    def name(self) -> str:
        return f"batch {self.rows}, k = {self.k:g}, context {self.context:.0f}"


@dataclass(frozen=True, slots=True)
class Calibration:
    efficiency: Efficiency
    software: Software
    fitted: Fit
    fitted_steps: tuple[MeasuredStep, ...]
    held_out: tuple[MeasuredStep, ...]
    errors: tuple[float, ...]  # relative, of the held-out steps

    @property
    def max_error(self) -> float:
        return max(map(abs, self.errors), default=0.0)


def read_trace(path: Path) -> list[MeasuredStep]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--fit {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--fit {path}: neither JSON nor jsonl (not UTF-8 text)") from None
    try:
        tree = parse_json(text)
        rows = tree.get("rows", [tree])
    except (ValueError, AttributeError):
        try:
            rows = [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"--fit {path}: neither JSON nor jsonl: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"--fit {path}: contains no steps")
    try:
        found = _from_bench(rows) if any("step_ms" in row for row in rows) else _from_engine_steps(rows)
    except ConfigError as error:
        raise ConfigError(f"--fit {path}: {error}") from None
    num_kinds = len({(each.rows, each.k, each.context, each.drafted) for each in found})
    if num_kinds < MIN_STEP_KINDS:
        raise ConfigError(
            f"--fit {path}: {num_kinds} kinds of steps, but {MIN_STEP_KINDS} or more are needed; give the output of "
            "`paceline bench step --json`, or a jsonl of engine steps"
        )
    return sorted(found, key=lambda each: (each.k, each.rows, each.context))


def _from_bench(rows: Sequence[Mapping[str, Any]]) -> list[MeasuredStep]:
    found = []
    for row in rows:
        is_unknown = row.get("drafter") == "dspark"  # there is no model of its time
        if row.get("step_ms") is None or row.get("policy") == "auto" or is_unknown:
            continue
        drafted = row.get("drafter") == "eagle3"
        k = _number(row, "num_speculative_tokens" if row.get("verified") is None else "verified")
        num_rows, context = _number(row, "batch", 1), _number(row, "context")
        found.append(MeasuredStep(int(num_rows), k, context, 1e-3 * _number(row, "step_ms", TINY), drafted))
    return found


def _number(row: Mapping[str, Any], key: str, least: float = 0.0) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        expected = f"a number of {least:g} or more" if least != TINY else "a number above zero"
        raise ConfigError(f"{key} = {value!r} in a row: must be {expected}")
    return float(value)


def _from_engine_steps(rows: Sequence[Mapping[str, Any]]) -> list[MeasuredStep]:
    """Medians over steps with the same rows and draft length, and contexts within a factor of two. Steps that compute
    prompts are skipped."""
    groups: dict[tuple[int, int, int], list[tuple[float, float]]] = {}  # values: (context per row, seconds)
    for row in rows:
        if missing := [key for key in REQUIRED_KEYS if key not in row]:
            raise ConfigError(
                f"a row has no {missing[0]!r}; its keys are {', '.join(row)}. Give the output of `paceline bench step "
                "--json`, or a run's trace.jsonl"
            )
        if not row["num_rows"]:
            continue
        num, drafted = int(_number(row, "num_rows")), int(_number({"num_draft_tokens": 0, **row}, "num_draft_tokens"))
        context = _number(row, "num_context_tokens") / num
        seconds = _number(row, "total_s", TINY) - _number({"draft_s": 0.0, **row}, "draft_s")
        if seconds <= 0:
            raise ConfigError(f"draft_s = {row['draft_s']} in a row: must be less than total_s = {row['total_s']}")
        if row["num_query_tokens"] == num + drafted and drafted % num == 0:
            groups.setdefault((num, drafted // num, int(np.log2(max(1, context)))), []).append((context, seconds))
    return [
        MeasuredStep(num, float(k), *(statistics.median(column) for column in zip(*steps, strict=True)))
        for (num, k, _), steps in groups.items()
    ]


def calibrate(
    measured: Sequence[MeasuredStep], hardware: Hardware, model: Model, efficiency: Efficiency, engine: Engine
) -> Calibration:
    """Fit half of the steps and predict the other half."""
    order = np.random.default_rng(SPLIT_SEED).permutation(len(measured)).tolist()
    half = (len(order) + 1) // 2
    fitted_steps, held_out = (tuple(measured[i] for i in sorted(some)) for some in (order[:half], order[half:]))
    software = Software("fitted", "this trace")

    def specs(values: Values) -> tuple[Efficiency, Software]:
        rates: dict[str, Any] = {name: values[name] for name in EFFICIENCY_PARAMETERS}
        host: dict[str, Any] = {name: values[name] for name in HOST_PARAMETERS}
        return replace(efficiency, **rates), replace(software, **host)

    def seconds(values: Values, rows: Sequence[MeasuredStep]) -> np.ndarray:
        fitted, host = specs(values)
        models = {
            method: StepModel(hardware, model, host, fitted, engine, method)
            for method in {"eagle3" if row.drafted else "none" for row in rows}
        }
        return np.array([
            float(models["eagle3" if row.drafted else "none"].step_s(row.rows, row.k, row.context)) for row in rows
        ])  # fmt: skip

    start = {name: float(getattr(efficiency, name)) for name in EFFICIENCY_PARAMETERS} | HOST_START
    bounds = {name: field_range(Software if name in HOST_PARAMETERS else Efficiency, name) for name in start}
    measured_s = np.array([row.seconds for row in fitted_steps])
    found = fit(lambda values: seconds(values, fitted_steps), measured_s, start, prior=2.0, bounds=bounds)
    predicted = seconds(found.values, held_out) if held_out else np.zeros(0)
    errors = tuple(float(p / row.seconds - 1) for p, row in zip(predicted, held_out, strict=True))
    return Calibration(*specs(found.values), found, fitted_steps, held_out, errors)
