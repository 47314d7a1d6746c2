"""What may change when a run is resumed, and what may not."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config import Config

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
