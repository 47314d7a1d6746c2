"""Faults of a run on the command line: it goes on, or stops with a message, and nothing is lost. test_failures.py has
the details of each."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import SETTINGS, assert_each_once, lines, settings

TESTS = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "COLUMNS": "400"}
Paceline = Callable[..., str]


def arguments(folder: Path) -> list[str]:
    model, task = (repr(str(folder / part)) for part in ("model", "task.jsonl"))
    return [f"model.name={model}", f"task.name={task}", *SETTINGS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings(folder)
    return folder


@pytest.fixture(scope="module")
def paceline(folder: Path) -> Iterator[Paceline]:
    """paceline(*arguments, status=0, **faults of kill_driver.py) -> the output."""
    driver = subprocess.Popen(
        [sys.executable, TESTS / "kill_driver.py", folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, bufsize=1,
    )  # fmt: skip
    assert driver.stdin is not None and driver.stdout is not None

    def call(*argv: object, status: int = 0, **faults: Any) -> str:
        print(json.dumps({"argv": [*map(str, argv)], **faults}), file=driver.stdin, flush=True)
        end = json.loads(driver.stdout.readline())
        assert end["status"] == status, end["output"]
        return end["output"]

    yield call
    driver.stdin.close()
    driver.wait(10)


def test_a_nan_gradient_at_step_3(folder: Path, paceline: Paceline) -> None:
    run = folder / "nan"
    output = paceline("train", "--run", run, *arguments(folder), "train.num_steps=5", nan_at=3)
    assert "ALARM: step 3: 1 of 1 optimizer steps skipped, because the gradient norm is nan" in output
    metrics = lines(run, "metrics")
    assert [m["num_skipped_optimizer_steps"] for m in metrics] == [0, 0, 1, 0, 0]
    assert metrics[1]["weights_checksum"] == metrics[2]["weights_checksum"] != metrics[3]["weights_checksum"]
    assert_each_once(run, 5)
    assert "1 optimizer step was skipped" in (run / "report.html").read_text()


def test_a_verifier_that_hangs_on_some_answers(folder: Path, paceline: Paceline) -> None:
    run = folder / "hangs"
    hangs = ('reward.functions=["reward_functions:hangs_on_some"]', "reward.timeout_s=0.3")
    output = paceline("train", "--run", run, *arguments(folder), *hangs)
    failed = [r for r in lines(run, "rollouts") if r["failure"] is not None]
    assert failed and all("did not return within 0.3 s: scored 0" in r["failure"] and r["reward"] == 0 for r in failed)
    assert failed[0]["failure"] in output and f"{len(failed)} samples scored 0" in (run / "report.html").read_text()
    assert_each_once(run, 4)


def test_a_verifier_that_hangs_on_every_answer(folder: Path, paceline: Paceline) -> None:
    """From the second start of the run on: the first two steps are kept."""
    run = folder / "never"
    paceline("train", "--run", run, *arguments(folder), "train.num_steps=2")
    never = ('reward.functions=["reward_functions:never"]', "reward.timeout_s=0.2")
    output = paceline("train", "--resume", run, "train.num_steps=4", *never, status=2)
    assert "error: step 3: rewards failed for all 8 samples" in output and "raise reward.timeout_s" in output
    paceline("train", "--resume", run, 'reward.functions=["reward_functions:many_a"]', "reward.timeout_s=10.0")
    assert_each_once(run, 4)


def test_a_reward_that_sleeps(folder: Path, paceline: Paceline) -> None:
    """Within its time limit: nothing changes."""
    found = []
    for name in ("sleeps_on_some", "num_letters"):
        run = folder / name
        paceline("train", "--run", run, *arguments(folder), f'reward.functions=["reward_functions:{name}"]')
        keys = ("group", "sample", "token_ids", "reward", "failure")
        found.append([[record[key] for key in keys] for record in lines(run, "rollouts")])
        assert_each_once(run, 4)
    assert found[0] == found[1]


# ---- full disks: real file systems, which a user may mount in a namespace ----

START = ("unshare", "--map-root-user", "--mount", "sh", "-c")


def on_a_small_disk(script: str, place: Path) -> str:
    """Run a shell script in which `paceline` is a command; returns its output."""
    place.mkdir()
    trial = [*START, f"mount -t tmpfs -o size=50k tmpfs {place}"]
    if shutil.which("unshare") is None or subprocess.run(trial, capture_output=True).returncode:
        pytest.skip("no user namespaces")
    whole = f'paceline() {{ {sys.executable} -m paceline "$@" 2>&1; echo status $?; }}\n{script}'
    done = subprocess.run([*START, whole], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def quoted(argv: list[str]) -> str:
    return " ".join("'" + each.replace("'", "'\\''") + "'" for each in argv)


@pytest.mark.slow
def test_a_disk_that_is_full_during_an_export(folder: Path, tmp_path: Path) -> None:
    """The run goes on without the export, which can be made later."""
    run, out = tmp_path / "disk" / "run", tmp_path / "out"
    output = on_a_small_disk(
        f"""
        mount -t tmpfs -o size=100m tmpfs {tmp_path / "disk"}
        paceline train --run {run} {quoted([*arguments(folder), "train.num_steps=1"])}
        mkdir {run}/exports && mount -t tmpfs -o size=50k tmpfs {run}/exports
        paceline train --resume {run} train.num_steps=4 train.export_every=2
        echo exports: $(ls -A {run}/exports)
        umount {run}/exports
        paceline export {run} {out}
        cp -r {run} {tmp_path / "copy"}
        """,
        tmp_path / "disk",
    )
    assert [line for line in output.splitlines() if line.startswith("status")] == ["status 0"] * 3, output
    for step in (2, 4):
        assert f"ALARM: step {step} is not exported, training goes on: " in output
    assert "free disk space" in output and f"paceline export {run} DIR" in output
    assert "exports:\n" in output, "a part of an export is left"
    assert_each_once(tmp_path / "copy", 4)
    assert (out / "model.safetensors").stat().st_size > 50_000


@pytest.mark.slow
def test_a_disk_that_is_full_during_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    """The run stops. With more room it continues from the checkpoint before."""
    disk = tmp_path / "disk"
    run = disk / "run"
    argv = quoted([*arguments(folder), "train.checkpoint_every=1", "train.keep_checkpoints=3", "train.num_steps=6"])
    output = on_a_small_disk(
        f"""
        mount -t tmpfs -o size=2m tmpfs {disk}
        paceline train --run {run} {argv}
        echo kept: $(ls -A {run}/checkpoints)
        mount -o remount,size=100m {disk}
        paceline train --resume {run}
        cp -r {run} {tmp_path / "copy"}
        """,
        disk,
    )
    assert [line for line in output.splitlines() if line.startswith("status")] == ["status 2", "status 0"], output
    assert "No space left on device" in output and "continue with --resume" in output, output
    assert "kept: step-000001" in output
    assert_each_once(tmp_path / "copy", 6)
