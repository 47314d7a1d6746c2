"""Cost tables from the steps that a run recorded."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replayed_run import CpuCosts, write_run

from paceline.sim.run_costs import fit_costs, read_steps
from paceline.speculation.batch import Load


def step(rows: int, drafted: int, seconds: float, prompt: int = 0, **changes: Any) -> dict[str, Any]:
    query = rows + drafted + prompt
    return {
        "num_rows": rows, "num_query_tokens": query, "num_context_tokens": 50 * rows + query, "total_s": seconds,
        "num_draft_tokens": drafted, "draft_s": 0.001, "drafter": "suffix", "num_planned": drafted,
        "drafted_per_position": [drafted] * (drafted > 0), "accepted_per_position": [drafted // 2] * (drafted > 0),
    } | changes  # fmt: skip


def test_the_table_has_the_runs_step_times(tmp_path: Path) -> None:
    write_run(tmp_path)
    found, true = fit_costs(list(read_steps(tmp_path / "trace.jsonl")), "mine", "here"), CpuCosts()
    assert found.max_rows == 8 and found.table.frozen and found.table.name == "mine"
    for rows in (1, 2, 4, 8):
        load = Load(rows, rows, 40 * rows)
        ratios = found.table.steps_s(load, 3 * rows) / true.steps_s(load, 3 * rows)
        assert np.abs(np.log(ratios)).max() < 0.2, rows
    assert found.table.draft_s("suffix", 8, 3) == pytest.approx(0.004, rel=0.1)
    assert 0.2 < found.acceptance_rates[0] < 0.9 and len(found.acceptance_rates) == 3
    assert found.median_error < 0.1


def test_slow_steps_do_not_count_and_prompts_do(tmp_path: Path) -> None:
    """Other processes make a third of the steps five times as long."""
    lines = [step(r, 0, (0.1 + 0.01 * r) * (5 if i % 3 == 0 else 1)) for i in range(30) for r in (1, 2, 4, 8)]
    lines += [step(4, 0, 0.1 + 0.01 * 204, prompt=200) for _ in range(16)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = fit_costs(list(read_steps(tmp_path / "trace.jsonl")), "mine", "").table
    for rows in (1, 8):
        assert table.step_s(Load(rows, rows, 51 * rows)) == pytest.approx(0.1 + 0.01 * rows, rel=0.1)
    assert table.step_s(Load(4, 204, 404)) == pytest.approx(2.14, rel=0.1)
    assert table.drafts == {}


def test_unusable_steps_are_left_out(tmp_path: Path) -> None:
    good = json.dumps(step(2, 0, 0.1))
    few_rows = json.dumps(step(2, 0, 9.0) | {"num_rows": 0.5})
    bad = [
        json.dumps(step(2, 0, 9.0, num_captured=1)), json.dumps(step(0, 0, 9.0)), json.dumps({"num_rows": 2}), "[1]",
        json.dumps(step(2, 0, math.inf)), json.dumps(step(2, 0, math.nan)), json.dumps(step(2, 0, 10**400)), few_rows,
        *(json.dumps(step(2, 2, 9.0, accepted_per_position=invalid)) for invalid in (None, ["x"], [-1], 3)),
        json.dumps(step(2, 0, 9.0, draft_s=9.5)), json.dumps(step(2, 0, 9.0, total_s="9")), '{"num_rows": 2, "num_que',
    ]  # fmt: skip
    (tmp_path / "trace.jsonl").write_text("\n".join([good, *bad, good, good[:40]]))
    steps = list(read_steps(tmp_path / "trace.jsonl"))
    assert [s.num_rows for s in steps] == [2, 2] and steps[0].seconds == pytest.approx(0.099)
    with pytest.raises(ValueError, match="2 usable engine steps, but 32 or more are needed"):
        fit_costs(steps, "", "")
    with pytest.raises(ValueError, match="no such file"):
        list(read_steps(tmp_path / "none.jsonl"))


def test_a_draft_of_which_nothing_was_verified_took_time_too(tmp_path: Path) -> None:
    lines = [step(4, 0, 0.2, draft_s=0.05, num_planned=12) for _ in range(40)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert fit_costs(list(read_steps(tmp_path / "trace.jsonl")), "", "").table.drafts == {"suffix": [(4, 3, 0.05)]}
