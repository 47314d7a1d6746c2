"""A run that is killed at any instant continues bit for bit; a run that is stopped saves its last step."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import SETTINGS, assert_each_once, lines, make, outcome, settings

TESTS = Path(__file__).parents[1]
BASE = ("speculation.method=suffix", "train.num_steps=6", "train.checkpoint_every=2")
STALE = ("train.max_staleness=2", "train.checkpoint_every=1")
DAPO = ("algorithm.name=dapo", 'reward.functions=["reward_functions:sometimes_alike"]')
FLAVOURS = {
    "adamw, validated": ("train.eval_every=3",),
    "muon, minibatches": ("learner.optimizer=muon", "learner.num_minibatches=2", "learner.schedule=cosine"),
    "lora, reference": ("learner.lora_rank=4", "algorithm.beta=0.1", "learner.warmup_steps=3"),
    "dapo, resampled": DAPO,
    "staleness 2": (*STALE, "algorithm.correction=token_tis"),
    "staleness 2, dapo, resampled": (*STALE, *DAPO, "train.groups_per_step=3"),
    "staleness 2, keep": (*STALE, "train.inflight=keep"),
    "staleness 2, keep, dapo, resampled": (*STALE, *DAPO, "train.inflight=keep"),
}
SEED = int(os.environ.get("KILL_SEED", "5"))  # of the random instants
Drive = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings(folder)
    return folder


@pytest.fixture(scope="module")
def drive(folder: Path) -> Iterator[Drive]:
    """drive(name=…, overrides=…, …) -> status and output; see kill_driver.py."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "COLUMNS": "200"}
    driver = subprocess.Popen(
        [sys.executable, TESTS / "kill_driver.py", folder],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1,
    )  # fmt: skip
    assert driver.stdin is not None and driver.stdout is not None

    def call(**job: Any) -> dict[str, Any]:
        print(json.dumps(job), file=driver.stdin, flush=True)
        return json.loads(driver.stdout.readline())

    yield call
    driver.stdin.close()
    driver.wait(10)


@pytest.fixture(scope="module")
def whole(folder: Path, drive: Drive) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """whole(flavour) -> the folder of an uninterrupted run, and its number of instants."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def run(flavour: str) -> tuple[Path, dict[str, Any]]:
        if flavour not in made:
            end = drive(name=flavour, overrides=[*BASE, *FLAVOURS[flavour]])
            assert end["status"] == 0, end["output"]
            made[flavour] = folder / flavour, json.loads(end["output"])
        return made[flavour]

    return run


def random_kills() -> list[Any]:
    """Four per flavour: while writing a checkpoint, at an engine step, at an update, and at any time. `share` is the
    instant as a fraction of all instants. Ten cases run in the default suite, the other 22 in `make soak`. KILL_SEED=n
    gives other instants."""
    cases = []
    for i, flavour in enumerate(FLAVOURS):
        for j, kind in enumerate(("at_write", "step", "update", "after_s")):
            share = random.Random(f"{SEED} {flavour} {kind}").random()
            in_short = j == i % 4 or (j == 0 and "keep" in flavour)
            marks = [] if in_short else [pytest.mark.soak]
            cases.append(pytest.param(flavour, kind, share, marks=marks, id=f"seed {SEED}, {flavour}, {kind}"))
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("flavour", "kind", "share"), random_kills())
def test_killed_at_a_random_instant(
    folder: Path, drive: Drive, whole: Any, flavour: str, kind: str, share: float
) -> None:
    """With drain, bit for bit. With keep the result depends on timing: every rollout is recorded exactly once."""
    uninterrupted, counts = whole(flavour)
    name, overrides = f"{flavour} {kind}", [*BASE, *FLAVOURS[flavour]]
    at = share * counts[kind]
    job: dict[str, Any] = {"name": name, "overrides": overrides}
    if "staleness" in flavour:  # a slow engine: no pending batches; a slow learner: some
        job["slow"] = ["step", 0.005] if share < 0.5 else ["update", 0.1]
    if kind == "after_s":
        job[kind] = 0.2 + at  # a process needs 0.25 s to reach its first step
    elif kind == "at_write":
        job[kind] = int(at)
    else:
        job["signal"] = [kind, int(at), signal.SIGKILL]
    print(f"KILL_SEED={SEED}", job)
    end = drive(**job)
    if kind == "after_s" or "keep" in flavour:
        assert end["status"] in (-signal.SIGKILL, 0), end["output"]  # it may be finished by then
    else:
        assert end["status"] == -signal.SIGKILL, end["output"]
    exists = (folder / name / "config.toml").exists()
    end = drive(name=name, overrides=overrides, resume=exists)
    assert end["status"] == 0, end["output"]
    assert_each_once(folder / name, 6, regenerated="keep" in flavour)
    if "keep" not in flavour:
        assert outcome(folder / name) == outcome(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "flavour", ["adamw, validated", pytest.param("staleness 2, dapo, resampled", marks=pytest.mark.soak)]
)
def test_killed_again_and_again(folder: Path, drive: Drive, whole: Any, flavour: str) -> None:
    """While it writes each checkpoint, also in the resumed runs."""
    uninterrupted, _ = whole(flavour)
    overrides = [*BASE, *FLAVOURS[flavour]]
    for attempt, at in enumerate((0, 4, 14, 20, 9, 1)):
        end = drive(name=f"often {flavour}", overrides=overrides, resume=attempt > 0, at_write=at)
        assert end["status"] == -signal.SIGKILL, end["output"]
    end = drive(name=f"often {flavour}", overrides=overrides, resume=True)
    assert end["status"] == 0, end["output"]
    assert_each_once(folder / f"often {flavour}", 6)
    assert outcome(folder / f"often {flavour}") == outcome(uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("inflight", ["keep", pytest.param("recompute", marks=pytest.mark.soak)])
@pytest.mark.parametrize("dapo", [False, True])
def test_twelve_kills_of_continuous_rollouts(folder: Path, drive: Drive, inflight: str, dapo: bool) -> None:
    """At engine steps, updates and instants of writing, while the engine or the learner is the slower one. Each group
    is trained on once, or dropped once and counted."""
    num_steps, name = 40, f"twelve {inflight} {dapo}"
    overrides = [*BASE, *STALE, *(DAPO if dapo else ()), f"train.inflight={inflight}", f"train.num_steps={num_steps}"]
    rng = random.Random(f"{SEED} {name}")
    print(f"KILL_SEED={SEED}")
    reached = []
    for life in range(12):
        where, first, last = (("step", 5, 60), ("update", 1, 4), ("at_write", 10, 60))[life % 3]
        n = rng.randrange(first, last)
        kill = {where: n} if where == "at_write" else {"signal": [where, n, signal.SIGKILL]}
        slow = ["step", 0.004] if life % 2 else ["update", 0.08]
        resume = (folder / name / "config.toml").exists()
        end = drive(name=name, overrides=overrides, resume=resume, slow=slow, **kill)
        assert end["status"] == -signal.SIGKILL, end["output"]
        metrics = folder / name / "metrics.jsonl"
        reached.append(len(metrics.read_bytes().splitlines()) if metrics.exists() else 0)
    assert 4 < reached[-1] < num_steps and len(set(reached)) > 4, reached
    end = drive(name=name, overrides=overrides, resume=True)
    assert end["status"] == 0, end["output"]
    run = folder / name
    assert_each_once(run, num_steps, regenerated=True)
    metrics, rollouts = lines(run, "metrics"), lines(run, "rollouts")
    assert max(m["staleness_max"] for m in metrics) == 2
    assert all(r["step"] - version <= 2 for r in rollouts for version, _ in r["versions"])
    used = {r["group"]: r["step"] for r in rollouts}
    assert all(used[r["group"]] == r["step"] for r in rollouts), "a group is in two steps"
    for m in metrics:
        groups = {r["group"] for r in rollouts if r["step"] == m["step"]}
        assert m["num_groups"] + m["num_groups_filtered"] == len(groups) and m["num_groups"] == 2
    if dapo:
        assert sum(m["num_groups_filtered"] for m in metrics) > 0
    else:
        assert set(used) == set(range(2 * num_steps)), "a group is missing"
        assert not any(m["num_groups_stale"] or m["num_groups_filtered"] for m in metrics)


def test_a_different_run_is_caught(folder: Path, drive: Drive, whole: Any) -> None:
    """Otherwise `outcome` would compare too little."""
    uninterrupted, _ = whole("adamw, validated")
    assert drive(name="seed", overrides=[*BASE, "train.eval_every=3", "train.seed=1"])["status"] == 0
    one, other = outcome(folder / "seed"), outcome(uninterrupted)
    assert all(one[key] != other[key] for key in ("files", "metrics", "rollouts", "trace"))


@pytest.mark.parametrize("inflight", ["drain", "keep"])
def test_overlapped_runs_continue(folder: Path, drive: Drive, inflight: str) -> None:
    overrides = [*BASE, "train.max_staleness=1", f"train.inflight={inflight}", "train.num_steps=8"]
    name = f"overlapped {inflight}"
    slow = ["step", 0.01]  # new weights arrive while requests run
    for attempt, at in enumerate((30, 10)):
        end = drive(name=name, overrides=overrides, resume=attempt > 0, at_write=at, slow=slow)
        assert end["status"] == -signal.SIGKILL, end["output"]
    end = drive(name=name, overrides=overrides, resume=True, slow=slow)
    assert end["status"] == 0, end["output"]
    assert_each_once(folder / name, 8, regenerated=inflight == "keep")
    metrics = lines(folder / name, "metrics")
    assert max(m["staleness_max"] for m in metrics) == 1
    rollouts = lines(folder / name, "rollouts")
    assert any(len(r["versions"]) > 1 for r in rollouts) == (inflight == "keep"), "running requests got no new weights"
    groups = [r["group"] for r in rollouts]
    assert set(groups) == set(range(16)), "a problem is missing or was used twice"
    assert groups == sorted(groups) or inflight == "keep"


def test_a_finished_run_is_finished(folder: Path, drive: Drive, whole: Any) -> None:
    run, _ = whole("adamw, validated")
    before, summary = outcome(run), (run / "summary.json").read_text()
    end = drive(name=run.name, overrides=[*BASE, "train.eval_every=3"], resume=True)
    assert end["status"] == 0 and json.loads(end["output"])["finished"]
    assert outcome(run) == before
    assert (run / "summary.json").read_text() == summary


def test_more_steps_than_before(folder: Path, drive: Drive, whole: Any) -> None:
    """Four steps, then six, equal six steps at once."""
    uninterrupted, _ = whole("muon, minibatches")
    constant = [*BASE, "learner.optimizer=muon"]
    assert drive(name="six", overrides=constant)["status"] == 0
    assert drive(name="longer", overrides=[*constant, "train.num_steps=4"])["status"] == 0
    end = drive(name="longer", overrides=constant, resume=True)
    assert end["status"] == 0, end["output"]
    assert outcome(folder / "longer") == outcome(folder / "six") != outcome(uninterrupted)


def test_one_process_at_a_time(folder: Path, drive: Drive) -> None:
    trainer = make(folder, "held")
    end = drive(name="held", overrides=[], resume=True)
    trainer.close()
    assert end["status"] == 1 and f"in use by process {os.getpid()}" in end["output"]
    assert drive(name="held", overrides=["train.num_steps=1"], resume=True)["status"] == 0


# ---- stopped ----


def command(folder: Path, name: str, *overrides: str) -> list[str]:
    model, task = (repr(str(folder / part)) for part in ("model", "task.jsonl"))
    return ["train", "--run", str(folder / name), f"model.name={model}", f"task.name={task}", *SETTINGS, *overrides]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(("where", "n", "kept"), [("step", 45, 3), ("update", 3, 4), ("step", 0, 0)])
def test_stopped(folder: Path, drive: Drive, whole: Any, number: signal.Signals, where: str, n: int, kept: int) -> None:
    """During generation the step is discarded; during training the step is finished."""
    flavour = "muon, minibatches"
    uninterrupted, _ = whole(flavour)
    name = f"{number.name} {where} {n}"
    run = folder / name
    overrides = [*BASE, *FLAVOURS[flavour], "train.checkpoint_every=0"]
    end = drive(argv=command(folder, name, *overrides), signal=[where, n, number])
    assert end["status"] == 130, end["output"]
    assert f"stopped after {kept} of 6 steps" in end["output"] and f"paceline train --resume {run}" in end["output"]
    assert json.loads((run / "summary.json").read_text())["num_steps"] == kept
    assert json.loads((run / "summary.json").read_text())["finished"] is False
    assert "</html>" in (run / "report.html").read_text()
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{kept:06}"]
    end = drive(argv=["train", "--resume", str(run), "train.checkpoint_every=2"])
    assert end["status"] == 0, end["output"]
    assert_each_once(run, 6)
    one, other = outcome(run), outcome(uninterrupted)
    drafts = ("files", "totals", "metrics", "rollouts", "trace")  # compared below without drafts
    assert {k: v for k, v in one.items() if k not in drafts} == {k: v for k, v in other.items() if k not in drafts}
    learner = "learner/shard-00001-of-00001.safetensors"
    assert one["files"][learner] == other["files"][learner]
    for key in ("loss", "reward_mean", "num_tokens", "grad_norm"):
        assert [m[key] for m in one["metrics"]] == [m[key] for m in other["metrics"]]
    for key in ("group", "sample", "token_ids", "reward", "advantage"):
        assert [r[key] for r in one["rollouts"]] == [r[key] for r in other["rollouts"]]


def test_stopped_while_generation_runs_ahead(folder: Path, drive: Drive) -> None:
    overrides = [*BASE, "train.max_staleness=2", "train.num_steps=8"]
    end = drive(argv=command(folder, "ahead", *overrides), signal=["update", 3, signal.SIGTERM])
    assert end["status"] == 130 and "stopped after 4 of 8 steps" in end["output"], end["output"]
    end = drive(argv=["train", "--resume", str(folder / "ahead")])
    assert end["status"] == 0, end["output"]
    assert_each_once(folder / "ahead", 8)
    assert {r["group"] for r in lines(folder / "ahead", "rollouts")} == set(range(16))


def test_stopped_while_waiting_for_rewards(folder: Path, drive: Drive) -> None:
    """It does not wait for the rewards, which would take ten minutes."""
    reward = 'reward.functions=["reward_functions:never"]'
    argv = command(folder, "hanging", *BASE, reward, "reward.timeout_s=600")
    end = drive(argv=argv, signal=["step", 8, signal.SIGTERM])
    assert end["status"] == 130, end["output"]


@pytest.mark.slow
def test_a_real_process(folder: Path, tmp_path: Path, whole: Any) -> None:
    """`paceline train` from a shell, which gets SIGTERM as soon as two steps are on disk."""
    flavour = "adamw, validated"
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "paceline.cli"]
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    arguments = command(folder, "unused", *BASE, *FLAVOURS[flavour], "train.num_steps=2000")
    arguments[2] = str(run)
    process = subprocess.Popen([*argv, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_bytes().splitlines()) < 3:
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)
    assert process.returncode == 130, output
    steps = json.loads((run / "summary.json").read_text())["num_steps"]
    assert steps >= 2 and (run / "report.html").exists()
    assert (run / "checkpoints" / f"step-{steps:06}").is_dir()
    assert_each_once(run, steps)
    whole_metrics = outcome(whole(flavour)[0])["metrics"]
    assert [m["loss"] for m in lines(run, "metrics")][:2] == [m["loss"] for m in whole_metrics][:2]
