"""Who drafts how much in a simulation, and how much of it stands."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.config import ConfigError
from paceline.sim.settings import choice, number
from paceline.sim.step import METHODS, PRECISIONS

POLICIES = ("static", "das", "auto")
HALVINGS = 60


@dataclass(frozen=True, slots=True)
class Speculation:
    method: str = choice("eagle3", of=METHODS)
    policy: str = choice("static", of=POLICIES)
    k: int = number(3, low=0, high=256)  # tokens drafted; under das and auto: at most
    # Mean tokens that a step brings a row when all drafts have `acceptance_at` tokens (0: k).
    acceptance: float = number(1.0, low=1, high=257)
    acceptance_at: int = number(0, low=0, high=256)
    chances: tuple[float, ...] = ()  # instead: of each position to stand, given those before it
    spread: float = number(0.3, low=0, high=1)  # how much positions differ in it, for policies that look
    draft_model: str | None = None
    head_precision: str = choice("bf16", of=PRECISIONS)
    head_tp: bool = False  # the head is cut like the target; else every device has all of it
    free_row_us: float = number(2.0, low=0, high=1e6, unit="µs")
    # hybrid: how often history has a draft for a row, how likely its tokens stand, and how many it has.
    history_share: float = number(0.3, low=0, high=1)
    history_chance: float = number(0.85, low=0, high=1)

    def __post_init__(self) -> None:
        for i, chance in enumerate(self.chances):
            if not 0 <= chance <= 1:
                raise ConfigError(f"speculation.chances[{i}] = {chance}: must be from 0 to 1")
        if self.chances and self.acceptance != 1:
            raise ConfigError(
                f"speculation.acceptance = {self.acceptance:g} with speculation.chances = {list(self.chances)}: give "
                "one of them"
            )
        if not self.k and self.policy != "static" and self.method != "none":
            raise ConfigError(
                f"speculation.k = 0: policy {self.policy!r} needs at least 1; to draft nothing, set "
                'speculation.method = "none"'
            )
        at = self.acceptance_at or self.k
        if not self.chances and self.method != "none" and not 1 <= self.acceptance <= 1 + at:
            raise ConfigError(
                f"speculation.acceptance = {self.acceptance:g}: a step that verifies {at} tokens brings from 1 to "
                f"{1 + at}; set speculation.acceptance_at to the draft length that it was measured at"
            )

    def position_chances(self, num: int) -> np.ndarray:
        """Of the first `num` positions: float64 [num]. The last that is known goes on."""
        if self.chances:
            known = np.array(self.chances)
            return known[np.minimum(np.arange(num), len(known) - 1)]
        return np.full(num, chance_of(self.acceptance, self.acceptance_at or self.k))

    def length(self, k: int) -> float:
        """Mean tokens that a step brings a row: 1 + Σ of the chances that a draft of k gets so far."""
        head = float(np.cumprod(self.position_chances(k)).sum())
        if self.method != "hybrid":
            return 1 + head
        history = float(np.cumprod(np.full(k, self.history_chance)).sum())
        return 1 + self.history_share * history + (1 - self.history_share) * head


PLAIN = Speculation(method="none", k=0)


def chance_of(length: float, k: int) -> float:
    """The p with 1 + p + … + p^k = length."""
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + sum(middle**i for i in range(1, k + 1)) < length else (low, middle)
    return high
