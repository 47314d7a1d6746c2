"""Which tokens see which. An Attention is made for one forward and called once per layer.

PackedAttention: whole sequences laid end to end, causal within each; for training, with gradients.
PagedAttention: rows of (sequence, start, num_query) over the paged KV; a prefill chunk, a decode step and a
verification are the same thing here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.kv import BatchPlan, PagedKV


class Attention(Protocol):
    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor: ...  # [T, H*E]


class PackedAttention:
    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        outs = []
        for q, k, v in zip(*(x.split(self.lengths) for x in (q_THE, k_TGE, v_TGE)), strict=True):
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, length, E]
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            outs.append(out.squeeze(0).transpose(0, 1).flatten(1))
        return torch.cat(outs)


class PagedAttention:
    """The plain torch twin: correct anywhere, fast nowhere."""

    def __init__(self, kv: PagedKV, plan: BatchPlan) -> None:
        self.kv, self.plan = kv, plan
        self.slots = torch.as_tensor(plan.slots(), device=kv.k.device)
        self.tables = torch.as_tensor(plan.block_tables, device=kv.k.device).long()

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        self.kv.write(layer, self.slots, k_TGE, v_TGE)
        outs = []
        for row in range(self.plan.num_rows):
            start, end = int(self.plan.query_start[row]), int(self.plan.query_start[row + 1])
            context = int(self.plan.context[row])
            k, v = self.kv.read(layer, self.tables[row], context)  # [context, G, E]
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THE[start:end], k, v))
            seen = torch.ones(end - start, context, dtype=torch.bool, device=q.device).tril(context - (end - start))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            outs.append(out.squeeze(0).transpose(0, 1).flatten(1))
        return torch.cat(outs)
