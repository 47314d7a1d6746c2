"""Efficiencies from measured steps: `paceline simulate --fit TRACE`.

A trace is what `paceline bench step --json` writes (a row per batch size and draft length, with `step_ms`, `context`
and `verified`), or a jsonl of engine steps (StepTrace as a run's steps.jsonl has it). Half of the rows, drawn by a
fixed seed, are fitted on, and the other half is predicted: other batch sizes, draft lengths and contexts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import ConfigError
from paceline.sim.cards import Efficiency, Hardware, Model, Software
from paceline.sim.fit import Fit, Values, fit
from paceline.sim.step import Engine, StepModel

EFFICIENCIES = ("bandwidth", "matmul", "knee", "attention", "layer_us", "pass_us")
HOSTS = ("host_step_us", "host_row_us")
HOST_START = {"host_step_us": 20.0, "host_row_us": 1.0}
LEAST_ROWS = 4
SEED = 0  # of who is fitted on
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
    try:
        tree = json.loads(text)
        rows = tree.get("rows", [tree])
    except (ValueError, AttributeError):
        try:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise ConfigError(f"--fit {path}: neither JSON nor jsonl ({error})") from None
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"--fit {path}: holds no steps")
    found = _of_bench(rows) if any("step_ms" in row for row in rows) else _of_steps(rows)
    if len(found) < LEAST_ROWS:
        raise ConfigError(
            f"--fit {path}: {len(found)} kinds of steps; {LEAST_ROWS} or more are needed, as `paceline bench step "
            "--json` writes them, or a jsonl of engine steps"
        )
    return sorted(found, key=lambda each: (each.k, each.rows, each.context))


def _of_bench(rows: Sequence[Mapping[str, Any]]) -> list[Measured]:
    found = []
    for row in rows:
        if row.get("step_ms") is None or row.get("policy") == "auto":
            continue
        drafted = row.get("drafter") in ("eagle3",)
        k = row.get("verified")
        k = row["num_speculative_tokens"] if k is None else k
        found.append(Measured(row["batch"], float(k), float(row["context"]), 1e-3 * row["step_ms"], drafted))
    return found


def _of_steps(rows: Sequence[Mapping[str, Any]]) -> list[Measured]:
    """Medians over steps with the same rows and tokens, and contexts within a factor of two, without prompts."""
    groups: dict[tuple[int, int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        if not all(key in row for key in KEYS) or not row["num_rows"]:
            continue
        num, drafted = row["num_rows"], row.get("num_draft_tokens", 0)
        if row["num_query_tokens"] == num + drafted and drafted % num == 0:
            depth = int(np.log2(max(1, row["num_context_tokens"] / num)))
            groups.setdefault((num, drafted // num, depth), []).append(row)
    return [
        Measured(
            num, float(k), statistics.median(r["num_context_tokens"] / num for r in many),
            statistics.median(r["total_s"] - r.get("draft_s", 0.0) for r in many),
        )
        for (num, k, _), many in groups.items()
    ]  # fmt: skip


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
    found = fit(lambda values: seconds(values, used), np.array([row.seconds for row in used]), start, prior=2.0)
    predicted = seconds(found.values, held_out) if held_out else np.zeros(0)
    errors = tuple(float(p / row.seconds - 1) for p, row in zip(predicted, held_out, strict=True))
    return Calibration(*cards(found.values), found, used, held_out, errors)
