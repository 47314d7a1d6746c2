"""Dense attention of draft positions: the reference for `block_attention`, and inputs for both."""

from __future__ import annotations

import torch
from torch import Tensor

S, H, G, L, E = 2, 4, 2, 9, 8


def dense(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, reach: int = 0) -> Tensor:
    """`reach`: how far a base sees beyond itself."""
    k, v, own_k, own_v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v, own_k, own_v))
    length = k.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(reach)[:, None]
    context = torch.einsum("shlqe,shje->shlqj", q, k).masked_fill(~mask, -torch.inf)
    own = torch.einsum("shlqe,shlme->shlqm", q, own_k)
    weights = (torch.cat([context, own], -1) / q.shape[-1] ** 0.5).softmax(-1)
    of_context = torch.einsum("shlqj,shje->shlqe", weights[..., :length], v)
    return of_context + torch.einsum("shlqm,shlme->shlqe", weights[..., length:], own_v)


def inputs(num_queries: int, num_own: int, dtype: torch.dtype = torch.float64, size: int = E) -> list[Tensor]:
    noise = torch.Generator().manual_seed(0)
    shapes = [(S, H, L, num_queries, size), *[(S, G, L, size)] * 2, *[(S, G, L, num_own, size)] * 2]
    return [torch.randn(shape, generator=noise, dtype=dtype).requires_grad_() for shape in shapes]
