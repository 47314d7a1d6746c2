"""How probable it is that a draft token is accepted, given that those before it are. Learned from outcomes.

Outcomes are counted in cells of (drafter, match length, position, score), the score being the drafter's own estimate.
A cell with few outcomes has about the mean of all cells of its drafter and score. With few outcomes there too, that
mean is about the score itself. Older outcomes count less, and a new policy version halves all counts.

If the policy makes probes, a few outcomes are enough to find out that a drafter's scores are far too high: it will be
tried again. Without probes it would not, so there the scores count for more outcomes.

The model also keeps the cells of each drafter's latest drafts. So it can say what its next drafts will bring, before
they are made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from paceline.speculation.draft_batch import DraftBatch

SCORE_EDGES = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.88, 0.94, 0.98], np.float32)
SCORES = np.array([0.05, 0.15, 0.25, 0.35, 0.45, 0.55, 0.65, 0.75, 0.84, 0.91, 0.96, 0.99])  # middles of the buckets
POSITION_BUCKETS = np.array([0, 1, 2, 2, 3, 3, 3, 3], np.int64)  # later positions are in the last
MATCH_EDGES = np.array([1, 2, 3, 5, 9, 17], np.int32)  # 0: not found by a match
NUM_SCORES, NUM_POSITIONS, NUM_MATCHES = len(SCORES), 4, len(MATCH_EDGES) + 1
NUM_CELLS = NUM_MATCHES * NUM_POSITIONS * NUM_SCORES  # of one drafter
MEMORY = 512.0  # outcomes that a cell remembers, about
KEPT_BY_NEW_VERSION = 0.5  # share of the counts
SCORE_PRIOR, CELL_PRIOR = 16.0, 8.0  # outcomes that the more general estimate counts for
# With probes. Accepted tokens per token that the scores promise: a drafter at or above FAIR has the scores as prior.
# TRUST is assumed before any outcome and counts for TRUST_PRIOR certain tokens.
FAIR, TRUST, TRUST_PRIOR = 0.5, 0.7, 1.0
SCORE_PRIOR_WITH_PROBES = 4.0
MIN_OUTCOMES = 16  # of a drafter, before probabilities are relied on
NUM_RECENT, MIN_RECENT = 128, 16  # drafts kept of a drafter; with fewer than MIN_RECENT, average ones are added
PRIOR_SCORE = 6  # bucket of these
NOT_DRAFTED, UNKNOWN = -1, -2  # instead of a cell: nothing was drafted there, although possible; not asked for


class _Recent:
    """Cells of the latest drafts of a drafter."""

    def __init__(self) -> None:
        self.cells = np.full((NUM_RECENT, 1), UNKNOWN, np.int64)
        self.num = self.next = 0
        self.num_total = self.num_used = 0  # added so far; and when they were last used

    def add(self, cells: np.ndarray) -> None:
        cells = cells[:: -(-len(cells) // NUM_RECENT) or 1]
        num, k = cells.shape
        if k > self.cells.shape[1]:
            more = np.full((NUM_RECENT, k - self.cells.shape[1]), UNKNOWN)
            self.cells = np.concatenate([self.cells, more], 1)
        at = (self.next + np.arange(num)) % NUM_RECENT
        self.cells[at, :k], self.cells[at, k:] = cells, UNKNOWN
        self.next = (self.next + num) % NUM_RECENT
        self.num = min(self.num + num, NUM_RECENT)
        self.num_total += num


class AcceptanceModel:
    def __init__(self, has_probes: bool = False) -> None:
        self.has_probes = has_probes
        self.version = -1  # of the policy; none yet
        self._first_cells: dict[str, int] = {}  # by drafter
        self._counts = np.zeros((2, 0))  # [accepted, all] by cell
        self._tables: dict[float, np.ndarray] = {}  # probability by cell, see `probabilities`
        self._positions = POSITION_BUCKETS
        self._recent: dict[str, _Recent] = {}  # by drafter

    def set_version(self, version: int) -> None:
        if version != self.version:
            if self.version >= 0:
                self._counts, self._tables = self._counts * KEPT_BY_NEW_VERSION, {}
            self.version = version

    def set_probes(self, has_probes: bool) -> None:
        self.has_probes, self._tables = has_probes, {}

    def forget(self, name: str, num_kept: float | None) -> None:
        """Expect average drafts of this drafter again, until it has made some. Let its outcomes count for `num_kept` at
        most (None: as they do)."""
        self._recent.pop(name, None)
        if num_kept is not None:
            self._counts[:, self._first_cell(name) :][:, :NUM_CELLS] *= min(
                1, num_kept / (self.num_outcomes(name) or 1)
            )
            self._tables = {}

    # -- probabilities ----------------------------------------------------------------------------------------------

    def rate(self, drafts: DraftBatch, name: str) -> None:
        """Set the probabilities of the drafts of the drafter `name`."""
        k = drafts.scores.shape[1]
        cells = self.cells_of(drafts.scores, np.arange(k), drafts.names or (name,), drafts.sources, drafts.match)
        if int(drafts.num.sum()) < cells.size:
            cells[np.arange(k) >= drafts.num[:, None]] = NOT_DRAFTED
        drafts.cells, drafts.probabilities = cells, self.probabilities(cells)

    def cells_of(
        self,
        scores: np.ndarray,
        positions: np.ndarray,
        names: tuple[str, ...],
        sources: np.ndarray | None = None,
        match: np.ndarray | None = None,
    ) -> np.ndarray:
        """Cells of scores [B, K] at positions [K]: int64 [B, K]."""
        if len(positions) and positions[-1] >= len(self._positions):
            more = np.full(int(positions[-1]), POSITION_BUCKETS[-1])
            self._positions = np.concatenate([POSITION_BUCKETS, more])
        cells = SCORE_EDGES.searchsorted(scores, "right")
        cells += self._positions[positions] * NUM_SCORES
        if match is not None:
            cells += MATCH_EDGES.searchsorted(match, "right")[:, None] * (NUM_POSITIONS * NUM_SCORES)
        first = [self._first_cell(name) for name in names]
        cells += first[0] if sources is None else np.array(first)[sources][:, None]
        return cells

    def _first_cell(self, name: str) -> int:
        if name not in self._first_cells:
            self._first_cells[name] = self._counts.shape[1]
            self._counts, self._tables = np.concatenate([self._counts, np.zeros((2, NUM_CELLS))], 1), {}
        return self._first_cells[name]

    def probabilities(self, cells: np.ndarray, min_outcomes: float = 0) -> np.ndarray:
        """0 for NOT_DRAFTED. A drafter with fewer outcomes than `min_outcomes` is rated as without probes."""
        if min_outcomes not in self._tables:
            accepted, seen = counts = self._counts.reshape(2, -1, NUM_MATCHES * NUM_POSITIONS, NUM_SCORES)
            accepted_S, seen_S = counts.sum(2)  # [drafters, scores]
            trust = (accepted_S.sum(1) + TRUST_PRIOR * TRUST) / ((seen_S * SCORES).sum(1) + TRUST_PRIOR)
            is_strict = self.has_probes & (seen_S.sum(1) >= min_outcomes)
            prior = np.where(is_strict, np.minimum(1, trust / FAIR) ** 2, 1)[:, None] * SCORES
            weight = np.where(is_strict, SCORE_PRIOR_WITH_PROBES, SCORE_PRIOR)[:, None]
            by_score = (accepted_S + weight * prior) / (seen_S + weight)
            by_cell = (accepted + CELL_PRIOR * by_score[:, None]) / (seen + CELL_PRIOR)
            self._tables[min_outcomes] = np.append(by_cell.ravel(), 0.0)
        return self._tables[min_outcomes][cells]

    def calibration(self, name: str, num: int) -> np.ndarray:
        """Factors that make a drafter's scores probabilities, for drafts without a match: float32 [num, NUM_SCORES], by
        position in the draft and by score bucket."""
        positions = POSITION_BUCKETS[np.minimum(np.arange(num), len(POSITION_BUCKETS) - 1)]
        cells = self._first_cell(name) + positions[:, None] * NUM_SCORES + np.arange(NUM_SCORES)
        return (self.probabilities(cells, MIN_OUTCOMES) / SCORES).astype(np.float32)

    def trust(self, name: str) -> float:
        """Accepted tokens per token that the drafter's scores promise."""
        first = self._first_cell(name)
        accepted_S, seen_S = self._counts[:, first : first + NUM_CELLS].reshape(2, -1, NUM_SCORES).sum(1)
        return float((accepted_S.sum() + TRUST_PRIOR * TRUST) / (seen_S @ SCORES + TRUST_PRIOR))

    def num_outcomes(self, name: str | None = None) -> float:
        """Of a drafter or of all, as far as they are remembered."""
        first = self._first_cell(name) if name is not None else 0
        return float(self._counts[1, first : first + NUM_CELLS if name is not None else None].sum())

    # -- drafts to come ---------------------------------------------------------------------------------------------

    def is_drafted(self, name: str, num: int) -> np.ndarray:
        """Whether the latest drafts have a token at the first `num` positions: bool [N, num]."""
        return self._latest(name, num) >= 0

    def survival(self, name: str, num: int) -> np.ndarray:
        """For drafts like the latest ones: the probability that the tokens up to each of the first `num` positions are
        all accepted. float64 [N, num]."""
        return self.probabilities(self._latest(name, num), MIN_OUTCOMES).cumprod(1)

    def num_drafts(self, name: str) -> int:
        """Drafts of this drafter that were observed so far, forgotten ones excluded."""
        return self._recent[name].num_total if name in self._recent else 0

    def needs_outcomes(self, name: str) -> bool:
        """Whether more outcomes of this drafter would change what `survival` returns next."""
        recent = self._recent.get(name)
        has_many = recent is not None and recent.num_total - recent.num_used >= NUM_RECENT
        return not has_many or self.num_outcomes(name) < MIN_OUTCOMES

    def _latest(self, name: str, num: int) -> np.ndarray:
        """Cells of the latest drafts, int64 [N, num]. A position that was not asked for gets the score before it."""
        recent = self._recent.setdefault(name, _Recent())
        recent.num_used = recent.num_total
        known = recent.cells[: recent.num, :num]
        cells = np.full((max(MIN_RECENT, recent.num), num), UNKNOWN)
        cells[: recent.num, : known.shape[1]] = known
        cells[recent.num :, 0] = self._first_cell(name) + PRIOR_SCORE
        positions = np.minimum(np.arange(num), len(POSITION_BUCKETS) - 1)
        step = np.diff(POSITION_BUCKETS[positions], prepend=0) * NUM_SCORES
        for j in range(1, num):
            before, column = cells[:, j - 1], cells[:, j]
            unknown = column == UNKNOWN
            column[unknown] = np.where(before >= 0, before + step[j], before)[unknown]
        return cells

    # -- learning ---------------------------------------------------------------------------------------------------

    def observe(
        self, drafts: DraftBatch, name: str, rows: np.ndarray | None, num_accepted: np.ndarray, num_known: np.ndarray
    ) -> None:
        """The outcomes of rated drafts. Of row rows[i] (of row i, if None), num_known[i] tokens have an outcome, and
        the first num_accepted[i] of these were accepted."""
        cells = drafts.cells
        assert cells is not None
        self._record(drafts, cells, name)
        if rows is not None:
            cells = cells[rows]
        position, size = np.arange(cells.shape[1], dtype=np.int32)[:, None], self._counts.shape[1]
        # The first bin is that of NOT_DRAFTED: a device may verify a token whose score is not a number.
        seen_C = np.bincount(cells.T[position < num_known] + 1, minlength=size + 1)[1:]
        at = seen_C.nonzero()[0]  # a few of hundreds
        if len(at):
            accepted_C = np.bincount(cells.T[position < num_accepted] + 1, minlength=size + 1)[1:]
            seen = seen_C[at]
            self._counts[:, at] = self._counts[:, at] * (1 - 1 / MEMORY) ** seen + (accepted_C[at], seen)
            self._tables = {}

    def _record(self, drafts: DraftBatch, cells: np.ndarray, name: str) -> None:
        sources = drafts.sources
        if drafts.caps is not None:
            if (drafts.caps < cells.shape[1]).any():
                cells = np.where(np.arange(cells.shape[1]) < drafts.caps[:, None], cells, UNKNOWN)
            asked = drafts.caps > 0
            if not asked.all():
                cells, sources = cells[asked], sources[asked] if sources is not None else None
        if not cells.size:
            return
        self._recent.setdefault(name, _Recent()).add(cells)
        for source, drafter in enumerate(drafts.names if sources is not None else ()):
            if len(own := cells[sources == source]):
                self._recent.setdefault(drafter, _Recent()).add(own)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, np.ndarray]:
        state = {"version": np.array([self.version])}
        for i, (name, at) in enumerate(self._first_cells.items()):  # numbered, because cells depend on their order
            state[f"counts.{i}.{name}"] = self._counts[:, at : at + NUM_CELLS].copy()
        for name, recent in self._recent.items():
            state[f"recent.{name}"], state[f"place.{name}"] = recent.cells.copy(), np.array([recent.num, recent.next])
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        counts = sorted((int(key.split(".")[1]), key) for key in state if re.fullmatch(r"counts\.\d+\..+", key))
        recent = {key.removeprefix("recent."): state[key] for key in state if key.startswith("recent.")}
        shapes = {key: array.shape for key, array in state.items()}
        expected = {"version": (1,), **{key: (2, NUM_CELLS) for _, key in counts}}
        for name, cells in recent.items():
            expected |= {f"recent.{name}": (NUM_RECENT, max(1, cells.size // NUM_RECENT)), f"place.{name}": (2,)}
        is_valid = shapes == expected and all(
            array.dtype.kind in "iuf" and np.isfinite(array).all() and array.min(initial=0) >= UNKNOWN
            for array in state.values()
        )
        if not is_valid or any(cells.max(initial=0) >= len(counts) * NUM_CELLS for cells in recent.values()):
            raise ValueError(f"the acceptance model's state is damaged: its arrays are {shapes}")
        self.version = int(state["version"][0])
        self._first_cells = {key.split(".", 2)[2]: i * NUM_CELLS for i, (_, key) in enumerate(counts)}
        self._counts = np.concatenate([np.zeros((2, 0)), *(state[key] for _, key in counts)], 1).astype(np.float64)
        self._tables, self._recent = {}, {name: _Recent() for name in recent}
        for name, cells in recent.items():
            self._recent[name].cells = cells.astype(np.int64)
            self._recent[name].num, self._recent[name].next = (
                int(n) % (NUM_RECENT + 1) for n in state[f"place.{name}"]
            )
            self._recent[name].num_total = self._recent[name].num
