"""The kernel of `gated.py`, in Gluon: one warp feeds a program's tile, the others multiply."""

from __future__ import annotations

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

# Newer versions call them so.
load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def tiles(x: Tensor, *sizes: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [*sizes], gl.NVMMASharedLayout.get_default_for([*sizes], gl.bfloat16))


@gluon.jit(do_not_specialize=["num_rows", "num"])
def gates(
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
        load(x, [row, i * x.block_type.shape[1]], full.index(i), xs.index(i))
    for i in range(STAGES, num):
        at = i % STAGES
        mbarrier.wait(free.index(at), (i // STAGES & 1) ^ 1)
        _expect(x, wide, narrow, full.index(at), NARROW)
        load(x, [row, i * x.block_type.shape[1]], full.index(at), xs.index(at))
        _feed_weights(wide, narrow, ws.index(at), ns.index(at), full.index(at), column, i, NARROW)


@gluon.jit
def _expect(x, wide, narrow, barrier, NARROW: gl.constexpr):
    mbarrier.expect(barrier, x.block_type.nbytes + wide.block_type.nbytes + (narrow.block_type.nbytes if NARROW else 0))


@gluon.jit
def _feed_weights(wide, narrow, to_wide, to_narrow, barrier, column, turn, NARROW: gl.constexpr):
    depth = turn * wide.block_type.shape[2]
    load(wide, [0, column, depth], barrier, to_wide)
    if NARROW:
        load(narrow, [0, column + wide.block_type.shape[1], depth], barrier, to_narrow)


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
    store(out, [row, column], found)
