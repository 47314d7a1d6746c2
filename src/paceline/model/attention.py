"""Which tokens attend to which. An Attention is built for one forward pass and called once per layer.

PackedAttention: sequences concatenated, causal within each, with gradients, for training. Sequences may share a prefix.
VarlenAttention: the same in one kernel, for a GPU in 16 bits.
PaddedAttention: sequences padded to one length, for training on a GPU.
PagedAttention: rows of (sequence, start, num_query) over the paged KV. Prefill chunks, decode steps and verification
are the same case.
GatheredAttention: the same in one kernel, for a GPU in 16 bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from paceline.model.device import to_device
from paceline.model.flash import Segments, flash_attention
from paceline.model.kv import BLOCK, BatchPlan, PagedKV


class Attention(Protocol):
    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor: ...  # [T, H*E]


class PackedAttention:
    """Concatenated segments of the given lengths. A segment attends causally to itself and, if `prefixes[i]` is not
    None, to all of segment `prefixes[i]`: a prompt is stored once for all its completions. A prefix has no prefix
    itself. Completions of one prompt are computed together, padded at the end; the causal mask hides the padding."""

    def __init__(self, lengths: Sequence[int], prefixes: Sequence[int | None] | None = None) -> None:
        self.lengths = list(lengths)
        prefixes = [None] * len(self.lengths) if prefixes is None else prefixes
        assert len(prefixes) == len(self.lengths)
        assert all(p is None or prefixes[p] is None for p in prefixes), "a prefix has no prefix itself"
        self.without_prefix = [i for i, prefix in enumerate(prefixes) if prefix is None]
        self.by_prefix: dict[int, list[int]] = {}  # prefix -> the segments that share it
        for i, prefix in enumerate(prefixes):
            if prefix is not None:
                self.by_prefix.setdefault(prefix, []).append(i)

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        q, k, v = (x.split(self.lengths) for x in (q_THE, k_TGE, v_TGE))
        outs = [q_THE] * len(self.lengths)
        for i in self.without_prefix:
            qi, ki, vi = (x[i].transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, length, E]
            out = F.scaled_dot_product_attention(qi, ki, vi, is_causal=True, enable_gqa=True)
            outs[i] = out.squeeze(0).transpose(0, 1)
        for prefix, members in self.by_prefix.items():
            qs, ks, vs = (
                pad_sequence([x[i] for i in members], batch_first=True) for x in (q, k, v)
            )  # [S, L, heads, E]
            ks, vs = (torch.cat([x[prefix].expand(len(members), -1, -1, -1), y], 1) for x, y in ((k, ks), (v, vs)))
            mask = qs.new_ones(qs.shape[1], ks.shape[1], dtype=torch.bool).tril(self.lengths[prefix])
            qs, ks, vs = (x.transpose(1, 2) for x in (qs, ks, vs))
            out = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, enable_gqa=True)
            for i, padded in zip(members, out.transpose(1, 2), strict=True):
                outs[i] = padded[: self.lengths[i]]
        return torch.cat(outs).flatten(1)


def keys_of(lengths: Sequence[int], prefixes: Sequence[int | None]) -> list[np.ndarray]:
    """For each segment, the indices of the tokens that it attends to: those of its prefix, if any, and its own."""
    rows = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    pairs = zip(prefixes, rows, strict=True)
    return [own if prefix is None else np.concatenate([rows[prefix], own]) for prefix, own in pairs]


def has_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether VarlenAttention supports this. Flash attention needs 16 bits, heads that are a multiple of 16 bytes, and
    a GPU with bfloat16."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > 256:
        return False
    return torch.backends.cuda.is_flash_attention_available() and torch.cuda.get_device_capability(device) >= (8, 0)


class VarlenAttention:
    """PackedAttention in one kernel. With prefixes, keys and values are copied to a new layout of K rows: each
    segment's own follow those of its prefix."""

    def __init__(
        self,
        lengths: Sequence[int],
        prefixes: Sequence[int | None] | None,
        device: torch.device | str,
        deterministic: bool = True,
    ) -> None:
        num, keys = np.array(lengths, np.int64), keys_of(lengths, prefixes or [None] * len(lengths))
        sizes = np.array([len(each) for each in keys], np.int64)
        self.needs_gather = bool((sizes > num).any())
        cu_seqlens_q, cu_seqlens_k = (
            torch.tensor([0, *np.cumsum(x)], dtype=torch.int32, device=device) for x in (num, sizes)
        )
        self.segments = Segments(cu_seqlens_q, cu_seqlens_k, int(num.max()), int(sizes.max()), deterministic)
        token_K = np.concatenate(keys)
        self.token_K = torch.from_numpy(token_K).to(device)  # the token that each row is a copy of
        # A token's copies are rows copies_K[i] for i = copies_start[token] … copies_start[token + 1] - 1.
        copies_start = np.cumsum(np.bincount(token_K + 1, minlength=int(num.sum()) + 1))
        self.copies_K, self.copies_start = (
            torch.from_numpy(x.astype(np.int32)).to(device) for x in (np.argsort(token_K, kind="stable"), copies_start)
        )

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        k, v = k_TGE, v_TGE
        if self.needs_gather:
            both = torch.cat([k, v], 1)  # [T, 2 G, E]
            k, v = F.embedding(self.token_K, both.flatten(1)).unflatten(1, both.shape[1:]).chunk(2, 1)
        return flash_attention(q_THE, k, v, self.segments).flatten(1)


class PaddedAttention:
    """Sequences padded at the end to one length; the causal mask hides the padding. No loop: for training on a GPU."""

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.num_sequences, -1)).transpose(1, 2) for x in (q_THE, k_TGE, v_TGE))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1).flatten(1)


class PagedAttention:
    """The reference implementation in plain torch: for any device and dtype, slow."""

    def __init__(self, kv: PagedKV, plan: BatchPlan) -> None:
        self.kv, self.plan = kv, plan
        self.slots, self.tables = (
            to_device(array, kv.k.device, torch.int64) for array in (plan.slot_mapping(), plan.block_tables)
        )

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        self.kv.write(layer, self.slots, k_TGE, v_TGE)
        outs = []
        for row in range(self.plan.num_rows):
            start, end = int(self.plan.query_start[row]), int(self.plan.query_start[row + 1])
            context = int(self.plan.context[row])
            k, v = self.kv.read(layer, self.tables[row], context)  # [context, G, E]
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_THE[start:end], k, v))
            mask = torch.ones(end - start, context, dtype=torch.bool, device=q.device).tril(context - (end - start))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            outs.append(out.squeeze(0).transpose(0, 1).flatten(1))
        return torch.cat(outs)


class GatheredAttention:
    """PagedAttention in one kernel, after the rows' keys and values are gathered from their blocks. For prefill: decode
    steps read the blocks in place (`model/cuda/attention.py`)."""

    def __init__(self, kv: PagedKV, plan: BatchPlan) -> None:
        self.kv, device = kv, kv.k.device
        context = plan.context.astype(np.int64)
        rows = np.repeat(np.arange(plan.num_rows), context)
        positions = np.arange(len(rows)) - np.repeat(np.cumsum(context) - context, context)
        blocks = plan.block_tables[rows, positions // BLOCK].astype(np.int64)
        self.slots, self.blocks, self.offsets, cu_seqlens_q, cu_seqlens_k = (
            to_device(array, device)
            for array in (
                plan.slot_mapping(), blocks, positions % BLOCK, plan.query_start.astype(np.int32),
                np.concatenate([[0], np.cumsum(context)]).astype(np.int32),
            )
        )  # fmt: skip
        self.segments = Segments(cu_seqlens_q, cu_seqlens_k, int(np.diff(plan.query_start).max()), int(context.max()))

    def __call__(self, layer: int, q_THE: Tensor, k_TGE: Tensor, v_TGE: Tensor) -> Tensor:
        self.kv.write(layer, self.slots, k_TGE, v_TGE)
        k, v = (x[layer][self.blocks, :, self.offsets] for x in (self.kv.k, self.kv.v))  # [all contexts, G, E]
        return flash_attention(q_THE, k, v, self.segments).flatten(1)
