"""A DSpark head on the device.

It first computes the context's keys and values at the step's own tokens, then the block of each row: the last token,
whose hidden states are not known yet, and k - 1 mask tokens. The block's keys and values come after those of the
context, so they replace what was computed for rejected tokens. One pass and one product give the logits of all draft
tokens; then, one after another, the Markov term of the token before is added and the token is drawn. For a skipped row
it leaves out sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.cuda.attention import AttentionRows, CudaPagedAttention
from paceline.model.cuda.device_state import DeviceState, Inputs
from paceline.model.cuda.graph_drafter import DraftStep
from paceline.model.cuda.graph_head import GraphHead
from paceline.model.cuda.ops import qk_norm_rope
from paceline.model.cuda.rotate_and_store import rotate_and_store
from paceline.model.device import to_device
from paceline.model.dspark import DSparkHead
from paceline.model.kv import BatchPlan, PagedKV
from paceline.model.layer import Linear


@dataclass(slots=True)
class _Blocks:
    """The blocks of R rows, one after another."""

    tokens: Tensor  # int32 [R * k]
    positions: Tensor  # int32 [R * k]
    first_tokens: Tensor  # int32 [R]
    rows: AttentionRows


class GraphDSpark(GraphHead):
    head: DSparkHead

    def __init__(
        self, head: DSparkHead, embed: Linear, kv: PagedKV, state: DeviceState, edges: Sequence[float]
    ) -> None:
        super().__init__(head, embed, kv, state, edges)
        c = head.config.layer
        self._context_kv = [layer.qkv.outputs_from(c.num_heads * c.head_dim) for layer in head.layers]

    def compute(self, plan: BatchPlan, x_TD: Tensor) -> None:
        slots_T, positions_T = (to_device(a, self.head.device) for a in (plan.slot_mapping(), plan.positions))
        for layer, (k, v) in enumerate(self.head.context(x_TD, positions_T)):
            self.kv.write(layer, slots_T, k, v)

    def draft(self, step: DraftStep) -> None:
        assert step.aux_hidden_TF is not None
        rows, k = step.inputs.rows, step.draft_length
        self._write_context(step.aux_hidden_TF, step.inputs)
        if not k:
            return
        blocks = self._blocks(rows, k)
        attention = CudaPagedAttention(self.kv, blocks.rows, k, self.state.limit)
        h = self.head(blocks.tokens, blocks.positions, attention, self.embed)
        logits = self.head.base_logits(h).view(rows.num_rows, k, -1)
        inputs, tokens = self._inputs(rows, k), blocks.first_tokens
        for i in range(k):
            self._add_markov(logits[:, i], tokens)
            tokens = self._draw(logits[:, i], step, inputs, i)

    def _write_context(self, aux_hidden_TF: Tensor, inputs: Inputs) -> None:
        """Keys and values of the step's tokens, in each layer."""
        head, tables = self.head, inputs.rows.block_tables
        fused, rope = head.fuse(aux_hidden_TF), head.rope.tables(head.norm)
        for i, (layer, linear) in enumerate(zip(head.layers, self._context_kv, strict=True)):
            keys_values = head.ops.linear(fused, linear)
            norm_rope = qk_norm_rope(layer, rope)
            rotate_and_store(keys_values, None, self.kv, i, norm_rope, inputs.positions, inputs.slots, tables)

    def _blocks(self, rows: AttentionRows, k: int) -> _Blocks:
        def empty(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=rows.context.device)

        num, state = rows.num_rows, self.state
        own = AttentionRows(empty(num + 1), empty(num), rows.slots, rows.block_tables)
        blocks = _Blocks(empty(num * k), empty(num * k), empty(num), own)
        _prepare_blocks[(1,)](
            rows.slots, state.last, state.length, state.limit, blocks.tokens, blocks.positions, blocks.first_tokens,
            own.query_start, own.context, num, k, self.head.config.mask_token_id, ROWS=triton.next_power_of_2(num),
            num_warps=4,
        )  # fmt: skip
        return blocks

    def _add_markov(self, logits_RN: Tensor, previous_R: Tensor) -> None:
        """In place."""
        weight = self.head.markov_out.weight
        assert weight is not None
        logits_RN.addmm_(self.head.previous(previous_R), weight.T)


@triton.jit(do_not_specialize=["num_rows", "k", "mask_token"])
def _prepare_blocks(
    slots, last, length, limit, tokens, positions, first_tokens, query_start, context, num_rows, k, mask_token,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A block begins at the last token, at position length - 1. Attention leaves out its positions past the limit."""
    r = tl.arange(0, ROWS)
    in_range = r < num_rows
    slot = tl.load(slots + r, mask=in_range, other=-1)
    is_row = slot >= 0
    first = tl.load(last + slot, mask=is_row, other=0)
    most = tl.load(limit + slot, mask=is_row, other=1)
    start = tl.minimum(tl.load(length + slot, mask=is_row, other=1), most) - 1
    tl.store(first_tokens + r, first, mask=in_range)
    tl.store(context + r, start + k, mask=in_range)
    num = is_row.to(tl.int32) * k
    ends = tl.cumsum(num, 0)
    tl.store(query_start + r, ends - num, mask=in_range)
    tl.store(query_start + num_rows, tl.sum(num))
    for i in range(k):
        tl.store(tokens + r * k + i, tl.where(i == 0, first, mask_token), mask=in_range)
        tl.store(positions + r * k + i, tl.minimum(start + i, most - 1), mask=in_range)
