"""examples/slurm/train.sbatch as it is, with the real Ray of two nodes on this machine. Slurm's own commands are
stand-ins that run at once what they are given."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray_runs import each_once
from tiny_run import SETTINGS, lines

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
COMMANDS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    "scontrol": "echo here; echo there",
}
SMALL = ("model.device=cpu", "cluster.num_engines=2", "cluster.num_learners=1", "train.checkpoint_every=0")
ONE_EACH = ("cluster.cpus_per_engine=1", "cluster.cpus_per_learner=1", "reward.workers=1")


def start(folder: Path, place: Path, *overrides: str) -> subprocess.Popen[bytes]:
    commands = place / "bin"
    commands.mkdir(exist_ok=True)
    for name, script in COMMANDS.items():
        (commands / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (commands / name).chmod(0o755)
    (place / "config.toml").write_text("")
    model, task = (repr(str(folder / part)) for part in ("model", "task.jsonl"))
    words = [f"model.name={model}", f"task.name={task}", *SETTINGS, *SMALL, *ONE_EACH, *overrides]
    slurm = {"JOB_ID": str(os.getpid()), "SUBMIT_DIR": str(place), "JOB_NODELIST": "here,there"}
    slurm |= {"JOB_NUM_NODES": "2", "CPUS_PER_TASK": "2"}
    environment = {
        # Not what a Ray of this process was started with, which is to stay on this machine.
        **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HEAD_IP": "127.0.0.1",
        "PACELINE_VLLM_PYTHON": "/nowhere",  # or the doctor would import vLLM, which takes long
    }
    command = ["bash", str(ROOT / "examples/slurm/train.sbatch"), "config.toml", "run", *words]
    with (place / "said.txt").open("w") as file:  # no pipe, which Ray's processes would keep open for a while
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)


def test_stopped_and_gone_on_with(folder: Path, tmp_path: Path) -> None:
    """Slurm's warning before the time is over ends the run with a checkpoint; the same script then goes on."""
    run = tmp_path / "run"

    def said() -> str:
        return (tmp_path / "said.txt").read_text()

    job = start(folder, tmp_path, "train.num_steps=500")
    try:
        while not (run / "metrics.jsonl").exists() or (run / "metrics.jsonl").read_bytes().count(b"\n") < 2:
            assert job.poll() is None, said()
            time.sleep(0.2)
        job.send_signal(signal.SIGTERM)  # to the shell alone
        code = job.wait(timeout=120)
    finally:
        _end(job)
    assert code == 130 and "2 node(s)" in said() and "stopped after" in said(), said()
    steps = len(lines(run, "metrics"))
    job = start(folder, tmp_path, f"train.num_steps={steps + 2}")
    try:
        code = job.wait(timeout=240)
    finally:
        _end(job)
    assert code == 0, said()
    each_once(run, steps + 2)


def _end(job: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    job.wait()
