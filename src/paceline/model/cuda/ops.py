"""A decoder's operations on a CUDA device, without gradients.

Matrix products are torch's, except SwiGLU for many tokens (`swiglu.py`), the linear layers of small models for few
tokens (`small_batch.py`), and the terms of LoRA adapters (`adapters.py`). Everything else is fused Triton kernels. An
output that is added to the residual stream may come as partial sums, float32 [P, T, D] (`split_k.py`): the kernel that
adds it sums and rounds them.

Each kernel rounds where `ops.TorchOps` rounds, so the two differ at most by the order of a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.model.attention import Attention, GatheredAttention, has_varlen
from paceline.model.config import ModelConfig
from paceline.model.cuda import adapters, small_batch, split_k, swiglu
from paceline.model.cuda.attention import CudaPagedAttention, QKNormRope, apply_norm_rope
from paceline.model.cuda.pdl import pdl_launch_dependents, pdl_options, pdl_wait
from paceline.model.kv import BatchPlan, PagedKV
from paceline.model.layer import Layer, Linear
from paceline.model.ops import TorchOps
from paceline.model.rope import Tables

if TYPE_CHECKING:
    from paceline.model.cuda.device_state import Inputs

SILU = 1024, 4  # block size and warps of `_silu_mul`


class CudaOps(TorchOps):
    is_cuda = True
    activation_dtype: torch.dtype | None = None  # of inputs to a head's large linear layers; None: the model's dtype
    fp_fusion = True  # whether the compiler may fuse operations in norms and draws

    def base_linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        if small_batch.should_use(x_TK, linear):
            return small_batch.fused_linear(x_TK, linear)[1]
        return super().base_linear(x_TK, linear)

    def adapted(self, x_TK: Tensor, linear: Linear, y: Tensor) -> Tensor:
        """`y` may also be partial sums: see `residual_linear`."""
        lora = linear.lora
        if lora is None or not lora.enabled or x_TK.itemsize != 2:
            return super().adapted(x_TK, linear, y)
        return adapters.add_adapters(x_TK, lora, y, self.fp_fusion)

    def norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return self._norm(x_TD, weight_D, eps, weight_D.dtype)

    def input_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return self._norm(x_TD, weight_D, eps, self.activation_dtype or weight_D.dtype)

    def _norm(self, x_TD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        out = torch.empty(x_TD.shape, dtype=dtype, device=x_TD.device)
        _norm[(len(x_TD),)](
            x_TD, x_TD, weight_D, out, eps, 0, **_row_options(x_TD), NUM_PARTS=0, LAUNCH_NEXT=False,
            enable_fp_fusion=self.fp_fusion,
        )  # fmt: skip
        return out

    def residual_linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        if split_k.should_use(x_TK, linear):
            return self.adapted(x_TK, linear, split_k.split_k_linear(x_TK, linear))
        return self.linear(x_TK, linear)

    def add_norm(self, x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Adds y to x in place. The norm is written to y's memory if shape and dtype allow."""
        dtype = self.activation_dtype or weight_D.dtype
        out = y_TD if y_TD.shape == x_TD.shape and y_TD.dtype == dtype else torch.empty_like(x_TD, dtype=dtype)
        _norm[(len(x_TD),)](
            x_TD, y_TD, weight_D, out, eps, x_TD.numel(), **_row_options(x_TD), NUM_PARTS=_num_parts(y_TD),
            enable_fp_fusion=self.fp_fusion,
            LAUNCH_NEXT=len(x_TD) == swiglu.TOKENS,  # the SwiGLU kernel loads weights meanwhile
        )  # fmt: skip
        return x_TD, out

    def norm_concat(self, x_TD: Tensor, x_norm_D: Tensor, y_TD: Tensor, y_norm_D: Tensor, eps: float) -> Tensor:
        out = x_TD.new_empty(len(x_TD), 2 * x_TD.shape[1], dtype=self.activation_dtype or x_TD.dtype)
        _norm_concat[(len(x_TD), 2)](x_TD, y_TD, x_norm_D, y_norm_D, out, eps, **_row_options(x_TD))
        return out

    def rounded_sum(self, x_TD: Tensor, y_TD: Tensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(x_TD, dtype=dtype)
        _rounded_sum[(len(x_TD),)](x_TD, y_TD, out, x_TD.numel(), **_row_options(x_TD), NUM_PARTS=_num_parts(y_TD))
        return out

    def silu_mul(self, gate_up_TI: Tensor) -> Tensor:
        num_tokens, size = gate_up_TI.shape[0], gate_up_TI.shape[1] // 2
        out = gate_up_TI.new_empty(num_tokens, size, dtype=self.activation_dtype or gate_up_TI.dtype)
        block, warps = SILU
        _silu_mul[(num_tokens, triton.cdiv(size, block))](
            gate_up_TI, out, size, BLOCK=block, num_warps=warps, **pdl_options(out.device)
        )
        return out

    def gated(self, h_TD: Tensor, gate_up: Linear) -> Tensor:
        lora = gate_up.lora
        if lora is not None and lora.enabled and h_TD.itemsize == 2:
            return adapters.gated_adapters(h_TD, lora, self.base_linear(h_TD, gate_up), self.fp_fusion)
        if small_batch.should_fuse(h_TD, gate_up):
            return small_batch.fused_linear(h_TD, gate_up, swiglu=True)[1]
        weight = gate_up.weight
        if weight is not None and gate_up.bias is None and swiglu.should_use(h_TD, weight):
            return swiglu.swiglu(h_TD, weight)
        return super().gated(h_TD, gate_up)

    def qkv(self, h_TD: Tensor, layer: Layer, positions_T: Tensor, rope: Tables) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self._project(h_TD, layer)
        apply = qk_norm_rope(layer, rope)
        return _norm_rope(q, positions_T, apply, apply.q_norm), _norm_rope(k, positions_T, apply, apply.k_norm), v

    def attend(
        self, h_TD: Tensor, layer: Layer, positions_T: Tensor, rope: Tables, attention: Attention, i: int
    ) -> Tensor:
        if not isinstance(attention, CudaPagedAttention):
            return super().attend(h_TD, layer, positions_T, rope, attention, i)
        return attention(i, *self._project(h_TD, layer), qk_norm_rope(layer, rope), self.activation_dtype)

    def layer(
        self, layer: Layer, x_TD: Tensor, y_TD: Tensor | None, positions_T: Tensor, rope: Tables, attention: Attention,
        i: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not isinstance(attention, CudaPagedAttention) or not (
            small_batch.should_fuse(x_TD, layer.qkv) and small_batch.should_fuse(x_TD, layer.gate_up)
        ):
            return self.separate_layer(layer, x_TD, y_TD, positions_T, rope, attention, i)
        input_norm = small_batch.InputNorm(layer.input_norm, layer.config.norm_eps, y_TD)
        x, heads = small_batch.fused_linear(x_TD, layer.qkv, input_norm)
        h = self.linear(attention(i, *_split_heads(heads, layer.config), qk_norm_rope(layer, rope)), layer.o)
        post_norm = small_batch.InputNorm(layer.post_norm, layer.config.norm_eps, h)
        x, h = small_batch.fused_linear(x, layer.gate_up, post_norm, swiglu=True)
        return x, self.linear(h, layer.down)

    def separate_layer(self, *args: Any) -> tuple[Tensor, Tensor]:
        """A layer with the norms in kernels of their own."""
        return super().layer(*args)

    def paged_attention(self, kv: PagedKV, plan: BatchPlan) -> Attention:
        if has_varlen(kv.k.device, kv.k.dtype, kv.k.shape[-1]):
            return GatheredAttention(kv, plan)
        return super().paged_attention(kv, plan)

    def row_attention(self, kv: PagedKV, inputs: Inputs, max_queries: int) -> Attention:
        """Attention over rows with at most max_queries queries, in a CUDA graph."""
        return CudaPagedAttention(kv, inputs.rows, max_queries)

    def _project(self, h_TD: Tensor, layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
        return _split_heads(self.linear(h_TD, layer.qkv), layer.config)


def _split_heads(heads_TN: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, E], keys and values [T, G, E]."""
    num_q, num_kv = config.num_heads, config.num_kv_heads
    heads = heads_TN.view(-1, num_q + 2 * num_kv, config.head_dim)
    q, k, v = heads.split([num_q, num_kv, num_kv], 1)
    return q, k, v


def qk_norm_rope(layer: Layer, rope: Tables) -> QKNormRope:
    return QKNormRope(*rope, layer.q_norm, layer.k_norm, layer.config.norm_eps)


def _norm_rope(x_THE: Tensor, positions_T: Tensor, norm_rope: QKNormRope, norm: Tensor | None) -> Tensor:
    num_tokens, num_heads, dim = x_THE.shape
    out = torch.empty(x_THE.shape, dtype=x_THE.dtype, device=x_THE.device)
    block = 4 if dim <= 128 else 2
    _rotate[(num_tokens, triton.cdiv(num_heads, block))](
        x_THE, out, out if norm is None else norm, norm_rope.cos, norm_rope.sin, positions_T, norm_rope.eps,
        x_THE.stride(0), num_heads, DIM=dim, HEADS=block, HAS_NORM=norm is not None, num_warps=2,
    )  # fmt: skip
    return out


def _num_parts(y: Tensor) -> int:
    """Partial sums of an output that is added to the residual stream."""
    return len(y) if y.dim() == 3 else 1


def _row_options(x_TD: Tensor) -> dict[str, Any]:
    """Launch options of a kernel with one program per row of x."""
    width = triton.next_power_of_2(x_TD.shape[1])
    return {"D": x_TD.shape[1], "WIDTH": width, "num_warps": 8 if width >= 4096 else 4, **pdl_options(x_TD.device)}


@triton.jit
def _norm(
    x, y, weight, out, eps, part_stride, D: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
    NUM_PARTS: tl.constexpr, LAUNCH_NEXT: tl.constexpr,
):  # fmt: skip
    """out = norm(x) · weight, one row per program. If NUM_PARTS > 0, x += y first."""
    if LAUNCH_NEXT:
        pdl_launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, WIDTH)
    inside = at < D
    scale = tl.load(weight + at, mask=inside, other=0.0)
    pdl_wait(PDL)
    value = tl.load(x + row + at, mask=inside, other=0.0)
    if NUM_PARTS > 0:
        addend = _load_sum(y + row + at, inside, part_stride, scale.dtype, NUM_PARTS)
        value = (value.to(tl.float32) + addend).to(value.dtype)
        tl.store(x + row + at, value, mask=inside)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide) / D + eps)
    normed = wide * factor * scale.to(tl.float32)
    tl.store(out + row + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_sum(at, inside, part_stride, dtype: tl.constexpr, NUM_PARTS: tl.constexpr):
    """The sum of the parts: float32, rounded to `dtype` like the output of an unsplit product."""
    total = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, NUM_PARTS):
        total += tl.load(at + i * part_stride, mask=inside, other=0.0)
    if NUM_PARTS > 1:
        total = total.to(dtype).to(tl.float32)
    return total


@triton.jit
def _rounded_sum(
    x, y, out, part_stride, D: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr, NUM_PARTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * D
    at = tl.arange(0, WIDTH)
    inside = at < D
    pdl_wait(PDL)
    value = tl.load(x + row + at, mask=inside, other=0.0).to(tl.float32)
    value += _load_sum(y + row + at, inside, part_stride, out.dtype.element_ty, NUM_PARTS)
    tl.store(out + row + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_concat(x, y, x_weight, y_weight, out, eps, D: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """Program (row, 0) computes x's norm and program (row, 1) y's. Loads from the other one are masked."""
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    left, right = (at < D) & (side == 0), (at < D) & (side == 1)
    scale = tl.load(x_weight + at, mask=left, other=0.0) + tl.load(y_weight + at, mask=right, other=0.0)
    pdl_wait(PDL)
    value = tl.load(x + row * D + at, mask=left, other=0.0) + tl.load(y + row * D + at, mask=right, other=0.0)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide) / D + eps)
    normed = wide * factor * scale.to(tl.float32)
    tl.store(out + (2 * row + side) * D + at, normed.to(out.dtype.element_ty), mask=at < D)


@triton.jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    pdl_wait(PDL)
    gate = tl.load(gate_up + row * 2 * size + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    activated = wide / (1 + tl.exp(-wide)) * up.to(tl.float32)
    tl.store(out + row * size + at, activated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    heads, out, norm, cos, sin, positions, eps, stride, num_heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """One token and HEADS of its heads per program."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < num_heads
    position = tl.load(positions + token).to(tl.int32) + tl.zeros([HEADS], tl.int32)
    x, y = apply_norm_rope(heads + token * stride, head * DIM, inside, norm, cos, sin, position, eps, DIM, HAS_NORM)
    to = out + (token * num_heads + head[:, None]) * DIM + tl.arange(0, DIM // 2)[None, :]
    tl.store(to, x, mask=inside[:, None])
    tl.store(to + DIM // 2, y, mask=inside[:, None])
