"""An EAGLE-3 head that has drafted already: on the device, at the end of the step before.

The engine's runner has the head compute (`engine/graph_runner.py`); here stands what the host knows of it: for whom
there are drafts, how long they are, and, once the step has landed, how likely their tokens were. What they are it need
not know: a drafted token of -1 means the one that the device has.
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
from paceline.speculation.batch import Commits, DraftBatch, Rows, places_of
from paceline.types import Receipt, Request


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
        self._said: dict[int, np.ndarray] = {}  # and how likely each was
        self._ids = np.zeros(0, np.int64)  # of the rows drafted for last, …
        self._offered = np.zeros((0, 0), np.float32)  # … and how likely each of their tokens was

    # -- by the runner ----------------------------------------------------------------------------------------------

    def made(self, request_ids: list[int], k: int) -> None:
        """A step was launched that drafts k tokens for each of these; those before are spent."""
        for request_id in request_ids:
            self._made[request_id] = k
            self._said.pop(request_id, None)

    def told(self, request_ids: list[int], tokens: np.ndarray, chances: np.ndarray) -> None:
        """It has landed."""
        for request_id, said in zip(request_ids, chances, strict=True):
            if request_id in self._made:
                self._said[request_id] = said.copy()

    def forget(self, request_id: int) -> None:
        self._made.pop(request_id, None)
        self._said.pop(request_id, None)

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
        num = np.array([self._made.get(i, 0) for i in rows.request_ids.tolist()], np.int32)
        num = np.minimum(num, caps)
        drafts = DraftBatch.empty(len(rows), int(num.max(initial=0)))
        drafts.num, drafts.tokens[:] = num, -1
        said = np.zeros_like(drafts.confidence)
        for i, request_id in enumerate(rows.request_ids.tolist()):
            known = self._said.get(request_id)
            if known is not None and num[i]:
                said[i, : num[i]] = known[: num[i]]
        drafts.confidence = self.calibration(said).astype(np.float32)
        self._ids, self._offered = rows.request_ids, said
        return drafts

    def observe(self, commits: Commits) -> None:
        drafted = np.flatnonzero((commits.num_drafted > 0) & np.isin(commits.request_ids, self._ids))
        if len(drafted):
            said = self._offered[places_of(commits.request_ids[drafted], self._ids)]
            known = said[:, 0] > 0  # where nobody waited for what was said there is nothing to learn
            drafted = drafted[known]
            self.calibration.observe_many(said[known], commits.num_accepted[drafted], commits.num_known[drafted])

    def end(self, request_id: int) -> None:
        self.forget(request_id)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        started = time.perf_counter()
        assign_head(self.head, weights)
        self.version = version
        return receipt_of(head_state(self.head), version, started)
