"""SwiGLU: silu(gate) · up, fused into the product that computes gate and up, so that neither is written to memory.

A program computes the same tile of gate and up. One warp loads, the others multiply. With one tile of tokens the kernel
is limited by memory bandwidth: tiles are so wide that there is one per multiprocessor, and the first weights are loaded
while the norm before still runs. torch's product is as fast by itself, and takes smaller tiles if these would leave
multiprocessors idle. So the kernel is used only if its tiles fill the device, and for the numbers of tokens that were
measured.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
import triton
from torch import Tensor

from paceline.model.cuda.pdl import pdl_options

TOKENS, TILE_IN = 128, 64  # tokens of a tile, and input features of one pipeline stage
# Gate outputs of a tile (and as many of up), as two widths that are powers of two, and pipeline stages. Measured on an
# H200, for one tile of tokens and for more.
ONE_TILE, MORE_TILES = (64, 32, 5), (128, 0, 4)
WARPS, REGISTERS = 8, 168  # of the multiplying warps; the most registers that three groups of four warps can have
MIN_OCCUPANCY = 0.95  # programs, as a share of those that the device could run in the same number of waves
MAX_TOKENS = 1024


def should_use(x_TD: Tensor, weight_ID: Tensor) -> bool:
    """Whether the kernel supports these shapes and its tiles fill the device."""
    num_out, num_in = weight_ID.shape
    wide, narrow, stages = _tile(len(x_TD))
    if not TOKENS <= len(x_TD) <= MAX_TOKENS or x_TD.itemsize != 2 or not weight_ID.is_contiguous():
        return False
    if num_out % (2 * (wide + narrow)) or num_in % TILE_IN or num_in < TILE_IN * stages:
        return False
    num_programs = triton.cdiv(len(x_TD), TOKENS) * (num_out // (2 * (wide + narrow)))
    sms = num_sms(x_TD.device)
    if num_programs <= sms and len(x_TD) > TOKENS:  # not measured
        return False
    return num_programs >= MIN_OCCUPANCY * sms * triton.cdiv(num_programs, sms) and passes_self_test(x_TD.device)


def _tile(num_tokens: int) -> tuple[int, int, int]:
    return ONE_TILE if num_tokens <= TOKENS else MORE_TILES


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a Hopper device, which the kernel is for. On other devices a number so large that the kernel
    is never used."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 1 << 30


@cache
def passes_self_test(device: torch.device) -> bool:
    """Whether the kernel compiles and is correct. It is written in Gluon, Triton's experimental language, which may
    change from version to version."""
    try:
        correct = all(map(_is_correct, (device, device), (TOKENS, 2 * TOKENS)))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        warnings.warn(f"the SwiGLU kernel is not used: this Triton version fails to compile it ({error})", stacklevel=2)
        return False
    if not correct:
        warnings.warn("the SwiGLU kernel is not used: this Triton version computes wrong results with it", stacklevel=2)
    return correct


def _is_correct(device: torch.device, num_tokens: int) -> bool:
    """Compares the kernel with torch. Inputs are small integers and each token selects other features, so nothing is
    rounded before silu."""
    wide, narrow, stages = _tile(num_tokens)
    num_in, generator = 3 * stages * TILE_IN, torch.Generator(device).manual_seed(0)
    weight = torch.randint(-2, 3, (2 * (wide + narrow), num_in), generator=generator, device=device).bfloat16()
    feature = torch.arange(num_in, device=device)
    x = (feature % TOKENS == torch.arange(num_tokens, device=device)[:, None] % TOKENS).bfloat16()
    gate, up = (x.float() @ half.float().T for half in weight.chunk(2))
    torch.cuda.synchronize(device)  # the kernel may read weights before the previous kernel has finished
    return torch.allclose(swiglu(x, weight).float(), gate * torch.sigmoid(gate) * up, rtol=1e-2, atol=1e-2)


def swiglu(x_TD: Tensor, weight_ID: Tensor) -> Tensor:
    """[T, I / 2]. The first half of the weight's rows computes the gate, the second half up."""
    from paceline.model.cuda.swiglu_kernel import descriptor, swiglu_kernel  # not at the top: needs Gluon

    num_tokens, num_in = x_TD.shape
    size = len(weight_ID) // 2
    wide, narrow, stages = _tile(num_tokens)
    out, weights = x_TD.new_empty(num_tokens, size), weight_ID.view(2, size, num_in)
    num_tiles = triton.cdiv(num_tokens, TOKENS)
    swiglu_kernel[(num_tiles * (size // (wide + narrow)),)](
        descriptor(x_TD, TOKENS, TILE_IN), descriptor(weights, 2, wide, TILE_IN),
        descriptor(weights, 2, narrow or wide, TILE_IN), descriptor(out, TOKENS, wide),
        descriptor(out, TOKENS, narrow or wide), num_tiles, num_in // TILE_IN,
        NARROW=narrow, STAGES=stages, num_warps=WARPS, maxnreg=REGISTERS, **pdl_options(out.device),
    )  # fmt: skip
    return out
