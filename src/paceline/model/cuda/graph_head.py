"""A draft head on the device: drafts at the end of a step for the next one.

Its keys and values are in the same KV blocks as the target's, so it uses the target's block tables and prefix cache.
What it computes for rejected tokens is past a row's end and is overwritten by the next step.

If the next step selects among the draft tokens of many rows, a row hardly gets more of them once the survival
probability of its last draft token is below the last selection's threshold. The head then skips that row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.confidence import BY_LOGPROB, BY_MARGIN, START
from paceline.model.cuda.attention import AttentionRows
from paceline.model.cuda.device_state import MAX_DRAFT, DeviceState, imposed_probability
from paceline.model.cuda.graph_drafter import DraftStep
from paceline.model.cuda.ops import CudaOps
from paceline.model.cuda.pdl import pdl_options, pdl_wait
from paceline.model.cuda.sample import Draws, draw
from paceline.model.cuda.truncate import truncate
from paceline.model.draft_head import DraftHead
from paceline.model.kv import BatchPlan, PagedKV
from paceline.model.layer import Linear
from paceline.model.paged import PagedDecoder, Span, make_plan
from paceline.model.sample import Stream

ALIGNMENT = 16  # rows


@dataclass(slots=True)
class DraftInputs:
    """Of each of k draft tokens and R rows. The k parts of a tensor start at aligned addresses, or kernels would be
    compiled again for unaligned ones."""

    positions: Tensor  # int32 [k, R], at which an EAGLE-3 head reads the token before the draft token
    context: Tensor  # int32 [k, R], one more than the position; 0: the row is skipped
    emitted_at: Tensor  # int64 [k, R], position of the draft token
    keys: Tensor  # int64 [R]
    temperature: Tensor  # float64 [R]
    query_start: Tensor  # int32 [R + 1], if every row has one query


class GraphHead(ABC):
    """`embed` is the target's; `kv` has the target's blocks. `edges`: of buckets of probabilities."""

    may_draft_less = False

    def __init__(self, head: DraftHead, embed: Linear, kv: PagedKV, state: DeviceState, edges: Sequence[float]) -> None:
        self.head, self.embed, self.kv, self.state = head, embed, kv, state
        if not isinstance(head.ops, CudaOps):
            head.ops = CudaOps()
        config = head.config
        self.aux_layers = config.aux_layers
        self.ids = head.draft_ids if config.draft_vocab_size < config.layer.vocab_size else None
        device = state.survival.device
        # Factors of the head's probabilities, by position in the draft and by the bucket between `edges`. The host sets
        # them.
        self.edges = torch.as_tensor(edges, dtype=torch.float32, device=device)
        self.calibration = torch.ones(MAX_DRAFT, 1 + len(edges), dtype=torch.float32, device=device)

    @torch.inference_mode()
    def prefill(self, spans: list[Span], paged: PagedDecoder) -> None:
        tables = [(span.table, span.start, span.start + len(span.tokens)) for span in spans]
        self.compute(make_plan(spans), self.head.fuse(paged.aux_hidden_states(tables)))

    @abstractmethod
    def compute(self, plan: BatchPlan, x_TD: Tensor) -> None:
        """Keys and values of rows outside of the graph, from the fused states."""

    @abstractmethod
    def draft(self, step: DraftStep) -> None:
        """Draft as the target would sample, with the target's noise."""

    def _draw(self, logits_RN: Tensor, step: DraftStep, inputs: DraftInputs, i: int) -> Tensor:
        """Draft token i of each row, int32 [R]; 0 for skipped rows."""
        limits = truncate(logits_RN, step.inputs.rows.slots, self.state) if step.truncates else None
        draws = draw(
            logits_RN, inputs.keys, inputs.emitted_at[i], inputs.temperature, Stream.SAMPLE, self.ids, limits,
            margins=True, active_P=inputs.context[i] if step.stops_early else None,
        )  # fmt: skip
        self._store_draft(draws, step, inputs, i)
        return draws.tokens

    def _inputs(self, rows: AttentionRows, k: int) -> DraftInputs:
        def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(*size, dtype=dtype, device=rows.context.device)

        num = rows.num_rows
        width = triton.cdiv(num, ALIGNMENT) * ALIGNMENT
        positions, context, emitted_at = empty(k, width), empty(k, width), empty(k, width, dtype=torch.int64)
        inputs = DraftInputs(
            positions[:, :num], context[:, :num], emitted_at[:, :num], empty(num, dtype=torch.int64),
            empty(num, dtype=torch.float64), empty(num + 1),
        )  # fmt: skip
        state = self.state
        _prepare_draft[(1,)](
            rows.slots, state.length, state.limit, state.key, state.temperature, inputs.positions, inputs.context,
            inputs.emitted_at, inputs.keys, inputs.temperature, inputs.query_start, num, k, width,
            ROWS=triton.next_power_of_2(num), num_warps=4,
        )  # fmt: skip
        return inputs

    def _store_draft(self, draws: Draws, step: DraftStep, inputs: DraftInputs, i: int) -> None:
        slots, state, imposed = step.inputs.rows.slots, self.state, step.imposed
        num, context = len(slots), inputs.context
        _store_draft[(1,)](
            draws.tokens, draws.raw_logprobs, draws.margins, slots, state.drafts, state.survival, state.length,
            state.threshold, context, step.scores_out, state.survival if imposed is None else imposed,
            self.calibration[i], self.edges, i, num, len(context), context.stride(0),
            MAX_DRAFT=MAX_DRAFT, ROWS=triton.next_power_of_2(num), STOPS_EARLY=step.stops_early,
            IMPOSED=0 if imposed is None else len(imposed), START=START, BY_MARGIN=BY_MARGIN, BY_LOGPROB=BY_LOGPROB,
            NUM_EDGES=len(self.edges), num_warps=4, **pdl_options(slots.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "k"])
def _prepare_draft(
    slots, length, limit, key, temperature, positions, context, emitted_at, keys, temperatures, query_start,
    num_rows, k, width, ROWS: tl.constexpr,
):  # fmt: skip
    """The last token is at position length - 1, and the head reads it at the position before. There are no KV blocks
    past a sequence's limit, so positions stop there; draft tokens past the limit are never verified."""
    r = tl.arange(0, ROWS)
    in_range = r < num_rows
    slot = tl.load(slots + r, mask=in_range, other=-1)
    is_row = slot >= 0
    size = tl.load(length + slot, mask=is_row, other=2)
    most = tl.load(limit + slot, mask=is_row, other=2)
    tl.store(keys + r, tl.load(key + slot, mask=is_row, other=0), mask=in_range)
    tl.store(temperatures + r, tl.load(temperature + slot, mask=is_row, other=1.0), mask=in_range)
    num = is_row.to(tl.int32)
    ends = tl.cumsum(num, 0)
    tl.store(query_start + r, ends - num, mask=in_range)
    tl.store(query_start + num_rows, tl.sum(num))
    for i in range(k):
        at = tl.minimum(size - 2 + i, most - 1)
        tl.store(positions + i * width + r, at, mask=in_range)
        tl.store(context + i * width + r, at + 1, mask=in_range)
        tl.store(emitted_at + i * width + r, (size + i).to(tl.int64), mask=in_range)


@triton.jit(do_not_specialize=["i", "num_rows", "k"])
def _store_draft(
    tokens, raw_logprobs, margins, slots, drafts, survival, length, threshold, context, scores_out, imposed,
    calibration, edges, i, num_rows, k, width, MAX_DRAFT: tl.constexpr, ROWS: tl.constexpr, STOPS_EARLY: tl.constexpr,
    IMPOSED: tl.constexpr, START: tl.constexpr, BY_MARGIN: tl.constexpr, BY_LOGPROB: tl.constexpr,
    NUM_EDGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Probabilities: see `model/confidence.py`. Survival is the product of calibrated ones. A token of a skipped row
    has survival 0, and the probability of the token before it. (Attention reads `context` before its `pdl_wait`. That
    is safe: kernels without PDL, such as that of the embedding, run in between.)"""
    r = tl.arange(0, ROWS)
    in_range = r < num_rows
    slot = tl.load(slots + r, mask=in_range, other=-1)
    step = tl.zeros([ROWS], tl.int32) + i  # a vector: the interpreter needs it
    is_later, has_next = step > 0, step + 1 < k
    pdl_wait(PDL)
    token = tl.load(tokens + r, mask=in_range, other=0)
    tl.store(drafts + slot * MAX_DRAFT + i, token, mask=slot >= 0)
    if IMPOSED:
        place = tl.maximum(slot, 0)
        probability = imposed_probability(imposed, place, tl.load(length + place) + i, IMPOSED)
        calibrated = probability
    else:
        logprob = tl.load(raw_logprobs + r, mask=in_range, other=0.0).to(tl.float32)
        margin = tl.load(margins + r, mask=in_range, other=0.0)
        probability = tl.sigmoid(START + BY_MARGIN * margin + BY_LOGPROB * logprob)
        bucket = tl.zeros([ROWS], tl.int32)
        for j in range(NUM_EDGES):
            bucket += (probability >= tl.load(edges + j)).to(tl.int32)
        calibrated = tl.minimum(probability * tl.load(calibration + bucket), 1.0)
    joint = calibrated * tl.load(survival + slot * MAX_DRAFT + i - 1, mask=(slot >= 0) & is_later, other=1.0)
    if STOPS_EARLY:
        skipped = tl.load(context + i * width + r, mask=in_range, other=1) == 0
        before = tl.load(scores_out + r * MAX_DRAFT + i - 1, mask=in_range & is_later, other=0.0)
        probability, joint = tl.where(skipped, before.to(tl.float32), probability), tl.where(skipped, 0.0, joint)
        below_threshold = joint < tl.load(threshold)
        skips_next = in_range & below_threshold & has_next
        tl.store(context + (i + 1) * width + r, tl.zeros([ROWS], tl.int32), mask=skips_next)
    tl.store(scores_out + r * MAX_DRAFT + i, probability.to(tl.float64), mask=in_range)
    tl.store(survival + slot * MAX_DRAFT + i, joint, mask=slot >= 0)
