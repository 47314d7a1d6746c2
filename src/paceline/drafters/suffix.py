"""Drafts from history: what siblings and earlier rollouts of the same problem said after the same words.

A request speaks into the shard of its problem and of the policy version that it began under, so that its siblings
profit at once, and keeps its place in the problem's older shards. `shards.py` says what is kept; `history.py` has the
automata. Nothing here walks a sequence: a step costs O(new tokens x shards).

Every shard keeps the log of what it was told, in order (csrc/suffix.c), which is what a checkpoint holds: told again,
it becomes the same automaton.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.drafters.history import LOST, MAX_WIDTH, NativeHistory
from paceline.drafters.shards import STATE, Shard, Shelf
from paceline.drafters.slow_history import SlowHistory
from paceline.native import NativeUnavailable
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Receipt, Request


@dataclass(slots=True)
class _Live:
    slot: int
    shard: Shard


class SuffixDrafter:
    """Proposes how the longest known contexts of a row's end went on most often, most recently on ties.

    `min_match` is the shortest context that may speak. Each problem keeps its last `max_versions` versions, of which
    one counts `recency` times as much as the next. All of them together keep to `max_bytes`, but for what live requests
    are saying."""

    name = "suffix"
    version = 0
    wants_hidden: tuple[int, ...] = ()
    reads_drafts = False
    listens = True

    def __init__(
        self,
        min_match: int = 1,
        max_bytes: int = 1 << 30,
        max_versions: int = 4,
        recency: float = 0.8,
        history: NativeHistory | SlowHistory | None = None,
    ) -> None:
        if min_match < 1:
            raise ValueError(f"suffix.min_match = {min_match}: must be >= 1, the tokens of the shortest context")
        if max_bytes < 1:
            raise ValueError(f"suffix.max_bytes = {max_bytes}: must be >= 1")
        if not 1 <= max_versions <= MAX_WIDTH:
            raise ValueError(f"suffix.max_versions = {max_versions}: must be from 1 to {MAX_WIDTH}")
        if not 0 < recency <= 1:
            raise ValueError(f"suffix.recency = {recency}: must be above 0 and at most 1, which forgets nothing")
        self._history = history or make_history()
        self._history.resize(64, max_versions)
        self._shelf = Shelf(self._history, max_versions, max_bytes)
        self._live: dict[int, _Live] = {}
        self._min_match = min_match
        self._weights = recency ** np.arange(max_versions, dtype=np.float64)
        self._free_slots = list(range(len(self._history.cursors)))
        # The rows and caps of one step are mostly those of the step before.
        self._slots_of: dict[bytes, np.ndarray] = {}
        self._k_of: tuple[bytes, int] = b"", 0

    @property
    def is_native(self) -> bool:
        return isinstance(self._history, NativeHistory)

    @property
    def num_problems(self) -> int:
        return len(self._shelf.problems)

    @property
    def num_shards(self) -> int:
        """Those of requests without a problem included, as in the figures below."""
        return len(self._shelf)

    @property
    def num_bytes(self) -> int:
        """What the history takes."""
        return self._shelf.num_bytes

    @property
    def num_tokens(self) -> int:
        """How many tokens the history has been told and still knows."""
        return sum(self._history.num_tokens(shard.handle) for shard in self._shelf)

    def begin(self, request: Request, version: int = 0) -> None:
        assert request.request_id not in self._live, f"request {request.request_id} began twice"
        if not self._free_slots:
            num_slots, width = self._history.cursors.shape
            self._history.resize(2 * num_slots, width)
            self._free_slots += range(num_slots, 2 * num_slots)
        slot = self._free_slots.pop()
        shard = self._shelf.open(request.problem, version)
        shard.problem.slots.add(slot)
        prompt = np.array(request.prompt_ids, np.int32)
        end = self._shelf.end_of_prompt(shard, prompt)
        if end == LOST:
            _warn_lost()
        cursors = self._history.cursors[slot]
        cursors[:] = 0
        for i, place in enumerate([(shard.handle, end, len(prompt)), *self._shelf.older(shard, prompt)]):
            cursors[i] = (*place, 0, 0)
        self._live[request.request_id] = _Live(slot, shard)
        self._slots_of.clear()
        self._shelf.fit()

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        key = caps.tobytes()
        if not key:
            return DraftBatch.empty(0)
        if key != self._k_of[0]:
            self._k_of = key, int(caps.max())
        slots = self._slots(rows.request_ids)
        return self._history.propose(slots, caps, self._k_of[1], self._min_match, self._weights)

    def observe(self, commits: Commits) -> None:
        grown = self._history.observe(self._slots(commits.request_ids), commits.tokens, commits.num)
        if grown == LOST:
            _warn_lost()
            self._shelf.recount()
            self._shelf.fit()
        elif grown:
            self._shelf.num_bytes += grown
            self._shelf.fit()

    def end(self, request_id: int) -> None:
        live = self._live.pop(request_id)
        live.shard.problem.slots.remove(live.slot)
        self._free_slots.append(live.slot)
        self._slots_of.clear()
        self._shelf.close(live.shard)
        self._shelf.fit()

    def remove(self, version: int) -> int:
        """Forget what was said under a policy version; how many shards that were. Requests that speak there go on, and
        what they said goes with the last of them."""
        return self._shelf.remove(version)

    def update(self, weights: Any, version: int) -> Receipt:
        raise ValueError("the suffix drafter has no weights to update; it learns from what it observes")

    def state(self) -> dict[str, np.ndarray]:
        """What a live request has said is in it; that it lives, and what requests without a problem say, is not."""
        return self._shelf.state()

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        """Know what the drafter knew whose state this is, and nothing else."""
        assert not self._live, "restored while requests run"
        if state.keys() != STATE:
            raise ValueError(
                f"not a state of the suffix drafter: it holds {sorted(state) or 'nothing'}; "
                "was speculation.method changed?"
            )
        self._shelf.restore(state)

    def close(self) -> None:
        """Forget everything. Also happens when the drafter is collected."""
        self._free_slots += [live.slot for live in self._live.values()]
        self._live.clear()
        self._slots_of.clear()
        self._shelf.clear()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_slots_of") and not is_finalizing():  # then modules are half gone, and so is all memory soon
            self.close()

    def _slots(self, request_ids: np.ndarray) -> np.ndarray:
        key = request_ids.tobytes()
        slots = self._slots_of.get(key)
        if slots is None:
            if len(self._slots_of) > 8:
                self._slots_of.clear()
            slots = np.array([self._live[i].slot for i in request_ids.tolist()], np.int32)
            self._slots_of[key] = slots
        return slots


def make_history() -> NativeHistory | SlowHistory:
    """The fast one where there is a C compiler."""
    try:
        return NativeHistory()
    except NativeUnavailable:
        return SlowHistory()


def _warn_lost() -> None:
    warnings.warn(
        "suffix drafter: no memory to grow a problem's history; its rows are not drafted for any more. "
        "Lower speculation.suffix_max_bytes.",
        RuntimeWarning,
        stacklevel=3,
    )
