"""Splits problems into training and held-out problems.

Invariants: no held-out problem is trained on, no problem is held out twice, and equal problems have the same name, that
of the first one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from paceline.tasks.prompt import prompt_identity
from paceline.tasks.task import Problem

DEFAULT_SIZE = 1024  # of a source that may be infinite
HELD_OUT_SEED = 1_000_000_007  # added to the seed for held-out problems; large, as some sources use seed + i
MAX_REPEATS = 5000  # after so many consecutive repeats an infinite source has no new problem


def _prompt_identity(problem: Problem) -> str:
    return prompt_identity(problem.prompt)


def split(
    source: Iterable[Problem],
    held_out_source: Iterable[Problem],
    size: int | None,
    num_held_out: int,
    max_repeats: float = math.inf,
    identity: Callable[[Problem], str] = _prompt_identity,
) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems. Held-out problems are taken first, training gets the remaining ones. Either list
    may be too short: the caller must check. `identity` is equal for equal problems."""
    names: dict[str, str] = {}  # by identity
    excluded: set[str] = set()  # names of held-out problems

    def take(problems: Iterable[Problem], num: int | None, is_held_out: bool) -> list[Problem]:
        taken: list[Problem] = []
        num_repeats = 0
        for problem in problems if num != 0 else ():
            name = names.setdefault(identity(problem), problem.name)
            num_repeats = num_repeats + 1 if name in excluded else 0
            if num_repeats == 0:
                taken.append(replace(problem, name=name))
                if is_held_out:
                    excluded.add(name)
            if len(taken) == num or num_repeats >= max_repeats:
                break
        return taken

    held_out = take(held_out_source, num_held_out, True)
    return take(source, size, False), held_out
