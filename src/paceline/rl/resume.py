"""Resuming a run: which checkpoint it continues from, and which settings may change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from paceline.config import Config
from paceline.config_io import own_keys, sections_of
from paceline.rl.checkpoint import Checkpoint, Checkpoints
from paceline.rl.folder import RunFolder

# Settings that must not change: they define the run or the content of its checkpoints.
FIXED = (
    "task.",
    "model.name",
    "model.dtype",
    "model.yarn_factor",
    "model.chat_template",
    "train.seed",
    "train.max_staleness",
    "learner.model",
    "learner.optimizer",
    "learner.lora_",
)


def find_checkpoint(
    folder: RunFolder, checkpoints: Checkpoints, note: Callable[[str], None], keep: Sequence[str] = ()
) -> Checkpoint | None:
    """The checkpoint to resume from. None if the run was interrupted before its first checkpoint: it starts again from
    its beginning, and its records are moved aside, except the streams to `keep`. ValueError if checkpoints were saved
    and are gone: a restart would replace them if they come back."""
    checkpoint = checkpoints.latest()
    try:
        last = folder.last_checkpoint()
    except ValueError as error:
        if checkpoint is None:
            raise
        note(f"{error}; the run continues from the checkpoint {_place(checkpoint.step)}")
        last = None
    if checkpoint is None and last is not None:
        raise ValueError(
            f"{folder.checkpoints}: no checkpoint found, but this run saved one {_place(last)}. Restore the folder (is "
            "its disk mounted?) and resume again, or start a new run. Nothing was changed"
        )
    if checkpoint is None:
        aside = folder.move_records_aside(keep)
        where = f"; its previous records are now in {aside}" if aside is not None else ""
        note(f"{folder.path} was interrupted before its first checkpoint: it starts again{where}")
    elif last is not None and checkpoint.step < last:
        note(
            f"the checkpoint {_place(last)} is gone or damaged: the run continues from the one "
            f"{_place(checkpoint.step)}, and the records of later steps are replaced"
        )
    return checkpoint


def _place(num_steps: int) -> str:
    """Of a checkpoint after so many steps."""
    return f"of step {num_steps}" if num_steps else "before step 1"


def changed_settings(old: Config, new: Config) -> Iterator[str]:
    """One line per setting that changes on resume. ValueError for a setting that must not change."""
    before, after = dict(_settings(old)), dict(_settings(new))
    if [task.label for task in new.tasks] != [task.label for task in old.tasks]:
        raise ValueError(
            f"task = {new.task_names}: this run started with {old.task_names}, and tasks can't change on resume; leave "
            "them, or start a new run"
        )
    for key, value in after.items():
        was = before[key]
        if value == was:
            continue
        may_change = ".reward." in key or key.endswith(".max_tokens")  # of one of several tasks
        if key.startswith(FIXED) and not may_change:
            raise ValueError(
                f"{key} = {value!r}: this run started with {was!r}, and the setting can't change on "
                "resume; leave it, or start a new run"
            )
        yield f"changed on resume: {key} = {value!r}, was {was!r}"


def _settings(config: Config) -> Iterator[tuple[str, Any]]:
    """(dotted key, value)"""
    for _, name, section in sections_of(config):
        for key in own_keys(section):
            yield f"{name}.{key}", getattr(section, key)
