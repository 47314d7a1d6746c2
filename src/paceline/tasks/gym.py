"""Any reasoning-gym dataset, by name and parameters. The dataset makes the problems and scores the answers.

Problems keep the dataset's order, so problem i does not depend on the number of problems. Held-out problems come from
another seed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from paceline.config import TaskSection
from paceline.tasks.prompt import apply_template
from paceline.tasks.split import DEFAULT_SIZE, HELD_OUT_SEED, MAX_REPEATS, split
from paceline.tasks.task import Problem


class GymTask:
    def __init__(self, section: TaskSection) -> None:
        self.name = section.name
        size = section.size or DEFAULT_SIZE
        self.train, self.held_out = split(
            _problems(section, self.name, section.seed, size),
            _problems(section, f"{self.name}/held_out", section.seed + HELD_OUT_SEED, max(section.held_out, 1)),
            size,
            section.held_out,
            MAX_REPEATS,
        )
        if len(self.held_out) < section.held_out or len(self.train) < size:
            raise ValueError(
                f"task.held_out = {section.held_out}: {self.name} has too few different questions for it with these "
                f"task.params ({len({p.name for p in [*self.train, *self.held_out]})} were found); lower it, or widen "
                "task.params"
            )

    def close(self) -> None:
        pass


def _problems(section: TaskSection, stem: str, seed: int, size: int) -> Iterator[Problem]:
    for index, entry in enumerate(_entries(section.name, section.params, seed, size)):
        prompt = apply_template(str(entry["question"]), section)
        columns = {"answer": entry["answer"], "entry": entry}
        yield Problem(f"{stem}/{index}", prompt, columns, None, section.chat, section.chat_template_kwargs)


def _entries(name: str, params: dict[str, Any], seed: int, size: int) -> Iterator[dict[str, Any]]:
    """The entries of a dataset, infinitely many if the dataset is infinite. Some datasets can't give more entries than
    their size: at its end the dataset is made again with twice the size. The entries before stay the same."""
    index = 0
    while True:
        dataset = make_dataset(name, params, seed, size)
        while index < size:
            try:
                entry = dataset[index]
            except IndexError:
                return
            except Exception as error:
                raise ValueError(
                    f"task.params = {params!r}: {name} can't make a problem with them: {type(error).__name__}: {error}"
                ) from error
            yield entry
            index += 1
        size *= 2


def make_dataset(name: str, params: dict[str, Any], seed: int = 0, size: int = 1) -> Any:
    try:
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(
            f'task.kind = "reasoning_gym" needs the reasoning-gym library ({error}); pip install reasoning-gym'
        ) from None
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.0)
        raise ValueError(f"task.name = {name!r}: no such reasoning-gym dataset; similar names are {', '.join(close)}")
    known = [field.name for field in fields(DATASETS[name][1])]
    for key, instead in (("seed", "task.seed"), ("size", "task.size")):
        known.remove(key)
        if key in params:
            raise ValueError(f"task.params.{key} = {params[key]!r}: set {instead} instead")
    if unknown := [key for key in params if key not in known]:
        raise ValueError(f"task.params.{unknown[0]}: not a parameter of {name}, which has {', '.join(known)}")
    try:
        if name == "composite":
            params = {key: [DatasetSpec(**spec) for spec in specs] for key, specs in params.items()}
        return create_dataset(name, seed=seed, size=size, **params)
    except Exception as error:  # the datasets check their parameters by assertions, or not at all
        raise ValueError(
            f"task.params = {params!r}: {name} can't use them: {error or type(error).__name__}; its parameters are "
            f"{', '.join(known)}"
        ) from error
