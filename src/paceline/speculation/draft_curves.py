"""What drafts will bring, by draft length and by how many of their tokens are verified, the most probable ones first.

If probabilities differ much, a longer draft of which only the best tokens are verified may bring more than a shorter
one that is verified as a whole. So the drafts that a drafter made last are taken as an example of its next ones.
"""

from __future__ import annotations

import numpy as np

from paceline.speculation.acceptance import AcceptanceModel

NUM_POINTS = 32  # numbers of verified tokens at which a curve is known, about
MAX_AGE = 16  # steps that curves are used for; fewer in the beginning


class DraftCurves:
    """For drafts of 1 … `num` tokens of the drafter `name`. Curves are used for at least `min_age` steps."""

    def __init__(self, name: str, num: int, min_age: int = 1) -> None:
        self.name, self.num, self.min_age = name, num, min_age
        self._points_per_token = max(1, NUM_POINTS // num)
        self._points = np.arange(1, 1 + num * self._points_per_token)
        self._curves = np.ones((num, len(self._points)))
        self._age = self._max_age = 0

    def num_verified(self, num_rows: int) -> np.ndarray:
        """The numbers of verified tokens, over so many rows, at which the curves are known: int64 [P]."""
        return -(self._points * -num_rows // self._points_per_token)

    def tokens_per_row(self, acceptance: AcceptanceModel) -> np.ndarray:
        """Tokens that a row emits per step, float64 [num, P]."""
        if not self._max_age or (self._age >= self._max_age and acceptance.num_new(self.name)):
            self._curves = self._compute(acceptance.survival(self.name, self.num))
            self._age, self._max_age = 0, min(max(self._max_age + 1, self.min_age), MAX_AGE)
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
