"""Expected completion lengths, from the lengths of earlier completions of the same problem.

While a problem has few lengths, those of all problems count too; before any there is only the limit. For a running
sequence only lengths above its present one count. A problem keeps its newest lengths, and the model the most recently
used problems, so memory is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.types import Request

OWN = 64  # lengths kept of a problem
ALL = 1024  # and of all problems together
PRIOR = 4.0  # all problems' lengths together count like so many of a problem's own
MAX_PROBLEMS = 16384
STATE = {"names", "name_ends", "lengths", "length_ends", "lengths_of_all"}
ONES = np.ones(OWN)
NO_PROBLEM = 0  # the row of `_own` that stays empty: for requests without a problem or of a forgotten one


class LengthModel:
    def __init__(self, max_problems: int = MAX_PROBLEMS) -> None:
        self.max_problems = max_problems
        self._live: dict[int, tuple[str | None, int]] = {}  # problem, max_tokens
        self._forget_all()

    def _forget_all(self) -> None:
        self._rows: dict[str | None, int] = {}  # problem -> row of `_own`; least recently used first
        self._own = np.zeros((1, OWN))  # ring buffers of lengths; 0: empty
        self._num = [0]  # lengths that each ring buffer got
        self._all = np.zeros(ALL)  # a ring buffer too
        self._num_all = 0
        self._sorted: tuple[np.ndarray, np.ndarray] | None = None
        self._cached: tuple[bytes, np.ndarray, np.ndarray] | None = None  # see `_of`; until a request begins or ends

    def begin(self, request: Request) -> None:
        self._live[request.request_id] = request.problem, request.sampling.max_tokens
        self._cached = None
        if request.problem in self._rows:
            self._rows[request.problem] = self._rows.pop(request.problem)

    def end(self, request_id: int, num_tokens: int, whole: bool = True) -> None:
        """It emitted num_tokens. Aborted ones (`whole` is false) do not count."""
        problem, _ = self._live.pop(request_id)
        self._cached = None
        if not whole or num_tokens < 1:
            return
        self._all[self._num_all % ALL] = num_tokens
        self._num_all += 1
        self._sorted = None
        if problem is not None:
            row = self._row(problem)
            self._own[row, self._num[row] % OWN] = num_tokens
            self._num[row] += 1

    def _row(self, problem: str) -> int:
        """The problem's row. If all are used, the least recently used problem is forgotten."""
        row = self._rows.pop(problem, None)
        if row is None and len(self._rows) < self.max_problems:
            row = len(self._num)
            self._num.append(0)
            if row >= len(self._own):
                self._own = np.concatenate([self._own, np.zeros((max(64, row), OWN))])
        elif row is None:
            row = self._rows.pop(next(iter(self._rows)))
            self._own[row], self._num[row] = 0, 0
        self._rows[problem] = row
        return row

    def expected(self, request: Request) -> float:
        """Tokens of a waiting request."""
        own = self._own[[self._rows.get(request.problem, NO_PROBLEM)]]
        return float(self._left(own, np.zeros(1), np.array([request.sampling.max_tokens]))[0])

    def expected_left(self, request_ids: np.ndarray, num_emitted: np.ndarray) -> np.ndarray:
        """Tokens that live requests will still emit: float64 [B], at least 1, at most what max_tokens leaves."""
        own, limits = self._of(request_ids)
        return self._left(own, num_emitted.astype(np.float64), limits)

    def _of(self, request_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of each request's problem [B, OWN], and its max_tokens [B]."""
        key = request_ids.tobytes()
        if self._cached is None or self._cached[0] != key:
            live = [self._live[request_id] for request_id in request_ids.tolist()]
            rows = np.array([self._rows.get(problem, NO_PROBLEM) for problem, _ in live], np.int64)
            self._cached = key, self._own[rows], np.array([limit for _, limit in live], np.float64)
        return self._cached[1:]

    def _left(self, own: np.ndarray, num_emitted: np.ndarray, limits: np.ndarray) -> np.ndarray:
        num_longer, excess = self._beyond(own, num_emitted)
        most = limits - num_emitted
        # Longer than all before: as long again as it is now, or half of what the limit leaves.
        unknown = np.minimum(most / 2, num_emitted if self._num_all else np.inf)
        left = np.where(num_longer > 0, excess / np.maximum(num_longer, 1e-9), unknown)
        return np.maximum(1.0, np.minimum(left, most))

    def _beyond(self, own: np.ndarray, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of the lengths that count for each row, those above num_tokens: how many, and by how much in total."""
        beyond = own - num_tokens[:, None]  # [B, OWN]
        np.maximum(beyond, 0, out=beyond)
        num_longer, excess = np.minimum(beyond, 1) @ ONES, beyond @ ONES  # lengths are integers: above is 1 or more
        if self._num_all:
            lengths, sums = self._all_sorted()
            at = lengths.searchsorted(num_tokens, "right")
            share, num = PRIOR / len(lengths), len(lengths) - at
            num_longer += share * num
            excess += share * (sums[at] - num * num_tokens)
        return num_longer, excess

    def _all_sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """All lengths sorted, and the sum of those from each index on."""
        if self._sorted is None:
            lengths = np.sort(self._all[: self._num_all])
            self._sorted = lengths, np.append(lengths[::-1].cumsum()[::-1], 0.0)
        return self._sorted

    def state_dict(self) -> dict[str, np.ndarray]:
        """Lengths by problem, oldest first; the least recently used problem first. Without live requests."""
        names = [np.frombuffer(str(problem).encode(), np.uint8) for problem in self._rows]
        lengths = [_in_order(self._own[row], self._num[row]) for row in self._rows.values()]
        return {
            "names": np.concatenate([np.zeros(0, np.uint8), *names]),
            "name_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
            "lengths": np.concatenate([np.zeros(0, np.int64), *lengths]),
            "length_ends": np.cumsum([len(own) for own in lengths], dtype=np.int64),
            "lengths_of_all": _in_order(self._all, self._num_all),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Live requests stay."""
        if state.keys() != STATE:
            raise ValueError(f"not a state of the length model: it holds {sorted(state) or 'nothing'}")
        names, owns = _parts(state["names"], state["name_ends"]), _parts(state["lengths"], state["length_ends"])
        of_all = state["lengths_of_all"]
        fits = len(names) == len(owns) and all(len(own) <= OWN for own in owns) and len(of_all) <= ALL
        if not fits or (np.append(state["lengths"], of_all) < 1).any():
            raise ValueError("the length model's state is damaged")
        self._forget_all()
        for name, own in zip(names, owns, strict=True):
            row = self._row(name.tobytes().decode())
            self._own[row, : len(own)], self._num[row] = own, len(own)
        self._all[: len(of_all)], self._num_all = of_all, len(of_all)


def _in_order(ring: np.ndarray, num: int) -> np.ndarray:
    """The lengths in a ring buffer that got `num`, oldest first: int64."""
    held = np.roll(ring, -(num % len(ring))) if num > len(ring) else ring[:num]
    return held.astype(np.int64)


def _parts(whole: np.ndarray, ends: np.ndarray) -> list[np.ndarray]:
    if (np.diff(ends, prepend=0) < 0).any() or (ends[-1] if len(ends) else 0) != len(whole):
        raise ValueError("the length model's state is damaged")
    return np.split(whole, ends)[:-1]
