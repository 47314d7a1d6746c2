"""The arithmetic that a decoder is made of, in plain torch. `kernels.py` has the same methods for CPUs, faster.

Ops is stateless apart from scratch memory; which Ops a decoder uses is decided once, when it is built.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import Attention
from paceline.model.config import ModelConfig
from paceline.model.layer import Layer, Linear


class Ops(Protocol):
    is_cuda: bool  # whether it is a GPU's own kernels that compute

    def embed(self, tokens_T: Tensor, table: Linear) -> Tensor: ...
    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor: ...
    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...
    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + y and its norm. May reuse the memory of x and y."""
        ...

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor: ...
    def qkv(
        self, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Projected, normed and rotated: q [T, H, E], k and v [T, G, E]."""
        ...

    def attend(
        self, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor],
        attention: Attention, i: int,
    ) -> Tensor:  # fmt: skip
        """What layer i's queries find among its keys and values: [T, H * E]."""
        ...


class Attends:
    """First queries, keys and values, then the attention."""

    def attend(
        self: Ops, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor],
        attention: Attention, i: int,
    ) -> Tensor:  # fmt: skip
        return attention(i, *self.qkv(h_TD, layer, config, positions_T, rope))


class TorchOps(Attends):
    """Any device, any dtype, with gradients."""

    is_cuda = False

    def embed(self, tokens_T: Tensor, table: Linear) -> Tensor:
        assert table.weight is not None
        return F.embedding(tokens_T, table.weight)

    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        assert linear.weight is not None
        y = F.linear(x_TK, linear.weight, linear.bias)
        lora = linear.lora
        return y + lora(x_TK) if lora is not None and lora.enabled else y

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = x_TD if x_TD.dtype == torch.float64 else x_TD.float()
        return weight_D * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x_TD.dtype)

    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TD = x_TD + y_TD
        return x_TD, self.norm(x_TD, weight_D, eps)

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor:
        gate, up = gate_up_TI.chunk(2, -1)
        return F.silu(gate) * up

    def qkv(
        self, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.linear(h_TD, layer.qkv).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self.norm(q, layer.q_norm, config.norm_eps), self.norm(k, layer.k_norm, config.norm_eps)
        cos, sin = (table[positions_T].unsqueeze(1) for table in rope)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's half-split rotation: pairs are (x[i], x[i + E/2])."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
