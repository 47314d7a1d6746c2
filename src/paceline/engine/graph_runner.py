"""Runs decode steps on a CUDA device as graphs, one after another without waiting for the host.

Rows that decode (the last token, and perhaps a draft) go into a graph. Their outputs are copied to the host and read
when the step is waited for. All other rows (prompts) go to the eager runner after it.

Invariant: the device's state of a sequence is right at every launch. If no step of a sequence is in flight, the host
sends its last token and length; otherwise the device has newer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import torch
from torch import Tensor

from paceline.engine.accept import VerificationResult
from paceline.engine.runner import EagerRunner, FinishedStep, Runner, StepOutput
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import Sequence
from paceline.engine.sequence_table import EMPTY_SLOT, SequenceTable
from paceline.model.cuda.attention import MAX_QUERIES
from paceline.model.cuda.device_drafter import DeviceContext
from paceline.model.cuda.device_state import HEADER, MAX_DRAFT, MAX_SELECT_ROWS, ROW_WORDS, DeviceState
from paceline.model.cuda.graphs import Graphs, OutputBuffers, Size
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder, Span
from paceline.speculation.ahead_drafter import AheadDrafter
from paceline.speculation.batch import Drafter

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
        self.probabilities, self.sources = outputs.probabilities.numpy(), outputs.sources.numpy()
        self.started, self.done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


@dataclass(slots=True)
class _PendingGraphStep:
    """`in_graph`, `eager_rows`: indices of the graph's rows and of the others among the emitting rows."""

    buffers: _HostBuffers | None
    eager: FinishedStep | None
    in_graph: np.ndarray
    eager_rows: np.ndarray
    size: Size | None = None
    seconds: dict[Size, float] = field(default_factory=dict)  # times by size, for `Graphs`
    on_drafted: Callable[[_HostBuffers], None] | None = None

    @property
    def is_async(self) -> bool:
        return self.eager is None

    def wait(self) -> StepOutput:
        if self.buffers is None:
            assert self.eager is not None
            return self.eager.output
        buffers, num = self.buffers, len(self.in_graph)
        buffers.done.synchronize()
        if self.on_drafted is not None:
            self.on_drafted(buffers)
        draft_length = self.size.draft_length if self.size is not None else 0
        tokens = buffers.tokens[:num].copy()
        width = max(tokens[:, 0].tolist())
        logprobs = buffers.logprobs[:num, :, :width].copy()
        result = VerificationResult(tokens[:, 2 : 2 + width], tokens[:, 0] - 1, logprobs[:, 0], logprobs[:, 1])
        if self.eager is None:
            return StepOutput(result, tokens[:, 1], draft_length)
        others = self.eager.output.result
        merged = VerificationResult.empty(num + len(self.eager_rows), max(width, others.tokens.shape[1]))
        for rows, part in ((self.in_graph, result), (self.eager_rows, others)):
            merged.num_accepted[rows] = part.num_accepted
            for name in ("tokens", "logprobs", "raw_logprobs"):
                getattr(merged, name)[rows, : part.tokens.shape[1]] = getattr(part, name)
        num_verified = np.full(len(merged.tokens), ALL)
        num_verified[self.in_graph] = tokens[:, 1]
        return StepOutput(merged, num_verified, draft_length)

    def times(self) -> tuple[float, float]:
        device_s = 0.0
        if self.buffers is not None and self.size is not None:
            device_s = self.seconds[self.size] = self.buffers.started.elapsed_time(self.buffers.done) / 1e3
        forward_s, sample_s = self.eager.times() if self.eager is not None else (0.0, 0.0)
        return device_s + forward_s, sample_s


class GraphRunner(Runner):
    """For the rule `coupled`. `eager`: the same kernels without graphs. `imposed`: acceptance probabilities that
    replace the real ones, only for `bench step`."""

    def __init__(
        self,
        paged: PagedDecoder,
        others: EagerRunner,
        max_num_seqs: int,
        eager: bool = False,
        imposed: np.ndarray | None = None,
    ) -> None:
        self.paged, self.others, self.max_num_seqs = paged, others, max_num_seqs
        self.ahead: AheadDrafter | None = None  # the drafter, if it drafts on the device
        self._device = paged.decoder.device
        self.eager = eager
        self.imposed = None if imposed is None else self._to_device(imposed, torch.float32)
        max_blocks = -(-paged.decoder.config.max_positions // BLOCK)
        self.state = DeviceState(max_num_seqs, max_blocks, self._device)
        self._graphs: dict[Hashable, Graphs] = {}  # by drafter, least recently used first
        self._num_dropped = 0  # captured graphs that were dropped
        self._buffers: list[_HostBuffers] = []
        # By slot: the arrival of the sequence that was sent to the device, and `changes` of the block table that was.
        self._known, self._changes = np.full(max_num_seqs, EMPTY_SLOT), np.zeros(max_num_seqs, np.int64)
        self._sent_blocks: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._new_blocks: dict[tuple[int, int], int] = {}  # (slot, index) -> block, not sent yet
        self._must_select = False  # some drafts may have stopped early: the next step must select on the device

    @property
    def num_captured(self) -> int:
        return self._num_dropped + sum(graphs.num_captured for graphs in self._graphs.values())

    def set_drafter(self, drafter: Drafter | None) -> None:
        self.ahead = drafter if isinstance(drafter, AheadDrafter) else None
        self._forget()

    @property
    def drafts_ahead(self) -> bool:
        return self.ahead is not None

    def set_draft_length(self, num: int) -> None:
        if self.ahead is not None:
            self.ahead.draft_length = num

    def launch(self, batch: ScheduledBatch, q: dict[int, Tensor], draft_budget: int | None = None) -> _PendingGraphStep:
        graphs = self._current_graphs()
        fits = (batch.num_query == 1) & batch.emits & (batch.num_draft < MAX_QUERIES)
        if self.paged.aux_layers and self.ahead is None:  # a drafter on the host reads hidden states: not in graphs
            fits[:] = False
        in_graph, others = (batch, None) if fits.all() else (batch.pick(fits), batch.pick(~fits))
        emitting = fits[batch.emits]
        is_selected = draft_budget is not None
        if draft_budget is not None and len(in_graph) > MAX_SELECT_ROWS:
            _split_evenly(in_graph, draft_budget)
            draft_budget = None
        buffers, size = self._run(graphs, in_graph, draft_budget, is_selected) if len(in_graph) else (None, None)
        eager = self.others.launch(others, q) if others is not None else None
        if others is not None and eager is not None and graphs.drafter is not None:
            graphs.drafter.prefill(_computed_spans(others, eager.output.result), self.paged)
        on_drafted = None
        if self.ahead is not None and buffers is not None:
            ids, k = in_graph.seq_table.request_ids(in_graph.slots), self.ahead.draft_length
            self.ahead.launched(ids, k)
            on_drafted = partial(self._on_drafted, self.ahead, ids, k)
        rows = np.flatnonzero(emitting), np.flatnonzero(~emitting)
        return _PendingGraphStep(buffers, eager, *rows, size, graphs.seconds, on_drafted)

    @staticmethod
    def _on_drafted(ahead: AheadDrafter, ids: np.ndarray, k: int, buffers: _HostBuffers) -> None:
        ahead.drafted(ids, buffers.probabilities[: len(ids), :k].copy(), buffers.sources[: len(ids)].copy())

    def _current_graphs(self) -> Graphs:
        key = None if self.ahead is None else self.ahead.graph_key
        if key not in self._graphs:
            kv, decoder = self.paged.kv, self.paged.decoder
            assert kv is not None, "asleep"
            context = DeviceContext(decoder, kv, self.paged.pool.num_blocks, self.state, self.max_num_seqs)
            drafter = None if self.ahead is None else self.ahead.build(context)
            if len(self._graphs) == MAX_DRAFTERS:
                self._drop(next(iter(self._graphs)))
            self._graphs[key] = Graphs(decoder, kv, self.state, self.max_num_seqs, drafter, self.eager, self.imposed)
            self._buffers = self._buffers or [_HostBuffers(self._graphs[key]) for _ in range(NUM_BUFFERS)]
        self._graphs[key] = self._graphs.pop(key)
        return self._graphs[key]

    def remove(self, sequence: Sequence) -> None:
        for slot in (self._known == sequence.arrival).nonzero()[0].tolist():
            self._known[slot] = EMPTY_SLOT
            self._new_blocks = {place: block for place, block in self._new_blocks.items() if place[0] != slot}
        if self.ahead is not None:
            self.ahead.forget(sequence.request.request_id)

    def _drop(self, key: Hashable) -> None:
        self._num_dropped += self._graphs.pop(key).num_captured

    def _forget(self) -> None:
        self._known[:] = EMPTY_SLOT
        self._new_blocks.clear()

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        self._forget()

    def release_memory(self) -> None:
        for key in list(self._graphs):
            self._drop(key)
        self._forget()

    # -- launching a graph ------------------------------------------------------------------------------------------

    def _run(
        self, graphs: Graphs, batch: ScheduledBatch, draft_budget: int | None, is_selected: bool
    ) -> tuple[_HostBuffers, Size]:
        """`is_selected`: the budget depends on measured times, so sizes vary from run to run."""
        buffers = self._buffers.pop(0)
        self._buffers.append(buffers)
        num, lengths = len(batch), batch.num_draft.tolist()
        num_tokens, selects_drafts = num + sum(lengths), False
        draft_length, max_draft_length = 0, 0
        if self.ahead is not None:
            draft_length, max_draft_length = self.ahead.draft_length, self.ahead.max_draft_length
        may_lack = graphs.drafter is not None and graphs.drafter.may_find_nothing
        if may_lack and draft_budget != 0 and num <= MAX_SELECT_ROWS and (batch.drafts < 0).any():
            draft_budget = num_tokens - num if draft_budget is None else draft_budget
            self._must_select = True
        if draft_budget and (num + draft_budget < num_tokens or self._must_select):
            selects_drafts, num_tokens = True, num + draft_budget
        truncates = bool(batch.seq_table.truncates[batch.slots].any())
        size = _size(num, num_tokens, 1 + max(lengths), draft_length, truncates, selects_drafts, not is_selected)
        if is_selected:
            size = graphs.fit(size, max_draft_length)
        self._must_select = size.stops_early
        words = buffers.input_words[: size.num_words]
        self._write_inputs(batch, size, words)
        graphs.prepare(size)
        graphs.input_words[: size.num_words].copy_(buffers.inputs[: size.num_words], non_blocking=True)
        stream = graphs.stream  # asking torch for it takes as long as launching a graph
        buffers.started.record(stream)
        graphs.run(size)
        buffers.outputs.whole.copy_(graphs.outputs.whole, non_blocking=True)
        buffers.done.record(stream)
        return buffers, size

    def _write_inputs(self, batch: ScheduledBatch, size: Size, words: np.ndarray) -> None:
        num, seq_table, slots = len(batch), batch.seq_table, batch.slots
        rows = words[: size.num_row_words].reshape(-1, ROW_WORDS)
        blocks = words[size.num_row_words : -1].reshape(-1, 3)
        self._send_new_sequences(seq_table, slots[self._known[slots] != batch.arrivals])
        self._collect_new_blocks(seq_table, slots[self._changes[slots] != seq_table.changes[slots]])
        length, in_flight = seq_table.num_tokens[slots], seq_table.num_in_flight[slots] > 0
        rows[:num, 0] = slots
        rows[:num, 1] = batch.num_draft
        rows[:num, 2] = np.where(in_flight, -1, seq_table.record.tokens[slots, length - 1])
        rows[:num, 3] = np.where(in_flight, 0, length)
        width = min(batch.drafts.shape[1], MAX_DRAFT)
        rows[:num, HEADER : HEADER + width] = batch.drafts[:, :width]
        rows[num:, 0] = -1
        new = [(slot, index, block) for (slot, index), block in self._new_blocks.items()]
        assert len(new) <= len(blocks)
        blocks[: len(new)] = np.array(new, np.int32).reshape(-1, 3)
        blocks[len(new) :, 0] = -1
        self._new_blocks.clear()
        if size.selects_drafts:
            words[-1] = size.num_tokens - num  # also the tokens that would be padding

    def _collect_new_blocks(self, seq_table: SequenceTable, slots: np.ndarray) -> None:
        """Of block tables that have changed."""
        self._changes[slots] = seq_table.changes[slots]
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
        self._known[slots], self._changes[slots] = seq_table.arrival[slots], seq_table.changes[slots]
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
        if self.ahead is not None:
            drafter = self._current_graphs().drafter
            self.ahead.add(drafter, slots.tolist(), [sequence.request for sequence in sequences])

    def _put(self, name: str, at: Tensor, values: np.ndarray) -> None:
        column: Tensor = getattr(self.state, name)
        column[at] = self._to_device(values, column.dtype)

    def _to_device(self, values: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
        """Without waiting for the steps in flight."""
        return torch.as_tensor(values, dtype=dtype).to(self._device, non_blocking=True)


@lru_cache(maxsize=4096)
def _size(
    num_rows: int, num_tokens: int, num_queries: int, draft_length: int, truncates: bool, selects_drafts: bool,
    fills: bool,
) -> Size:  # fmt: skip
    """The size of the graph for a step. `fills`: if the rows have at least two thirds of the draft tokens that they
    could have (half, if these are few), take a graph with room for all: how many are missing differs from step to
    step."""
    full = num_rows * num_queries
    if fills and full <= (2 if full <= FEW_TOKENS else 1.5) * num_tokens:
        num_tokens = full
    return Size(num_rows, num_tokens, num_queries, draft_length, truncates, selects_drafts).rounded_up()


def _split_evenly(batch: ScheduledBatch, draft_budget: int) -> None:
    """For more rows than the device can select from."""
    each, more = divmod(draft_budget, len(batch))
    batch.num_draft = np.minimum(batch.num_draft, each + (np.arange(len(batch)) < more))


def _computed_spans(batch: ScheduledBatch, result: VerificationResult) -> list[Span]:
    """For each row, the tokens after the positions that the target has just computed. For an emitting row, these
    include the accepted tokens of its draft."""
    spans, emitting = [], iter(range(len(result.tokens)))
    for i, (sequence, num) in enumerate(zip(batch.sequences, batch.num_query.tolist(), strict=True)):
        start = sequence.num_computed
        end = start + num
        after = sequence.tokens[end : end + 1]
        if batch.emits[i]:
            row = next(emitting)
            after = result.tokens[row, : result.num_accepted[row] + 1]
        tokens = np.concatenate([sequence.tokens[start + 1 : end], after]).astype(np.int32)
        spans.append(Span(tokens, start, sequence.table, 1))
    return spans
