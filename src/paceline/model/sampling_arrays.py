"""Sampling parameters as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.types import SamplingParams


@dataclass(slots=True)
class SamplingArrays:
    """The sampling parameters of P positions."""

    temperature: np.ndarray  # float64, like top_p and min_p, so that logprobs do not depend on the rounding of 0.7
    top_k: np.ndarray  # int32
    top_p: np.ndarray
    min_p: np.ndarray

    @staticmethod
    def of(params: Sequence[SamplingParams], repeats: np.ndarray | None = None) -> SamplingArrays:
        table = np.array([(s.temperature, s.top_k, s.top_p, s.min_p) for s in params], np.float64).reshape(-1, 4)
        if repeats is not None:
            table = np.repeat(table, repeats, axis=0)
        temperature, top_k, top_p, min_p = np.ascontiguousarray(table.T)
        return SamplingArrays(temperature, top_k.astype(np.int32), top_p, min_p)
