"""Efficiencies from measured steps: `paceline simulate --fit TRACE`.

A trace is what `paceline bench step --json` writes (a row per batch size and draft length, with `step_ms`, `context`
and `verified`), or a jsonl of engine steps (StepTrace as a run's trace.jsonl has it). Half of the rows, drawn by a
fixed seed, are fitted on, and the other half is predicted: other batch sizes, draft lengths and contexts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import ConfigError
from paceline.files import parse_json
from paceline.sim.cards import Efficiency, Hardware, Model, Software
from paceline.sim.fit import Fit, Values, fit
from paceline.sim.settings import limits
from paceline.sim.step import Engine, StepModel

EFFICIENCIES = ("bandwidth", "matmul", "knee", "attention", "layer_us", "pass_us")
HOSTS = ("host_step_us", "host_row_us")
HOST_START = {"host_step_us": 20.0, "host_row_us": 1.0}
LEAST_ROWS = 4
SEED = 0  # of who is fitted on
TINY = 1e-9  # above zero
KEYS = ("num_rows", "num_query_tokens", "num_context_tokens", "total_s")


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of step: rows, drafted tokens of each, tokens of each in memory, and what it took."""

    rows: int
    k: float
    context: float
    seconds: float
    drafted: bool = False  # by a head, within that time

    @property
    def name(self) -> str:
        return f"batch {self.rows}, k = {self.k:g}, context {self.context:.0f}"


@dataclass(frozen=True, slots=True)
class Calibration:
    efficiency: Efficiency
    software: Software
    fitted: Fit
    used: tuple[Measured, ...]
    held_out: tuple[Measured, ...]
    errors: tuple[float, ...]  # of those held out, relative

    @property
    def worst(self) -> float:
        return max(map(abs, self.errors), default=0.0)


def read_trace(path: Path) -> list[Measured]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--fit {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--fit {path}: neither JSON nor jsonl (not text)") from None
    try:
        tree = parse_json(text)
        rows = tree.get("rows", [tree])
    except (ValueError, AttributeError):
        try:
            rows = [parse_json(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"--fit {path}: neither JSON nor jsonl: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"--fit {path}: holds no steps")
    try:
        found = _of_bench(rows) if any("step_ms" in row for row in rows) else _of_steps(rows)
    except ConfigError as error:
        raise ConfigError(f"--fit {path}: {error}") from None
    num_kinds = len({(each.rows, each.k, each.context, each.drafted) for each in found})
    if num_kinds < LEAST_ROWS:
        raise ConfigError(
            f"--fit {path}: {num_kinds} kinds of steps; {LEAST_ROWS} or more are needed, as `paceline bench step "
            "--json` writes them, or a jsonl of engine steps"
        )
    return sorted(found, key=lambda each: (each.k, each.rows, each.context))


def _of_bench(rows: Sequence[Mapping[str, Any]]) -> list[Measured]:
    found = []
    for row in rows:
        if row.get("step_ms") is None or row.get("policy") == "auto":
            continue
        drafted = row.get("drafter") in ("eagle3",)
        k = _number(row, "num_speculative_tokens" if row.get("verified") is None else "verified")
        rows_, context = _number(row, "batch", 1), _number(row, "context")
        found.append(Measured(int(rows_), k, context, 1e-3 * _number(row, "step_ms", TINY), drafted))
    return found


def _number(row: Mapping[str, Any], key: str, least: float = 0.0) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        asked = f"a number of {least:g} or more" if least != TINY else "a number above zero"
        raise ConfigError(f"{key} = {value!r} in a row: must be {asked}")
    return float(value)


def _of_steps(rows: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Medians over steps with the same rows and tokens, and contexts within a factor of two, without prompts."""
    groups: dict[tuple[int, int, int], list[tuple[float, float]]] = {}  # (context of a row, seconds)
    for row in rows:
        if not all(key in row for key in KEYS) or not row["num_rows"]:
            continue
        num, drafted = int(_number(row, "num_rows")), int(_number({"num_draft_tokens": 0, **row}, "num_draft_tokens"))
        context = _number(row, "num_context_tokens") / num
        seconds = _number(row, "total_s", TINY) - _number({"draft_s": 0.0, **row}, "draft_s")
        if seconds <= 0:
            raise ConfigError(f"draft_s = {row['draft_s']} in a row: all of its total_s = {row['total_s']} or more")
        if row["num_query_tokens"] == num + drafted and drafted % num == 0:
            groups.setdefault((num, drafted // num, int(np.log2(max(1, context)))), []).append((context, seconds))
    return [
        Measured(num, float(k), *(statistics.median(each) for each in zip(*many, strict=True)))
        for (num, k, _), many in groups.items()
    ]


def calibrate(
    measured: Sequence[Measured], hardware: Hardware, model: Model, efficiency: Efficiency, engine: Engine
) -> Calibration:
    """Half of the rows are fitted on, the other half is predicted."""
    order = np.random.default_rng(SEED).permutation(len(measured)).tolist()
    half = (len(order) + 1) // 2
    used, held_out = (tuple(measured[i] for i in sorted(some)) for some in (order[:half], order[half:]))
    software = Software("fitted", "this trace")

    def cards(values: Values) -> tuple[Efficiency, Software]:
        rates: dict[str, Any] = {name: values[name] for name in EFFICIENCIES}
        host: dict[str, Any] = {name: values[name] for name in HOSTS}
        return replace(efficiency, **rates), replace(software, **host)

    def seconds(values: Values, rows: Sequence[Measured]) -> np.ndarray:
        fitted, host = cards(values)
        models = {
            method: StepModel(hardware, model, host, fitted, engine, method)
            for method in {"eagle3" if row.drafted else "none" for row in rows}
        }
        return np.array([
            float(models["eagle3" if row.drafted else "none"].step_s(row.rows, row.k, row.context)) for row in rows
        ])  # fmt: skip

    start = {name: float(getattr(efficiency, name)) for name in EFFICIENCIES} | HOST_START
    bounds = {name: limits(Software if name in HOSTS else Efficiency, name) for name in start}
    measured_s = np.array([row.seconds for row in used])
    found = fit(lambda values: seconds(values, used), measured_s, start, prior=2.0, bounds=bounds)
    predicted = seconds(found.values, held_out) if held_out else np.zeros(0)
    errors = tuple(float(p / row.seconds - 1) for p, row in zip(predicted, held_out, strict=True))
    return Calibration(*cards(found.values), found, used, held_out, errors)
