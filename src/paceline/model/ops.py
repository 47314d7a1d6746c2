"""The arithmetic that a decoder is made of, in plain torch. `kernels.py` has the same methods for CPUs, faster.

In 16 bits a step is computed in float32 and rounded once, at its end; the residual stream and the logits are not
rounded at all. An engine and a learner sum in different orders, and what they then round differently grows from layer
to layer: this way by a third of it.

Ops is stateless apart from scratch memory; which Ops a decoder uses is decided once, when it is built.
"""

from __future__ import annotations

from typing import Any, Protocol

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
    def logits(self, h_TD: Tensor, linear: Linear) -> Tensor:
        """In float32 or better."""
        ...

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...
    def summand(self, x_TK: Tensor, linear: Linear) -> Tensor:
        """A product that is to be added to the residual stream. It is for `add_norm` and `rounded_sum` alone: an Ops
        may leave its last sum to them."""
        ...

    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + y and its norm. May reuse the memory of x and y."""
        ...

    def beside(self, x_TD: Tensor, x_norm_D: Tensor, y_TD: Tensor, y_norm_D: Tensor, eps: float) -> Tensor:
        """The norms of x and y: [T, 2 D]."""
        ...

    def rounded_sum(self, x_TD: Tensor, y_TD: Tensor, dtype: torch.dtype) -> Tensor:
        """x + y, in the dtype of the weights."""
        ...

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor: ...
    def gated(self, h_TD: Tensor, gate_up: Linear) -> Tensor:
        """silu(gate) · up of the two that the linear map makes."""
        ...

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

    def layer(
        self, layer: Layer, config: ModelConfig, x_TD: Tensor, y_TD: Tensor | None, positions_T: Tensor,
        rope: tuple[Tensor, Tensor], attention: Attention, i: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Through layer i: the residual stream x, and y that is to be added to it, which the next norm does in the same
        stroke. So a layer needs no parameters but its own. May reuse the memory of x and y."""
        ...


class Composed:
    """What can be made of the others."""

    def summand(self: Ops, x_TK: Tensor, linear: Linear) -> Tensor:
        return self.linear(x_TK, linear)

    def beside(self: Ops, x_TD: Tensor, x_norm_D: Tensor, y_TD: Tensor, y_norm_D: Tensor, eps: float) -> Tensor:
        return torch.cat([self.norm(x_TD, x_norm_D, eps), self.norm(y_TD, y_norm_D, eps)], -1)

    def rounded_sum(self, x_TD: Tensor, y_TD: Tensor, dtype: torch.dtype) -> Tensor:
        return (x_TD + y_TD).to(dtype)

    def gated(self: Ops, h_TD: Tensor, gate_up: Linear) -> Tensor:
        return self.silu_mul(self.linear(h_TD, gate_up))

    def attend(
        self: Ops, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor],
        attention: Attention, i: int,
    ) -> Tensor:  # fmt: skip
        return attention(i, *self.qkv(h_TD, layer, config, positions_T, rope))

    def layer(
        self: Ops, layer: Layer, config: ModelConfig, x_TD: Tensor, y_TD: Tensor | None, positions_T: Tensor,
        rope: tuple[Tensor, Tensor], attention: Attention, i: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x, norm, eps = x_TD, layer.input_norm, config.norm_eps
        x, h = (x, self.norm(x, norm, eps)) if y_TD is None else self.add_norm(x, y_TD, norm, eps)
        h = self.summand(self.attend(h, layer, config, positions_T, rope, attention, i), layer.o)
        x, h = self.add_norm(x, h, layer.post_norm, eps)
        return x, self.summand(self.gated(h, layer.gate_up), layer.down)


def wide(x: Tensor) -> Tensor:
    """In float32 or better."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class TorchOps(Composed):
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

    def logits(self, h_TD: Tensor, linear: Linear) -> Tensor:
        assert linear.weight is not None and linear.bias is None and linear.lora is None
        if h_TD.is_cuda and h_TD.itemsize == 2 and not torch.is_grad_enabled():  # a product that has no gradient yet
            return torch.mm(h_TD, linear.weight.T, out_dtype=torch.float32)
        return F.linear(wide(h_TD), wide(linear.weight))

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return _normed(x_TD, weight_D, eps).to(weight_D.dtype)

    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TD = x_TD + y_TD
        return x_TD, self.norm(x_TD, weight_D, eps)

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor:
        return _SiluMul.apply(gate_up_TI)

    def qkv(
        self, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.linear(h_TD, layer.qkv).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _normed(q, layer.q_norm, config.norm_eps), _normed(k, layer.k_norm, config.norm_eps)
        cos, sin = (table[positions_T].unsqueeze(1) for table in rope)
        return _rotated(q, cos, sin).to(v.dtype), _rotated(k, cos, sin).to(v.dtype), v


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = wide(x)
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's half-split rotation: pairs are (x[i], x[i + E/2])."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class _SiluMul(torch.autograd.Function):
    """silu(gate) · up. Of all that its gradient is made of only the input is kept."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = wide(gate_up).chunk(2, -1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = wide(gate_up).chunk(2, -1)
        grad = wide(grad)
        gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat([gate_grad, grad * F.silu(gate)], -1).to(gate_up.dtype)
