"""An EAGLE-3 head on the device.

It first computes the step's own tokens (each position's auxiliary hidden states with the token sampled there), then
drafts k tokens one after another from each row's new end. For a skipped row it leaves out attention and sampling, which
is nearly half of the time of a draft token.
"""

from __future__ import annotations

from torch import Tensor

from paceline.model.cuda.attention import AttentionRows, CudaPagedAttention
from paceline.model.cuda.graph_drafter import DraftStep
from paceline.model.cuda.graph_head import GraphHead
from paceline.model.device import to_device
from paceline.model.eagle3 import Eagle3Head
from paceline.model.kv import BatchPlan


class GraphEagle3(GraphHead):
    head: Eagle3Head

    def compute(self, plan: BatchPlan, x_TD: Tensor) -> None:
        tokens_T, positions_T = (to_device(a, self.head.device) for a in (plan.tokens, plan.positions))
        self.head(x_TD, tokens_T, positions_T, self.head.ops.paged_attention(self.kv, plan), self.embed)

    def draft(self, step: DraftStep) -> None:
        assert step.aux_hidden_TF is not None
        rows, k = step.inputs.rows, step.draft_length
        attention = CudaPagedAttention(self.kv, rows, step.max_queries)
        x = self.head.fuse(step.aux_hidden_TF)
        x, h = self.head(x, step.sampled_T, step.inputs.positions, attention, self.embed, step.ends_R)
        if not k:
            return
        inputs = self._inputs(rows, k)
        for i in range(k):
            tokens = self._draw(self.head.logits(h), step, inputs, i)
            if i + 1 < k:
                next_rows = AttentionRows(inputs.query_start, inputs.context[i + 1], rows.slots, rows.block_tables)
                attention = CudaPagedAttention(self.kv, next_rows, 1)
                x, h = self.head(x, tokens, inputs.positions[i + 1], attention, self.embed)
