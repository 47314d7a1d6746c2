"""What a step takes: T(rows, query tokens, context), from measured points.

    T(r, q, c) = plain(r) + extra_r(q - r) + per_context_token · (c - c_r)

`plain(r)`: r rows that decode one token each, at the context c_r at which they were measured. `extra_r(x)`: what x
query tokens beyond one per row add; steps jump where kernels change, so it is a table and not a line. Between rows
and between extras it is interpolated, beyond the last extra it goes on with the last slope.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.speculation.batch import Load
from paceline.types import StepTrace


@dataclass(frozen=True, slots=True)
class Point:
    """A measured step, without drafting."""

    num_rows: int
    num_query_tokens: int
    num_context_tokens: int  # of all rows together
    seconds: float


class CostTable:
    def __init__(
        self,
        name: str,
        points: list[Point],
        drafts: Mapping[str, list[tuple[int, int, float]]] | None = None,  # drafter -> (rows, k, seconds)
        per_context_token_s: float = 0.0,
        source: str = "",  # where the numbers come from, for people
    ) -> None:
        raise NotImplementedError

    def step_s(self, load: Load) -> float:
        """A step without drafts."""
        raise NotImplementedError

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        """The same step with 0 … num_extra further query tokens: float64 [num_extra + 1]. Never falling."""
        raise NotImplementedError

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        """What it takes `drafter` to propose k tokens for num_rows rows. 0 where k is 0 or the drafter is not in it."""
        raise NotImplementedError

    def observe(self, trace: StepTrace, k: int) -> None:
        """Learn from a step that was really made, with drafts of at most k: the table keeps its shape, and each region
        of it moves towards what is seen."""
        raise NotImplementedError

    def save(self, path: Path) -> None:
        raise NotImplementedError

    @staticmethod
    def load(path: Path) -> CostTable:
        raise NotImplementedError
