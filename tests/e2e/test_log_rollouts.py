"""`train.log_rollouts` changes what is written to rollouts.jsonl, and nothing else."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TIMES, lines, make, policy
from typer.testing import CliRunner

from paceline.cli import app
from paceline.report.html import write_report

STEPS = ("train.num_steps=4", "train.checkpoint_every=2", "speculation.method=suffix", "train.max_staleness=1")


def run(folder: Path, name: str, *overrides: str, resume: bool = False) -> dict[str, torch.Tensor]:
    trainer = make(folder, name, *STEPS, *overrides, resume=resume)
    try:
        assert trainer.run()["finished"]
        return policy(trainer)
    finally:
        trainer.close()


def metrics(run: Path) -> list[dict[str, Any]]:
    left_out = (*TIMES, "num_rollouts_logged")
    return [{key: value for key, value in m.items() if key not in left_out} for m in lines(run, "metrics")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs with the same seed, "all", "one" and "none"."""
    folder = tmp_path_factory.mktemp("runs")
    policies = [run(folder, "all")]
    policies += [run(folder, name, f"train.log_rollouts={value}") for name, value in (("one", "1"), ("none", "none"))]
    for other in policies[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in policies[0].items())
    return folder


def test_only_the_stream_of_rollouts_changes(folder: Path) -> None:
    everything = lines(folder / "all", "rollouts")
    assert len(everything) == 4 * 2 * 4
    first = {m["step"]: min(r["group"] for r in everything if r["step"] == m["step"]) for m in metrics(folder / "all")}
    assert lines(folder / "one", "rollouts") == [r for r in everything if r["group"] == first[r["step"]]]
    assert lines(folder / "none", "rollouts") == []
    assert metrics(folder / "all") == metrics(folder / "one") == metrics(folder / "none")
    logged = [[m["num_rollouts_logged"] for m in lines(folder / name, "metrics")] for name in ("all", "one", "none")]
    assert logged == [[8] * 4, [4] * 4, [0] * 4]


@pytest.mark.parametrize("value", ["1", "none"])
def test_a_resumed_run_is_the_same(folder: Path, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pending batches, the history and the order of problems are in the checkpoint, not in the stream."""
    name = f"stopped {value}"
    trainer = make(folder, name, *STEPS, f"train.log_rollouts={value}")
    save = trainer.checkpoints.save
    saved = threading.Event()

    def save_and_stop(step: int, *args: Any, **kwargs: Any) -> Any:
        save(step, *args, **kwargs)
        if step == 2:
            saved.set()
            trainer.producer.stop()

    monkeypatch.setattr(trainer.checkpoints, "save", save_and_stop)
    try:
        trainer.run()
    finally:
        trainer.close()
    assert saved.is_set() and len(lines(folder / name, "metrics")) < 4
    run(folder, name, f"train.log_rollouts={value}", resume=True)
    same = "one" if value == "1" else "none"
    assert lines(folder / name, "rollouts") == lines(folder / same, "rollouts")
    assert metrics(folder / name) == metrics(folder / same)


@pytest.mark.parametrize("command", ["replay", "advise"])
@pytest.mark.parametrize("path", ["", "rollouts.jsonl"])
def test_tools_that_need_all_rollouts_refuse(folder: Path, command: str, path: str) -> None:
    for name, num in (("one", 16), ("none", 0)):
        result = CliRunner().invoke(app, [command, str(folder / name / path)])
        assert result.exit_code != 0
        text = " ".join(result.output.split())
        assert f"has only {num} of the 32 rollouts of its run, because of train.log_rollouts" in text
    assert CliRunner().invoke(app, [command, str(folder / "all" / path), "--batch", "4"]).exit_code == 0


def test_the_report_says_what_was_not_logged(folder: Path) -> None:
    pages = {name: write_report(folder / name).read_text() for name in ("all", "one", "none")}
    assert "All 32 samples are in this page" in pages["all"] and "not logged" not in pages["all"]
    assert "All 16 samples are in this page. 16 other samples were not logged (train.log_rollouts)." in pages["one"]
    assert "32 other samples were not logged (train.log_rollouts)." in pages["none"]
