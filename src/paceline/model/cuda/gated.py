"""silu(gate) · up straight from the product that makes both: neither is written to memory.

A program computes a tile of both, so that they meet in its registers: one warp feeds it, the others multiply. For one
tile of tokens memory is what all wait for. There tiles are so wide that there is one for each multiprocessor, and the
first weights come while the norm ahead still runs. The framework's product is as fast by itself, and takes smaller
tiles where few programs would leave multiprocessors idle: so only where tiles of these sizes fill them, and for as many
tokens as were measured.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
import triton
from torch import Tensor

from paceline.model.cuda.early import early

TOKENS, DEPTH = 128, 64  # of a tile: tokens, and what is summed at once
# Of gates (and as many ups), in the powers of two that a product can have, and how many turns are on their way.
FEW, MANY = (64, 32, 5), (128, 0, 4)  # for one tile of tokens, and for more, as measured on an H200
WARPS, REGISTERS = 8, 168  # that multiply, and as many as three groups of four warps can have
FULL = 0.95  # of the programs that could run when the last ones do
MOST = 1024  # tokens


def pays(x_TD: Tensor, weight_ID: Tensor) -> bool:
    """Whether a program's tiles suit the product, and fill the device."""
    width, depth = weight_ID.shape
    wide, narrow, stages = _tile(len(x_TD))
    if not TOKENS <= len(x_TD) <= MOST or x_TD.itemsize != 2 or not weight_ID.is_contiguous():
        return False
    if width % (2 * (wide + narrow)) or depth % DEPTH or depth < DEPTH * stages:
        return False
    num = triton.cdiv(len(x_TD), TOKENS) * (width // (2 * (wide + narrow)))
    processors = num_processors(x_TD.device)
    if num <= processors and len(x_TD) > TOKENS:  # not measured
        return False
    return num >= FULL * processors * triton.cdiv(num, processors) and works(x_TD.device)


def _tile(num_tokens: int) -> tuple[int, int, int]:
    return FEW if num_tokens <= TOKENS else MANY


@cache
def num_processors(device: torch.device) -> int:
    """Of a device that has this kind of product (Hopper); else more than there ever are."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 1 << 30


@cache
def works(device: torch.device) -> bool:
    """The kernel's language is Triton's experimental one: another version may not know it, or mean something else."""
    try:
        right = all(map(_is_right, (device, device), (TOKENS, 2 * TOKENS)))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(f"gates go by the framework's product: this Triton does not compile ours ({error})", stacklevel=2)
        return False
    if not right:
        warnings.warn("gates go by the framework's product: this Triton makes something else of ours", stacklevel=2)
    return right


def _is_right(device: torch.device, num_tokens: int) -> bool:
    """Of small whole numbers, each token's sums being of other ones, so that nothing is rounded before silu."""
    wide, narrow, stages = _tile(num_tokens)
    depth, dice = 3 * stages * DEPTH, torch.Generator(device).manual_seed(0)
    weight = torch.randint(-2, 3, (2 * (wide + narrow), depth), generator=dice, device=device).bfloat16()
    at = torch.arange(depth, device=device)
    x = (at % TOKENS == torch.arange(num_tokens, device=device)[:, None] % TOKENS).bfloat16()
    gate, up = (x.float() @ half.float().T for half in weight.chunk(2))
    torch.cuda.synchronize(device)  # weights may be read before a kernel ahead is done
    return torch.allclose(gated(x, weight).float(), gate * torch.sigmoid(gate) * up, rtol=1e-2, atol=1e-2)


def gated(x_TD: Tensor, weight_ID: Tensor) -> Tensor:
    """The upper half of the weight makes the gates, the lower the ups: [T, I / 2]."""
    from paceline.model.cuda.gates import gates, tiles  # here: where its language is missing, only this is

    num, depth = x_TD.shape
    size = len(weight_ID) // 2
    wide, narrow, stages = _tile(num)
    out, weights, num_rows = x_TD.new_empty(num, size), weight_ID.view(2, size, depth), triton.cdiv(num, TOKENS)
    gates[(num_rows * (size // (wide + narrow)),)](
        tiles(x_TD, TOKENS, DEPTH), tiles(weights, 2, wide, DEPTH), tiles(weights, 2, narrow or wide, DEPTH),
        tiles(out, TOKENS, wide), tiles(out, TOKENS, narrow or wide), num_rows, depth // DEPTH,
        NARROW=narrow, STAGES=stages, num_warps=WARPS, maxnreg=REGISTERS, **early(out.device),
    )  # fmt: skip
    return out
