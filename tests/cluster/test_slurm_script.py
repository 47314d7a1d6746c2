"""Run examples/slurm/train.sbatch with a Ray of two nodes on this machine. Stubs replace Slurm's commands and run their
arguments directly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray_runs import assert_each_once
from tiny_run import SETTINGS, lines

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
COMMANDS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo here; echo there",
}
SMALL = ("model.device=cpu", "cluster.num_engines=2", "cluster.num_learners=1", "train.checkpoint_every=0")
ONE_EACH = ("cluster.cpus_per_engine=1", "cluster.cpus_per_learner=1", "reward.workers=1")


def start(folder: Path, submit_dir: Path, *overrides: str) -> subprocess.Popen[bytes]:
    commands = submit_dir / "bin"
    commands.mkdir(exist_ok=True)
    for name, script in COMMANDS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (commands / name).chmod(0o755)
    (submit_dir / "config.toml").write_text("")
    model, task = (repr(str(folder / part)) for part in ("model", "task.jsonl"))
    settings = [f"model.name={model}", f"task.name={task}", *SETTINGS, *SMALL, *ONE_EACH, *overrides]
    slurm = {"JOB_ID": str(os.getpid()), "SUBMIT_DIR": str(submit_dir), "JOB_NODELIST": "here,there"}
    slurm |= {"JOB_NUM_NODES": "2", "CPUS_PER_TASK": "2"}
    environment = {
        # Without the variables of this process's own Ray, which restrict it to the loopback address.
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HEAD_IP": "127.0.0.1",
        "PACELINE_VLLM_PYTHON": "/nowhere",  # so that `paceline doctor` does not import vLLM, which is slow
    }
    command = ["bash", str(ROOT / "examples/slurm/train.sbatch"), "config.toml", "run", *settings]
    with (submit_dir / "output.txt").open("w") as file:  # not a pipe: Ray's processes keep it open for a while
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)


def test_job_is_stopped_and_resumed(folder: Path, tmp_path: Path) -> None:
    """Slurm's signal before the time limit ends the run with a checkpoint. The same script then resumes it."""
    run = tmp_path / "run"

    def output() -> str:
        return (tmp_path / "output.txt").read_text()

    job = start(folder, tmp_path, "train.num_steps=500")
    try:
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 2:
            assert job.poll() is None, output()
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)  # to the shell only
        code = job.wait(timeout=120)
    finally:
        _end(job)
    assert code == 130 and "2 node(s)" in output() and "stopped after" in output(), output()
    steps = len(lines(run, "metrics"))
    job = start(folder, tmp_path, f"train.num_steps={steps + 2}")
    try:
        code = job.wait(timeout=240)
    finally:
        _end(job)
    assert code == 0, output()
    assert_each_once(run, steps + 2)


def _end(job: subprocess.Popen[bytes]) -> None:
    """With all of its child processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
