"""The host's part of drafters on the device: for which requests there are drafts, how long these are, and, once the
step is committed, the scores of their tokens. While steps overlap, the scores in `propose` are those of the drafts
before. The part that drafts, inside the CUDA graph, is a `GraphDrafter` (model/cuda/graph_drafter.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from paceline.speculation.batch import Drafter, Rows, are_same, look_up
from paceline.speculation.draft_batch import DraftBatch
from paceline.types import Request

MAX_DRAFT = 15  # tokens per row, as in model/cuda/device_state.py


class _Scores:
    """Of draft tokens, [B, K]: 0 if unknown or not drafted; and which drafter they are from."""

    def __init__(
        self, request_ids: np.ndarray, values: np.ndarray, sources: np.ndarray, is_known: np.ndarray | None = None
    ) -> None:
        self.request_ids, self.values, self.sources = request_ids, values, sources
        self.is_known = np.ones(len(request_ids), bool) if is_known is None else is_known

    def of(self, request_ids: np.ndarray, width: int) -> _Scores:
        """For these requests, as [B, width]."""
        same = are_same(request_ids, self.request_ids)
        if same and width == self.values.shape[1]:
            return self
        num, known = len(request_ids), min(width, self.values.shape[1])
        values, sources, is_known = np.zeros((num, width)), np.zeros(num, np.uint8), np.ones(num, bool)
        if same:
            values[:, :known], sources = self.values[:, :known], self.sources
        elif len(self.request_ids):
            place, is_known = look_up(request_ids, self.request_ids)
            values[:, :known] = self.values[place, :known] * is_known[:, None]
            sources = self.sources[place]
        else:
            is_known[:] = False
        return _Scores(request_ids, values, sources, is_known)


NOTHING = _Scores(np.zeros(0, np.int64), np.zeros((0, 0)), np.zeros(0, np.uint8))
NO_REQUESTS = np.zeros(0, np.int64), 0


class DeviceDrafter(Drafter):
    """Base of the drafters on the device. They draft at the end of each step for the next one, so `propose` only says
    how many tokens are there; the tokens are -1, since the host does not know them."""

    sources: tuple[str, ...] = ()  # names of the drafters that `DraftStep.sources_out` counts, if there are several
    reads_acceptance = False  # needs `Rows.acceptance`
    writes_kv = True  # has KV of its own, in the target's blocks
    is_paused = False  # the next step runs without it; see `SpeculationPolicy.pauses_drafter`

    def __init__(self) -> None:
        self.draft_length = self.max_draft_length = 0  # tokens that the next step drafts, and the most so far
        self._num_drafted: dict[int, int] = {}  # by request: tokens drafted for it
        self._launched = NO_REQUESTS  # for which requests, and how many tokens, the last launched step drafts
        self._drafted = NOTHING  # by the last step that was waited for, …
        self._verified = NOTHING  # … and by the one before, whose drafts that step has verified

    # -- called by the runner ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def graph_key(self) -> Hashable:
        """Drafters with the same key share CUDA graphs."""

    @abstractmethod
    def build(self, context: Any) -> Any:
        """DeviceContext -> GraphDrafter."""

    def add(self, drafter: Any, slots: Sequence[int], requests: Sequence[Request]) -> None:
        """These sequences are in these slots now; no step of theirs is in flight. `drafter` is from `build`, perhaps of
        another drafter with the same key."""

    def launched(self, request_ids: np.ndarray, k: int) -> None:
        """A step was launched that drafts k tokens for each of these requests. Their drafts before are used up."""
        last, last_k = self._launched
        if k != last_k or not are_same(request_ids, last):
            self._num_drafted.update(dict.fromkeys(request_ids.tolist(), k))
            self._launched = request_ids, k

    def drafted(self, request_ids: np.ndarray, scores: np.ndarray, sources: np.ndarray) -> None:
        """The step has finished."""
        self._verified = self._drafted
        self._drafted = _Scores(request_ids, scores, sources.astype(np.uint8))

    def forget(self, request_id: int) -> None:
        self._num_drafted.pop(request_id, None)
        self._launched = NO_REQUESTS

    # -- called by the engine ---------------------------------------------------------------------------------------

    def set_draft_length(self, rows: Rows, caps: np.ndarray) -> None:
        """Of the next step: one length for all rows."""
        self.draft_length = min(MAX_DRAFT, int(caps.max(initial=0)))
        self.max_draft_length = max(self.max_draft_length, self.draft_length)

    @property
    def kv_lookahead(self) -> int:
        """Positions after a row's end whose KV the next step may write while drafting. A graph that was captured for
        longer drafts may be used, so it is the longest draft so far."""
        return self.max_draft_length if self.draft_length and self.writes_kv else 0

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        last, k = self._launched
        if are_same(rows.request_ids, last):
            num = np.full(len(last), k, np.int32)
        else:
            num = np.array([self._num_drafted.get(i, 0) for i in rows.request_ids.tolist()], np.int32)
        num = np.minimum(num, caps)
        return self._batch(num, self._drafted.of(rows.request_ids, int(num.max(initial=0))))

    def verified(self, request_ids: np.ndarray) -> DraftBatch:
        width = self._verified.values.shape[1]
        found = self._verified.of(request_ids, width)
        drafts = self._batch((found.values > 0).sum(1).astype(np.int32), found)
        drafts.caps = found.is_known * np.int32(width)
        return drafts

    def _batch(self, num: np.ndarray, found: _Scores) -> DraftBatch:
        scores = found.values.astype(np.float32)
        sources = found.sources if self.sources else None
        return DraftBatch(np.full(scores.shape, -1, np.int32), num, scores, None, self.sources, sources)

    def end(self, request_id: int) -> None:
        self.forget(request_id)
