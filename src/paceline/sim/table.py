"""A step model with forward and draft times from a measured cost table (speculation/cost.py)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from paceline.sim.step import DRAFTER_NAMES, StepModel
from paceline.speculation.batch import Load
from paceline.speculation.cost import CostTable


class CostTableStepModel(StepModel):
    """Memory, prompt and host times are those of StepModel."""

    table: CostTable

    def forward_s(self, rows: ArrayLike, tokens: ArrayLike, context: ArrayLike) -> np.ndarray:
        def seconds(rows: float, tokens: float, context: float) -> float:
            num, extra = round(rows), round(tokens - rows)
            return float(self.table.steps_s(Load(num, num, round(context)), extra)[-1])

        return np.vectorize(seconds, otypes=[float])(rows, tokens, context)

    def draft_s(self, rows: ArrayLike, k: ArrayLike, context: ArrayLike) -> np.ndarray:
        def seconds(rows: float, k: float, context: float) -> float:
            return self.table.draft_s(DRAFTER_NAMES.get(self.method, self.method), round(rows), round(k))

        return np.vectorize(seconds, otypes=[float])(rows, k, context)
