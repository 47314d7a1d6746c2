"""Resuming a run whose checkpoints are missing: refused where there were some, and no record is ever lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_run import lines, make

from paceline.rl.folder import STREAMS
from paceline.rl.loop import Loop

EVERY_TWO = ("train.num_steps=4", "train.checkpoint_every=2")


def contents(run: Path) -> dict[Path, bytes]:
    """Every file of a run; the lock's names the process that held it last."""
    files = [path for path in run.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(run): path.read_bytes() for path in files}


def die(loop: Loop, at_step: int) -> None:
    """End a run before this step as SIGKILL does: nothing is saved."""
    one_step = loop._one_step

    def step() -> None:
        if loop.step == at_step:
            raise KeyboardInterrupt
        one_step()

    loop._one_step, loop.save = step, lambda best=False: None  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    loop.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of four steps, with checkpoints of two of them."""
    loop = make(tmp_path, "run", *EVERY_TWO)
    loop.run()
    loop.close()
    assert len(lines(tmp_path / "run", "metrics")) == 4
    return tmp_path / "run"


@pytest.mark.parametrize("left", ["nothing", "an empty folder"])
def test_checkpoints_that_are_gone_end_the_resume_and_nothing_is_touched(run: Path, left: str) -> None:
    shutil.move(run / "checkpoints", run.parent / "elsewhere")
    if left == "an empty folder":
        (run / "checkpoints").mkdir()
    before = contents(run)
    with pytest.raises(ValueError, match=f"{run / 'checkpoints'}: no checkpoint is there, but .* of step 4"):
        make(run.parent, "run", "train.num_steps=6", "train.checkpoint_every=2", resume=True)
    assert contents(run) == before
    if left == "an empty folder":
        (run / "checkpoints").rmdir()
    shutil.move(run.parent / "elsewhere", run / "checkpoints")
    loop = make(run.parent, "run", "train.num_steps=6", "train.checkpoint_every=2", resume=True)
    assert loop.step == 4 and loop.run()["steps"] == 6
    loop.close()
    assert [m["step"] for m in lines(run, "metrics")] == list(range(6))


def test_without_the_newest_checkpoint_the_one_before_it_is_taken_and_that_is_said(run: Path) -> None:
    shutil.rmtree(run / "checkpoints" / "step-000004")
    rewards = [m["reward_mean"] for m in lines(run, "metrics")]
    loop = make(run.parent, "run", *EVERY_TWO, resume=True)
    assert loop.step == 2
    assert any(
        "the checkpoint of step 4 is gone or damaged: the run goes on from step 2" in n for n in loop.watcher.notes
    )
    loop.run()
    loop.close()
    assert [m["reward_mean"] for m in lines(run, "metrics")] == rewards


def test_interrupted_before_the_first_checkpoint(tmp_path: Path, run: Path) -> None:
    """It begins again; what was recorded so far is moved aside, each time to another folder."""
    kept = {}
    for attempt, at_step in enumerate((3, 2), 1):
        loop = make(tmp_path, "again", "train.num_steps=4", "train.checkpoint_every=4", resume=attempt > 1)
        die(loop, at_step)
        kept[attempt] = {f"{name}.jsonl": (tmp_path / "again" / f"{name}.jsonl").read_bytes() for name in STREAMS}
        assert all(kept[attempt].values())
    loop = make(tmp_path, "again", "train.num_steps=4", "train.checkpoint_every=4", resume=True)
    aside = tmp_path / "again" / "interrupted-2"
    assert any(f"it begins again at step 0; its records so far are now in {aside}" in n for n in loop.watcher.notes)
    loop.run()
    loop.close()
    for attempt, files in kept.items():
        folder = tmp_path / "again" / f"interrupted-{attempt}"
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == files
    assert lines(tmp_path / "again", "rollouts") == lines(run, "rollouts"), "as if it had never been interrupted"


def test_interrupted_before_anything_was_recorded(tmp_path: Path) -> None:
    die(make(tmp_path, "run", "train.num_steps=1"), 0)
    loop = make(tmp_path, "run", "train.num_steps=1", resume=True)
    assert any("it begins again at step 0" in note for note in loop.watcher.notes)
    loop.run()
    loop.close()
    assert len(lines(tmp_path / "run", "metrics")) == 1 and not list((tmp_path / "run").glob("interrupted-*"))


def test_a_damaged_note_of_the_last_checkpoint_is_named(run: Path) -> None:
    (run / "checkpoint.json").write_text("[]")
    loop = make(run.parent, "run", *EVERY_TWO, resume=True)  # there is a whole one: it goes on
    assert any("checkpoint.json is damaged" in note for note in loop.watcher.notes)
    loop.close()
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoint.json").write_text("[]")
    with pytest.raises(ValueError, match=f"{run / 'checkpoint.json'} is damaged"):
        make(run.parent, "run", *EVERY_TWO, resume=True)
