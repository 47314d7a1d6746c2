"""The kernel of `swiglu.py`, in Gluon: one warp loads a program's tiles, the others multiply."""

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

# Newer versions use the first name, older ones the second.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def descriptor(x: Tensor, *tile: int) -> TensorDescriptor:
    """Describes a tensor to the TMA unit, which copies tiles of this shape."""
    return TensorDescriptor.from_tensor(x, [*tile], gl.NVMMASharedLayout.get_default_for([*tile], gl.bfloat16))


@gluon.jit(do_not_specialize=["num_tiles", "num_steps"])
def swiglu_kernel(
    x, w_wide, w_narrow, out_wide, out_narrow, num_tiles, num_steps, NARROW: gl.constexpr, STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The `num_steps` steps along the input dimension use STAGES buffers in turn. Each buffer has two barriers: `full`
    when it is loaded, and `free` when it has been multiplied."""
    TOKENS: gl.constexpr = x.block_type.shape[0]
    TILE_IN: gl.constexpr = x.block_type.shape[1]
    WIDE: gl.constexpr = w_wide.block_type.shape[1]
    # Neighbouring programs have the same weights, so these are read from memory once.
    row, column = gl.program_id(0) % num_tiles * TOKENS, gl.program_id(0) // num_tiles * (WIDE + NARROW)
    xs = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, TILE_IN], x.layout)
    wides = gl.allocate_shared_memory(x.dtype, [STAGES, 2, WIDE, TILE_IN], w_wide.layout)
    result_wide = gl.allocate_shared_memory(x.dtype, [TOKENS, WIDE], out_wide.layout)
    narrows, result_narrow = wides, result_wide
    if NARROW:
        narrows = gl.allocate_shared_memory(x.dtype, [STAGES, 2, NARROW, TILE_IN], w_narrow.layout)
        result_narrow = gl.allocate_shared_memory(x.dtype, [TOKENS, NARROW], out_narrow.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    out_wide, out_narrow, xs, wides, narrows, result_wide, result_narrow, full, free, row, column,
                    num_steps, NARROW,
                ),
            ),
            (_load, (x, w_wide, w_narrow, xs, wides, narrows, full, free, row, column, num_steps, NARROW, PDL)),
        ],
        [1],
        [24],  # registers
    )  # fmt: skip


@gluon.jit
def _load(
    x, w_wide, w_narrow, xs, wides, narrows, full, free, row, column, num_steps, NARROW: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """The first weights do not depend on the previous kernel, so they are loaded before it has finished."""
    STAGES: gl.constexpr = full.shape[0]
    for i in gl.static_range(STAGES):
        _expect(x, w_wide, w_narrow, full.index(i), NARROW)
        _load_weights(w_wide, w_narrow, wides.index(i), narrows.index(i), full.index(i), column, i, NARROW)
    if PDL:
        gdc_wait()
    for i in gl.static_range(STAGES):
        tma_load(x, [row, i * x.block_type.shape[1]], full.index(i), xs.index(i))
    for i in range(STAGES, num_steps):
        stage = i % STAGES
        mbarrier.wait(free.index(stage), (i // STAGES & 1) ^ 1)
        _expect(x, w_wide, w_narrow, full.index(stage), NARROW)
        tma_load(x, [row, i * x.block_type.shape[1]], full.index(stage), xs.index(stage))
        _load_weights(w_wide, w_narrow, wides.index(stage), narrows.index(stage), full.index(stage), column, i, NARROW)


@gluon.jit
def _expect(x, w_wide, w_narrow, barrier, NARROW: gl.constexpr):
    """Set the number of bytes of a step, which the barrier waits for."""
    mbarrier.expect(
        barrier, x.block_type.nbytes + w_wide.block_type.nbytes + (w_narrow.block_type.nbytes if NARROW else 0)
    )


@gluon.jit
def _load_weights(w_wide, w_narrow, to_wide, to_narrow, barrier, column, step, NARROW: gl.constexpr):
    at_in = step * w_wide.block_type.shape[2]
    tma_load(w_wide, [0, column, at_in], barrier, to_wide)
    if NARROW:
        tma_load(w_narrow, [0, column + w_wide.block_type.shape[1], at_in], barrier, to_narrow)


@gluon.jit
def _multiply(
    out_wide, out_narrow, xs, wides, narrows, result_wide, result_narrow, full, free, row, column, num_steps,
    NARROW: gl.constexpr,
):  # fmt: skip
    STAGES: gl.constexpr = full.shape[0]
    WIDE: gl.constexpr = out_wide.block_type.shape[1]
    acc_wide, acc_narrow = _zeros(out_wide.block_type.shape[0], WIDE), 0
    if NARROW:
        acc_narrow = _zeros(out_wide.block_type.shape[0], NARROW)
    for i in range(num_steps):
        stage = i % STAGES
        mbarrier.wait(full.index(stage), i // STAGES & 1)
        acc_wide = _matmul(xs.index(stage), wides.index(stage), acc_wide)
        if NARROW:
            acc_narrow = _matmul(xs.index(stage), narrows.index(stage), acc_narrow)
            acc_wide, acc_narrow = warpgroup_mma_wait(2, deps=(acc_wide, acc_narrow))
        else:
            acc_wide = warpgroup_mma_wait(1, deps=(acc_wide,))
        mbarrier.arrive(free.index((i + STAGES - 1) % STAGES), pred=i > 0)  # the step before is done
    if NARROW:
        acc_wide, acc_narrow = warpgroup_mma_wait(0, deps=(acc_wide, acc_narrow))
        _store(acc_narrow, out_narrow, result_narrow, row, column + WIDE)
    else:
        acc_wide = warpgroup_mma_wait(0, deps=(acc_wide,))
    _store(acc_wide, out_wide, result_wide, row, column)
    tma.store_wait(0)


@gluon.jit
def _zeros(TOKENS: gl.constexpr, SIZE: gl.constexpr):
    """An accumulator for gate and up, side by side."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * SIZE, 16])
    return gl.zeros([TOKENS, 2 * SIZE], gl.float32, layout)


@gluon.jit
def _matmul(x, weights, acc):
    flat = weights.reshape([weights.shape[0] * weights.shape[1], weights.shape[2]])
    return warpgroup_mma(x, flat.permute((1, 0)), acc, is_async=True)


@gluon.jit
def _store(acc, out, result, row, column):
    """silu(gate) · up, through shared memory to the output."""
    TOKENS: gl.constexpr = out.block_type.shape[0]
    SIZE: gl.constexpr = out.block_type.shape[1]
    gate_up = acc.reshape([TOKENS, 2, SIZE]).permute((0, 2, 1)).to(out.dtype)
    gate, up = gate_up.to(gl.float32).split()
    result.store((gate / (1 + gl.exp(-gate)) * up).to(out.dtype))
    fence_async_shared()
    tma_store(out, [row, column], result)
