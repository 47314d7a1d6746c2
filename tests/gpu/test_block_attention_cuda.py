"""The attention of draft positions on a GPU, in 16 bits, compared with a dense one in float32, with gradients."""

from __future__ import annotations

import pytest
import torch
from dense_block_attention import dense, inputs

from paceline.draft.block_attention import block_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_queries", "num_own"), [(1, 0), (1, 3), (4, 4), (7, 7)])
def test_equals_dense_attention(num_queries: int, num_own: int, dtype: torch.dtype) -> None:
    given = [x.detach().to("cuda", dtype).requires_grad_() for x in inputs(num_queries, num_own, torch.float32, 64)]
    wide = [x.detach().float().requires_grad_() for x in given]
    outs = block_attention(*given), dense(*wide)
    weights = torch.randn(outs[1].shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    grads = [torch.autograd.grad((out * weights).sum(), each) for out, each in zip(outs, (given, wide), strict=True)]
    # bfloat16 has 8 significant bits; gradients are sums of up to 36 terms.
    limit = 0.03 if dtype == torch.bfloat16 else 1e-4
    for found, expected in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        if found.numel():
            assert float((found.float() - expected).detach().abs().max()) < limit * float(expected.detach().abs().max())
