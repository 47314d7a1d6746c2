"""Whole decode steps as CUDA graphs: one launch computes a step from its inputs to its outputs, with the drafts for the
next step.

There is one graph per size of step, rounded up so that there are few sizes and little padding. A graph is captured when
its size is first needed. If the device selects draft tokens, the sizes vary from step to step. Then the captured graph
that suits the size best is used, until that has cost as much time as capturing a graph of the exact size (capturing
takes as long as dozens of steps). A larger graph verifies more draft tokens than wanted, a smaller one only the most
probable of them. `enforce_eager` runs the same kernels without graphs.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.model.cuda.attention import MAX_QUERIES
from paceline.model.cuda.device_state import MAX_DRAFT, MAX_SELECT_ROWS, ROW_WORDS, DeviceState
from paceline.model.cuda.graph_drafter import DraftStep, GraphDrafter
from paceline.model.cuda.ops import CudaOps
from paceline.model.cuda.sample import draw
from paceline.model.cuda.truncate import truncate
from paceline.model.decoder import Decoder
from paceline.model.kv import PagedKV
from paceline.model.sample import Stream

ROWS = tuple(sorted({size for i in range(14) for size in (2**i, 3 * 2**i // 2) if size <= 8192}))
# Numbers of tokens. Matmuls use tiles of 128: on an H200 448 tokens take as long as 512, and 384 a fifth less.
SIZES = (
    *(size for size in ROWS if size < 256), *range(256, 1024, 128), *range(1024, 2048, 256), *range(2048, 4096, 512),
    *range(4096, 8193, 1024),
)  # fmt: skip
QUERIES = (1, 2, 4, 8, MAX_QUERIES)
NEW_BLOCKS = 2  # that a row gets in one step, at most: it extends by up to 1 + 15 tokens and drafts 15 more
MAX_GRAPHS = 256  # the least recently used one is dropped first
MIN_STOP_ROWS = 32  # with fewer rows, the last threshold is a poor estimate of the next one
MOST_PADDING = 2  # a graph may have so many times the tokens of a step, and SMALL_PADDING more
SMALL_PADDING = 8
LEAST_DRAFTS = 0.5  # share of the wanted draft tokens that a smaller graph verifies at least
# If a share x of the wanted draft tokens is left out, LOSS x^2 of the step's time is lost. The wanted number is the
# best one by estimate, so leaving out a few costs little: they are the ones that hardly pay.
LOSS = 0.3


@dataclass(frozen=True, slots=True)
class GraphSize:
    """The size of a step. `draft_length`: tokens that it drafts for the next step. `truncates`: whether a row uses
    top-k, top-p or min-p. `selects_drafts`: whether the device selects which draft tokens to verify."""

    num_rows: int
    num_tokens: int
    max_queries: int  # of a row, at most
    draft_length: int = 0
    truncates: bool = False
    selects_drafts: bool = False

    def rounded_up(self) -> GraphSize:
        return GraphSize(
            round_up(self.num_rows, ROWS), round_up(self.num_tokens, SIZES), round_up(self.max_queries, QUERIES),
            self.draft_length, self.truncates, self.selects_drafts,
        )  # fmt: skip

    def can_run(self, other: GraphSize) -> bool:
        """Whether a step of the other size can use this size's graph, with not much padding, or with not many draft
        tokens left out. If the other size drafts nothing, this one must not draft either: there may be no KV blocks
        for it."""
        num_drafts = other.num_tokens - other.num_rows
        return (
            self.num_rows == other.num_rows
            and self.num_tokens <= MOST_PADDING * other.num_tokens + SMALL_PADDING
            and (
                self.num_tokens >= other.num_tokens
                or (self.selects_drafts and self.num_tokens - self.num_rows >= LEAST_DRAFTS * num_drafts > 0)
            )
            and self.max_queries >= other.max_queries
            and self.draft_length >= other.draft_length
            and bool(self.draft_length) == bool(other.draft_length)
            and self.truncates >= other.truncates
            and self.selects_drafts >= other.selects_drafts
        )

    def lost_share(self, other: GraphSize) -> float:
        """Share of this graph's time that a step of the other size loses with it, about."""
        padding = 1 - replace(other, num_tokens=min(self.num_tokens, other.num_tokens)).work / self.work
        num_left_out = max(0, other.num_tokens - self.num_tokens)
        if not num_left_out:
            return padding
        return padding + LOSS * (num_left_out / (other.num_tokens - other.num_rows)) ** 2

    def widened(self, max_draft_length: int) -> GraphSize:
        """A size for all steps with about as many rows and tokens, if drafts have at most max_draft_length tokens."""
        if not self.draft_length and self.num_tokens == self.num_rows:
            return self
        return replace(
            self,
            max_queries=max(self.max_queries, 1 + max_draft_length),
            draft_length=max_draft_length if self.draft_length else 0,
            selects_drafts=self.num_rows <= MAX_SELECT_ROWS,
        ).rounded_up()

    @property
    def work(self) -> float:
        """A measure of its time, in tokens of a large batch: a token of the head takes an eighth, but a pass of the
        head takes as long as a few tokens; more queries in attention take a little."""
        return self.num_tokens + 8 * self.draft_length + self.num_rows * (self.draft_length / 8 + self.max_queries / 16)

    @property
    def stops_early(self) -> bool:
        """Whether the head stops drafting for rows that get no more draft tokens in the next step, judging by the last
        threshold. The next step must select."""
        return self.selects_drafts and self.num_rows >= MIN_STOP_ROWS and self.draft_length > 0

    @property
    def num_row_words(self) -> int:
        return self.num_rows * ROW_WORDS

    @property
    def num_words(self) -> int:
        """Row inputs, then new blocks, then the draft budget."""
        return self.num_rows * (ROW_WORDS + 3 * NEW_BLOCKS) + 1


def round_up(number: int, sizes: tuple[int, ...]) -> int:
    """To one of the sizes; beyond the last, to a multiple of 1024."""
    at = bisect_left(sizes, number)
    return sizes[at] if at < len(sizes) else -(-number // 1024) * 1024


class OutputBuffers:
    """A step's outputs for the host, in one piece of memory, so that one copy transfers them."""

    def __init__(self, num_rows: int, **where: Any) -> None:
        shapes = {
            "logprobs": ((2, MAX_QUERIES), torch.float64),  # processed and raw
            "scores": ((MAX_DRAFT,), torch.float64),  # of the drafts for the next step
            "tokens": ((2 + MAX_QUERIES,), torch.int32),  # number emitted, number verified, emitted tokens
            "sources": ((), torch.int32),  # which drafter the drafts for the next step are from
        }
        sizes = {name: num_rows * math.prod(shape) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
        self.whole = torch.zeros(sum(sizes.values()), dtype=torch.uint8, **where)
        parts = dict(zip(shapes, self.whole.split(list(sizes.values())), strict=True))
        self.logprobs, self.scores, self.tokens, self.sources = (
            parts[name].view(dtype).view(num_rows, *shape) for name, (shape, dtype) in shapes.items()
        )


class GraphPool:
    """Memory for what graphs compute in between. All graphs of an engine share it, those of other drafters too, because
    they run one after another."""

    handle: Any = None  # torch's


class Graphs:
    """Of one drafter, or of none."""

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        state: DeviceState,
        max_rows: int,
        drafter: GraphDrafter | None = None,
        enforce_eager: bool = False,
        imposed: Tensor | None = None,  # see `DeviceState.commit_tokens`
        pool: GraphPool | None = None,
    ) -> None:
        device, ops = decoder.device, decoder.ops
        assert isinstance(ops, CudaOps)
        self.ops = ops
        self.decoder, self.kv, self.state, self.drafter, self.enforce_eager = decoder, kv, state, drafter, enforce_eager
        self.imposed, self.pool = imposed, pool or GraphPool()
        most = round_up(max_rows, ROWS)
        self.input_words = torch.empty(GraphSize(most, most, 1).num_words, dtype=torch.int32, device=device)
        self.outputs = OutputBuffers(most, device=device)
        self.seconds: dict[GraphSize, float] = {}  # of the last step with this size
        self._captured: OrderedDict[GraphSize, Callable[[], None]] = OrderedDict()  # least recently used first
        self.num_captured = 0  # so far, dropped ones included
        self._capture_s = math.inf  # time to capture a graph
        self._out_of_memory = False  # for a larger graph
        self._lost_s: defaultdict[GraphSize, float] = defaultdict(float)  # with other graphs, by size not captured

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream that steps run on."""
        return torch.cuda.current_stream(self.input_words.device)

    def fit(self, size: GraphSize, max_draft_length: int) -> GraphSize:
        """The captured size to use for a step of this size, which may verify more or less draft tokens.
        `max_draft_length`: the longest draft there are KV blocks for."""
        if size in self._captured or self.enforce_eager:
            return size
        others = [known for known in self._captured if known.can_run(size) and known.draft_length <= max_draft_length]
        if not others:
            return self._captured_wide(size, max_draft_length)
        best = min(others, key=lambda known: known.lost_share(size))
        self._lost_s[size] += self.seconds.get(best, 0.0) * best.lost_share(size)
        return size if self._lost_s[size] > self._capture_s else best

    def _captured_wide(self, size: GraphSize, max_draft_length: int) -> GraphSize:
        if self._out_of_memory:
            return size
        wide = size.widened(max_draft_length)
        try:
            self.prepare(wide)
        except ValueError:
            self._out_of_memory = True
            return size
        return wide

    def prepare(self, size: GraphSize) -> None:
        """Capture this size if it is not captured yet. The inputs stay as they are."""
        if size in self._captured:
            return
        started = time.perf_counter()
        try:
            self._captured[size] = self._capture(size)
            self.num_captured += 1
            if len(self._captured) > MAX_GRAPHS:  # not running: capturing waits for the device
                oldest, _ = self._captured.popitem(last=False)
                self.seconds.pop(oldest, None)
        except torch.cuda.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise ValueError(
                f"no device memory for a step of {size.num_rows} rows and {size.num_tokens} tokens ({free / 2**30:.1f} "
                f"of {total / 2**30:.0f} GiB are free): lower engine.kv_tokens, engine.max_num_seqs or "
                "speculation.num_speculative_tokens"
            ) from error
        self._capture_s = min(self._capture_s, time.perf_counter() - started)  # the first ones also compile kernels

    def run(self, size: GraphSize) -> None:
        """Run a step on `input_words`, which are laid out for this size. The size was prepared."""
        self._captured.move_to_end(size)
        self._captured[size]()

    @torch.inference_mode()
    def _step(self, size: GraphSize) -> None:
        row_inputs = self.input_words[: size.num_row_words].view(size.num_rows, ROW_WORDS)
        new_blocks = self.input_words[size.num_row_words : size.num_words - 1].view(-1, 3)
        if size.selects_drafts:
            draft_budget = self.input_words[size.num_words - 1 : size.num_words]
            self.state.select_drafts(row_inputs, draft_budget, size.max_queries)
        inputs = self.state.prepare_inputs(row_inputs, new_blocks, size.num_tokens, size.max_queries)
        attention = self.ops.row_attention(self.kv, inputs, size.max_queries)
        aux_layers = self.drafter.aux_layers if self.drafter is not None else ()
        out = self.decoder(inputs.tokens, inputs.positions, attention, aux_layers)
        logits = self.decoder.logits(out.hidden)
        limits = truncate(logits, inputs.slots, self.state) if size.truncates else None
        draws = draw(
            logits, inputs.keys, inputs.emitted_at, inputs.temperature, Stream.SAMPLE, truncation=limits,
            fp_fusion=self.ops.fp_fusion,
        )  # fmt: skip
        outputs = self.outputs
        ends = self.state.commit_tokens(inputs, draws, outputs.tokens, outputs.logprobs, self.imposed)
        if self.drafter is not None:
            aux_hidden = torch.cat([out.aux_hidden_states[i] for i in aux_layers], -1) if aux_layers else None
            self.drafter.draft(
                DraftStep(
                    inputs, size.max_queries, aux_hidden, draws.tokens, ends, outputs.tokens, size.draft_length,
                    size.truncates, size.stops_early, outputs.scores, outputs.sources, self.imposed,
                )
            )  # fmt: skip

    def _capture(self, size: GraphSize) -> Callable[[], None]:
        if self.enforce_eager:
            return lambda: self._step(size)
        # Once with empty inputs, so that kernels are compiled and libraries allocate their workspace; then captured.
        given, input_words = self.input_words.clone(), self.input_words
        input_words.fill_(-1)
        try:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Only calls of this thread can break the capture: a learner in another thread may allocate meanwhile.
            with torch.cuda.graph(graph, pool=self.pool.handle, capture_error_mode="thread_local"):
                self._step(size)
        finally:
            input_words.copy_(given)
        self.pool.handle = graph.pool()
        return graph.replay
