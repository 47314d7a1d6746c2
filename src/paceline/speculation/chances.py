"""How likely a drafted token stands, given that those before it do: learned from what stood.

Outcomes are counted in cells of (drafter, match length, position, what the drafter itself said). A cell that has seen
little follows all cells of the same drafter and word; these follow the word itself, as long as the drafter
keeps half of what it promises: what stood of all it said, by what should have. One that only boasts is found out after
a handful of tokens, whatever words it uses. Older outcomes fade, and with every new policy half of all are forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from paceline.speculation.batch import DraftBatch

MATCHES = np.array([1, 2, 3, 5, 9, 17], np.int32)  # bucket edges of match lengths; 0 is "not found by a match"
DEPTHS = np.array([0, 1, 2, 2, 3, 3, 3, 3], np.int64)  # bucket of each position; further ones are in the last
WORDS = 10  # buckets of confidence …
SAID = (np.arange(WORDS) + 0.5) / WORDS  # … and their middles
NUM_MATCHES, NUM_DEPTHS = len(MATCHES) + 1, 4
PER_SOURCE = NUM_MATCHES * NUM_DEPTHS * WORDS
MEMORY = 512.0  # outcomes that a cell remembers, about
FAIR = 0.5  # a drafter of whose promises so much comes true is taken at its word, one below that soon is not at all
TRUST, TRUST_PRIOR = 0.7, 1.0  # what comes true before anything was seen, and how many sure tokens that is worth
WORD_PRIOR, CELL_PRIOR = 4.0, 8.0  # outcomes that the more general belief counts for
FADE = 0.5  # what a new policy leaves


class Chances:
    def __init__(self) -> None:
        self._counts = np.zeros((2, 0))  # [stood, seen] by cell
        self._table: np.ndarray | None = None
        self._depths = DEPTHS

    def cells(self, drafts: DraftBatch) -> np.ndarray:
        """The cell of every drafted position: int64 [B, K]."""
        k = drafts.confidence.shape[1]
        if k > len(self._depths):
            self._depths = np.concatenate([DEPTHS, np.full(k - len(DEPTHS), DEPTHS[-1])])
        num_sources = 1 if drafts.sources is None else int(drafts.sources.max(initial=0)) + 1
        if num_sources * PER_SOURCE > self._counts.shape[1]:
            more = num_sources * PER_SOURCE - self._counts.shape[1]
            self._counts = np.concatenate([self._counts, np.zeros((2, more))], 1)
            self._table = None
        cells = np.minimum((drafts.confidence * WORDS).astype(np.int64), WORDS - 1)
        cells += self._depths[:k] * WORDS
        if drafts.match is not None:
            cells += MATCHES.searchsorted(drafts.match, "right")[:, None] * (NUM_DEPTHS * WORDS)
        if drafts.sources is not None:
            cells += drafts.sources.astype(np.int64)[:, None] * PER_SOURCE
        return cells

    def __call__(self, cells: np.ndarray) -> np.ndarray:
        if self._table is None:
            self._table = self._chances()
        return self._table[cells]

    def _chances(self) -> np.ndarray:
        stood, seen = counts = self._counts.reshape(2, -1, NUM_MATCHES * NUM_DEPTHS, WORDS)
        stood_W, seen_W = counts.sum(2)  # [sources, WORDS]
        trust = (stood_W.sum(1) + TRUST_PRIOR * TRUST) / ((seen_W * SAID).sum(1) + TRUST_PRIOR)
        word = np.minimum(1, trust[:, None] / FAIR) ** 2 * SAID
        word = (stood_W + WORD_PRIOR * word) / (seen_W + WORD_PRIOR)
        return ((stood + CELL_PRIOR * word[:, None]) / (seen + CELL_PRIOR)).reshape(-1)

    def num_seen(self, cells: np.ndarray) -> np.ndarray:
        """How many outcomes each cell's drafter has had, as far as they are remembered."""
        return self._seen_by_source()[cells // PER_SOURCE]

    def least_seen(self) -> float:
        """The same of the drafter of whom the least is known."""
        seen = self._seen_by_source()
        return float(seen.min()) if len(seen) else 0.0

    def _seen_by_source(self) -> np.ndarray:
        return self._counts[1].reshape(-1, PER_SOURCE).sum(1)

    def observe(self, cells: np.ndarray, num_stood: np.ndarray, num_known: np.ndarray) -> None:
        """Row i's first num_stood[i] positions stood, num_known[i] of them (that many or one more) have an outcome."""
        position, size = np.arange(cells.shape[1], dtype=np.int32)[:, None], self._counts.shape[1]
        num_stood_C = np.bincount(cells.T[position < num_stood], minlength=size)
        num_seen_C = np.bincount(cells.T[position < num_known], minlength=size)
        at = num_seen_C.nonzero()[0]  # a few of hundreds
        seen = num_seen_C[at]
        self._counts[:, at] = self._counts[:, at] * (1 - 1 / MEMORY) ** seen + (num_stood_C[at], seen)
        self._table = None

    def fade(self) -> None:
        self._counts = self._counts * FADE
        self._table = None

    def state(self) -> dict[str, np.ndarray]:
        return {"counts": self._counts.copy()}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        counts = state["counts"]
        if counts.ndim != 2 or len(counts) != 2 or counts.shape[1] % PER_SOURCE:
            raise ValueError(f"the state of what stood is damaged: its counts have the shape {counts.shape}")
        self._counts, self._table = counts.astype(np.float64), None
