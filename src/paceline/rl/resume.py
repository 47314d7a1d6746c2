"""Where a resumed run continues; which settings may change then, and which may not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from paceline.config import Config
from paceline.rl.checkpoint import Checkpoint, Checkpoints
from paceline.rl.folder import RunFolder

# What a checkpoint is made of, or what a run is about: with another value it would be another run.
FIXED = (
    "task.",
    "model.name",
    "model.dtype",
    "model.yarn_factor",
    "train.seed",
    "train.max_staleness",
    "learner.model",
    "learner.optimizer",
    "learner.lora_",
)


def find_checkpoint(
    folder: RunFolder, checkpoints: Checkpoints, note: Callable[[str], None], keep: Sequence[str] = ()
) -> Checkpoint | None:
    """The checkpoint to resume from. None: the run was interrupted before it saved one, and begins again at step 0;
    its records are moved aside, but for the streams to `keep`. ValueError where checkpoints were saved and are gone:
    to begin again would in the end replace them, should they come back."""
    checkpoint = checkpoints.latest()
    try:
        last = folder.last_checkpoint()
    except ValueError as error:
        if checkpoint is None:
            raise
        note(f"{error}; the run goes on from the checkpoint of step {checkpoint.step}")
        last = None
    if checkpoint is None and last is not None:
        raise ValueError(
            f"{folder.checkpoints}: no checkpoint is there, but this run saved one of step {last}. Put the folder back "
            "(is its disk mounted?) and resume again, or start a new run; nothing was changed"
        )
    if checkpoint is None:
        aside = folder.set_aside(keep)
        where = f"; its records so far are now in {aside}" if aside is not None else ""
        note(f"{folder.path} was interrupted before its first checkpoint: it begins again at step 0{where}")
    elif last is not None and checkpoint.step < last:
        note(
            f"the checkpoint of step {last} is gone or damaged: the run goes on from step {checkpoint.step}, and the "
            "records of later steps are replaced"
        )
    return checkpoint


def changes(old: Config, new: Config) -> Iterator[str]:
    """A line per setting that is different from here on. ValueError for one that must not be."""
    before = old.model_dump()
    for section, values in new.model_dump().items():
        for key, value in values.items():
            was = before[section][key]
            if value == was:
                continue
            if f"{section}.{key}".startswith(FIXED):
                raise ValueError(
                    f"{section}.{key} = {value!r}: this run began with {was!r}, and would be another one; leave it, or "
                    "start a new run"
                )
            yield f"from here on {section}.{key} = {value!r}, was {was!r}"
