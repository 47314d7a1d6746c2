"""What drafts will bring, by draft length and by how many of their tokens are verified, the most probable ones first.

If probabilities differ much, a longer draft of which only the best tokens are verified may bring more than a shorter
one that is verified as a whole. So the drafts that a drafter made last are taken as an example of its next ones.
"""

from __future__ import annotations

import numpy as np

from paceline.speculation.acceptance import MIN_OUTCOMES, AcceptanceModel

NUM_POINTS = 32  # numbers of verified tokens at which a curve is known, about
MAX_AGE = 16  # steps that curves are used for; fewer in the beginning


class DraftCurves:
    """For drafts of 1 … `num` tokens of the drafter `name`. The first curves of a history are used until it has
    MIN_OUTCOMES, or for MAX_AGE steps: in the beginning few rows find a match."""

    def __init__(self, name: str, num: int, is_history: bool = False) -> None:
        self.name, self.num, self.is_history = name, num, is_history
        self._points_per_token = max(1, NUM_POINTS // num)
        self._points = np.arange(1, 1 + num * self._points_per_token)
        self._curves = np.ones((num, len(self._points)))
        self._age = self._max_age = 0
        self._is_known, self._num_drafts = (
            False,
            0,
        )  # of the curves: whether there were enough outcomes; drafts observed

    def num_verified(self, num_rows: int) -> np.ndarray:
        """The numbers of verified tokens, over so many rows, at which the curves are known: int64 [P]."""
        return -(self._points * -num_rows // self._points_per_token)

    def tokens_per_row(self, acceptance: AcceptanceModel) -> np.ndarray:
        """Tokens that a row emits per step, float64 [num, P]."""
        is_known = acceptance.num_outcomes(self.name) >= MIN_OUTCOMES
        is_old = self._age >= self._max_age or (self.is_history and is_known and not self._is_known)
        num_drafts = acceptance.num_drafts(self.name)
        if not self._max_age or (is_old and num_drafts != self._num_drafts):
            self._is_known, self._num_drafts = is_known, num_drafts
            self._curves = self._compute(acceptance.survival(self.name, self.num))
            self._age, self._max_age = 0, MAX_AGE if self.is_history else min(self._max_age + 1, MAX_AGE)
        return self._curves

    def step_launched(self) -> None:
        self._age += 1

    def reset(self) -> None:
        """Compute the curves again at the next use."""
        self._max_age = 0

    def _compute(self, survival: np.ndarray) -> np.ndarray:
        num_drafts = len(survival)
        order = (-survival).argsort(axis=None)
        best_first, position = survival.ravel()[order], order % self.num
        num_taken = self._points * num_drafts // self._points_per_token
        gains = [
            best_first[position < k].cumsum()[np.minimum(num_taken, num_drafts * k) - 1] for k in range(1, 1 + self.num)
        ]
        return 1 + np.stack(gains) / num_drafts
