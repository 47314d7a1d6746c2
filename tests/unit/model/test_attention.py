"""VarlenAttention and GatheredAttention with a reference implementation of their kernel equal PackedAttention and
PagedAttention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import tiny_config
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import GatheredAttention, PackedAttention, PagedAttention, VarlenAttention, has_varlen
from paceline.model.kv import BatchPlan, PagedKV

SHARED = [5, 3, 1, 4, 2, 2, 6], [None, 0, 0, None, 3, 3, 3]
ALONE = [5, 1, 7], None


def slow_varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, window_size: tuple[int, int], from_the_end: bool = True,
) -> Tensor:  # fmt: skip
    """A reference implementation of torch 2.11's varlen_attn, sequence by sequence."""
    assert window_size == (-1, 0) and cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    q, k, v = (x.split(at.diff().tolist()) for x, at in ((query, cu_seq_q), (key, cu_seq_k), (value, cu_seq_k)))
    outs = []
    for qi, ki, vi in zip(q, k, v, strict=True):
        offset = len(ki) - len(qi) if from_the_end else 0
        mask = torch.ones(len(qi), len(ki), dtype=torch.bool).tril(offset)
        qi, ki, vi = (x.transpose(0, 1) for x in (qi, ki, vi))
        outs.append(F.scaled_dot_product_attention(qi, ki, vi, mask, enable_gqa=True).transpose(0, 1))
    return torch.cat(outs)


def slow_varlen_212(*args: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    """torch 2.12's, with `enable_gqa`."""
    assert enable_gqa
    return slow_varlen(*args, **options)


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


@pytest.mark.parametrize("kernel", [slow_varlen, slow_varlen_212], ids=["2.11", "2.12"])
@pytest.mark.parametrize("lengths, prefixes", [SHARED, ALONE], ids=["shared", "alone"])
def test_varlen_equals_packed(
    lengths: list[int], prefixes: list[int | None] | None, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    for varlen, packed in zip(*both(lengths, prefixes), strict=True):
        torch.testing.assert_close(varlen, packed, rtol=0, atol=1e-12)


def test_a_kernel_that_aligns_queries_at_the_start_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def top_left(*args: Any, **options: Any) -> Tensor:
        return slow_varlen(*args, **options, from_the_end=False)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", top_left)
    for varlen, packed in zip(*both(*SHARED), strict=True):
        assert (varlen - packed).abs().max() > 0.1


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
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", slow_varlen)
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
