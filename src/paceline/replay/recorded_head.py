"""An EAGLE-3 head as it was: where a file says how many of a head's tokens would have been accepted after each token,
this drafts that many right ones and then a wrong one. It knows the future from the tape that plays.

The head's own confidences were not recorded. What is said of a position is how often it stood so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from paceline.replay.tape import Tape
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Receipt, Request

MAX_DEPTH = 9  # tokens of a draft that a digit can tell of
DEPTHS = np.arange(MAX_DEPTH)
PRIOR = 0.6  # a head's acceptance at each position before any was seen, …
PRIOR_WEIGHT = 16.0  # … worth so many outcomes
MEMORY = 1024  # outcomes that a position remembers, about


class RecordedHead:
    name = "eagle3"
    version = 0
    wants_hidden: tuple[int, ...] = ()
    reads_drafts = False
    num_bytes = 0  # keeps nothing of ended requests

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.stood, self.tried = PRIOR * PRIOR_WEIGHT * np.ones(MAX_DEPTH), PRIOR_WEIGHT * np.ones(MAX_DEPTH)

    def begin(self, request: Request, version: int = 0) -> None:
        pass

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        k = min(int(caps.max(initial=0)), MAX_DEPTH)
        matches = self.tape.round.matches
        if not k or matches is None:
            return DraftBatch.empty(len(rows), k)
        place = self.tape.place[rows.request_ids - self.tape.first_id]
        tokens = self.tape.ahead(place, k)
        wrong = np.arange(k) == matches[place][:, None]
        tokens[wrong] += 1
        confidence = np.empty(tokens.shape, np.float32)
        confidence[:] = (self.stood / self.tried)[:k]
        return DraftBatch(tokens, np.minimum(caps, k).astype(np.int32), confidence)

    def observe(self, commits: Commits) -> None:
        """A position was tried where all before it stood. A draft that its sequence's end cut short was not wrong."""
        drafted, accepted = commits.num_drafted[:, None], commits.num_accepted[:, None]
        cut = (commits.num == commits.num_accepted)[:, None]
        stood = accepted > DEPTHS
        tried = stood | ((accepted == DEPTHS) & (drafted > DEPTHS) & ~cut)
        num_tried = tried.sum(0)
        faded = (1 - 1 / MEMORY) ** num_tried
        self.stood = self.stood * faded + stood.sum(0)
        self.tried = self.tried * faded + num_tried

    def end(self, request_id: int) -> None:
        pass

    def update(self, weights: Any, version: int) -> Receipt:
        raise ValueError("a recorded head has no weights to update")

    def state(self) -> dict[str, np.ndarray]:
        return {"stood": self.stood.copy(), "tried": self.tried.copy()}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state.keys() != {"stood", "tried"}:
            raise ValueError(f"not a state of a recorded head: it holds {sorted(state) or 'nothing'}")
        self.stood, self.tried = state["stood"].copy(), state["tried"].copy()
