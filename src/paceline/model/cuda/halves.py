"""A product in two halves of its depth, which whoever adds it to the residual stream sums.

Where a product has fewer tiles than the device has multiprocessors, the framework computes parts of it side by side as
well, but rounds their sum in a kernel of its own. Here the norm that follows reads both: one kernel less.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from paceline.model.cuda.few import MOST_WEIGHTS
from paceline.model.layer import Linear

TILE = 128  # tokens, and outputs
# As measured on an H200:
LEAST_DEPTH = 4096
BUT = 64  # tokens: these the framework has tiles for that need not be split


def pays(x_TK: Tensor, linear: Linear) -> bool:
    """Whether two programs for each tile have room on the device."""
    weight = linear.weight
    if weight is None or linear.bias is not None or linear.lora is not None or linear.rounded is not None:
        return False
    num_out, depth = weight.shape
    if weight.itemsize != 2 or weight.numel() <= MOST_WEIGHTS or depth < LEAST_DEPTH or depth % (2 * TILE):
        return False
    if len(x_TK) == BUT:
        return False
    num_tiles = triton.cdiv(len(x_TK), TILE) * triton.cdiv(num_out, TILE)
    return 2 * num_tiles <= _num_processors(x_TK.device) and weight.is_contiguous() and x_TK.is_contiguous()


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def halves(x_TK: Tensor, linear: Linear) -> Tensor:
    """Float32 [2, T, N]."""
    weight = linear.weight
    assert weight is not None
    half = weight.shape[1] // 2
    x, w = x_TK.view(-1, 2, half).transpose(0, 1), weight.view(-1, 2, half).permute(1, 2, 0)
    return torch.bmm(x, w, out_dtype=torch.float32)
