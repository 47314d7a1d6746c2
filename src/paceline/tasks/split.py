"""Which problems are trained on and which are held out.

Always: no problem that is held out is trained on, no problem is held out twice, and equal problems have one name, that
of the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from paceline.tasks.task import Problem

DEFAULT_SIZE = 1024  # of a source that may be endless
HELD_OUT_SEED = 1_000_000_007  # added for the held-out source: far off, as some sources seed problem i with seed + i
PATIENCE = 5000  # draws in a row without anything new: an endless source has nothing more to give


def split(
    source: Iterable[Problem],
    held_out_source: Iterable[Problem],
    size: int | None,
    num_held_out: int,
    identity: Callable[[Problem], str],
    patience: float = math.inf,
) -> tuple[list[Problem], list[Problem]]:
    """Training and held-out problems. The held-out ones are chosen first: where there are few problems in all, training
    gets what they leave. Either list may come out short; the task knows what to say then."""
    names: dict[str, str] = {}

    def named(problems: Iterable[Problem]) -> Iterator[Problem]:
        for problem in problems:
            yield replace(problem, name=names.setdefault(identity(problem), problem.name))

    held_out = _take(named(held_out_source), num_held_out, set(), True, patience)
    train = _take(named(source), size, {problem.name for problem in held_out}, False, patience)
    return train, held_out


def _take(
    problems: Iterable[Problem], num: int | None, without: set[str], once: bool, patience: float
) -> list[Problem]:
    taken: list[Problem] = []
    without = set(without)
    num_misses = 0
    if num == 0:
        return taken
    for problem in problems:
        if problem.name in without:
            num_misses += 1
            if num_misses >= patience:
                break
            continue
        num_misses = 0
        taken.append(problem)
        if once:
            without.add(problem.name)
        if len(taken) == num:
            break
    return taken
