"""Runs over Ray give the same result as runs in one process, also when processes are killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from ray_processes import kill, processes
from ray_runs import BASE, CLUSTER, ActingCallback, assert_each_once, outcome
from tiny_run import lines, make, settings

from paceline.build.cluster import build_supervisor
from paceline.report.html import write_report

pytestmark = pytest.mark.cluster
Run = Callable[[dict[int, Callable[[], object]]], tuple[Path, ActingCallback]]


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Run]:
    """run(actions) does a whole run with the same two engines, two reward workers and learner. It returns the run's
    folder and the callback."""
    callback = ActingCallback()
    supervisor = build_supervisor(settings(folder, *BASE, *CLUSTER, "cluster.num_reward_workers=2"), callback)
    numbers = count()

    def do_run(actions: dict[int, Callable[[], object]]) -> tuple[Path, ActingCallback]:
        callback.metrics, callback.notes, callback.actions = [], [], actions
        path = folder / f"ray {next(numbers)}"
        assert supervisor.run(path, resume=False)["finished"]
        return path, callback

    with contextlib.closing(supervisor):
        yield do_run


def test_same_result_as_in_one_process(run: Run, single_process_run: Path) -> None:
    path, callback = run({})
    assert_each_once(path, 6)
    assert outcome(path) == outcome(single_process_run)
    assert [m["step"] for m in callback.metrics] == list(range(6)) and callback.notes == []
    metrics = lines(path, "metrics")
    assert {t["engine"] for t in lines(path, "trace")} == {0, 1}
    assert all(0 < busy <= 1 for m in metrics for busy in m["cluster"]["engine_busy"])
    assert all(m["cluster"]["engine_idle"] == pytest.approx(1 - sum(m["cluster"]["engine_busy"]) / 2) for m in metrics)
    assert sum(m["num_accepted_tokens"] for m in metrics) > 0, "no drafts were accepted, so the test shows nothing"
    assert all(m["stages"]["sync"] > 0 for m in metrics)


def test_second_run_starts_with_fresh_engines(run: Run) -> None:
    """Even the drafts are the same: the engines' speculation state is reset."""
    first, second = (run({})[0] for _ in range(2))
    assert outcome(first) == outcome(second)
    drafts = [[r["provenance"] for r in lines(path, "rollouts")] for path in (first, second)]
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("kind", ["EngineActor", "RewardActor", "LearnerActor"])
def test_one_process_is_killed(run: Run, single_process_run: Path, kind: str) -> None:
    path, callback = run({2: lambda: kill(kind)})
    assert_each_once(path, 6)
    assert outcome(path) == outcome(single_process_run)
    name = {"EngineActor": "engine", "RewardActor": "reward", "LearnerActor": "learner"}[kind]
    assert len(callback.notes) == 1 and name in callback.notes[0] and "died" in callback.notes[0]
    for other in ("engine", "reward", "learner"):
        assert sum(m["cluster"][f"{other}_restarts"] for m in lines(path, "metrics")) == (other == name)


def test_all_processes_are_killed(run: Run, single_process_run: Path) -> None:
    """Both engines at once, the reward workers, then the learner and an engine together, then an engine again."""

    def engines() -> None:
        for process in processes("EngineActor"):
            os.kill(process, signal.SIGKILL)

    def rewards() -> None:
        for process in processes("RewardActor"):
            os.kill(process, signal.SIGKILL)

    actions = {
        0: engines,
        1: rewards,
        3: lambda: (kill("LearnerActor"), kill("EngineActor", 1)),
        4: lambda: kill("EngineActor", 0),
    }
    path, callback = run(actions)
    assert not callback.actions, "the run ended before all processes were killed"
    assert_each_once(path, 6)
    assert outcome(path) == outcome(single_process_run)
    report = write_report(path).read_text()
    assert "Engines" in report and "restarted" in report


def test_comparison_detects_a_different_run(single_process_run: Path, folder: Path) -> None:
    """The comparison above can fail."""
    trainer = make(folder, "other", *BASE, "train.seed=1")
    with contextlib.closing(trainer):
        trainer.run()
    one, other = outcome(single_process_run), outcome(folder / "other")
    assert all(one[key] != other[key] for key in ("rollouts", "metrics", "learner", "evals"))


def test_lost_and_repeated_samples_are_detected(single_process_run: Path, tmp_path: Path) -> None:
    """`assert_each_once` can fail."""
    for name, change in {"lost": lambda r: r[:-1], "twice": lambda r: [*r, r[0]]}.items():
        run = tmp_path / name
        run.mkdir()
        (run / "metrics.jsonl").write_bytes((single_process_run / "metrics.jsonl").read_bytes())
        records = (single_process_run / "rollouts.jsonl").read_text().splitlines(keepends=True)
        (run / "rollouts.jsonl").write_text("".join(change(records)))
        with pytest.raises(AssertionError):
            assert_each_once(run, 6)
