"""The operations that a decoder consists of, in plain torch. `kernels.py` implements them in C for CPUs, `cuda/ops.py`
for GPUs.

With 16-bit weights, each operation computes in float32 and rounds its result once. The residual stream and the logits
stay in float32. The engine and the learner sum in different orders, and rounding differences grow from layer to layer:
this way to a third of what they would be.

Ops have no state apart from scratch memory. A decoder's Ops are chosen when it is built.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.model.attention import Attention, PagedAttention
from paceline.model.kv import BatchPlan, PagedKV
from paceline.model.layer import Layer, Linear
from paceline.model.rope import Tables


class Ops(Protocol):
    """Backends implement what has no body here. Operations with a body are composed of others; a backend may fuse
    them."""

    is_cuda: bool  # whether these are CUDA kernels
    is_batch_invariant: bool = False  # whether a token's bits do not depend on the other tokens of the forward pass

    def describe(self) -> dict[str, Any]:
        """For the records of a run."""
        return {"batch_invariant": self.is_batch_invariant}

    def embed(self, tokens_T: Tensor, table: Linear) -> Tensor: ...
    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor: ...
    def logits(self, h_TD: Tensor, linear: Linear) -> Tensor:
        """In at least float32."""
        ...

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor: ...
    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """x + y, and its norm. May overwrite x and y."""
        ...

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor: ...
    def qkv(self, h_TD: Tensor, layer: Layer, positions_T: Tensor, rope: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Project, apply the q and k norms, and rotate: q [T, H, E], k and v [T, G, E]."""
        ...

    def paged_attention(self, kv: PagedKV, plan: BatchPlan) -> Attention:
        """Attention over the rows of a plan, with any number of queries each."""
        return PagedAttention(kv, plan)

    def padded(self, num_tokens: int) -> int:
        """How many tokens a forward pass should have. What is computed for the others is not used."""
        return num_tokens

    def residual_linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        """A linear map with an output that is added to the residual stream. Only `add_norm` and `rounded_sum` may read
        the output: it may consist of partial sums, which they add up."""
        return self.linear(x_TK, linear)

    def input_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """A norm that only large linear layers read, perhaps in a dtype of theirs."""
        return self.norm(x_TD, weight_D, eps)

    def norm_concat(self, x_TD: Tensor, x_norm_D: Tensor, y_TD: Tensor, y_norm_D: Tensor, eps: float) -> Tensor:
        """The norms of x and y, concatenated: [T, 2 D]."""
        return torch.cat([self.norm(x_TD, x_norm_D, eps), self.norm(y_TD, y_norm_D, eps)], -1)

    def rounded_sum(self, x_TD: Tensor, y_TD: Tensor, dtype: torch.dtype) -> Tensor:
        """x + y, in the dtype of the weights."""
        return (x_TD + y_TD).to(dtype)

    def gated(self, h_TD: Tensor, gate_up: Linear) -> Tensor:
        """silu(gate) · up, with both from the fused linear map."""
        return self.silu_mul(self.linear(h_TD, gate_up))

    def mlp(self, h_TD: Tensor, layer: Layer) -> Tensor:
        """Only `add_norm` and `rounded_sum` may read the output, as for `residual_linear`."""
        return self.residual_linear(self.gated(h_TD, layer.gate_up), layer.down)

    def attend(
        self, h_TD: Tensor, layer: Layer, positions_T: Tensor, rope: Tables, attention: Attention, i: int
    ) -> Tensor:
        """The attention of layer i, without its output projection: [T, H * E]."""
        return attention(i, *self.qkv(h_TD, layer, positions_T, rope))

    def layer(
        self, layer: Layer, x_TD: Tensor, y_TD: Tensor | None, positions_T: Tensor, rope: Tables, attention: Attention,
        i: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Layer i. Takes and returns the residual stream x and a term y that is still to be added to it: the next norm
        adds it in the same kernel. This way a layer needs only its own parameters. May overwrite x and y."""
        x, norm, eps = x_TD, layer.input_norm, layer.config.norm_eps
        x, h = (x, self.input_norm(x, norm, eps)) if y_TD is None else self.add_norm(x, y_TD, norm, eps)
        h = self.residual_linear(self.attend(h, layer, positions_T, rope, attention, i), layer.o)
        x, h = self.add_norm(x, h, layer.post_norm, eps)
        return x, self.mlp(h, layer)


def upcast(x: Tensor) -> Tensor:
    """To at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class TorchOps(Ops):
    """Any device, any dtype, with gradients."""

    is_cuda = False

    def embed(self, tokens_T: Tensor, table: Linear) -> Tensor:
        assert table.weight is not None
        return F.embedding(tokens_T, table.weight)

    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        return self.adapted(x_TK, linear, self.base_linear(x_TK, linear))

    def base_linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        """Without adapters."""
        assert linear.weight is not None
        return F.linear(x_TK, linear.weight, linear.bias)

    def adapted(self, x_TK: Tensor, linear: Linear, y: Tensor) -> Tensor:
        """The output y of `base_linear` plus the adapters' terms. May overwrite y."""
        lora = linear.lora
        return y if lora is None or not lora.enabled else lora(x_TK, y)

    def logits(self, h_TD: Tensor, linear: Linear) -> Tensor:
        assert linear.weight is not None and linear.bias is None and linear.lora is None
        if h_TD.is_cuda and h_TD.itemsize == 2 and not torch.is_grad_enabled():  # `out_dtype` has no gradient
            return torch.mm(h_TD, linear.weight.T, out_dtype=torch.float32)
        return F.linear(upcast(h_TD), upcast(linear.weight))

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return _normed(x_TD, weight_D, eps).to(weight_D.dtype)

    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x_TD = x_TD + y_TD
        return x_TD, self.norm(x_TD, weight_D, eps)

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor:
        return _SiluMul.apply(gate_up_TI)

    def qkv(self, h_TD: Tensor, layer: Layer, positions_T: Tensor, rope: Tables) -> tuple[Tensor, Tensor, Tensor]:
        config = layer.config
        heads = self.linear(h_TD, layer.qkv).view(-1, config.num_heads + 2 * config.num_kv_heads, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = _normed(q, layer.q_norm, config.norm_eps), _normed(k, layer.k_norm, config.norm_eps)
        cos, sin = (table[positions_T].unsqueeze(1) for table in rope)
        return _rotated(q, cos, sin).to(v.dtype), _rotated(k, cos, sin).to(v.dtype), v


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = upcast(x)
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's half-split rotation: pairs are (x[i], x[i + E/2])."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class _SiluMul(torch.autograd.Function):
    """silu(gate) · up. Saves only its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = upcast(gate_up).chunk(2, -1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = upcast(gate_up).chunk(2, -1)
        grad = upcast(grad)
        gate_grad = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat([gate_grad, grad * F.silu(gate)], -1).to(gate_up.dtype)
