"""Speculation settings of a simulation: drafter, policy, draft length and acceptance."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.config_io import ConfigError
from paceline.sim.settings import choice, number
from paceline.sim.step import METHODS, PRECISIONS
from paceline.types import acceptance_probability

POLICIES = ("static", "das", "auto")


@dataclass(frozen=True, slots=True)
class Speculation:
    method: str = choice("eagle3", of=METHODS)
    policy: str = choice("static", of=POLICIES)
    k: int = number(3, low=0, high=256)  # draft length; the maximum with das and auto
    # Acceptance length (emitted tokens per row and step) of drafts with `acceptance_at` tokens (0: k).
    acceptance: float = number(1.0, low=1, high=257)
    acceptance_at: int = number(0, low=0, high=256)
    # Instead of `acceptance`: P(position accepted | all before it accepted).
    acceptance_probabilities: tuple[float, ...] = ()
    spread: float = number(0.3, low=0, high=1)  # variation of these probabilities between drafts, 0 to 1
    draft_model: str | None = None
    head_precision: str = choice("bf16", of=PRECISIONS)
    head_tp: bool = False  # the head is tensor-parallel like the target; else every device has a full copy
    free_row_us: float = number(2.0, low=0, high=1e6, unit="µs")
    # hybrid: share of rows with a draft from history, and acceptance probability of its tokens
    history_share: float = number(0.3, low=0, high=1)
    history_acceptance: float = number(0.85, low=0, high=1)

    def __post_init__(self) -> None:
        for i, probability in enumerate(self.acceptance_probabilities):
            if not 0 <= probability <= 1:
                raise ConfigError(f"speculation.acceptance_probabilities[{i}] = {probability}: must be from 0 to 1")
        if self.acceptance_probabilities and self.acceptance != 1:
            raise ConfigError(
                f"speculation.acceptance = {self.acceptance:g} with speculation.acceptance_probabilities = "
                f"{list(self.acceptance_probabilities)}: set only one of them"
            )
        if not self.k and self.policy != "static" and self.method != "none":
            raise ConfigError(
                f"speculation.k = 0: policy {self.policy!r} needs at least 1; to draft nothing, set "
                'speculation.method = "none"'
            )
        at = self.acceptance_at or self.k
        if not self.acceptance_probabilities and self.method != "none" and not 1 <= self.acceptance <= 1 + at:
            raise ConfigError(
                f"speculation.acceptance = {self.acceptance:g}: must be from 1 to {1 + at} for drafts of {at} tokens; "
                "set speculation.acceptance_at to the draft length at which it was measured"
            )

    def position_probabilities(self, num: int) -> np.ndarray:
        """Acceptance probability of the first `num` positions, each given that all before it are accepted: float64
        [num]. Positions beyond `acceptance_probabilities` have the last one's probability."""
        if self.acceptance_probabilities:
            known = np.array(self.acceptance_probabilities)
            return known[np.minimum(np.arange(num), len(known) - 1)]
        return np.full(num, acceptance_probability(self.acceptance, self.acceptance_at or self.k))

    def length(self, k: int) -> float:
        """Acceptance length of drafts with k tokens: 1 + Σ_j P(the first j tokens are accepted)."""
        head = float(np.cumprod(self.position_probabilities(k)).sum())
        if self.method != "hybrid":
            return 1 + head
        history = float(np.cumprod(np.full(k, self.history_acceptance)).sum())
        return 1 + self.history_share * history + (1 - self.history_share) * head


NO_SPECULATION = Speculation(method="none", k=0)
