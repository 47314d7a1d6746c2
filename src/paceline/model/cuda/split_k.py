"""A split-K linear layer: two partial products over halves of the input dimension, summed by the kernel that adds the
output to the residual stream.

If a product has fewer output tiles than the device has multiprocessors, torch's library also splits it, but sums the
parts in a separate kernel. Here the norm that follows reads both parts, which saves one kernel.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from paceline.model.cuda.small_batch import MAX_WEIGHTS
from paceline.model.layer import Linear

TILE = 128  # tokens, and outputs
# Measured on an H200:
MIN_NUM_IN = 4096
UNSPLIT_TOKENS = 64  # for this number of tokens torch's library has tiles that need no split


def should_use(x_TK: Tensor, linear: Linear) -> bool:
    """Whether two programs per output tile fit on the device at once."""
    weight = linear.weight
    if weight is None or linear.bias is not None or linear.float8 is not None:
        return False
    num_out, num_in = weight.shape
    if weight.itemsize != 2 or weight.numel() <= MAX_WEIGHTS or num_in < MIN_NUM_IN or num_in % (2 * TILE):
        return False
    if len(x_TK) == UNSPLIT_TOKENS:
        return False
    num_tiles = triton.cdiv(len(x_TK), TILE) * triton.cdiv(num_out, TILE)
    return 2 * num_tiles <= _num_sms(x_TK.device) and weight.is_contiguous() and x_TK.is_contiguous()


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_k_linear(x_TK: Tensor, linear: Linear) -> Tensor:
    """The two partial products, without adapters: float32 [2, T, N]."""
    weight = linear.weight
    assert weight is not None
    half = weight.shape[1] // 2
    x, w = x_TK.view(-1, 2, half).transpose(0, 1), weight.view(-1, 2, half).permute(1, 2, 0)
    return torch.bmm(x, w, out_dtype=torch.float32)
