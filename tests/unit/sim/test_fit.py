"""Calibration: known parameters are recovered from simulated steps, and held-out steps are predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.config_io import ConfigError
from paceline.sim.fit import fit
from paceline.sim.settings import field_range
from paceline.sim.specs import Efficiency, Hardware, Model, Software, load_spec
from paceline.sim.step import Engine, StepModel
from paceline.sim.trace import EFFICIENCY_PARAMETERS, MeasuredStep, calibrate, read_trace

H200, QWEN = load_spec(Hardware, "h200", ""), load_spec(Model, "qwen3-8b", "")
START = load_spec(Efficiency, "published", "")


def test_fits_a_power_law():
    x = np.array([1.0, 2.0, 5.0, 20.0])
    found = fit(lambda v: v["a"] * x ** v["b"], 3 * x**0.7, {"a": 1.0, "b": 2.0}, prior=10.0)
    assert found.values == pytest.approx({"a": 3.0, "b": 0.7}, rel=0.01)
    assert found.max_error < 0.01


def test_parameters_without_influence_keep_their_start_value():
    found = fit(lambda v: np.full(3, v["a"]), np.full(3, 5.0), {"a": 1.0, "unused": 0.3})
    assert found.values["unused"] == pytest.approx(0.3) and found.values["a"] == pytest.approx(5, rel=0.01)


def test_values_must_be_above_zero():
    with pytest.raises(ValueError, match="above zero"):
        fit(lambda v: np.ones(1), np.zeros(1), {"a": 1.0})


def test_values_stay_within_their_bounds():
    """With a at its bound 2, the best fit is b = 3."""
    x = np.array([1.0, 2.0, 5.0])
    found = fit(lambda v: v["a"] * v["b"] * x, 6 * x, {"a": 1.0, "b": 0.5}, 10.0, bounds={"a": (0.1, 2), "b": (0, 99)})
    assert found.values["a"] <= 2 and found.max_error < 0.01
    narrow = fit(lambda v: v["a"] * x, 6 * x, {"a": 1.0, "b": 0.5}, bounds={"a": (0.1, 2)})
    assert narrow.values["a"] == pytest.approx(2) and narrow.at_bounds == ("a",)
    assert fit(lambda v: v["a"] * x, x / 6, {"a": 9.0}, bounds={"a": (2, 3)}).values["a"] == pytest.approx(2)


def test_efficiencies_stay_within_their_bounds():
    """Step times that do not depend on the number of rows would fit best with free KV cache reads."""
    flat = [MeasuredStep(rows, 0.0, 2000.0, 4e-3) for rows in (1, 2, 4, 8, 16, 32)]
    found = calibrate(flat, H200, QWEN, START, Engine())
    for name in EFFICIENCY_PARAMETERS:
        low, high = field_range(Efficiency, name)
        assert low <= found.fitted.values[name] <= high * (1 + 1e-12)
    assert "attention" in found.fitted.at_bounds and found.efficiency.attention == pytest.approx(1.05)


def test_predicts_the_steps_of_an_h200():
    measured = read_trace(Path(__file__).parents[3] / "benchmarks/data/h200-qwen3-8b-steps.json")
    found = calibrate(measured, H200, QWEN, START, Engine())
    assert len(found.held_out) >= 19 and found.max_error < 0.1 and not found.fitted.at_bounds


def simulated_bench_rows(seed: int = 0, noise: float = 0.01):
    """Step times with an efficiency that differs from the shipped spec."""
    true = replace(START, bandwidth=0.55, matmul=0.45, attention=0.5, layer_us=40.0, pass_us=150.0)
    host = Software("host", "", host_step_us=300.0, host_row_us=5.0)
    random = np.random.default_rng(seed)
    rows = []
    for context in (200, 1000, 4000):
        for batch in (1, 4, 16, 64, 256):
            for k in (0, 1, 3, 7):
                model = StepModel(H200, QWEN, host, true, Engine(), "eagle3" if k else "none")
                ms = 1e3 * float(model.step_s(batch, k, context)) * np.exp(noise * random.standard_normal())
                rows.append({
                    "batch": batch, "num_speculative_tokens": k, "verified": k, "context": context, "step_ms": ms,
                    "drafter": "eagle3" if k else "none", "policy": "static" if k else "none",
                })  # fmt: skip
    return rows


def test_steps_with_a_dspark_head_are_left_out(tmp_path):
    """They would count as steps without a head."""
    rows = simulated_bench_rows()
    others = [row | {"drafter": "dspark", "step_ms": 2 * row["step_ms"]} for row in rows]
    for name, each in (("one", rows), ("both", [*rows, *others])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": each}))
    assert read_trace(tmp_path / "both.json") == read_trace(tmp_path / "one.json")


def test_half_of_a_trace_predicts_the_other_half(tmp_path):
    (tmp_path / "steps.json").write_text(json.dumps({"rows": simulated_bench_rows()}))
    measured = read_trace(tmp_path / "steps.json")
    found = calibrate(measured, H200, QWEN, START, Engine())
    assert len(found.fitted_steps) == len(found.held_out) == 30
    assert found.max_error < 0.05
    # The times of reading weights and of launches are the same in every step, so they are hard to separate.
    assert found.efficiency.bandwidth == pytest.approx(0.55, rel=0.15)
    assert found.efficiency.matmul == pytest.approx(0.45, rel=0.05)
    # Without a fit the errors are large.
    shipped = StepModel(H200, QWEN, Software("", ""), START, Engine())
    not_drafted = [row for row in measured if not row.drafted]
    assert max(abs(float(shipped.step_s(r.rows, r.k, r.context)) / r.seconds - 1) for r in not_drafted) > 0.2


def test_engine_steps_are_grouped_by_rows_and_draft_length(tmp_path):
    steps = [
        {"num_rows": rows, "num_query_tokens": rows * (1 + k), "num_context_tokens": rows * 700, "total_s": s,
         "draft_s": d, "num_draft_tokens": rows * k}
        for rows, k, s, d in [(1, 0, 0.01, 0), (1, 0, 0.02, 0), (1, 0, 0.9, 0), (4, 0, 0.03, 0), (4, 3, 0.06, 0.01),
                              (8, 0, 0.05, 0)]
    ]  # fmt: skip
    steps.append(
        {"num_rows": 2, "num_query_tokens": 100, "num_context_tokens": 100, "total_s": 1.0, "num_draft_tokens": 0}
    )
    (tmp_path / "steps.jsonl").write_text("\n".join(map(json.dumps, steps)))
    found = read_trace(tmp_path / "steps.jsonl")
    assert [(m.rows, m.k, m.context, round(m.seconds, 9)) for m in found] == [
        (1, 0, 700, 0.02), (4, 0, 700, 0.03), (8, 0, 700, 0.05), (4, 3, 700, 0.05),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "neither JSON nor jsonl"), ("[1]", "contains no steps"), ('{"rows": []}', "0 kinds of steps, but 4 or")],
)
def test_invalid_trace_files(tmp_path, text, message):
    (tmp_path / "steps.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / "steps.json")
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.json")
    (tmp_path / "steps.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"steps\.json: neither JSON nor jsonl"):
        read_trace(tmp_path / "steps.json")


BENCH = {"batch": 1, "num_speculative_tokens": 0, "context": 100, "step_ms": 5.0}
STEP = {"num_rows": 1, "num_query_tokens": 1, "num_context_tokens": 100, "total_s": 0.005}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (BENCH | {"step_ms": -1}, "step_ms = -1 in a row: must be a number above zero"),
        (BENCH | {"step_ms": float("nan")}, "step_ms = nan"),
        (BENCH | {"step_ms": "5"}, "step_ms = '5'"),
        (BENCH | {"batch": 0}, "batch = 0 in a row: must be a number of 1 or more"),
        (BENCH | {"context": None}, "context = None"),
        (BENCH | {"num_speculative_tokens": -3}, "num_speculative_tokens = -3"),
        ({"step_ms": 5.0}, "num_speculative_tokens = None"),
        (BENCH, "1 kinds of steps, but 4 or more"),
        ({"rows": 1, "seconds": 0.005}, "a row has no 'num_rows'; its keys are rows, seconds"),
        (STEP | {"num_rows": "1"}, "num_rows = '1'"),
        (STEP | {"num_rows": -1}, "num_rows = -1"),
        (STEP | {"total_s": 0}, "total_s = 0 in a row: must be a number above zero"),
        (STEP | {"draft_s": 0.1}, r"draft_s = 0\.1 in a row: must be less than total_s = 0\.005"),
    ],
)
def test_invalid_rows_of_a_trace(tmp_path, row, message):
    (tmp_path / "steps.json").write_text(json.dumps({"rows": [row] * 8}))
    with pytest.raises(ConfigError, match=message):
        read_trace(tmp_path / "steps.json")
