"""VarlenAttention and GatheredAttention with a reference implementation of their kernel equal PackedAttention and
PagedAttention."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from support import tiny_config
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import GatheredAttention, PackedAttention, PagedAttention, VarlenAttention, has_varlen
from paceline.model.flash import Segments
from paceline.model.kv import BatchPlan, PagedKV

SHARED = [5, 3, 1, 4, 2, 2, 6], [None, 0, 0, None, 3, 3, 3]
ALONE = [5, 1, 7], None


def slow_flash(q: Tensor, k: Tensor, v: Tensor, segments: Segments, from_the_end: bool = True) -> Tensor:
    """A reference implementation of flash_attention, segment by segment."""
    bounds = segments.cu_seqlens_q, segments.cu_seqlens_k, segments.cu_seqlens_k
    assert all(at.dtype == torch.int32 for at in bounds)
    assert (segments.max_seqlen_q, segments.max_seqlen_k) == tuple(int(at.diff().max()) for at in bounds[:2])
    outs = []
    for qi, ki, vi in zip(*(x.split(at.diff().tolist()) for x, at in zip((q, k, v), bounds, strict=True)), strict=True):
        offset = len(ki) - len(qi) if from_the_end else 0
        mask = torch.ones(len(qi), len(ki), dtype=torch.bool).tril(offset)
        qi, ki, vi = (x.transpose(0, 1) for x in (qi, ki, vi))
        outs.append(F.scaled_dot_product_attention(qi, ki, vi, mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


def both(lengths: list[int], prefixes: list[int | None] | None) -> list[list[Tensor]]:
    """Outputs and gradients of q, k and v, of both implementations."""
    noise = torch.Generator().manual_seed(0)
    made = [torch.randn(sum(lengths), heads, 8, dtype=torch.float64, generator=noise) for heads in (6, 2, 2)]
    weight = torch.randn(sum(lengths), 48, dtype=torch.float64, generator=noise)
    found = []
    for attention in (VarlenAttention(lengths, prefixes, "cpu"), PackedAttention(lengths, prefixes)):
        leaves = [x.clone().requires_grad_(True) for x in made]
        out = attention(0, *leaves)
        torch.testing.assert_close(attention(1, *leaves), out)  # a second call, as for the next layer
        found.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    return found


@pytest.mark.parametrize("lengths, prefixes", [SHARED, ALONE], ids=["shared", "alone"])
def test_varlen_equals_packed(
    lengths: list[int], prefixes: list[int | None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.model.attention.flash_attention", slow_flash)
    for varlen, packed in zip(*both(lengths, prefixes), strict=True):
        torch.testing.assert_close(varlen, packed, rtol=0, atol=1e-12)


def test_a_kernel_that_aligns_queries_at_the_start_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.attention.flash_attention", partial(slow_flash, from_the_end=False))
    for varlen, packed in zip(*both(*SHARED), strict=True):
        assert (varlen - packed).abs().max() > 0.1


@pytest.mark.parametrize("lengths, prefixes", [SHARED, ALONE], ids=["shared", "alone"])
def test_copies_are_the_rows_of_each_token(lengths: list[int], prefixes: list[int | None] | None) -> None:
    attention = VarlenAttention(lengths, prefixes, "cpu")
    starts = attention.copies_start.tolist()
    assert len(starts) == sum(lengths) + 1 and starts[-1] == len(attention.token_K)
    for token in range(sum(lengths)):
        rows = attention.copies_K[starts[token] : starts[token + 1]].tolist()
        assert rows == (attention.token_K == token).nonzero().flatten().tolist()


def test_varlen_is_for_a_gpu_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.backends.cuda.is_flash_attention_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert has_varlen(cuda, torch.bfloat16, 64) and has_varlen(cuda, torch.float16, 128)
    assert not has_varlen(cpu, torch.bfloat16, 64)
    assert not has_varlen(cuda, torch.float32, 64)
    assert not has_varlen(cuda, torch.bfloat16, 12)
    assert not has_varlen(cuda, torch.bfloat16, 512)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (7, 5))
    assert not has_varlen(cuda, torch.bfloat16, 64)


def test_gathered_equals_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.model.attention.flash_attention", slow_flash)
    config, rng = tiny_config(), np.random.default_rng(0)
    num_query, context = np.array([5, 40, 1, 17]), np.array([5, 61, 33, 17], np.int32)
    tables = rng.permutation(4 * 4).astype(np.int32).reshape(4, 4)
    start = np.concatenate([[0], np.cumsum(num_query)]).astype(np.int32)
    positions = np.concatenate([np.arange(c - n, c) for n, c in zip(num_query, context, strict=True)])
    plan = BatchPlan(np.zeros(63, np.int64), positions, start, context, tables, np.arange(63))
    slow, fast = (PagedKV(config, 16, torch.float64, "cpu") for _ in range(2))
    for mine, theirs in ((slow.k, fast.k), (slow.v, fast.v)):
        theirs.copy_(mine.normal_(generator=torch.Generator().manual_seed(1)))
    shapes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    q, k, v = (torch.from_numpy(rng.normal(size=(63, heads, config.head_dim))) for heads in shapes)
    want, got = PagedAttention(slow, plan)(1, q, k, v), GatheredAttention(fast, plan)(1, q, k, v)
    assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(slow.k, fast.k) and torch.equal(slow.v, fast.v)
