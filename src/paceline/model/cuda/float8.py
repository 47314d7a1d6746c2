"""The large linear layers of a head in float8, on devices that multiply float8 twice as fast (Ada, Hopper and later).

Draft tokens are verified: rounding changes which tokens are drafted, but never what is sampled. The layers of the
decoder layer and the LM head are quantized. Their inputs come from a norm, or from a linear layer of a norm's output
(`down`, and `o` after attention), and need no scale: the kernel that computes them writes float8. (The inputs of `down`
are often small, where float8 has fewer bits. But a scale would clip the large ones, which costs more acceptance.)
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from paceline.model.cuda.ops import CudaOps
from paceline.model.draft_head import DraftHead
from paceline.model.layer import FLOAT8, Float8Weight, Linear

MIN_HIDDEN_SIZE = 2048  # from here on linear layers take most of a head's time
ALIGNMENT = 16  # sizes must be divisible by it
FLOAT8_MAX = torch.finfo(FLOAT8).max


def apply_head_dtype(head: DraftHead, dtype: str) -> None:
    """Apply `speculation.head_dtype`. The head keeps its weights; float8 copies are updated when they change."""
    if dtype == "model" or head.lm_head.float8 is not None:
        return
    reason = _reason_against(head)
    if dtype == "float8" and reason is not None:
        raise ValueError(f'speculation.head_dtype = "float8": {reason}; use "auto" or "model"')
    if reason is not None or (dtype == "auto" and head.config.layer.hidden_size < MIN_HIDDEN_SIZE):
        return
    for linear in _quantized_layers(head):
        assert linear.weight is not None
        linear.float8 = Float8Weight(linear.weight)
    head.ops = Float8Ops(head.device)


def _reason_against(head: DraftHead) -> str | None:
    device = head.device
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no float8 matrix products"
    for linear in _quantized_layers(head):
        if linear.num_in % ALIGNMENT or linear.num_out % ALIGNMENT:
            return f"the head has a linear layer of {linear.num_in} x {linear.num_out}, not divisible by {ALIGNMENT}"
        if linear.bias is not None and linear.bias.itemsize > 2:
            return "the head has a 32-bit bias; float8 matrix products need a 16-bit bias"
    return None


def _quantized_layers(head: DraftHead) -> list[Linear]:
    of_layers = [(layer.qkv, layer.o, layer.gate_up, layer.down) for layer in head.decoder_layers]
    return [head.lm_head, *chain.from_iterable(of_layers)]


class Float8Ops(CudaOps):
    activation_dtype = FLOAT8

    def __init__(self, device: torch.device) -> None:
        self._one = torch.ones((), device=device)

    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        float8 = linear.float8
        if float8 is None:
            return super().linear(x_TK, linear)
        assert linear.weight is not None
        if x_TK.dtype != FLOAT8:  # the attention output of a prefill
            x_TK = x_TK.clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
        return torch._scaled_mm(
            x_TK, float8.weight.T, self._one, float8.scale, linear.bias, out_dtype=linear.weight.dtype,
            use_fast_accum=True,
        )  # fmt: skip

    def gated(self, h_TD: Tensor, gate_up: Linear) -> Tensor:
        return self.silu_mul(self.linear(h_TD, gate_up))
