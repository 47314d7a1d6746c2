"""Options of `paceline simulate` that contradict each other."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from paceline.cli import app

run = CliRunner().invoke


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "k=3:1"], "FROM must not be above TO"),
        (["--sweep", "k=1:1000000000000"], "at most 10000 numbers"),
        (["--sweep", "k=1:2", "speculation.k=3,4"], "speculation.k is given more than once"),
        (["--sweep", "k=1:2", "k=5"], "speculation.k is given more than once"),
        (["--sweep", "k=1:2", "--fit", "steps.json"], "give one of them"),
        (["--sweep", "k=1:2", "--timeline"], "--timeline with --sweep"),
        (["--fit", "steps.json", "--timeline"], "--timeline with --fit"),
        (["acceptence=3"], "did you mean speculation.acceptance?"),
        (["--sweep", "bach=1:3"], "did you mean workload.batch?"),
        (["hardwre=h100"], "did you mean hardware?"),
    ],
)
def test_contradicting_options_are_errors(arguments, message):
    done = run(app, ["simulate", "nvidia-8b-zero", *arguments])
    assert done.exit_code == 2 and message in " ".join(done.output.split())


def test_list_takes_no_other_options(tmp_path):
    done = run(app, ["simulate", "--list", "--json", str(tmp_path / "out.json")])
    assert done.exit_code == 2 and "takes no other arguments" in done.output and not (tmp_path / "out.json").exists()


def test_a_list_of_probabilities_is_one_value(tmp_path):
    path = tmp_path / "out.json"
    arguments = ["acceptance_probabilities=[0.8,0.5]", "--sweep", "k=1:2", "--json", str(path)]
    done = run(app, ["simulate", "nvidia-8b-zero", *arguments])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["rows"]
    assert [row["mean_acceptance_length"] for row in rows] == pytest.approx([1.8, 2.2])


def test_a_fit_reports_parameters_at_their_bounds(tmp_path):
    """These step times are too short for an H200."""
    rows = [{"batch": b, "num_speculative_tokens": 0, "context": 2000, "step_ms": 1e-3} for b in (1, 2, 4, 8, 16, 32)]
    (tmp_path / "steps.json").write_text(json.dumps({"rows": rows}))
    path = tmp_path / "out.json"
    arguments = ["hardware=h200", "--fit", str(tmp_path / "steps.json"), "--json", str(path)]
    done = run(app, ["simulate", "nvidia-8b-zero", *arguments])
    assert done.exit_code == 0 and "fitted values at their bounds: bandwidth" in " ".join(done.output.split())
    found = json.loads(path.read_text())
    assert "bandwidth" in found["at_bounds"] and found["efficiency"]["bandwidth"] <= 1.0500001
