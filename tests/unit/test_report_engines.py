"""The report of a run with several engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_run import make_run, write_lines

from paceline.report.html import render_page
from paceline.report.run import read_run


def page(folder: Path, cluster: Any) -> str:
    make_run(folder, 4)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder / "metrics.jsonl", [step | {"cluster": cluster} for step in steps])
    return render_page(read_run(folder))


def test_busy_shares_and_restarts(tmp_path: Path) -> None:
    restarts = {"engine_restarts": 1, "reward_restarts": 0, "learner_restarts": 2}
    text = page(tmp_path / "run", {"engine_busy": [0.75, 0.5], "engine_idle": 0.375, **restarts})
    for name, value in {
        "engine 0, busy": "75%",
        "engine 1, busy": "50%",
        "idle, of all engines' time": "38%",
        "engines restarted": "4",
        "reward workers restarted": "0",
        "learner restarted": "8",
    }.items():
        assert f'<td class="text">{name}</td><td class="num">{value}</td>' in text


@pytest.mark.parametrize(
    "cluster",
    [None, {}, {"engine_busy": [0.9], "engine_idle": 0.1}, {"engine_busy": "x"}, {"engine_busy": []}, "x", [1, 2]],
)
def test_no_section_for_a_single_engine(tmp_path: Path, cluster: Any) -> None:
    assert 'id="engines"' not in page(tmp_path / "run", cluster)


@pytest.mark.parametrize("busy", [[None, 0.5], ["x", {}], [1e300, -1.0], [0.1, 0.2, 0.3]])
def test_invalid_values_do_not_break_the_page(tmp_path: Path, busy: Any) -> None:
    assert 'id="engines"' in page(tmp_path / "run", {"engine_busy": busy, "engine_idle": "x"})
