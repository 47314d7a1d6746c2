"""Runs over Ray: the command, a learner with several ranks, and an engine that may not restart."""

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
from ray_runs import BASE, CLUSTER, ActingCallback, assert_each_once, outcome
from tiny_run import SETTINGS, lines, make, settings

from paceline.build.cluster import build_supervisor
from paceline.build.config import load_config

pytestmark = pytest.mark.cluster


def test_learner_with_two_ranks(folder: Path, single_process_run: Path) -> None:
    """One rank is killed, and both restart. Sums over ranks are added in another order, hence the tolerance of 1e-9."""
    callback = ActingCallback()
    callback.actions = {3: lambda: kill("LearnerRankActor")}
    config = settings(folder, *BASE, *CLUSTER, "cluster.num_learners=2")
    with contextlib.closing(build_supervisor(config, callback)) as supervisor:
        assert supervisor.run(folder / "two-ranks", resume=False)["finished"]
    assert_each_once(folder / "two-ranks", 6)
    assert not callback.actions and ["learner died" in note for note in callback.notes] == [True]
    for one, other in zip(lines(folder / "two-ranks", "metrics"), lines(single_process_run, "metrics"), strict=True):
        assert all(one[key] == pytest.approx(other[key], abs=1e-9) for key in ("loss", "grad_norm", "reward_mean"))


def test_run_moves_between_ray_and_one_process(folder: Path, single_process_run: Path) -> None:
    """Two steps in one process, then over Ray until an engine dies that may not be restarted, then the remaining steps
    in one process. The result is that of an uninterrupted run."""
    path, callback = folder / "moved", ActingCallback()
    trainer = make(folder, "moved", *BASE, "train.num_steps=2")
    with contextlib.closing(trainer):
        trainer.run()
    callback.actions = {3: lambda: kill("EngineActor")}
    config = settings(folder, *BASE, *CLUSTER, "cluster.max_restarts=0")
    message = r"rollout engine \d can't be started, or died more often than cluster.max_restarts = 0"
    with contextlib.closing(build_supervisor(config, callback)) as supervisor, pytest.raises(ValueError, match=message):
        supervisor.run(path, resume=True)
    assert [m["step"] for m in callback.metrics][:2] == [2, 3]
    trainer = make(folder, "moved", *BASE, resume=True)
    with contextlib.closing(trainer):
        trainer.run()
    assert_each_once(path, 6)
    one, other = outcome(path), outcome(single_process_run)
    assert one["rollouts"] == other["rollouts"] and one["learner"] == other["learner"] != {}


def command(folder: Path, run: Path, *overrides: str) -> list[str]:
    model, task = (repr(str(folder / part)) for part in ("model", "task.jsonl"))
    settings = [f"model.name={model}", f"task.name={task}", *SETTINGS, *CLUSTER, *overrides]
    return [sys.executable, "-m", "paceline.cli", "train", "--run", str(run), *settings]


def test_command_is_stopped_and_resumed(folder: Path, tmp_path: Path) -> None:
    """`paceline train` with max_staleness = 1 and n-gram drafts: SIGTERM in the middle, then --resume to the end. The
    reward workers run programs; the run reports and records how these are isolated."""
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
    output = process.communicate(timeout=300)  # on a busy machine
    assert process.returncode == 130, output
    steps = json.loads((run / "summary.json").read_text())["num_steps"]
    assert 3 <= steps < 60 and f"stopped after {steps} of 60 steps" in output[1] and (run / "report.html").exists()
    assert "step 2/60" in output[1], "no progress was shown"
    assert "programs run in sandbox: namespaces" in output[1]
    assert json.loads((run / "run.json").read_text())["sandbox"] == "namespaces"
    assert {metrics["sandbox"] for metrics in lines(run, "metrics")} == {"namespaces"}
    assert load_config(run / "config.toml").cluster.num_engines == 2
    resumed = [sys.executable, "-m", "paceline.cli", "train", "--resume", str(run), f"train.num_steps={steps + 4}"]
    done = subprocess.run(resumed, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done
    assert_each_once(run, steps + 4)
    assert {r["group"] for r in lines(run, "rollouts")} == set(range(2 * (steps + 4)))
    assert max(m["staleness_max"] for m in lines(run, "metrics")) == 1
