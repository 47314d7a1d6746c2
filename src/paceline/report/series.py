"""Series over the steps of a run: means of adjacent steps, the running mean, and whether a series is constant."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report.run import mean

Values = Sequence[float | None]
STYLES = ("solid", "dashed", "dotted")
NUM_COLOURS = 6  # for series of one kind; the colours above are for stages
ROUNDING = 1e-15  # smaller values are 0: the loss of an on-policy step is the rounding error of a sum of advantages
MIN_SMOOTHED = 10  # values; fewer have no running mean


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    values: Values
    colour: int = 0
    # solid | dashed | dotted | points (joined by a thin line, also across missing values; may be followed by a style)
    style: str = "solid"
    band: Values | None = None  # half the height of a band around the line

    @property
    def has_marks(self) -> bool:
        return self.style.startswith("points")


def color_and_style(index: int) -> tuple[int, str]:
    """(colour, style) of the series with this index; the first 18 differ."""
    return index % NUM_COLOURS, STYLES[(index + index // NUM_COLOURS) % len(STYLES)]


def buckets(num: int, limit: int) -> list[range]:
    """Splits 0 … num-1 into at most `limit` ranges of equal length; the last one may be shorter."""
    length = max(1, math.ceil(num / limit))
    return [range(start, min(start + length, num)) for start in range(0, num, length)]


def means(values: Values, parts: Sequence[range]) -> list[float | None]:
    return [mean([values[i] for i in part]) for part in parts]


def constant(values: Values) -> float | None:
    """The value of a series that does not change, else None. Rounding errors are no change."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    low, high = min(present), max(present)
    largest = max(abs(low), abs(high))
    if largest < ROUNDING:
        return 0.0
    return present[-1] if high - low <= 1e-9 * largest else None


def smoothing_window(values: Values) -> int:
    """Number of steps in the running mean; 0 if it would show nothing new: few values, or a series that rarely changes
    its direction, such as a learning rate."""
    present = [value for value in values if value is not None]
    if len(present) < MIN_SMOOTHED:
        return 0
    is_rise = [b > a for a, b in itertools.pairwise(present) if a != b]
    num_turns = sum(a != b for a, b in itertools.pairwise(is_rise))
    return max(5, len(present) // 15 | 1) if num_turns > len(present) // 6 else 0


def running_mean(values: Values, window: int) -> list[float | None]:
    """The mean of each value and its neighbours, `window` in all; fewer at the ends."""
    half = window // 2
    return [
        mean(values[max(0, i - half) : i + half + 1]) if value is not None else None for i, value in enumerate(values)
    ]
