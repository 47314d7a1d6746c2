"""Drafters that have drafted already: on the device, at the end of the step before. An EAGLE-3 head, and history.

The engine's runner has them compute (`engine/graph_runner.py`); here stands what the host knows of it: for whom
there are drafts, how long they are, and, once the step has landed, how sure their tokens are. What they are it need
not know: a drafted token of -1 means the one that the device has. Where steps overlap, what it says in `propose` is of
the drafts before: those that are meant are still in the making.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import numpy as np
from torch import Tensor

from paceline.drafters.eagle3 import Calibrated
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import assign_head, head_state
from paceline.model.paged import receipt_of
from paceline.speculation.batch import Commits, DraftBatch, Rows, are_same, look_up
from paceline.speculation.calibration import of_probabilities
from paceline.speculation.library import Library
from paceline.types import Receipt, Request


class _Told:
    """How sure drafted tokens are: chances[i] those of request_ids[i], 0 where nothing is known. And the bins that
    these fall into by the drafter's calibration, which are asked for more than once."""

    def __init__(self, request_ids: np.ndarray, chances: np.ndarray, bins: np.ndarray) -> None:
        self.request_ids, self.chances, self.bins = request_ids, chances, bins

    def of(self, request_ids: np.ndarray, width: int) -> _Told:
        """Of these, as [B, width]."""
        known = min(width, self.chances.shape[1])
        same = are_same(request_ids, self.request_ids)
        if same and width == self.chances.shape[1]:  # as ever, when nobody comes or goes
            return self
        shape = len(request_ids), width
        found = _Told(request_ids, np.zeros(shape), np.zeros(shape, np.int64))  # the first bin is that of 0
        if same:
            found.chances[:, :known], found.bins[:, :known] = self.chances[:, :known], self.bins[:, :known]
        elif len(self.request_ids):
            place, is_there = look_up(request_ids, self.request_ids)
            found.chances[:, :known] = self.chances[place, :known] * is_there[:, None]
            found.bins[:, :known] = self.bins[place, :known] * is_there[:, None]
        return found


NOTHING = _Told(np.zeros(0, np.int64), np.zeros((0, 0)), np.zeros((0, 0), np.int64))
NOBODY_YET = np.zeros(0, np.int64), 0
MOST = 15  # drafted tokens of a row that a device has room for, as `model/cuda/slots.py` has it


class DraftsAhead(Calibrated):
    reads_drafts = False

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = self.most_asked = 0  # tokens that the next step drafts, and the most so far
        self._made: dict[int, int] = {}  # by request: how many tokens are drafted for it
        self._made_last = NOBODY_YET  # for whom, and how many, by the step that was launched last
        self._told = NOTHING  # how sure each is, by the step that landed last, …
        self._judged = self._told  # … and by the one before it, whose drafts that one has verified
        self._offered = NOTHING  # what `propose` said last, …
        self._verified = NOTHING  # … and `verified`

    # -- by the runner ----------------------------------------------------------------------------------------------

    def made(self, request_ids: np.ndarray, k: int) -> None:
        """A step was launched that drafts k tokens for each of these; those before are spent."""
        last, last_k = self._made_last
        if k != last_k or not are_same(request_ids, last):
            self._made.update(dict.fromkeys(request_ids.tolist(), k))
            self._made_last = request_ids, k

    def told(self, request_ids: np.ndarray, chances: np.ndarray) -> None:
        """It has landed."""
        self._judged, self._told = self._told, _Told(request_ids, chances, self.calibration.bins(chances))

    def forget(self, request_id: int) -> None:
        self._made.pop(request_id, None)
        self._made_last = NOBODY_YET

    def _num_made(self, request_ids: np.ndarray) -> np.ndarray:
        last, k = self._made_last
        if are_same(request_ids, last):  # as ever, when nobody comes or goes
            return np.full(len(last), k, np.int32)
        made = self._made
        return np.array([made.get(request_id, 0) for request_id in request_ids.tolist()], np.int32)

    # -- by the engine ----------------------------------------------------------------------------------------------

    def ask(self, rows: Rows, caps: np.ndarray) -> int:
        """The policy's wish for this step is what the device drafts at its end; or more, up to the most so far, where
        its graph can no less."""
        self.num_asked = min(MOST, int((caps if rows.head_caps is None else rows.head_caps).max(initial=0)))
        self.most_asked = max(self.most_asked, self.num_asked)
        return self.most_asked if self.num_asked else 0

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        if rows.version != self._policy_version:
            if self._policy_version >= 0:
                self.calibration.fade()
            self._policy_version = rows.version
        num = np.minimum(self._num_made(rows.request_ids), caps)
        self._offered = self._told.of(rows.request_ids, int(num.max(initial=0)))
        return self._drafts(num, self._offered)

    def _drafts(self, num: np.ndarray, said: _Told) -> DraftBatch:
        confidence = self.calibration.chances.astype(np.float32)[said.bins]
        return DraftBatch(np.full(confidence.shape, -1, np.int32), num, confidence)

    def verified(self, request_ids: np.ndarray) -> DraftBatch:
        width = self._judged.chances.shape[1]
        self._verified = said = self._judged.of(request_ids, width)
        return self._drafts(said.chances[:, :1].any(1).astype(np.int32) * width, said)

    def observe(self, commits: Commits) -> None:
        if not commits.num_drafted.any():
            return
        # Where steps overlap it is known now what was said of the drafts that were verified, else since `propose`.
        before = self._offered if commits.drafts is None else self._verified
        said = before.of(commits.request_ids, max(before.chances.shape[1], 1))
        known = (commits.num_drafted > 0) & (said.chances[:, 0] > 0)
        self.calibration.observe_bins(said.bins, commits.num_accepted * known, commits.num_known * known)

    def end(self, request_id: int) -> None:
        self.forget(request_id)


class Eagle3Ahead(DraftsAhead):
    name = "eagle3"
    num_bytes = 0  # keeps nothing of ended requests

    def __init__(self, head: Eagle3Head, version: int = 0) -> None:
        super().__init__()
        self.head, self.version = head, version
        self.wants_hidden = head.config.taps

    def begin(self, request: Request, version: int = 0) -> None:
        pass

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        started = time.perf_counter()
        assign_head(self.head, weights)
        self.version = version
        return receipt_of(head_state(self.head), version, started)


class HistoryAhead(DraftsAhead):
    """`library` has what was said; what a device makes of it is in `model/cuda/recall.py`."""

    name = "suffix"
    version = 0
    wants_hidden: tuple[int, ...] = ()

    def __init__(self, library: Library, recency: float = 0.8, min_match: int = 1) -> None:
        super().__init__()
        self.calibration = of_probabilities()
        self.library, self.recency, self.min_match = library, recency, min_match

    @property
    def num_bytes(self) -> int:
        return self.library.num_bytes

    def ask(self, rows: Rows, caps: np.ndarray) -> int:
        super().ask(rows, caps)
        return 0  # it writes nothing behind a row's end

    def begin(self, request: Request, version: int = 0) -> None:
        self.library.begin(request, version)

    def observe(self, commits: Commits) -> None:
        super().observe(commits)
        self.library.hear(commits)

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.library.end(request_id)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        raise ValueError("the suffix drafter has no weights to update; it learns from what it observes")

    def state(self) -> dict[str, np.ndarray]:
        return self.library.state() | super().state()

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        own = {name: state[name] for name in state if name in ("calibration", "policy_version")}
        self.library.restore({name: array for name, array in state.items() if name not in own})
        super().restore(own)
