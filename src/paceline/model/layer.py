"""What a decoder holds: linear maps and, made of them, its layers. How to compute with them is `ops.py`'s business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model.config import ModelConfig
from paceline.model.lora import Lora

FLOAT8 = torch.float8_e4m3fn  # 4 significant bits, from 2^-6 to 448; fewer down to 2^-9
ROWS = 4096  # of a matrix, rounded at once: meanwhile they lie in memory in float32


class Rounded:
    """A matrix in 8 bits: all of it by one scale, since what counts in a float is its relative error."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.empty(weight.shape, dtype=FLOAT8, device=weight.device)
        self.scale = torch.empty((), device=weight.device)
        self.follow(weight)

    def follow(self, weight: Tensor) -> None:
        """In place: who computes by graphs knows where it lies."""
        weight = weight.detach()
        self.scale.copy_(weight.abs().max().float().clamp_min(1e-12) / torch.finfo(FLOAT8).max)
        for mine, rows in zip(self.weight.split(ROWS), weight.split(ROWS), strict=True):
            mine.copy_(rows.float() / self.scale)


class Linear(nn.Module):
    """y = x W^T + b. Holds W as `weight` [N, K]; a CPU engine replaces it by `panels`, its packed twin.
    A learner may add a trainable difference to W, `lora`; a head that drafts on a GPU may compute with W `rounded`."""

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__()
        self.num_in, self.num_out = num_in, num_out
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.zeros(num_out)) if bias else None
        self.panels: Tensor | None = None
        self.lora: Lora | None = None
        self.rounded: Rounded | None = None


class Layer(nn.Module):
    """`num_in` is what attention reads; the residual stream, unless an EAGLE-3 head puts something beside it."""

    def __init__(self, config: ModelConfig, num_in: int | None = None) -> None:
        super().__init__()
        c = config
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = Linear(num_in or c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, bias=c.qkv_bias)
        self.q_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        self.o = Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        self.post_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate_up = Linear(c.hidden_size, 2 * c.intermediate_size, bias=c.mlp_bias)
        self.down = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        """What `compute` makes of this layer. A layer is called as a module, so that who watches modules (sharding
        gathers a layer's parameters for as long as it computes) sees where it begins and ends."""
        return compute(self, *args)
