"""`paceline simulate`: output, JSON and errors."""

from __future__ import annotations

import json

import pytest
from replayed_run import write_run
from typer.testing import CliRunner

from paceline.cli import app
from paceline.sim.simulator import presets

run = CliRunner().invoke


def test_a_preset_as_json(tmp_path):
    path = tmp_path / "out.json"
    done = run(app, ["simulate", "nvidia-8b-async", "--timeline", "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    assert found["rollout_speedup"] == pytest.approx(found["ar"]["generation_s"] / found["generation_s"])
    assert found["step_speedup"] == pytest.approx(found["ar"]["step_s"] / found["step_s"])
    assert found["step_s"] == pytest.approx(60.5, rel=0.1) and found["ar"]["step_s"] == pytest.approx(75.0, rel=0.1)
    assert {"generation", "logprob", "training"} <= found["stages"].keys() == found["ar"]["stages"].keys()
    assert "generation" in done.output and "training" in done.output


def test_overrides_change_the_simulation(tmp_path):
    found = []
    for arguments in ([], ["k=5", "acceptance=4"], ["speculation.method=none", "speculation.k=0"]):
        assert run(app, ["simulate", "nvidia-235b-512", *arguments, "--json", str(tmp_path / "o.json")]).exit_code == 0
        found.append(json.loads((tmp_path / "o.json").read_text())["rollout_speedup"])
    assert found[0] == pytest.approx(2.72, rel=0.1) and found[1] == pytest.approx(3.42, rel=0.1) and found[2] == 1


def test_a_sweep(tmp_path):
    path, picture = tmp_path / "o.json", tmp_path / "o.png"
    arguments = ["--sweep", "k=1:5:2", "batch=1024,2048", "--json", str(path), "--plot", str(picture)]
    done = run(app, ["simulate", "nvidia-235b-512", *arguments])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["k"], row["batch"]) for row in rows] == [(k, b) for k in "135" for b in ("1024", "2048")]
    assert rows[0]["rollout_speedup"] < rows[2]["rollout_speedup"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_fit_of_a_trace(tmp_path):
    rows = [
        {"batch": b, "num_speculative_tokens": 0, "verified": 0, "context": 640, "step_ms": ms, "drafter": "none"}
        for b, ms in ((1, 5.24), (8, 5.63), (32, 6.17), (64, 7.13), (128, 9.54), (256, 15.53))
    ]
    (tmp_path / "steps.json").write_text(json.dumps({"rows": rows}))
    done = run(app, ["simulate", "nvidia-8b-zero", "hardware=h200", "--fit", str(tmp_path / "steps.json"), "--json",
                     str(tmp_path / "o.json")])  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "o.json").read_text())
    assert found["worst_error"] < 0.1 and found["efficiency"]["bandwidth"] > 0.5
    assert "held out" in done.output


def test_all_presets_are_listed():
    done = run(app, ["simulate", "--list"])
    for name in (*presets(), "1.5b-1xh200", "8b-8xh100"):
        assert name in done.output
    assert all(len(line) <= 80 for line in done.output.splitlines() if not line.startswith("Or the folder"))


def test_the_title_has_the_final_values():
    done = run(app, ["simulate", "8b-8xh200", "hardware=h100", "batch=256", "policy=static", "k=2"])
    title = done.output.splitlines()[0]
    assert title.startswith("8b-8xh200 hardware=h100 batch=256 policy=static k=2: Qwen3-8B on 8 × H100 SXM; ")
    assert "256 requests per RL step (32 per GPU)" in title and "eagle3, policy static, k = 2" in title
    assert "H200" not in title and "no drafts" in run(app, ["simulate", "8b-8xh200", "method=none"]).output


def test_a_recorded_run(tmp_path):
    """Generation time without drafts must be that of the run's step times, and training that of its metrics."""
    measured = write_run(tmp_path / "mine")
    out = tmp_path / "o.json"
    done = run(app, ["simulate", str(tmp_path / "mine"), "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "smollm2-135m, float32 on Abacus 3000, 2 threads; 8 requests per RL step" in done.output.splitlines()[0]
    assert "GPU hours" not in done.output and "smollm2-135m, float32 on Abacus" in json.loads(out.read_text())["title"]
    assert json.loads(out.read_text())["about"] == "mine, a recorded run"
    found = json.loads(out.read_text())
    metrics = json.loads((tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()[0])
    assert found["ar"]["generation_s"] == pytest.approx(measured * metrics["stages"]["generation"], rel=0.2)
    assert "`paceline advise` replays its real drafts" in done.output
    assert found["stages"]["training"] == pytest.approx(20.0, rel=0.3)  # proportional to the drawn lengths
    done = run(app, ["simulate", str(tmp_path / "mine"), "batch=16", "method=eagle3", "acceptance=2", "k=2"])
    assert done.exit_code == 0 and "16 requests" in done.output
    assert "The run has no draft times of eagle3: assumed to be 0." in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hardware=h100"], "hardware = 'h100': the step times are those of the run"),
        (["pipeline.gpus=8"], "pipeline: the simulation of a run has one engine"),
        (["engine.tp=2"], "engine: the simulation of a run has engine.max_rows only"),
        (["--fit", "steps.json"], "with a run: its step times are fitted already"),
    ],
)
def test_settings_that_a_run_does_not_have(tmp_path, arguments, message):
    write_run(tmp_path / "mine")
    done = run(app, ["simulate", str(tmp_path / "mine"), *arguments])
    assert done.exit_code == 2 and message in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nvidia-9b"], "is not a preset"),
        ([], "no preset; give a name of `paceline simulate --list`"),
        (["--list", "nvidia-8b-zero"], "--list: takes no other arguments"),
        (["."], "is not the folder of a run"),
        (["nvidia-8b-zero", "engine.tp=5"], "does not divide"),
        (
            ["nvidia-8b-zero", "gpus=32"],
            "ambiguous; give one of pipeline.gpus (all devices of the RL step), engine",
        ),
        (["nvidia-8b-zero", "k"], "is not of the form"),
        (["nvidia-8b-zero", "--sweep", "k=a:b"], "a range is FROM:TO"),
        (["nvidia-8b-zero", "--sweep", "k"], "write KEY=FROM:TO"),
        (["nvidia-8b-zero", "--plot", "o.png"], "needs --sweep, and a .png file"),
        (["nvidia-8b-zero", "--fit", "none.json"], "No such file"),
    ],
)
def test_errors(arguments, message):
    done = run(app, ["simulate", *arguments])
    assert done.exit_code == 2 and message in done.output
