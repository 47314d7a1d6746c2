"""Several tasks as one: the problems of all of them, with the label of their task.

Invariants: names are unique, as each begins with the label of its task, so tasks never share the history of a problem;
no task trains on a held-out problem of another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from paceline.tasks.prompt import prompt_identity
from paceline.tasks.task import Problem, Task


class Mixture:
    def __init__(self, tasks: Mapping[str, Task], max_tokens: Mapping[str, int]) -> None:
        """By label: the tasks, and the maximum tokens of their completions."""
        self.name = ", ".join(tasks)
        self._tasks = list(tasks.values())

        def labelled(label: str, problems: Iterable[Problem]) -> Iterator[Problem]:
            for problem in problems:
                yield replace(problem, name=f"{label}/{problem.name}", max_tokens=max_tokens[label], task=label)

        self.held_out = [each for label, task in tasks.items() for each in labelled(label, task.held_out)]
        excluded = {prompt_identity(problem.prompt) for problem in self.held_out}
        self.train: list[Problem] = []
        for label, task in tasks.items():
            kept = [each for each in task.train if prompt_identity(each.prompt) not in excluded]
            if not kept:
                raise ValueError(
                    f"task.{label}: all its problems are held out by other tasks, and training needs some; lower their "
                    "held_out"
                )
            self.train += labelled(label, kept)

    def close(self) -> None:
        for task in self._tasks:
            task.close()
