"""A head's large products in 8 bits, on devices that multiply those twice as fast (Ada, Hopper, and later).

What a head guesses is verified: a rounding costs a guess now and then, and never changes what is sampled. Rounded are
the products of its layer, and its LM head's. What goes into them comes from a norm, or from what a norm's product makes
(in `down`, and by way of attention in `o`), and is given no scale: the kernel that makes it writes 8 bits, and nothing
else is to be done. (Gates times ups are often small, where these have fewer bits; times a factor, the large ones are
cut off, which costs more guesses.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.model.cuda.ops import CudaOps
from paceline.model.eagle3 import Eagle3Head
from paceline.model.layer import FLOAT8, Linear, Rounded

PAYS = 2048  # hidden size from which a head's time is that of its products
TILE = 16  # what sizes must be divisible by
LARGEST = torch.finfo(FLOAT8).max


def settle_dtype(head: Eagle3Head, dtype: str) -> None:
    """By `speculation.head_dtype`. Its weights stay what they are; when they are assigned anew, what is rounded
    follows."""
    if dtype == "model" or head.lm_head.rounded is not None:
        return
    reason = _reason_against(head)
    if dtype == "float8" and reason is not None:
        raise ValueError(f'speculation.head_dtype = "float8": {reason}; use "auto" or "model"')
    if reason is not None or (dtype == "auto" and head.config.layer.hidden_size < PAYS):
        return
    for linear in _rounded(head):
        assert linear.weight is not None
        linear.rounded = Rounded(linear.weight)
    head.ops = Float8Ops(head.device)


def _reason_against(head: Eagle3Head) -> str | None:
    device = head.device
    if torch.version.hip is not None or torch.cuda.get_device_capability(device) < (8, 9):
        return f"{torch.cuda.get_device_name(device)} has no products in 8 bits"
    for linear in _rounded(head):
        if linear.num_in % TILE or linear.num_out % TILE:
            return f"a product of {linear.num_in} by {linear.num_out}, which {TILE} does not divide"
        if linear.bias is not None and linear.bias.itemsize > 2:
            return "it has a bias, which such products take in 16 bits only"
    return None


def _rounded(head: Eagle3Head) -> tuple[Linear, ...]:
    return head.layer.qkv, head.layer.o, head.layer.gate_up, head.layer.down, head.lm_head


class Float8Ops(CudaOps):
    narrow = FLOAT8

    def __init__(self, device: torch.device) -> None:
        self._one = torch.ones((), device=device)

    def linear(self, x_TK: Tensor, linear: Linear) -> Tensor:
        rounded = linear.rounded
        if rounded is None:
            return super().linear(x_TK, linear)
        assert linear.weight is not None
        if x_TK.dtype != FLOAT8:  # what a prompt's attention found
            x_TK = x_TK.clamp(-LARGEST, LARGEST).to(FLOAT8)
        return torch._scaled_mm(
            x_TK, rounded.weight.T, self._one, rounded.scale, linear.bias, out_dtype=linear.weight.dtype,
            use_fast_accum=True,
        )  # fmt: skip

    def gated(self, h_TD: Tensor, gate_up: Linear) -> Tensor:
        return self.silu_mul(self.linear(h_TD, gate_up))
