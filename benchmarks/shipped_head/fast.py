"""The decoder's elementwise arithmetic compiled for a GPU: the same formulas, each one kernel instead of many."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.model.layer import Layer
from paceline.model.ops import TorchOps, _rotate

torch._dynamo.config.recompile_limit = 64
torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every shape, which takes longer than the attention


def _turn(
    y_TK: Tensor, num_heads: int, num_kv_heads: int, head_dim: int, positions_T: Tensor, cos: Tensor, sin: Tensor
):
    q, k, v = y_TK.view(-1, num_heads + 2 * num_kv_heads, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    c, s = cos[positions_T].unsqueeze(1), sin[positions_T].unsqueeze(1)
    return _rotate(q, c, s), _rotate(k, c, s), v


class CompiledOps(TorchOps):
    def __init__(self) -> None:
        plain = TorchOps()
        self.norm = torch.compile(plain.norm)
        self.add_norm = torch.compile(plain.add_norm)
        self.silu_mul = torch.compile(plain.silu_mul)
        self.turn = torch.compile(_turn)

    def qkv(
        self, h_TD: Tensor, layer: Layer, config: ModelConfig, positions_T: Tensor, rope: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert layer.q_norm is None
        heads = config.num_heads, config.num_kv_heads, config.head_dim
        return self.turn(self.linear(h_TD, layer.qkv), *heads, positions_T, *rope)


def exact_logits(hidden: Tensor, weight_VD: Tensor) -> Tensor:
    """In float32 from whatever precision: bfloat16 logits are too coarse to sample from."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        return torch.mm(hidden, weight_VD.T, out_dtype=torch.float32)
    return (hidden @ weight_VD.T).float()
