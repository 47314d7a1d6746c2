"""An EAGLE-3 head that has drafted already: on the device, at the end of the step before.

The engine's runner has the head compute (`engine/graph_runner.py`); here stands what the host knows of it: for whom
there are drafts, how long they are, and, once the step has landed, how likely their tokens were. What they are it need
not know: a drafted token of -1 means the one that the device has. Where steps overlap, what it says in `propose` is of
the drafts before: those that are meant are still in the making.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np
from torch import Tensor

from paceline.drafters.eagle3 import Calibrated
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import assign_head, head_state
from paceline.model.paged import receipt_of
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Receipt, Request


class _Told:
    """How likely drafted tokens were: chances[i] those of request_ids[i]."""

    def __init__(self, request_ids: list[int], chances: np.ndarray) -> None:
        self.request_ids, self.chances = request_ids, chances
        self._place: dict[int, int] | None = None

    def of(self, request_ids: np.ndarray, width: int) -> np.ndarray:
        """[B, width]; 0 where nothing is known."""
        found = np.zeros((len(request_ids), width))
        known = self.chances[:, :width]
        wanted = request_ids.tolist()
        if wanted == self.request_ids:
            found[:, : known.shape[1]] = known
        elif len(self.request_ids):
            if self._place is None:
                self._place = {request_id: i for i, request_id in enumerate(self.request_ids)}
            place = np.array([self._place.get(request_id, -1) for request_id in wanted])
            found[:, : known.shape[1]] = known[place] * (place >= 0)[:, None]
        return found


class Eagle3Ahead(Calibrated):
    name = "eagle3"
    num_bytes = 0  # keeps nothing of ended requests
    reads_drafts = False
    blind = True

    def __init__(self, head: Eagle3Head, version: int = 0) -> None:
        super().__init__()
        self.head, self.version = head, version
        self.wants_hidden = head.config.taps
        self.num_asked = 0  # tokens that the next step drafts
        self._made: dict[int, int] = {}  # by request: how many tokens are drafted for it
        self._told = _Told([], np.zeros((0, 0)))  # how likely each was, by the step that landed last, …
        self._judged = self._told  # … and by the one before it, whose drafts that one has verified
        self._offered = _Told([], np.zeros((0, 0)))  # what `propose` said last

    # -- by the runner ----------------------------------------------------------------------------------------------

    def made(self, request_ids: list[int], k: int) -> None:
        """A step was launched that drafts k tokens for each of these; those before are spent."""
        for request_id in request_ids:
            self._made[request_id] = k

    def told(self, request_ids: list[int], chances: np.ndarray) -> None:
        """It has landed."""
        self._judged, self._told = self._told, _Told(request_ids, chances)

    def forget(self, request_id: int) -> None:
        self._made.pop(request_id, None)

    # -- by the engine ----------------------------------------------------------------------------------------------

    def ask(self, rows: Rows, caps: np.ndarray) -> None:
        """The policy's wish for this step is what the device drafts at its end."""
        self.num_asked = int((caps if rows.head_caps is None else rows.head_caps).max(initial=0))

    def begin(self, request: Request, version: int = 0) -> None:
        pass

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        if rows.version != self._policy_version:
            if self._policy_version >= 0:
                self.calibration.fade()
            self._policy_version = rows.version
        num = np.minimum(np.array([self._made.get(i, 0) for i in rows.request_ids.tolist()], np.int32), caps)
        said = self._told.of(rows.request_ids, int(num.max(initial=0)))
        self._offered = _Told(rows.request_ids.tolist(), said)
        return self._drafts(num, said)

    def _drafts(self, num: np.ndarray, said: np.ndarray) -> DraftBatch:
        drafts = DraftBatch.empty(*said.shape)
        drafts.num, drafts.tokens[:] = num, -1
        drafts.confidence = self.calibration(said).astype(np.float32)
        return drafts

    def verified(self, request_ids: np.ndarray) -> DraftBatch:
        width = self._judged.chances.shape[1]
        said = self._judged.of(request_ids, width)
        return self._drafts(np.where(said[:, :1].any(1), width, 0).astype(np.int32), said)

    def observe(self, commits: Commits) -> None:
        if not commits.num_drafted.any():
            return
        # Where steps overlap it is known now what was said of the drafts that were verified, else since `propose`.
        before = self._offered if commits.drafts is None else self._judged
        said = before.of(commits.request_ids, max(before.chances.shape[1], 1))
        known = (commits.num_drafted > 0) & (said[:, 0] > 0)
        self.calibration.observe_many(said[known], commits.num_accepted[known], commits.num_known[known])

    def end(self, request_id: int) -> None:
        self.forget(request_id)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        started = time.perf_counter()
        assign_head(self.head, weights)
        self.version = version
        return receipt_of(head_state(self.head), version, started)
