"""What a head's drafts would bring, by how deep they are and how many of their slots are verified, the best first.

The more chances differ, the more there is to choose: a deeper draft of which only the best slots are verified may bring
more than a shorter one of which all are. So the chances that the last drafts were given are kept, and drafts like these
are put to auction beforehand. How often a position holds is known better from outcomes (`Depths`), so chances are moved
until they agree with it in the mean. A position that was never drafted differs like the one before it, in other rows;
and before anything is heard all are alike.
"""

from __future__ import annotations

import numpy as np

from paceline.speculation.depths import Depths

SAMPLE = 128  # drafts that are kept
POINTS = 32  # numbers of slots that a curve is known at, about
SELDOM = 16  # steps that curves serve; fewer in the beginning


class Worth:
    """Of drafts of up to `num` positions."""

    def __init__(self, num: int) -> None:
        self._each = max(1, POINTS // num)  # points of a curve between a slot and the next of each row
        self._points = np.arange(1, 1 + num * self._each)
        most = SAMPLE * np.arange(1, 1 + num)[:, None]
        self._num_taken = np.minimum(self._points * SAMPLE // self._each, most)  # of SAMPLE drafts, by depth and point
        self._said = np.zeros((num, SAMPLE))  # chances by position; 0: not known
        self._num_said = self._next = self._num_new = 0
        self._curves = np.ones(self._num_taken.shape)
        self._age = self._due = 0

    def slots(self, num_rows: int) -> np.ndarray:
        """The numbers of slots that curves are known at, with so many rows: int64 [P]."""
        return -(self._points * -num_rows // self._each)

    def __call__(self, depths: Depths) -> np.ndarray:
        """Tokens that a row emits with drafts of 1, 2, … positions, by `slots`: float64 [num, P]."""
        if not self._due or (self._num_new and self._age >= self._due):
            self._curves = self._auctions(self._survival(depths))
            self._age, self._due, self._num_new = 0, min(self._due + 1, SELDOM), 0
        return self._curves

    def grow_older(self) -> None:
        """Curves served one more step."""
        self._age += 1

    def renew(self) -> None:
        """Depths are others."""
        self._due = 0

    @property
    def is_curious(self) -> bool:
        """Whether there is not yet enough to make the next curves of."""
        return self._num_new < SAMPLE

    def hear(self, chances: np.ndarray) -> None:
        """What drafts were given, position by position, 0 where nothing was drafted: float64 [B, K]. That there were
        none is news too, as depths have heard of it."""
        self._num_new += max(1, len(chances))
        if not len(chances):
            return
        said = chances[:: -(-len(chances) // SAMPLE), : len(self._said)].T
        k, num = said.shape
        self._said[:k, (self._next + np.arange(num)) % SAMPLE] = said  # what is deeper stays, in others' rows
        self._next = (self._next + num) % SAMPLE
        self._num_said = min(self._num_said + num, SAMPLE)

    def _survival(self, depths: Depths) -> np.ndarray:
        """Of drafts like those kept, that all up to a position stand: [num, SAMPLE]."""
        survival, before = self._chances(), np.ones(SAMPLE)
        for said, chance in zip(survival, depths(len(survival)).tolist(), strict=True):
            mean = float(before @ said / before.sum())  # given those before
            if chance <= mean:
                said *= chance / mean
            else:
                said += (1 - said) * ((chance - mean) / (1 - mean))
            said *= before
            before = said
        return survival

    def _chances(self) -> np.ndarray:
        """Those kept, and where none is known that of another row."""
        if not self._num_said:
            return np.ones(self._said.shape)
        said = self._said[:, np.arange(SAMPLE) % self._num_said]
        for at, num_known in enumerate(np.count_nonzero(said, axis=1).tolist()):
            if num_known == 0:
                said[at] = said[at - 1, np.arange(-1, SAMPLE - 1)]
            elif num_known < SAMPLE:
                known = said[at] > 0
                said[at, ~known] = np.resize(said[at, known], SAMPLE - num_known)
        return said

    def _auctions(self, survival: np.ndarray) -> np.ndarray:
        order = (-survival).argsort(axis=None)
        best_first, depth = survival.ravel()[order], order // SAMPLE
        gains = np.stack([best_first[depth <= k].cumsum()[num - 1] for k, num in enumerate(self._num_taken)])
        return 1 + gains / SAMPLE
