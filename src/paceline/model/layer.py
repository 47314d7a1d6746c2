"""What a decoder holds: linear maps and, made of them, its layers. How to compute with them is `ops.py`'s business."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from paceline.model.config import ModelConfig
from paceline.model.lora import Lora


class Linear(nn.Module):
    """y = x W^T + b. Holds W as `weight` [N, K]; a CPU engine replaces it by `panels`, its packed twin.
    A learner may add a trainable difference to W, `lora`."""

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__()
        self.num_in, self.num_out = num_in, num_out
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.zeros(num_out)) if bias else None
        self.panels: Tensor | None = None
        self.lora: Lora | None = None


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
