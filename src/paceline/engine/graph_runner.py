"""Runs steps on a CUDA device, one after another without waiting for the host.

A step first computes prompts: all tokens before the one that emits, without logits. Then one graph computes each row's
last token, and perhaps a draft. Its outputs are copied to the host and read when the step is waited for. Only rows that
need their logits go to the eager runner, which waits for them.

Invariant: the device's state of a sequence is right at every launch. If no step of a sequence is in flight, the host
sends its last token and length; otherwise the device has newer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engine.accept import VerificationResult
from paceline.engine.runner import EagerRunner, FinishedStep, Runner, StepOutput
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import Sequence
from paceline.engine.sequence_table import EMPTY_SLOT, SequenceTable
from paceline.model.cuda.attention import MAX_QUERIES
from paceline.model.cuda.device_state import HEADER, MAX_DRAFT, MAX_SELECT_ROWS, ROW_WORDS, DeviceState
from paceline.model.cuda.graph_drafter import DeviceContext
from paceline.model.cuda.graphs import GraphPool, Graphs, GraphSize, OutputBuffers
from paceline.model.device import to_device
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder, Span
from paceline.speculation.batch import Drafter
from paceline.speculation.device_drafter import DeviceDrafter

FEW_TOKENS = 256  # up to here one more token costs little: reading the weights takes most of the time
NUM_BUFFERS = 3  # host buffers, for steps in flight and the one being prepared
MAX_DRAFTERS = 4  # graphs are kept for so many; those of the least recently used drafter are dropped first
ALL = 2**31 - 1  # draft tokens


class _HostBuffers:
    """Pinned memory for one step's inputs and outputs."""

    def __init__(self, graphs: Graphs) -> None:
        self.inputs = torch.empty(graphs.input_words.shape, dtype=graphs.input_words.dtype, pin_memory=True)
        self.input_words = self.inputs.numpy()
        self.outputs = outputs = OutputBuffers(len(graphs.outputs.tokens), pin_memory=True)
        self.tokens, self.logprobs = outputs.tokens.numpy(), outputs.logprobs.numpy()
        self.scores, self.sources = outputs.scores.numpy(), outputs.sources.numpy()
        # `prefill_started`: before prompts; `started`: before the graph; `done`: after it; `ended`: after eager rows.
        self.prefill_started, self.started, self.done, self.ended = (
            torch.cuda.Event(enable_timing=True) for _ in range(4)
        )


@dataclass(slots=True)
class _PendingGraphStep:
    """`graph_rows`, `eager_rows`: indices among the emitting rows."""

    graph_rows: np.ndarray
    eager_rows: np.ndarray
    buffers: _HostBuffers
    eager_step: FinishedStep | None = None
    size: GraphSize | None = None  # None: no row is in a graph
    has_prefill: bool = False
    seconds: dict[GraphSize, float] = field(default_factory=dict)  # times by size, for `Graphs`
    on_drafted: Callable[[_HostBuffers], None] | None = None

    @property
    def is_async(self) -> bool:
        return self.eager_step is None

    def wait(self) -> StepOutput:
        buffers, num = self.buffers, len(self.graph_rows)
        buffers.done.synchronize()
        if self.eager_step is not None:
            buffers.ended.synchronize()
        if self.size is None:
            result = VerificationResult.empty(0, 1) if self.eager_step is None else self.eager_step.output.result
            return StepOutput(result, num_outside_graph=len(self.eager_rows))
        if self.on_drafted is not None:
            self.on_drafted(buffers)
        draft_length = self.size.draft_length
        tokens = buffers.tokens[:num].copy()
        width = max(tokens[:, 0].tolist())
        logprobs = buffers.logprobs[:num, :, :width].copy()
        result = VerificationResult(tokens[:, 2 : 2 + width], tokens[:, 0] - 1, logprobs[:, 0], logprobs[:, 1])
        if self.eager_step is None:
            return StepOutput(result, tokens[:, 1], draft_length)
        others = self.eager_step.output.result
        merged = VerificationResult.empty(num + len(self.eager_rows), max(width, others.tokens.shape[1]))
        for rows, part in ((self.graph_rows, result), (self.eager_rows, others)):
            merged.num_accepted[rows] = part.num_accepted
            for name in ("tokens", "logprobs", "raw_logprobs"):
                getattr(merged, name)[rows, : part.tokens.shape[1]] = getattr(part, name)
        merged.top_logprobs = {int(self.eager_rows[i]): top for i, top in others.top_logprobs.items()}
        merged.dead_ends = {int(self.eager_rows[i]): end for i, end in others.dead_ends.items()}
        num_verified = np.full(len(merged.tokens), ALL)
        num_verified[self.graph_rows] = tokens[:, 1]
        return StepOutput(merged, num_verified, draft_length, len(self.eager_rows))

    def times(self) -> tuple[float, float]:
        buffers = self.buffers
        if self.size is not None:
            self.seconds[self.size] = buffers.started.elapsed_time(buffers.done) / 1e3
        if self.size is None and not self.has_prefill:
            return self.eager_step.times() if self.eager_step is not None else (0.0, 0.0)
        first = buffers.prefill_started if self.has_prefill else buffers.started
        last = buffers.done if self.eager_step is None else buffers.ended
        return first.elapsed_time(last) / 1e3, 0.0


class GraphRunner(Runner):
    """For the rule `coupled`. `enforce_eager`: the same kernels without graphs. `imposed`: acceptance probabilities
    that replace the real ones, only for `bench step`."""

    batches_prompts = True  # they are not in graphs

    def __init__(
        self,
        paged: PagedDecoder,
        eager_runner: EagerRunner,
        max_num_seqs: int,
        enforce_eager: bool = False,
        imposed: np.ndarray | None = None,
    ) -> None:
        self.paged, self.eager_runner, self.max_num_seqs = paged, eager_runner, max_num_seqs
        self.device_drafter: DeviceDrafter | None = None  # the drafter, if it drafts on the device
        self._device = paged.decoder.device
        self.enforce_eager = enforce_eager
        self.imposed = None if imposed is None else self._to_device(imposed, torch.float32)
        max_blocks = -(-paged.decoder.config.max_positions // BLOCK)
        self.state = DeviceState(max_num_seqs, max_blocks, self._device)
        self._graphs: dict[Hashable, Graphs] = {}  # by drafter, least recently used first
        self._pool = GraphPool()
        self._num_dropped = 0  # captured graphs that were dropped
        self._buffers: list[_HostBuffers] = []
        # By slot: the arrival of the sequence and the version of the block table that the device has.
        self._sent_arrivals, self._sent_versions = np.full(max_num_seqs, EMPTY_SLOT), np.zeros(max_num_seqs, np.int64)
        self._sent_blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._new_blocks: dict[tuple[int, int], int] = {}  # (slot, index) -> block, not sent yet
        self._stopped_early = False  # the last step: some drafts for the next one may be shorter than planned

    @property
    def num_captured(self) -> int:
        return self._num_dropped + sum(graphs.num_captured for graphs in self._graphs.values())

    def set_drafter(self, drafter: Drafter | None) -> None:
        self.device_drafter = drafter if isinstance(drafter, DeviceDrafter) else None
        self._forget()

    @property
    def drafts_on_device(self) -> bool:
        return self.device_drafter is not None

    def set_draft_length(self, num: int) -> None:
        if self.device_drafter is not None:
            self.device_drafter.draft_length = num

    def launch(self, batch: ScheduledBatch, q: dict[int, Tensor], draft_budget: int | None = None) -> _PendingGraphStep:
        graphs = self._current_graphs()
        in_graph = batch.emits & (batch.num_draft < MAX_QUERIES) & ~batch.seq_table.needs_logits[batch.slots]
        if self.paged.aux_layers and self.device_drafter is None:
            in_graph[:] = False  # a drafter on the host reads hidden states
        is_in_graph = in_graph[batch.emits]
        buffers, stream = self._buffers.pop(0), graphs.stream  # asking torch for it takes as long as launching a graph
        self._buffers.append(buffers)
        step = _PendingGraphStep(np.flatnonzero(is_in_graph), np.flatnonzero(~is_in_graph), buffers)
        prefills = (batch.num_prefill > 0) & (in_graph | ~batch.emits)
        if prefills.any():
            step.has_prefill = True
            buffers.prefill_started.record(stream)
            self._prefill(graphs, batch.pick(prefills))
        if in_graph.any():
            graph_batch = batch if in_graph.all() else batch.pick(in_graph)
            step.size, step.seconds = self._run(graphs, graph_batch, draft_budget, buffers, stream), graphs.seconds
            if (drafter := self.device_drafter) is not None:  # a paused one drafts 0 tokens
                ids, k = graph_batch.seq_table.request_ids(graph_batch.slots), drafter.draft_length
                drafter.launched(ids, k)
                step.on_drafted = partial(self._on_drafted, drafter, ids, k)
        buffers.done.record(stream)
        if len(step.eager_rows):
            step.eager_step = self._run_eagerly(graphs, batch.pick(batch.emits & ~in_graph), q)
            buffers.ended.record(stream)
        return step

    def _prefill(self, graphs: Graphs, batch: ScheduledBatch) -> None:
        self.eager_runner.prefill(batch)
        if graphs.drafter is not None:
            graphs.drafter.prefill(batch.prefill_spans(shift=1), self.paged)

    def _run_eagerly(self, graphs: Graphs, batch: ScheduledBatch, q: dict[int, Tensor]) -> FinishedStep:
        step = self.eager_runner.launch(batch, q)
        if graphs.drafter is not None:  # it does not draft for these rows, but other sequences may share their KV
            graphs.drafter.prefill(_computed_spans(batch, step.output.result), self.paged)
        self._sent_arrivals[batch.slots] = EMPTY_SLOT  # the device does not have what they emit
        return step

    @staticmethod
    def _on_drafted(device_drafter: DeviceDrafter, ids: np.ndarray, k: int, buffers: _HostBuffers) -> None:
        device_drafter.drafted(ids, buffers.scores[: len(ids), :k].copy(), buffers.sources[: len(ids)].copy())

    @property
    def _running_drafter(self) -> DeviceDrafter | None:
        drafter = self.device_drafter
        return None if drafter is None or drafter.is_paused else drafter

    def _current_graphs(self) -> Graphs:
        device_drafter = self._running_drafter
        key = None if device_drafter is None else device_drafter.graph_key
        if key not in self._graphs:
            kv, decoder = self.paged.kv, self.paged.decoder
            assert kv is not None, "asleep"
            context = DeviceContext(decoder, kv, self.paged.pool.num_blocks, self.state, self.max_num_seqs)
            drafter = None if device_drafter is None else device_drafter.build(context)
            if len(self._graphs) == MAX_DRAFTERS:
                self._drop(next(iter(self._graphs)))
            self._graphs[key] = Graphs(
                decoder, kv, self.state, self.max_num_seqs, drafter, self.enforce_eager, self.imposed, self._pool
            )
            self._buffers = self._buffers or [_HostBuffers(self._graphs[key]) for _ in range(NUM_BUFFERS)]
        self._graphs[key] = self._graphs.pop(key)
        return self._graphs[key]

    def remove(self, sequence: Sequence) -> None:
        for slot in (self._sent_arrivals == sequence.arrival).nonzero()[0].tolist():
            self._sent_arrivals[slot] = EMPTY_SLOT
            self._new_blocks = {place: block for place, block in self._new_blocks.items() if place[0] != slot}
        if self.device_drafter is not None:
            self.device_drafter.forget(sequence.request.request_id)

    def _drop(self, key: Hashable) -> None:
        self._num_dropped += self._graphs.pop(key).num_captured

    def _forget(self) -> None:
        self._sent_arrivals[:] = EMPTY_SLOT
        self._new_blocks.clear()

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        self._forget()

    def release_memory(self) -> None:
        for key in list(self._graphs):
            self._drop(key)
        self._pool = GraphPool()
        self._forget()

    # -- launching a graph ------------------------------------------------------------------------------------------

    def _run(
        self, graphs: Graphs, batch: ScheduledBatch, draft_budget: int | None, buffers: _HostBuffers, stream: Any
    ) -> GraphSize:
        sizes_vary = draft_budget is not None  # from run to run: the budget depends on measured times
        if draft_budget is not None and len(batch) > MAX_SELECT_ROWS:
            _split_evenly(batch, draft_budget)
            draft_budget = None
        lengths = batch.num_draft.tolist()
        num_draft, selects_drafts = self._draft_room(graphs, batch, sum(lengths), draft_budget)
        draft_length, max_draft_length = 0, 0
        if (drafter := self._running_drafter) is not None:
            draft_length, max_draft_length = drafter.draft_length, drafter.max_draft_length
        truncates = bool(batch.seq_table.truncates[batch.slots].any())
        size = _size(
            len(batch), len(batch) + num_draft, 1 + max(lengths), draft_length, truncates, selects_drafts,
            not sizes_vary,
        )  # fmt: skip
        if sizes_vary:
            size = graphs.fit(size, max_draft_length)
        self._stopped_early = size.stops_early
        words = buffers.input_words[: size.num_words]
        self._write_inputs(batch, size, words)
        graphs.prepare(size)
        graphs.input_words[: size.num_words].copy_(buffers.inputs[: size.num_words], non_blocking=True)
        buffers.started.record(stream)
        graphs.run(size)
        buffers.outputs.whole.copy_(graphs.outputs.whole, non_blocking=True)
        return size

    def _draft_room(
        self, graphs: Graphs, batch: ScheduledBatch, num_draft: int, draft_budget: int | None
    ) -> tuple[int, bool]:
        """How many draft tokens the step has room for, and whether the device selects them. It must if the budget is
        less than all `num_draft` tokens, or if some of these may be missing: the host does not know that."""
        may_be_missing = self._stopped_early
        may_draft_less = graphs.drafter is not None and graphs.drafter.may_draft_less
        if may_draft_less and draft_budget != 0 and len(batch) <= MAX_SELECT_ROWS and (batch.drafts < 0).any():
            may_be_missing, draft_budget = True, num_draft if draft_budget is None else draft_budget
        if draft_budget and (draft_budget < num_draft or may_be_missing):
            return draft_budget, True
        return num_draft, False

    def _write_inputs(self, batch: ScheduledBatch, size: GraphSize, words: np.ndarray) -> None:
        """The rows, the changes of their block tables, and the draft budget; see `GraphSize.num_words`."""
        num, seq_table, slots = len(batch), batch.seq_table, batch.slots
        rows = words[: size.num_row_words].reshape(-1, ROW_WORDS)
        blocks = words[size.num_row_words : -1].reshape(-1, 3)
        self._send_new_sequences(seq_table, slots[self._sent_arrivals[slots] != batch.arrivals])
        self._collect_new_blocks(seq_table, slots[self._sent_versions[slots] != seq_table.block_table_versions[slots]])
        num_tokens, in_flight = seq_table.num_tokens[slots], seq_table.num_in_flight[slots] > 0
        slot, num_draft, last_token, length = rows[:num, :HEADER].T
        slot[:], num_draft[:] = slots, batch.num_draft
        last_token[:] = np.where(in_flight, -1, seq_table.record.tokens[slots, num_tokens - 1])
        length[:] = np.where(in_flight, 0, num_tokens)
        width = min(batch.drafts.shape[1], MAX_DRAFT)
        rows[:num, HEADER : HEADER + width] = batch.drafts[:, :width]
        rows[num:, 0] = -1
        new = [(slot, index, block) for (slot, index), block in self._new_blocks.items()]
        assert len(new) <= len(blocks)
        blocks[: len(new)] = np.array(new, np.int32).reshape(-1, 3)
        blocks[len(new) :, 0] = -1
        self._new_blocks.clear()
        if size.selects_drafts:
            words[-1] = size.num_tokens - num  # all the room of the graph, so that there is no padding

    def _collect_new_blocks(self, seq_table: SequenceTable, slots: np.ndarray) -> None:
        """Of block tables that have changed."""
        self._sent_versions[slots] = seq_table.block_table_versions[slots]
        firsts = (seq_table.num_computed[slots] // BLOCK).tolist()
        for slot, sequence, first in zip(slots.tolist(), seq_table.of(slots), firsts, strict=True):
            sent, blocks = self._sent_blocks[slot], sequence.table.blocks
            for index in range(first, len(blocks)):
                if index >= len(sent) or sent[index] != blocks[index]:
                    self._new_blocks[slot, index] = blocks[index]
                    sent[index:] = [blocks[index]]

    def _send_new_sequences(self, seq_table: SequenceTable, slots: np.ndarray) -> None:
        if not len(slots):
            return
        sequences, at = seq_table.of(slots), self._to_device(slots)
        self._sent_arrivals[slots] = seq_table.arrival[slots]
        self._sent_versions[slots] = seq_table.block_table_versions[slots]
        self._put("key", at, seq_table.noise_key[slots].view(np.int64))
        self._put("limit", at, seq_table.limit[slots])
        params = [sequence.request.sampling for sequence in sequences]
        for name in ("temperature", "top_k", "top_p", "min_p"):
            self._put(name, at, np.array([getattr(each, name) for each in params]))
        tables = np.zeros((len(slots), max(len(sequence.table.blocks) for sequence in sequences)), np.int32)
        for slot, sequence, table in zip(slots.tolist(), sequences, tables, strict=True):
            table[: len(sequence.table.blocks)] = sequence.table.blocks
            self._sent_blocks[slot] = list(sequence.table.blocks)
        self.state.block_tables[at, : tables.shape[1]] = self._to_device(tables)
        if self._running_drafter is not None:
            drafter = self._current_graphs().drafter
            self._running_drafter.add(drafter, slots.tolist(), [sequence.request for sequence in sequences])

    def _put(self, name: str, at: Tensor, values: np.ndarray) -> None:
        column: Tensor = getattr(self.state, name)
        column[at] = self._to_device(values, column.dtype)

    def _to_device(self, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        return to_device(values, self._device, dtype)


@lru_cache(maxsize=4096)
def _size(
    num_rows: int, num_tokens: int, max_queries: int, draft_length: int, truncates: bool, selects_drafts: bool,
    fills: bool,
) -> GraphSize:  # fmt: skip
    """The size of the graph for a step. `fills`: if most of the draft tokens that the rows could have are there (two
    thirds; half, if these are few), use the graph for all of them, so that fewer sizes are captured."""
    full = num_rows * max_queries
    if fills and full <= (2 if full <= FEW_TOKENS else 1.5) * num_tokens:
        num_tokens = full
    return GraphSize(num_rows, num_tokens, max_queries, draft_length, truncates, selects_drafts).rounded_up()


def _split_evenly(batch: ScheduledBatch, draft_budget: int) -> None:
    """For more rows than the device can select from."""
    each, more = divmod(draft_budget, len(batch))
    batch.num_draft = np.minimum(batch.num_draft, each + (np.arange(len(batch)) < more))


def _computed_spans(batch: ScheduledBatch, result: VerificationResult) -> list[Span]:
    """For each row, which emits, the tokens after the positions that the target has just computed and accepted."""
    spans = []
    for row, (sequence, num) in enumerate(zip(batch.sequences, result.num_accepted.tolist(), strict=True)):
        start = sequence.num_computed
        tokens = np.concatenate([sequence.tokens[start + 1 :], result.tokens[row, : num + 1]]).astype(np.int32)
        spans.append(Span(tokens, start, sequence.table, 1))
    return spans
