"""How long a completion may be expected to become, from how long those of the same problem were.

A problem's own lengths speak for it; while there are few, all problems' lengths fill in, and before any there is
only the limit. A sequence that has outlived some of them is judged by those that were longer still, so its class
(short, medium, long) moves up as it goes on. Lengths of recent versions push out older ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from paceline.types import Request

SHORT, MEDIUM, LONG = range(3)
OWN = 64  # lengths remembered of a problem
ALL = 1024  # and of all problems together
PRIOR = 4.0  # how many of a problem's own lengths all the others' together are worth


class LengthModel:
    def __init__(self) -> None:
        self._own: dict[str, deque[int]] = {}
        self._all: deque[int] = deque(maxlen=ALL)
        self._live: dict[int, Request] = {}

    def begin(self, request: Request) -> None:
        self._live[request.request_id] = request

    def end(self, request_id: int, num_tokens: int, whole: bool = True) -> None:
        """It emitted num_tokens. Those that were not let finish (`whole` is false) teach nothing."""
        request = self._live.pop(request_id)
        if whole:
            self._all.append(num_tokens)
            if request.problem is not None:
                self._own.setdefault(request.problem, deque(maxlen=OWN)).append(num_tokens)

    def expected(self, request: Request) -> float:
        """Tokens of a request that has not begun."""
        raise NotImplementedError

    def expected_left(self, request_ids: np.ndarray, num_emitted: np.ndarray) -> np.ndarray:
        """Tokens yet to come of live requests that have emitted so many: float64 [B], at least 1, at most what
        max_tokens leaves."""
        raise NotImplementedError

    def classes(self, request_ids: np.ndarray, num_emitted: np.ndarray) -> np.ndarray:
        """SHORT, MEDIUM or LONG, by thirds of all lengths: uint8 [B]."""
        raise NotImplementedError

    def state(self) -> dict[str, np.ndarray]:
        raise NotImplementedError

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        raise NotImplementedError
