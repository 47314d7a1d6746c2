"""The attention of draft positions compared with a dense one, with gradients. On a GPU:
tests/gpu/test_block_attention_cuda.py."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from dense_block_attention import dense, inputs
from torch import Tensor

from paceline.draft.block_attention import Dense, _BlockAttention, block_attention


def largest_difference(given: list[Tensor], reach: int = 0, attention: Any = block_attention) -> float:
    """Of the outputs and all gradients."""
    outs = attention(*given), dense(*given, reach)
    weights = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1), dtype=outs[0].dtype)
    grads = [torch.autograd.grad((out * weights).sum(), given) for out in outs]
    pairs = [outs, *zip(*grads, strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())


@pytest.mark.parametrize(("num_queries", "num_own"), [(1, 0), (1, 3), (3, 3), (4, 1)])
def test_equals_dense_attention(num_queries: int, num_own: int) -> None:
    assert largest_difference(inputs(num_queries, num_own)) < 1e-12
    assert largest_difference(inputs(num_queries, num_own, torch.float32)) < 1e-5
    in_torch = partial(_BlockAttention.apply, Dense())  # a GPU's, in more than 16 bits
    assert largest_difference(inputs(num_queries, num_own), attention=in_torch) < 1e-12


def test_a_mask_that_is_off_by_one_is_detected() -> None:
    assert largest_difference(inputs(3, 3), reach=1) > 0.01
