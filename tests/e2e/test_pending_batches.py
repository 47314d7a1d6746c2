"""Resuming while generation runs ahead: batches that wait for the learner keep all that they record, and batches that
were not generated yet begin with the version that they would have begun with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tiny_run import each_once, lines, make, outcome, settings, write_head

from paceline.rl.checkpoint import Checkpoint
from paceline.rl.loop import Loop
from paceline.rl.produce import Stopped

DIES_AT, NUM_STEPS = 3, 6
BASE = ("train.max_staleness=2", f"train.num_steps={NUM_STEPS}", "train.checkpoint_every=1")
FLAVOURS = {
    "dapo, resampled": (
        "speculation.method=suffix",
        "algorithm.name=dapo",
        'reward.functions=["reward_functions:sometimes_alike"]',
    ),
    "a head that learns": ("draft.online=every",),
}


def overrides(folder: Path, flavour: str) -> list[str]:
    settings(folder)
    head = write_head(folder) if "head" in flavour else []
    return [*BASE, *head, *FLAVOURS[flavour]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """whole(flavour) -> the folder of an uninterrupted run, and its settings."""
    made: dict[str, tuple[Path, list[str]]] = {}

    def run(flavour: str) -> tuple[Path, list[str]]:
        if flavour not in made:
            folder = tmp_path_factory.mktemp("pending")
            made[flavour] = folder, overrides(folder, flavour)
            loop = make(folder, "whole", *made[flavour][1])
            loop.run()
            loop.close()
        return made[flavour]

    return run


def wait_for_batches(loop: Loop) -> None:
    """A slow learner: every checkpoint finds as many finished batches as there can be."""
    save = loop.save

    def later(best: bool = False) -> None:
        until = time.monotonic() + 30
        while len(loop.producer._ready) < min(2, NUM_STEPS - loop.step):
            assert time.monotonic() < until, "generation does not run ahead"
            time.sleep(0.001)
        save(best)

    loop.save = later  # type: ignore[method-assign]


def hold_batches_back(loop: Loop) -> None:
    """A slow engine: when the run dies, no batch is finished but those that were trained on."""
    produce = loop.producer._produce

    def held(step: int) -> Any:
        while step >= DIES_AT:
            if loop.producer.stopping:
                raise Stopped
            time.sleep(0.001)
        return produce(step)

    loop.producer._produce = held  # type: ignore[method-assign]


def die(loop: Loop) -> Checkpoint:
    """As SIGKILL does it: nothing is saved but the checkpoints so far, the last of which is returned."""
    one_step = loop._one_step

    def step() -> None:
        if loop.step == DIES_AT:
            raise KeyboardInterrupt
        one_step()

    loop._one_step = step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    loop.close()
    checkpoint = loop.checkpoints.latest()
    assert checkpoint is not None and checkpoint.step == DIES_AT
    return checkpoint


def resumed(folder: Path, name: str, given: list[str]) -> Path:
    loop = make(folder, name, *given, resume=True)
    assert loop.step == DIES_AT
    loop.run()
    loop.close()
    each_once(folder / name, NUM_STEPS)
    return folder / name


def waiting(checkpoint: Checkpoint) -> list[int]:
    """Of which steps batches wait."""
    return [batch["step"] for batch in checkpoint.state["buffer"]["batches"]]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_batches_that_wait_keep_their_records(whole: Any, flavour: str) -> None:
    folder, given = whole(flavour)
    loop = make(folder, "slow learner", *given)
    wait_for_batches(loop)
    assert waiting(die(loop)) == [3, 4]
    run = resumed(folder, "slow learner", given)
    assert outcome(run) == outcome(folder / "whole")
    # The case is worth something: these batches had drafts, and with DAPO groups that taught nothing.
    metrics = lines(run, "metrics")[3:5]
    assert all(m["num_drafts"] > 0 for m in metrics)
    assert any(m["groups_filtered"] for m in metrics) == ("dapo" in flavour)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_batches_to_come_begin_with_the_version_that_they_would_have_begun_with(whole: Any, flavour: str) -> None:
    """Steps 3 and 4 begin under versions 1 and 2, though the learner has version 3 when the run dies."""
    folder, given = whole(flavour)
    loop = make(folder, "slow engine", *given)
    hold_batches_back(loop)
    assert waiting(die(loop)) == []
    run = resumed(folder, "slow engine", given)
    assert [m["lag_max"] for m in lines(run, "metrics")] == [0, 1, 2, 2, 2, 2]
    assert outcome(run) == outcome(folder / "whole")


def test_longer_than_first_asked_for(whole: Any) -> None:
    """Three steps, then six: as if six had been asked for at once."""
    folder, given = whole("dapo, resampled")
    loop = make(folder, "longer", *given, "train.num_steps=3")
    loop.run()
    loop.close()
    assert outcome(resumed(folder, "longer", given)) == outcome(folder / "whole")
