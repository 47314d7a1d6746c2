"""The modules that models consist of: linear maps, with their optional LoRA adapters, and layers.

They hold parameters. `ops.py` computes with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
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

    def outputs_from(self, first: int) -> Float8Weight:
        part = copy(self)
        part.weight = self.weight[first:]
        return part


@dataclass(frozen=True, slots=True)
class LoraPart:
    """A part of a linear map's outputs that has an adapter: one module of PEFT."""

    first: int  # output
    size: int

    @property
    def end(self) -> int:
        return self.first + self.size


class Lora(nn.Module):
    """Low-rank adapters (LoRA, arXiv 2106.09685) of a linear map, one for each module that is fused in it: a part's W
    becomes W + scale * B A, scale = alpha / rank. The parameters are those of all parts, one after the other: `down`
    has A [rank, K] of each, `up` has B [outputs, rank].

    Every implementation rounds x A^T to the dtype of the weights, and W x as without adapters. Their sum with the
    adapter's term is computed in at least float32 and rounded once."""

    def __init__(self, num_in: int, parts: Sequence[LoraPart], rank: int, scale: float) -> None:
        super().__init__()
        self.parts, self.rank, self.scale = tuple(parts), rank, scale
        self.enabled = True
        self.down = nn.Parameter(torch.empty(len(self.parts) * rank, num_in))  # A
        self.up = nn.Parameter(torch.zeros(sum(part.size for part in self.parts), rank))  # B
        self.panels: list[Tensor] = []  # of a CPU engine: `down`, and `up` of each part, packed

    def forward(self, x_TK: Tensor, y_TN: Tensor) -> Tensor:
        """The output y of the linear map, plus the adapters' terms."""
        inner = F.linear(x_TK, self.down).split(self.rank, -1)
        pieces, at = [], 0
        for part, inner_TR, up in zip(self.parts, inner, self.ups(self.up), strict=True):
            own = torch.addmm(y_TN[:, part.first : part.end], inner_TR, up.T, alpha=self.scale)
            pieces += [y_TN[:, at : part.first], own]
            at = part.end
        pieces = [piece for piece in (*pieces, y_TN[:, at:]) if piece.shape[1]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def ups(self, up: Tensor) -> tuple[Tensor, ...]:
        """B of each part."""
        return up.split([part.size for part in self.parts])

    def merged(self, weight_NK: Tensor, down: Tensor | None = None, up: Tensor | None = None) -> Tensor:
        """W + scale * B A, with the adapters as the forward pass rounds them; computed in at least float32 and rounded
        to W's dtype. `down` and `up` replace the parameters."""
        down, up = (
            full_tensor((own.detach() if given is None else given).to(weight_NK.dtype))
            for own, given in ((self.down, down), (self.up, up))
        )
        wide = torch.promote_types(weight_NK.dtype, torch.float32)
        merged = weight_NK.clone()
        for part, down_RK, up_NR in zip(self.parts, down.split(self.rank), self.ups(up), strict=True):
            rows = weight_NK[part.first : part.end].to(wide)
            merged[part.first : part.end] = torch.addmm(rows, up_NR.to(wide), down_RK.to(wide), alpha=self.scale)
        return merged


class Linear(nn.Module):
    """y = x W^T + b, with W as `weight` [N, K]. A CPU engine replaces `weight` by `panels`, the same matrix packed.
    A learner and its engine may add LoRA adapters, `lora`. A head on a GPU may compute with the quantised matrix
    `float8`."""

    def __init__(self, num_in: int, num_out: int, bias: bool = False) -> None:
        super().__init__()
        self.num_in, self.num_out = num_in, num_out
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(num_out, num_in))
        self.bias = nn.Parameter(torch.zeros(num_out)) if bias else None
        self.panels: Tensor | None = None
        self.lora: Lora | None = None
        self.float8: Float8Weight | None = None

    def outputs_from(self, first: int) -> Linear:
        """The part that computes the outputs from `first` on, without adapters. It shares the memory of the weights, so
        it changes with them."""
        assert self.weight is not None
        with torch.device("meta"):
            part = Linear(self.num_in, self.num_out - first)
        part.weight = nn.Parameter(self.weight[first:], requires_grad=False)
        if self.bias is not None:
            part.bias = nn.Parameter(self.bias[first:], requires_grad=False)
        if self.float8 is not None:
            part.float8 = self.float8.outputs_from(first)
        return part


class Model(nn.Module):
    """A decoder or a draft head."""

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
