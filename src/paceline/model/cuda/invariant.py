"""A decoder's operations on a CUDA device with batch-invariant results: a token's bits depend on its sequence alone.

So speculation on or off, another batch, preemption, prefix sharing and chunked prefill give the same bits. Norms, RoPE,
SwiGLU and sampling (`sampler.py`) compute each token by itself, with sums in one order. What remains are matrix
products (`invariant_product.py`, `adapters.py`) and attention (`invariant_attention.py`). For bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from paceline.model.attention import Attention
from paceline.model.cuda.adapters import gated_adapters
from paceline.model.cuda.graphs import SIZES, round_up
from paceline.model.cuda.invariant_attention import InvariantPagedAttention
from paceline.model.cuda.invariant_product import Order, Products, fused_swiglu, order_of, residual_parts
from paceline.model.cuda.ops import CudaOps, qk_norm_rope
from paceline.model.kv import BatchPlan, PagedKV
from paceline.model.layer import Layer, Linear
from paceline.model.rope import Tables

if TYPE_CHECKING:
    from paceline.model.cuda.device_state import Inputs
    from paceline.model.decoder import Decoder


MAX_LOGITS_POSITIONS = 2048  # for which torch's product is compared: float32 logits take much memory


class InvariantOps(CudaOps):
    is_batch_invariant = True
    # Norms have variants for numbers of tokens, draws for truncation: none may fuse more than others.
    fp_fusion = False

    def __init__(self, decoder: Decoder) -> None:
        """Compares torch's products with the reference, which takes seconds, and more if kernels must be compiled."""
        self.products = Products()
        self.orders: dict[str, Order] = {}
        layer, small = decoder.layers[0], tuple(size for size in SIZES if size <= MAX_LOGITS_POSITIONS)
        for name, linear, parts, sizes, dtype in (
            ("qkv", layer.qkv, 1, SIZES, None),
            ("gate_up", layer.gate_up, 1, SIZES, None),
            ("o", layer.o, residual_parts(layer.o), SIZES, None),
            ("down", layer.down, residual_parts(layer.down), SIZES, None),
            ("lm_head", decoder.lm_head or decoder.embed, 1, small, torch.float32),
        ):
            self.products.find_library_sizes(linear, parts, sizes, dtype)
            self.orders[name] = order_of(linear, parts, dtype)
        self.products.find_fused_sizes(layer.gate_up, SIZES)
        torch.cuda.empty_cache()  # the memory of logits

    def describe(self) -> dict[str, Any]:
        """With the parts of each product's inputs, and the numbers of tokens at which it is torch's."""
        products = {
            name: {"parts": order.parts, "torch_sizes": sorted(self.products.library_sizes[order])}
            for name, order in self.orders.items()
        }
        return super().describe() | {"products": products, "torch": torch.__version__, "triton": triton.__version__}

    def padded(self, num_tokens: int) -> int:
        """A library's choice of kernels can't be checked for every number of tokens."""
        return round_up(num_tokens, SIZES)

    def base_linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        return self._linear_chunked(x_TK, linear)

    def residual_linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        return self.adapted(x_TK, linear, self._linear_chunked(x_TK, linear, residual_parts(linear)))

    def _linear_chunked(self, x_TK: Tensor, linear: Linear, parts: int = 1) -> Tensor:
        """More tokens than were compared are computed in pieces."""
        pieces = [self.products(piece_TK, linear, parts) for piece_TK in x_TK.split(SIZES[-1])]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -2)

    def gated(self, h_TD: Tensor, gate_up: Linear) -> Tensor:
        if (lora := gate_up.lora) is not None and lora.enabled:
            return gated_adapters(h_TD, lora, self.base_linear(h_TD, gate_up), self.fp_fusion)
        if len(h_TD) in self.products.fused_sizes[order_of(gate_up, 1, None)]:
            return fused_swiglu(h_TD, gate_up)
        return self.silu_mul(self.linear(h_TD, gate_up))

    def logits(self, h_TD: Tensor, linear: Linear) -> Tensor:
        num = len(h_TD)
        if num < (size := self.padded(num)):
            h_TD = torch.cat([h_TD, h_TD.new_zeros(size - num, h_TD.shape[1])])
        return self.products(h_TD, linear, dtype=torch.float32)[:num]

    def attend(
        self, h_TD: Tensor, layer: Layer, positions_T: Tensor, rope: Tables, attention: Attention, i: int
    ) -> Tensor:
        assert isinstance(attention, InvariantPagedAttention)
        return attention(i, *self._project(h_TD, layer), qk_norm_rope(layer, rope))

    def layer(
        self, layer: Layer, x_TD: Tensor, y_TD: Tensor | None, positions_T: Tensor, rope: Tables, attention: Attention,
        i: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return self.separate_layer(layer, x_TD, y_TD, positions_T, rope, attention, i)

    def paged_attention(self, kv: PagedKV, plan: BatchPlan) -> Attention:
        num_tokens = len(plan.tokens)
        return InvariantPagedAttention.of_plan(kv, plan, self.padded(num_tokens) - num_tokens)

    def row_attention(self, kv: PagedKV, inputs: Inputs, max_queries: int) -> Attention:
        return InvariantPagedAttention(kv, inputs.rows, inputs.positions, inputs.slots, max_queries)
