"""Resuming a run whose generation runs ahead: pending batches keep everything that they record, and later batches begin
with the same version as without the interruption."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tiny_run import assert_each_once, lines, make, outcome, settings, write_head

from paceline.rl.checkpoint import Checkpoint
from paceline.rl.produce import Stopped
from paceline.rl.trainer import Trainer

DIES_AT, NUM_STEPS = 3, 6
BASE = ("train.max_staleness=2", f"train.num_steps={NUM_STEPS}", "train.checkpoint_every=1")
FLAVOURS = {
    "dapo, resampled": (
        "speculation.method=suffix",
        "algorithm.name=dapo",
        'reward.functions=["reward_functions:sometimes_alike"]',
    ),
    "a head that is trained online": ("draft.online=every",),
}


def overrides(folder: Path, flavour: str) -> list[str]:
    settings(folder)
    head = write_head(folder) if "head" in flavour else []
    return [*BASE, *head, *FLAVOURS[flavour]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """whole(flavour) -> the folder and the settings of an uninterrupted run."""
    made: dict[str, tuple[Path, list[str]]] = {}

    def run(flavour: str) -> tuple[Path, list[str]]:
        if flavour not in made:
            folder = tmp_path_factory.mktemp("pending")
            made[flavour] = folder, overrides(folder, flavour)
            trainer = make(folder, "whole", *made[flavour][1])
            trainer.run()
            trainer.close()
        return made[flavour]

    return run


def wait_for_batches(trainer: Trainer) -> None:
    """A slow learner: every checkpoint has as many pending batches as possible."""
    save = trainer.save

    def delayed(best: bool = False) -> None:
        until = time.monotonic() + 30
        while len(trainer.producer._pending) < min(2, NUM_STEPS - trainer.step):
            assert time.monotonic() < until, "generation does not run ahead"
            time.sleep(0.001)
        save(best)

    trainer.save = delayed  # type: ignore[method-assign]


def hold_batches_back(trainer: Trainer) -> None:
    """A slow engine: when the run dies, there is no pending batch."""
    produce = trainer.producer._produce

    def delayed(step: int) -> Any:
        while step >= DIES_AT:
            if trainer.producer.stopping:
                raise Stopped
            time.sleep(0.001)
        return produce(step)

    trainer.producer._produce = delayed  # type: ignore[method-assign]


def die(trainer: Trainer) -> Checkpoint:
    """End the run like SIGKILL, without saving anything; returns the last checkpoint."""
    run_step = trainer._run_step

    def step() -> None:
        if trainer.step == DIES_AT:
            raise KeyboardInterrupt
        run_step()

    trainer._run_step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer.close()
    checkpoint = trainer.checkpoints.latest()
    assert checkpoint is not None and checkpoint.step == DIES_AT
    return checkpoint


def resumed(folder: Path, name: str, given: list[str]) -> Path:
    trainer = make(folder, name, *given, resume=True)
    assert trainer.step == DIES_AT
    trainer.run()
    trainer.close()
    assert_each_once(folder / name, NUM_STEPS)
    return folder / name


def pending_steps(checkpoint: Checkpoint) -> list[int]:
    """The steps of the pending batches."""
    return [batch["step"] for batch in checkpoint.state["buffer"]["batches"]]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_pending_batches_keep_their_records(whole: Any, flavour: str) -> None:
    folder, given = whole(flavour)
    trainer = make(folder, "slow learner", *given)
    wait_for_batches(trainer)
    assert pending_steps(die(trainer)) == [3, 4]
    run = resumed(folder, "slow learner", given)
    assert outcome(run) == outcome(folder / "whole")
    # The batches have drafts, and with DAPO dropped groups; otherwise the test would check little.
    metrics = lines(run, "metrics")[3:5]
    assert all(m["num_drafts"] > 0 for m in metrics)
    assert any(m["num_groups_filtered"] for m in metrics) == ("dapo" in flavour)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_future_batches_begin_with_the_same_version(whole: Any, flavour: str) -> None:
    """Steps 3 and 4 begin with versions 1 and 2, though the learner has version 3 when the run dies."""
    folder, given = whole(flavour)
    trainer = make(folder, "slow engine", *given)
    hold_batches_back(trainer)
    assert pending_steps(die(trainer)) == []
    run = resumed(folder, "slow engine", given)
    assert [m["staleness_max"] for m in lines(run, "metrics")] == [0, 1, 2, 2, 2, 2]
    assert outcome(run) == outcome(folder / "whole")


def test_more_steps_on_resume(whole: Any) -> None:
    """Three steps, then six, equal six steps at once."""
    folder, given = whole("dapo, resampled")
    trainer = make(folder, "longer", *given, "train.num_steps=3")
    trainer.run()
    trainer.close()
    assert outcome(resumed(folder, "longer", given)) == outcome(folder / "whole")
