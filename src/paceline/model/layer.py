"""The modules that models consist of: linear maps, with their optional LoRA adapters, and layers.

They hold parameters. `ops.py` computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.model.config import ModelConfig
from paceline.model.sharding import full_tensor

FLOAT8 = torch.float8_e4m3fn  # 4 significant bits, from 2^-6 to 448; fewer down to 2^-9
ROWS = 4096  # rows of a matrix that are quantised at once; they need a temporary float32 copy


class Float8Weight:
    """A matrix in float8 with one scale for the whole tensor: what matters in a float is its relative error."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = torch.empty(weight.shape, dtype=FLOAT8, device=weight.device)
        self.scale = torch.empty((), device=weight.device)
        self.update(weight)

    def update(self, weight: Tensor) -> None:
        """Quantise new weights in place: CUDA graphs hold the addresses."""
        weight = weight.detach()
        self.scale.copy_(weight.abs().max().float().clamp_min(1e-12) / torch.finfo(FLOAT8).max)
        for target, rows in zip(self.weight.split(ROWS), weight.split(ROWS), strict=True):
            target.copy_(rows.float() / self.scale)


class Lora(nn.Module):
    """A low-rank adapter (LoRA, arXiv 2106.09685) of a linear map: W becomes W + scale * B A, scale = alpha / rank."""

    def __init__(self, num_in: int, num_out: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.enabled = True
        self.down = nn.Parameter(torch.empty(rank, num_in))  # A
        self.up = nn.Parameter(torch.zeros(num_out, rank))  # B

    def forward(self, x_TK: Tensor) -> Tensor:
        """The term that is added to the linear map's output."""
        return F.linear(F.linear(x_TK, self.down), self.up) * self.scale

    def merged(self, weight_NK: Tensor) -> Tensor:
        up, down = (full_tensor(part.detach().to(weight_NK.dtype)) for part in (self.up, self.down))
        return merge(weight_NK, up, down, self.scale)


def merge(weight_NK: Tensor, up: Tensor, down: Tensor, scale: float) -> Tensor:
    """W + scale * B A of the adapters as the forward pass rounds them, to W's dtype; computed in at least float32."""
    dtype = torch.promote_types(weight_NK.dtype, torch.float32)
    up, down = (part.to(weight_NK.dtype).to(dtype) for part in (up, down))
    return torch.addmm(weight_NK.to(dtype), up, down, alpha=scale).to(weight_NK.dtype)


class Linear(nn.Module):
    """y = x W^T + b, with W as `weight` [N, K]. A CPU engine replaces `weight` by `panels`, the same matrix packed.
    A learner may add a LoRA adapter, `lora`. A head on a GPU may compute with the quantised matrix `float8`."""

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__()
        self.num_in, self.num_out = num_in, num_out
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.zeros(num_out)) if bias else None
        self.panels: Tensor | None = None
        self.lora: Lora | None = None
        self.float8: Float8Weight | None = None


class Model(nn.Module):
    """A decoder or an EAGLE-3 head."""

    norm: nn.Parameter  # before the LM head
    compute_dtype: torch.dtype | None = None  # None: that of the parameters

    @property
    def device(self) -> torch.device:
        return self.norm.device

    @property
    def dtype(self) -> torch.dtype:
        return self.compute_dtype or self.norm.dtype


def init_random(parameters: Iterable[tuple[str, Tensor]], seed: int, device: torch.device | str = "cpu") -> None:
    """Random weights, drawn on `device`: normal with standard deviation 0.02; norms are one. Those from a CPU are the
    same for tensors on every device; a GPU is faster."""
    noise = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, tensor in parameters:
            if name.removesuffix(".weight").endswith("norm"):
                tensor.fill_(1)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=noise, device=device) * 0.02)


class Layer(nn.Module):
    """`num_in` is the size of attention's input: hidden_size, unless an EAGLE-3 head concatenates two inputs."""

    def __init__(self, config: ModelConfig, num_in: int | None = None) -> None:
        super().__init__()
        self.config = c = config
        self.input_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.qkv = Linear(num_in or c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim, bias=c.qkv_bias)
        self.q_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        self.k_norm = nn.Parameter(torch.ones(c.head_dim)) if c.qk_norm else None
        self.o = Linear(c.num_heads * c.head_dim, c.hidden_size, bias=c.o_bias)
        self.post_norm = nn.Parameter(torch.ones(c.hidden_size))
        self.gate_up = Linear(c.hidden_size, 2 * c.intermediate_size, bias=c.mlp_bias)
        self.down = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)

    def forward(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Call `compute` with this layer. It is a module call so that FSDP's hooks run: FSDP gathers a layer's
        parameters before its forward pass and frees them after it."""
        return compute(self, *args)
