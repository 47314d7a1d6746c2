"""Drafters on the device: an EAGLE-3 head, history, or both. The kernels are in `model/cuda`."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import assign_head, head_state
from paceline.model.paged import receipt_of
from paceline.speculation.ahead_drafter import AheadDrafter
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.history_store import HistoryStore
from paceline.types import Receipt, Request

if TYPE_CHECKING:
    from paceline.model.cuda.device_drafter import DeviceContext, DeviceDrafter
    from paceline.model.cuda.device_history import DeviceHistory
    from paceline.model.cuda.head import DeviceHead

FACTOR_EVERY = 16  # steps
MIN_HISTORY_TOKENS, MAX_HISTORY_TOKENS = 1 << 24, 1 << 26  # on the device, 4 bytes each


class Eagle3Ahead(AheadDrafter):
    name = "eagle3"

    def __init__(self, head: Eagle3Head, version: int = 0) -> None:
        super().__init__()
        self.head, self.version = head, version
        self.aux_layers = head.config.aux_layers

    @property
    def graph_key(self) -> Hashable:
        return id(self.head)

    def build(self, context: DeviceContext) -> DeviceHead:
        from paceline.model.cuda.head import DeviceHead
        from paceline.model.kv import PagedKV

        kv, head = context.kv, self.head
        if kv.draft_kv is None:
            kv.draft_kv = PagedKV(head.config.layer, context.num_blocks, head.dtype, context.decoder.device)
        return DeviceHead(head, context.decoder.embed, kv.draft_kv, context.state)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        started = time.perf_counter()
        assign_head(self.head, weights)
        self.version = version
        return receipt_of(head_state(self.head), version, started)


class HistoryAhead(AheadDrafter):
    name = "suffix"

    def __init__(self, store: HistoryStore, recency: float = 0.8, min_match: int = 1) -> None:
        super().__init__()
        self.store, self.recency, self.min_match = store, recency, min_match

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes

    @property
    def graph_key(self) -> Hashable:
        return "history", self.recency, self.min_match

    def build(self, context: DeviceContext) -> DeviceHistory:
        from paceline.model.cuda.device_history import DeviceHistory, HistorySettings

        longest = context.decoder.config.max_positions
        size = min(max(MIN_HISTORY_TOKENS, 2 * context.max_num_seqs * longest), MAX_HISTORY_TOKENS)
        settings = HistorySettings(self.recency, self.min_match, longest)
        return DeviceHistory(context.state, context.max_num_seqs, size, settings)

    def add(self, drafter: Any, slots: Sequence[int], requests: Sequence[Request]) -> None:
        from paceline.model.cuda.device_history import NewSequence

        live, entries = self.store.live, self.store.entries
        drafter.add(
            NewSequence(slot, live.get(request.request_id), request.problem, entries(request.problem))
            for slot, request in zip(slots, requests, strict=True)
        )

    def set_draft_lengths(self, rows: Rows, caps: np.ndarray) -> int:
        super().set_draft_lengths(rows, caps)
        return 0  # it writes no KV past a row's end

    def begin(self, request: Request, version: int = 0) -> None:
        self.store.begin(request, version)

    def observe(self, commits: Commits) -> None:
        self.store.observe(commits)

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.store.end(request_id)

    def state_dict(self) -> dict[str, np.ndarray]:
        return self.store.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self.store.load_state_dict(state)


class HybridAhead(HistoryAhead):
    """Both draft; each row gets the draft of which more tokens are expected to be accepted."""

    name = "hybrid"
    sources = ("suffix", "eagle3")
    reads_acceptance = True

    def __init__(self, store: HistoryStore, head: Eagle3Ahead, recency: float = 0.8, min_match: int = 1) -> None:
        super().__init__(store, recency, min_match)
        self.head, self.version, self.aux_layers = head, head.version, head.aux_layers
        self._num_steps = 0
        self._device: Any = None  # its part on the device
        self._factor = 1.0  # of the history's probabilities there

    @property
    def graph_key(self) -> Hashable:
        return "hybrid", super().graph_key, self.head.graph_key

    def build(self, context: DeviceContext) -> DeviceDrafter:  # type: ignore[override]
        from paceline.model.cuda.device_hybrid import DeviceHybrid

        return DeviceHybrid(super().build(context), self.head.build(context), context.state)

    def add(self, drafter: Any, slots: Sequence[int], requests: Sequence[Request]) -> None:
        super().add(drafter.history, slots, requests)
        self._device = drafter
        drafter.history_factor.fill_(self._factor)

    def set_draft_lengths(self, rows: Rows, caps: np.ndarray) -> int:
        self._num_steps += 1
        if self._num_steps % FACTOR_EVERY == 0 and self._device is not None:
            factor = min(1.0, rows.acceptance.trust("suffix") / rows.acceptance.trust("eagle3"))
            if abs(factor - self._factor) > 0.02:
                self._factor = factor
                self._device.history_factor.fill_(factor)
        return AheadDrafter.set_draft_lengths(self, rows, caps)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        receipt = self.head.update(weights, version)
        self.version = version
        return receipt
