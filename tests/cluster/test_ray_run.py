"""Runs over Ray against runs in one process; and what becomes of them when processes are killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from ray_processes import kill, processes
from ray_runs import BASE, CLUSTER, Witness, each_once, outcome
from tiny_run import lines, make, settings

from paceline.build.cluster import build_supervisor
from paceline.report.html import write_report

pytestmark = pytest.mark.cluster
Run = Callable[[dict[int, Callable[[], object]]], tuple[Path, Witness]]


@pytest.fixture(scope="module")
def run(folder: Path) -> Iterator[Run]:
    """run(deeds) -> a whole run over the same two engines, two reward workers and learner, and what was seen of it."""
    witness = Witness()
    supervisor = build_supervisor(settings(folder, *BASE, *CLUSTER, "cluster.num_reward_workers=2"), witness)
    numbers = count()

    def call(deeds: dict[int, Callable[[], object]]) -> tuple[Path, Witness]:
        witness.metrics, witness.notes, witness.deeds = [], [], deeds
        path = folder / f"ray {next(numbers)}"
        assert supervisor.run(path, resume=False)["finished"]
        return path, witness

    with contextlib.closing(supervisor):
        yield call


def test_as_in_one_process(run: Run, alone: Path) -> None:
    path, witness = run({})
    each_once(path, 6)
    assert outcome(path) == outcome(alone)
    assert [m["step"] for m in witness.metrics] == list(range(6)) and witness.notes == []
    metrics = lines(path, "metrics")
    assert {t["engine"] for t in lines(path, "trace")} == {0, 1}
    assert all(0 < busy <= 1 for m in metrics for busy in m["cluster"]["busy"])
    assert all(m["cluster"]["bubble"] == pytest.approx(1 - sum(m["cluster"]["busy"]) / 2) for m in metrics)
    assert sum(m["num_accepted_tokens"] for m in metrics) > 0, "nothing was drafted: too easy a test"
    assert all(m["stages"]["sync"] > 0 for m in metrics)


def test_a_second_learner_finds_nothing_of_the_first(run: Run) -> None:
    """Down to the drafts: what the engines had learned in the runs before is forgotten."""
    first, second = (run({})[0] for _ in range(2))
    assert outcome(first) == outcome(second)
    drafts = [[r["provenance"] for r in lines(path, "rollouts")] for path in (first, second)]
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("kind", ["EngineActor", "RewardActor", "LearnerActor"])
def test_one_is_killed(run: Run, alone: Path, kind: str) -> None:
    path, witness = run({2: lambda: kill(kind)})
    each_once(path, 6)
    assert outcome(path) == outcome(alone)
    name = {"EngineActor": "engine", "RewardActor": "reward", "LearnerActor": "learner"}[kind]
    assert len(witness.notes) == 1 and name in witness.notes[0] and "died" in witness.notes[0]
    for other in ("engine", "reward", "learner"):
        assert sum(m["cluster"][f"{other}_restarts"] for m in lines(path, "metrics")) == (other == name)


def test_all_are_killed(run: Run, alone: Path) -> None:
    """Both engines at once, the reward workers, then the learner and an engine together, then an engine again."""

    def engines() -> None:
        for process in processes("EngineActor"):
            os.kill(process, signal.SIGKILL)

    def rewards() -> None:
        for process in processes("RewardActor"):
            os.kill(process, signal.SIGKILL)

    deeds = {
        0: engines,
        1: rewards,
        3: lambda: (kill("LearnerActor"), kill("EngineActor", 1)),
        4: lambda: kill("EngineActor", 0),
    }
    path, witness = run(deeds)
    assert not witness.deeds, "the run was over before all were dead"
    each_once(path, 6)
    assert outcome(path) == outcome(alone)
    report = write_report(path).read_text()
    assert "Engines" in report and "restarted" in report


def test_another_run_is_told_apart(alone: Path, folder: Path) -> None:
    """The broken twin of the comparison."""
    loop = make(folder, "other", *BASE, "train.seed=1")
    with contextlib.closing(loop):
        loop.run()
    one, other = outcome(alone), outcome(folder / "other")
    assert all(one[key] != other[key] for key in ("rollouts", "metrics", "learner", "evals"))


def test_a_sample_twice_or_never_is_seen(alone: Path, tmp_path: Path) -> None:
    """And of the audit of ids."""
    for name, change in {"lost": lambda r: r[:-1], "twice": lambda r: [*r, r[0]]}.items():
        run = tmp_path / name
        run.mkdir()
        (run / "metrics.jsonl").write_bytes((alone / "metrics.jsonl").read_bytes())
        records = (alone / "rollouts.jsonl").read_text().splitlines(keepends=True)
        (run / "rollouts.jsonl").write_text("".join(change(records)))
        with pytest.raises(AssertionError):
            each_once(run, 6)
