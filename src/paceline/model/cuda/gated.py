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
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

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
    wide, narrow, stages = FEW if len(x_TD) <= TOKENS else MANY
    if not TOKENS <= len(x_TD) <= MOST or x_TD.itemsize != 2 or not weight_ID.is_contiguous():
        return False
    if width % (2 * (wide + narrow)) or depth % DEPTH or depth < DEPTH * stages:
        return False
    num = triton.cdiv(len(x_TD), TOKENS) * (width // (2 * (wide + narrow)))
    processors = num_processors(x_TD.device)
    return num >= FULL * processors * triton.cdiv(num, processors) and works(x_TD.device)


@cache
def num_processors(device: torch.device) -> int:
    """Of a device that has this kind of product (Hopper); else more than there ever are."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if properties.major == 9 else 1 << 30


@cache
def works(device: torch.device) -> bool:
    """Its language is Triton's experimental one: another version may not know it."""
    depth = DEPTH * FEW[2]
    x, weight = (torch.ones(n, depth, dtype=torch.bfloat16, device=device) for n in (TOKENS, 2 * (FEW[0] + FEW[1])))
    try:
        return bool((gated(x, weight) == depth**2).all())
    except Exception as error:
        warnings.warn(f"gates go by the framework's product: this Triton does not compile ours ({error})", stacklevel=2)
        return False


def gated(x_TD: Tensor, weight_ID: Tensor) -> Tensor:
    """The upper half of the weight makes the gates, the lower the ups: [T, I / 2]."""
    num, depth = x_TD.shape
    size = len(weight_ID) // 2
    wide, narrow, stages = FEW if num <= TOKENS else MANY
    out, weights, num_rows = x_TD.new_empty(num, size), weight_ID.view(2, size, depth), triton.cdiv(num, TOKENS)
    _gated[(num_rows * (size // (wide + narrow)),)](
        _tiles(x_TD, TOKENS, DEPTH), _tiles(weights, 2, wide, DEPTH), _tiles(weights, 2, narrow or wide, DEPTH),
        _tiles(out, TOKENS, wide), _tiles(out, TOKENS, narrow or wide), num_rows, depth // DEPTH,
        NARROW=narrow, STAGES=stages, num_warps=WARPS, maxnreg=REGISTERS, **early(out.device),
    )  # fmt: skip
    return out


def _tiles(x: Tensor, *sizes: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [*sizes], gl.NVMMASharedLayout.get_default_for([*sizes], gl.bfloat16))


@gluon.jit(do_not_specialize=["num_rows", "num"])
def _gated(
    x, wide, narrow, out, slim, num_rows, num, NARROW: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr
):  # fmt: skip
    """The `num` turns go through buffers in a circle, a barrier of each told when it is full and one when it is not."""
    TOKENS: gl.constexpr = x.block_type.shape[0]
    DEPTH: gl.constexpr = x.block_type.shape[1]
    WIDE: gl.constexpr = wide.block_type.shape[1]
    # Programs side by side have the same weights: those are read once.
    row, column = gl.program_id(0) % num_rows * TOKENS, gl.program_id(0) // num_rows * (WIDE + NARROW)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, DEPTH], x.layout)
    ws = gl.allocate_shared_memory(x.dtype, [STAGES, 2, WIDE, DEPTH], wide.layout)
    found = gl.allocate_shared_memory(x.dtype, [TOKENS, WIDE], out.layout)
    ns, more = ws, found
    if NARROW:
        ns = gl.allocate_shared_memory(x.dtype, [STAGES, 2, NARROW, DEPTH], narrow.layout)
        more = gl.allocate_shared_memory(x.dtype, [TOKENS, NARROW], slim.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (out, slim, xs, ws, ns, found, more, full, free, row, column, num, NARROW)),
            (_feed, (x, wide, narrow, xs, ws, ns, full, free, row, column, num, NARROW, EARLY)),
        ],
        [1],
        [24],  # registers
    )


@gluon.jit
def _feed(
    x, wide, narrow, xs, ws, ns, full, free, row, column, num, NARROW: gl.constexpr, EARLY: gl.constexpr
):  # fmt: skip
    """What comes of the weights first does not wait for the kernel ahead."""
    STAGES: gl.constexpr = full.shape[0]
    for i in gl.static_range(STAGES):
        _expect(x, wide, narrow, full.index(i), NARROW)
        _feed_weights(wide, narrow, ws.index(i), ns.index(i), full.index(i), column, i, NARROW)
    if EARLY:
        gdc_wait()
    for i in gl.static_range(STAGES):
        tma.async_copy_global_to_shared(x, [row, i * x.block_type.shape[1]], full.index(i), xs.index(i))
    for i in range(STAGES, num):
        at = i % STAGES
        mbarrier.wait(free.index(at), (i // STAGES & 1) ^ 1)
        _expect(x, wide, narrow, full.index(at), NARROW)
        tma.async_copy_global_to_shared(x, [row, i * x.block_type.shape[1]], full.index(at), xs.index(at))
        _feed_weights(wide, narrow, ws.index(at), ns.index(at), full.index(at), column, i, NARROW)


@gluon.jit
def _expect(x, wide, narrow, barrier, NARROW: gl.constexpr):
    mbarrier.expect(barrier, x.block_type.nbytes + wide.block_type.nbytes + (narrow.block_type.nbytes if NARROW else 0))


@gluon.jit
def _feed_weights(wide, narrow, to_wide, to_narrow, barrier, column, turn, NARROW: gl.constexpr):
    depth = turn * wide.block_type.shape[2]
    tma.async_copy_global_to_shared(wide, [0, column, depth], barrier, to_wide)
    if NARROW:
        tma.async_copy_global_to_shared(narrow, [0, column + wide.block_type.shape[1], depth], barrier, to_narrow)


@gluon.jit
def _multiply(
    out, slim, xs, ws, ns, found, more, full, free, row, column, num, NARROW: gl.constexpr
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    WIDE: gl.constexpr = out.block_type.shape[1]
    both, rest = _nothing(out.block_type.shape[0], WIDE), 0
    if NARROW:
        rest = _nothing(out.block_type.shape[0], NARROW)
    for i in range(num):
        at = i % STAGES
        mbarrier.wait(full.index(at), i // STAGES & 1)
        both = _product(xs.index(at), ws.index(at), both)
        if NARROW:
            rest = _product(xs.index(at), ns.index(at), rest)
            both, rest = warpgroup_mma_wait(2, deps=(both, rest))
        else:
            both = warpgroup_mma_wait(1, deps=(both,))
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=i > 0)  # the turn before is done
    if NARROW:
        both, rest = warpgroup_mma_wait(0, deps=(both, rest))
        _finish(rest, slim, more, row, column + WIDE)
    else:
        both = warpgroup_mma_wait(0, deps=(both,))
    _finish(both, out, found, row, column)
    tma.store_wait(0)


@gluon.jit
def _nothing(TOKENS: gl.constexpr, SIZE: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * SIZE, 16])
    return gl.zeros([TOKENS, 2 * SIZE], gl.float32, layout)


@gluon.jit
def _product(x, weights, both):
    flat = weights.reshape([weights.shape[0] * weights.shape[1], weights.shape[2]])
    return warpgroup_mma(x, flat.permute((1, 0)), both, is_async=True)


@gluon.jit
def _finish(both, out, found, row, column):
    TOKENS: gl.constexpr = out.block_type.shape[0]
    SIZE: gl.constexpr = out.block_type.shape[1]
    halves = both.reshape([TOKENS, 2, SIZE]).permute((0, 2, 1)).to(out.dtype)
    gate, up = halves.to(gl.float32).split()
    found.store((gate / (1 + gl.exp(-gate)) * up).to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [row, column], found)
