"""Resuming a run whose checkpoints are missing: rejected if some were saved; no record is lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_run import lines, make

from paceline.rl.folder import STREAMS
from paceline.rl.trainer import Trainer

EVERY_TWO = ("train.num_steps=4", "train.checkpoint_every=2")


def contents(run: Path) -> dict[Path, bytes]:
    """Every file of a run except the lock, which has the id of the last process."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(run): path.read_bytes() for path in files}


def die(trainer: Trainer, at_step: int) -> None:
    """End a run before this step like SIGKILL: without saving anything."""
    run_step = trainer._run_step

    def step() -> None:
        if trainer.step == at_step:
            raise KeyboardInterrupt
        run_step()

    trainer._run_step, trainer.save = step, lambda best=False: None  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four steps with two checkpoints."""
    trainer = make(tmp_path, "run", *EVERY_TWO)
    trainer.run()
    trainer.close()
    assert len(lines(tmp_path / "run", "metrics")) == 4
    return tmp_path / "run"


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_missing_checkpoints_are_an_error_and_nothing_is_changed(run: Path, left: str) -> None:
    shutil.move(run / "checkpoints", run.parent / "elsewhere")
    if left == "an empty folder":
        (run / "checkpoints").mkdir()
    before = contents(run)
    with pytest.raises(ValueError, match=f"{run / 'checkpoints'}: no checkpoint found, but .* of step 4"):
        make(run.parent, "run", "train.num_steps=6", "train.checkpoint_every=2", resume=True)
    assert contents(run) == before
    if left == "an empty folder":
        (run / "checkpoints").rmdir()
    shutil.move(run.parent / "elsewhere", run / "checkpoints")
    trainer = make(run.parent, "run", "train.num_steps=6", "train.checkpoint_every=2", resume=True)
    assert trainer.step == 4 and trainer.run()["num_steps"] == 6
    trainer.close()
    assert [m["step"] for m in lines(run, "metrics")] == list(range(6))


def test_without_the_newest_checkpoint_the_previous_one_is_loaded_with_a_note(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000004")
    rewards = [m["reward_mean"] for m in lines(run, "metrics")]
    trainer = make(run.parent, "run", *EVERY_TWO, resume=True)
    assert trainer.step == 2
    expected = "the checkpoint of step 4 is gone or damaged: the run continues from the one of step 2"
    assert any(expected in note for note in trainer.callback.notes)
    trainer.run()
    trainer.close()
    assert [m["reward_mean"] for m in lines(run, "metrics")] == rewards


def test_interrupted_before_the_first_checkpoint(tmp_path: Path, run: Path) -> None:
    """The run starts again; its records are moved aside, each time to another folder."""
    kept = {}
    for attempt, at_step in enumerate((3, 2), 1):
        trainer = make(tmp_path, "again", "train.num_steps=4", "train.checkpoint_every=4", resume=attempt > 1)
        die(trainer, at_step)
        kept[attempt] = {f"{name}.jsonl": (tmp_path / "again" / f"{name}.jsonl").read_bytes() for name in STREAMS}
        assert all(kept[attempt].values())
    trainer = make(tmp_path, "again", "train.num_steps=4", "train.checkpoint_every=4", resume=True)
    aside = tmp_path / "again" / "interrupted-2"
    expected = f"it starts again; its previous records are now in {aside}"
    assert any(expected in note for note in trainer.callback.notes)
    trainer.run()
    trainer.close()
    for attempt, files in kept.items():
        folder = tmp_path / "again" / f"interrupted-{attempt}"
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert lines(tmp_path / "again", "rollouts") == lines(run, "rollouts"), "the same as without an interruption"


def test_interrupted_before_anything_was_recorded(tmp_path: Path) -> None:
    die(make(tmp_path, "run", "train.num_steps=1"), 0)
    trainer = make(tmp_path, "run", "train.num_steps=1", resume=True)
    assert any("it starts again" in note for note in trainer.callback.notes)
    trainer.run()
    trainer.close()
    assert len(lines(tmp_path / "run", "metrics")) == 1 and not list((tmp_path / "run").glob("interrupted-*"))


def test_a_damaged_checkpoint_json_is_named(run: Path) -> None:
    (run / "checkpoint.json").write_text("[]")
    trainer = make(run.parent, "run", *EVERY_TWO, resume=True)  # a complete checkpoint exists: the run continues
    assert any("checkpoint.json is damaged" in note for note in trainer.callback.notes)
    trainer.close()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoint.json").write_text("[]")
    with pytest.raises(ValueError, match=f"{run / 'checkpoint.json'} is damaged"):
        make(run.parent, "run", *EVERY_TWO, resume=True)
