"""The decoder's elementwise operations compiled for a GPU: the same formulas, each in one kernel instead of many."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.layer import Layer
from paceline.model.ops import TorchOps, _normed, _rotated
from paceline.model.rope import Tables

torch._dynamo.config.recompile_limit = 64
torch.backends.cuda.enable_cudnn_sdp(False)  # it plans again for every shape, which takes longer than the attention


def _split_and_rotate(
    y_TK: Tensor, layer: Layer, num_heads: int, num_kv_heads: int, head_dim: int, positions_T: Tensor, cos: Tensor,
    sin: Tensor,
):  # fmt: skip
    q, k, v = y_TK.view(-1, num_heads + 2 * num_kv_heads, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = (_normed(x, w, layer.config.norm_eps) for x, w in ((q, layer.q_norm), (k, layer.k_norm)))
    c, s = cos[positions_T].unsqueeze(1), sin[positions_T].unsqueeze(1)
    return _rotated(q, c, s).to(v.dtype), _rotated(k, c, s).to(v.dtype), v


class CompiledOps(TorchOps):
    def __init__(self) -> None:
        plain = TorchOps()
        self.norm = torch.compile(plain.norm)
        self.add_norm = torch.compile(plain.add_norm)
        self.silu_mul = torch.compile(plain.silu_mul)
        self.split_and_rotate = torch.compile(_split_and_rotate)

    def qkv(self, h_TD: Tensor, layer: Layer, positions_T: Tensor, rope: Tables) -> tuple[Tensor, Tensor, Tensor]:
        config = layer.config
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return self.split_and_rotate(self.linear(h_TD, layer.qkv), layer, *heads, positions_T, *rope)


def exact_logits(hidden: Tensor, weight_VD: Tensor) -> Tensor:
    """float32 logits for any precision of the inputs: bfloat16 logits are too coarse for sampling."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight_VD.T, out_dtype=torch.float32)
    return (hidden @ weight_VD.T).float()
