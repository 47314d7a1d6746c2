"""Runs over Ray from outside: the command, a learner of several ranks, and what can't be saved."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray_processes import kill
from ray_runs import BASE, CLUSTER, Witness, each_once, outcome
from tiny_run import SETTINGS, lines, make, settings

from paceline.build.cluster import build_supervisor
from paceline.config import load_config

pytestmark = pytest.mark.cluster


def test_a_divided_learner(folder: Path, alone: Path) -> None:
    """Two ranks. One is killed, and both begin again; sums over ranks are added up in another order, hence 1e-9."""
    witness = Witness()
    witness.deeds = {3: lambda: kill("FollowerActor")}
    config = settings(folder, *BASE, *CLUSTER, "cluster.num_learners=2")
    with contextlib.closing(build_supervisor(config, witness)) as supervisor:
        assert supervisor.run(folder / "divided", resume=False)["finished"]
    each_once(folder / "divided", 6)
    assert not witness.deeds and ["learner died" in note for note in witness.notes] == [True]
    for one, other in zip(lines(folder / "divided", "metrics"), lines(alone, "metrics"), strict=True):
        assert all(one[key] == pytest.approx(other[key], abs=1e-9) for key in ("loss", "grad_norm", "reward_mean"))


def test_given_up_and_gone_on_with(folder: Path, alone: Path) -> None:
    """Two steps in one process, then over Ray until an engine dies that may not be restarted; the rest in one process
    again. As if nothing had happened."""
    path, witness = folder / "moved", Witness()
    loop = make(folder, "moved", *BASE, "train.num_steps=2")
    with contextlib.closing(loop):
        loop.run()
    witness.deeds = {3: lambda: kill("EngineActor")}
    config = settings(folder, *BASE, *CLUSTER, "cluster.max_restarts=0")
    said = r"rollout engine \d can't be started, or died more often than cluster.max_restarts = 0"
    with contextlib.closing(build_supervisor(config, witness)) as supervisor, pytest.raises(ValueError, match=said):
        supervisor.run(path, resume=True)
    assert [m["step"] for m in witness.metrics][:2] == [2, 3]
    loop = make(folder, "moved", *BASE, resume=True)
    with contextlib.closing(loop):
        loop.run()
    each_once(path, 6)
    one, other = outcome(path), outcome(alone)
    assert one["rollouts"] == other["rollouts"] and one["learner"] == other["learner"] != {}


def command(folder: Path, run: Path, *overrides: str) -> list[str]:
    model, task = (repr(str(folder / part)) for part in ("model", "task.jsonl"))
    words = [f"model.name={model}", f"task.name={task}", *SETTINGS, *CLUSTER, *overrides]
    return [sys.executable, "-m", "paceline.cli", "train", "--run", str(run), *words]


def test_the_command_runs_ahead(folder: Path, tmp_path: Path) -> None:
    """`paceline train` with max_staleness = 1 and n-gram drafts: SIGTERM in the middle, then --resume to the end.
    Reward workers that Ray has placed run programs as well: how these are isolated is said and recorded here too."""
    task = tmp_path / "programs.jsonl"
    task.write_text("".join(json.dumps({"prompt": f"say {i}", "tests": ["assert 1"]}) + "\n" for i in range(8)))
    overrides = ("speculation.method=ngram", "train.max_staleness=1", "train.num_steps=60", "train.checkpoint_every=2")
    overrides += (f"task.name={str(task)!r}", 'reward.functions=["reward_functions:many_a", "code"]')
    run, pipe = tmp_path / "run", subprocess.PIPE
    process = subprocess.Popen(command(folder, run, *overrides), stdout=pipe, stderr=pipe, text=True)
    while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=300)  # on a busy machine
    assert process.returncode == 130, said
    steps = json.loads((run / "summary.json").read_text())["steps"]
    assert 3 <= steps < 60 and f"stopped after {steps} of 60 steps" in said[1] and (run / "report.html").exists()
    assert "step 2/60" in said[1], "who looks on saw nothing"
    assert "programs run in sandbox: namespaces" in said[1]
    assert json.loads((run / "run.json").read_text())["sandbox"] == "namespaces"
    assert {metrics["sandbox"] for metrics in lines(run, "metrics")} == {"namespaces"}
    assert load_config(run / "config.toml").cluster.num_engines == 2
    resumed = [sys.executable, "-m", "paceline.cli", "train", "--resume", str(run), f"train.num_steps={steps + 4}"]
    done = subprocess.run(resumed, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done
    each_once(run, steps + 4)
    assert {r["group"] for r in lines(run, "rollouts")} == set(range(2 * (steps + 4)))
    assert max(m["lag_max"] for m in lines(run, "metrics")) == 1
