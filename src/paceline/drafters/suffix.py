"""Drafts from history: continues a sequence as other rollouts of the same problem continued after the same tokens.

A request's tokens are appended to the shard of its problem and the policy version that it began under, so the other
rollouts of its group use them at once. It also has cursors in the problem's older shards. `history_shards.py` decides
which shards are kept; `history.py` has the automata. No sequence is searched from its start again: a step takes
O(new tokens x shards).

Every shard keeps a log of its tokens in the order in which they were appended (csrc/suffix.c). A checkpoint holds only
the logs: replaying one gives the same automaton.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from paceline.drafters.history import MAX_WIDTH, OUT_OF_MEMORY, NativeHistory
from paceline.drafters.history_shards import STATE_KEYS, HistoryShards, Shard
from paceline.drafters.python_history import PythonHistory
from paceline.native import NativeUnavailable
from paceline.speculation.batch import Commits, Drafter, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.types import Request


@dataclass(slots=True)
class _LiveRequest:
    slot: int
    shard: Shard


class SuffixDrafter(Drafter):
    """Proposes the most frequent continuation of the longest matches of a row's end, the most recent one on ties.

    `min_match`: tokens of the shortest match that is used. `max_versions`: policy versions that are kept per problem.
    `recency`: the counts of each older version are multiplied by one more factor of it. `max_bytes`: of all shards
    together, except those that live requests append to."""

    name = "suffix"

    def __init__(
        self,
        min_match: int = 1,
        max_bytes: int = 1 << 30,
        max_versions: int = 4,
        recency: float = 0.8,
        history: NativeHistory | PythonHistory | None = None,
    ) -> None:
        if min_match < 1:
            raise ValueError(f"speculation.suffix_min_match = {min_match}: must be >= 1 token")
        if max_bytes < 1:
            raise ValueError(f"speculation.suffix_max_bytes = {max_bytes}: must be >= 1")
        if not 1 <= max_versions <= MAX_WIDTH:
            raise ValueError(f"speculation.suffix_max_versions = {max_versions}: must be from 1 to {MAX_WIDTH}")
        if not 0 < recency <= 1:
            raise ValueError(f"speculation.suffix_recency = {recency}: must be above 0 and at most 1 (equal weights)")
        self._history = history or make_history()
        self._history.resize(64, max_versions)
        self._shards = HistoryShards(self._history, max_versions, max_bytes)
        self._live: dict[int, _LiveRequest] = {}
        self._min_match = min_match
        self._weights = recency ** np.arange(max_versions, dtype=np.float64)
        self._free_slots = list(range(len(self._history.cursors)))
        # Rows and caps rarely change from one step to the next, so what is computed from them is cached by their bytes.
        self._slots_cache: dict[bytes, np.ndarray] = {}
        self._k_cache: tuple[bytes, int] = b"", 0

    @property
    def num_bytes(self) -> int:
        """Memory of all shards, those of requests without a problem included."""
        return self._shards.num_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(self._history.num_tokens(shard.handle) for shard in self._shards)

    def begin(self, request: Request, version: int = 0) -> None:
        assert request.request_id not in self._live, f"request {request.request_id} began twice"
        if not self._free_slots:
            num_slots, width = self._history.cursors.shape
            self._history.resize(2 * num_slots, width)
            self._free_slots += range(num_slots, 2 * num_slots)
        slot = self._free_slots.pop()
        shard = self._shards.acquire(request.problem, version)
        shard.problem.slots.add(slot)
        prompt = np.array(request.prompt_ids, np.int32)
        end = self._shards.prompt_end(shard, prompt)
        if end == OUT_OF_MEMORY:
            _warn_out_of_memory()
        cursors = self._history.cursors[slot]
        cursors[:] = 0
        for i, cursor in enumerate([(shard.handle, end, len(prompt)), *self._shards.older_cursors(shard, prompt)]):
            cursors[i] = (*cursor, 0, 0)
        self._live[request.request_id] = _LiveRequest(slot, shard)
        self._slots_cache.clear()
        self._shards.evict()

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        key = caps.tobytes()
        if not key:
            return DraftBatch.empty(0)
        if key != self._k_cache[0]:
            self._k_cache = key, int(caps.max())
        slots = self._slots(rows.request_ids)
        return self._history.propose(slots, caps, self._k_cache[1], self._min_match, self._weights)

    def observe(self, commits: Commits) -> None:
        growth = self._history.observe(self._slots(commits.request_ids), commits.tokens, commits.num)
        if growth == OUT_OF_MEMORY:
            _warn_out_of_memory()
            self._shards.recompute_num_bytes()
            self._shards.evict()
        elif growth:
            self._shards.num_bytes += growth
            self._shards.evict()

    def end(self, request_id: int) -> None:
        live = self._live.pop(request_id)
        live.shard.problem.slots.remove(live.slot)
        self._free_slots.append(live.slot)
        self._slots_cache.clear()
        self._shards.release(live.shard)
        self._shards.evict()

    def remove(self, version: int) -> int:
        """Remove the shards of a policy version and return their number. A shard that live requests append to is
        dropped when the last of them ends."""
        return self._shards.remove(version)

    def state_dict(self) -> dict[str, np.ndarray]:
        """Includes the tokens of live requests. Excludes which requests are live, and requests without a problem."""
        return self._shards.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces the whole history."""
        assert not self._live, "load_state_dict() while requests are live"
        if state.keys() != STATE_KEYS:
            raise ValueError(
                f"not a state of the suffix drafter: it holds {sorted(state) or 'nothing'}; "
                "was speculation.method changed?"
            )
        self._shards.load_state_dict(state)

    def close(self) -> None:
        """Drop all shards. Also runs when the drafter is garbage-collected."""
        self._free_slots += [live.slot for live in self._live.values()]
        self._live.clear()
        self._slots_cache.clear()
        self._shards.clear()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_slots_cache") and not is_finalizing():  # at interpreter exit modules may be gone already
            self.close()

    def _slots(self, request_ids: np.ndarray) -> np.ndarray:
        key = request_ids.tobytes()
        slots = self._slots_cache.get(key)
        if slots is None:
            if len(self._slots_cache) > 8:
                self._slots_cache.clear()
            slots = np.array([self._live[i].slot for i in request_ids.tolist()], np.int32)
            self._slots_cache[key] = slots
        return slots


def make_history() -> NativeHistory | PythonHistory:
    """The native one if there is a C compiler."""
    try:
        return NativeHistory()
    except NativeUnavailable:
        return PythonHistory()


def _warn_out_of_memory() -> None:
    warnings.warn(
        "suffix drafter: no memory to extend a problem's history; its requests are no longer drafted for. "
        "Lower speculation.suffix_max_bytes.",
        RuntimeWarning,
        stacklevel=3,
    )
