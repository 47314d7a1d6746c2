"""silu(gate) · up straight from the product that makes both: neither is written to memory.

A program computes a tile of both, so that they meet in its registers. The framework's product is as fast by itself, and
takes smaller tiles where few programs would leave multiprocessors idle: so only where tiles of this size fill them, or
most of them at once where memory is what all wait for, and for as many tokens as were measured.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from paceline.model.cuda.early import early, wait

TOKENS, SIZE, DEPTH = 128, 128, 64  # a tile: of tokens, of gates (and as many ups), and what is summed at once
WARPS = 8  # as measured on an H200
FULL = 0.95  # of the programs that could run when the last ones do
MOST_OF = 0.7  # of the multiprocessors, by one tile of tokens
MOST = 1024  # tokens


def pays(x_TD: Tensor, weight_ID: Tensor) -> bool:
    """Whether a program's tiles suit the product, and fill the device."""
    width, depth = weight_ID.shape
    if len(x_TD) > MOST or x_TD.itemsize != 2 or width % (2 * SIZE) or depth % DEPTH or not weight_ID.is_contiguous():
        return False
    num = triton.cdiv(len(x_TD), TOKENS) * (width // (2 * SIZE))
    processors = num_processors(x_TD.device)
    if num <= processors:
        return len(x_TD) == TOKENS and num >= MOST_OF * processors
    return num >= FULL * processors * triton.cdiv(num, processors)


@cache
def num_processors(device: torch.device) -> int:
    """Of a device that loads tiles by itself and has memory for four (Hopper, and Blackwell's large ones); else more
    than there ever are."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major in (9, 10) else 1 << 30


def gated(x_TD: Tensor, weight_ID: Tensor) -> Tensor:
    """The upper half of the weight makes the gates, the lower the ups: [T, I / 2]."""
    num, depth = x_TD.shape
    size = len(weight_ID) // 2
    out = x_TD.new_empty(num, size)
    _gated[(triton.cdiv(num, TOKENS) * (size // SIZE),)](
        TensorDescriptor.from_tensor(x_TD, [TOKENS, DEPTH]),
        TensorDescriptor.from_tensor(weight_ID.view(2, size, depth), [2, SIZE, DEPTH]),
        TensorDescriptor.from_tensor(out, [TOKENS, SIZE]),
        triton.cdiv(num, TOKENS), D=depth, TOKENS=TOKENS, SIZE=SIZE, DEPTH=DEPTH, num_warps=WARPS,
        num_stages=4 if num <= TOKENS else 3,  # as many as are on their way when memory is waited for
        **early(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _gated(
    x, weight, out, num_rows, D: tl.constexpr, TOKENS: tl.constexpr, SIZE: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    # Programs side by side have the same weights: those are read once.
    row, column = tl.program_id(0) % num_rows * TOKENS, tl.program_id(0) // num_rows * SIZE
    both = tl.zeros([TOKENS, 2 * SIZE], tl.float32)
    wait(EARLY)
    for d in range(0, D, DEPTH):
        weights = tl.reshape(weight.load([0, column, d]), [2 * SIZE, DEPTH])
        both = tl.dot(x.load([row, d]), weights.T, both)
    halves = tl.permute(tl.reshape(both, [TOKENS, 2, SIZE]), (0, 2, 1)).to(out.dtype)
    gate, up = tl.split(halves.to(tl.float32))
    out.store([row, column], (gate / (1 + tl.exp(-gate)) * up).to(out.dtype))
