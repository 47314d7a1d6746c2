"""The host's part of the drafters on the device: a head, history, or both."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch import Tensor

from paceline.model.device import to_device
from paceline.model.draft_head import DraftHead
from paceline.model.dspark import DSparkHead
from paceline.model.eagle3 import Eagle3Head
from paceline.model.head_files import assign_head, head_state
from paceline.model.paged import receipt_of
from paceline.speculation.acceptance import SCORE_EDGES, AcceptanceModel
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.device_drafter import MAX_DRAFT, DeviceDrafter
from paceline.speculation.history_store import HistoryStore
from paceline.types import Receipt, Request

if TYPE_CHECKING:
    from paceline.model.cuda.graph_drafter import DeviceContext, GraphDrafter
    from paceline.model.cuda.graph_head import GraphHead
    from paceline.model.cuda.graph_history import GraphHistory

FACTOR_EVERY = 16  # steps
MIN_CHANGE = 0.02  # of a factor that is sent to the device
MIN_HISTORY_TOKENS, MAX_HISTORY_TOKENS = 1 << 24, 1 << 26  # on the device, 4 bytes each


class DeviceHeadDrafter(DeviceDrafter):
    """The head's keys and values are in the target's blocks."""

    def __init__(self, head: DraftHead, version: int = 0) -> None:
        super().__init__()
        self.head, self.version = head, version
        self.aux_layers = head.config.aux_layers
        self._num_steps = 0
        # Of the head's probabilities: on the device, and what it has there. Only this tensor is kept of the head's part
        # on the device, which has KV memory.
        self._calibration_on_device: Tensor | None = None
        self._calibration: np.ndarray | None = None

    @property
    def graph_key(self) -> Hashable:
        return id(self.head)

    @abstractmethod
    def graph_head(self) -> type[GraphHead]:
        """The class of the part on the device."""

    def build(self, context: DeviceContext) -> GraphHead:
        from paceline.model.kv import PagedKV

        head, layer, kv = self.head, self.head.config.layer, context.kv.draft_kv
        if kv is None or kv.config != layer or kv.k.dtype != head.dtype:
            kv = context.kv.draft_kv = PagedKV(layer, context.num_blocks, head.dtype, context.decoder.device)
        drafter = self.graph_head()(head, context.decoder.embed, kv, context.state, SCORE_EDGES.tolist())
        self.use_calibration(drafter.calibration)
        return drafter

    def use_calibration(self, on_device: Tensor) -> None:
        """Of a head's new part on the device."""
        self._calibration_on_device = on_device
        if self._calibration is not None:
            on_device.copy_(to_device(self._calibration, on_device.device))

    def set_draft_length(self, rows: Rows, caps: np.ndarray) -> None:
        super().set_draft_length(rows, caps)
        self._num_steps += 1
        if self._num_steps % FACTOR_EVERY == 0:
            self.calibrate(rows.acceptance)

    def calibrate(self, acceptance: AcceptanceModel) -> None:
        """Let the device rate its drafts by what is accepted, so that it selects those that the policy expects."""
        on_device = self._calibration_on_device
        if on_device is None:
            return
        factors = acceptance.calibration(self.name, MAX_DRAFT)
        if self._calibration is None or np.abs(factors - self._calibration).max() > MIN_CHANGE:
            self._calibration = factors
            on_device.copy_(to_device(factors, on_device.device))

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        started = time.perf_counter()
        assign_head(self.head, weights)  # KV of the old weights is kept: it affects only what is accepted
        self.version = version
        return receipt_of(head_state(self.head), version, started)


class DeviceEagle3Drafter(DeviceHeadDrafter):
    name = "eagle3"
    head: Eagle3Head

    def graph_head(self) -> type[GraphHead]:
        from paceline.model.cuda.graph_eagle3 import GraphEagle3

        return GraphEagle3


class DeviceDSparkDrafter(DeviceHeadDrafter):
    name = "dspark"
    head: DSparkHead

    def set_draft_length(self, rows: Rows, caps: np.ndarray) -> None:
        super().set_draft_length(rows, np.minimum(caps, self.head.config.block_size))

    def graph_head(self) -> type[GraphHead]:
        from paceline.model.cuda.graph_dspark import GraphDSpark

        return GraphDSpark


def device_head_drafter(head: DraftHead) -> DeviceHeadDrafter:
    if isinstance(head, DSparkHead):
        return DeviceDSparkDrafter(head)
    return DeviceEagle3Drafter(cast(Eagle3Head, head))


class DeviceHistoryDrafter(DeviceDrafter):
    name = "suffix"
    writes_kv = False

    def __init__(self, store: HistoryStore, recency: float = 0.8, min_match: int = 1) -> None:
        super().__init__()
        self.store, self.recency, self.min_match = store, recency, min_match

    @property
    def num_bytes(self) -> int:
        return self.store.num_bytes

    @property
    def graph_key(self) -> Hashable:
        return "history", self.recency, self.min_match

    def build(self, context: DeviceContext) -> GraphHistory:
        from paceline.model.cuda.graph_history import GraphHistory, HistorySettings

        longest = context.decoder.config.max_positions
        size = min(max(MIN_HISTORY_TOKENS, 2 * context.max_num_seqs * longest), MAX_HISTORY_TOKENS)
        settings = HistorySettings(self.recency, self.min_match, longest)
        return GraphHistory(context.state, context.max_num_seqs, size, settings)

    def add(self, drafter: Any, slots: Sequence[int], requests: Sequence[Request]) -> None:
        from paceline.model.cuda.graph_history import NewSequence

        live, entries = self.store.live, self.store.entries
        drafter.add(
            NewSequence(slot, live.get(request.request_id), request.problem, entries(request.problem))
            for slot, request in zip(slots, requests, strict=True)
        )

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


class DeviceHybridDrafter(DeviceHistoryDrafter):
    """Both draft; each row gets the draft of which more tokens are expected to be accepted."""

    name = "hybrid"
    reads_acceptance = writes_kv = True

    def __init__(self, store: HistoryStore, head: DeviceHeadDrafter, recency: float = 0.8, min_match: int = 1) -> None:
        super().__init__(store, recency, min_match)
        self.head, self.version, self.aux_layers = head, head.version, head.aux_layers
        self.sources = ("suffix", head.name)
        self._num_steps = 0
        self._factor = 1.0  # of the history's probabilities
        self._factor_on_device: Tensor | None = None

    @property
    def graph_key(self) -> Hashable:
        return "hybrid", super().graph_key, self.head.graph_key

    def build(self, context: DeviceContext) -> GraphDrafter:  # type: ignore[override]
        from paceline.model.cuda.graph_hybrid import GraphHybrid

        return GraphHybrid(super().build(context), self.head.build(context), context.state)

    def add(self, drafter: Any, slots: Sequence[int], requests: Sequence[Request]) -> None:
        super().add(drafter.history, slots, requests)
        self._factor_on_device = drafter.history_factor
        drafter.history_factor.fill_(self._factor)

    def set_draft_length(self, rows: Rows, caps: np.ndarray) -> None:
        super().set_draft_length(rows, caps)
        self._num_steps += 1
        if self._num_steps % FACTOR_EVERY == 0 and self._factor_on_device is not None:
            self.head.calibrate(rows.acceptance)
            factor = min(1.0, rows.acceptance.trust("suffix"))  # the head's probabilities are calibrated
            if abs(factor - self._factor) > MIN_CHANGE:
                self._factor = factor
                self._factor_on_device.fill_(factor)

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Receipt:
        receipt = self.head.update(weights, version)
        self.version = version
        return receipt
