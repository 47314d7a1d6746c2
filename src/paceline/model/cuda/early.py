"""Kernels that begin before the one ahead of them has ended, where the device can (Hopper and later).

What they need not wait for is done meanwhile: their launch, and loads of what was written long before. Always: every
program waits (`wait`) before it reads what the kernel ahead wrote, before it writes, and before it ends; else the one
behind it would begin while the one ahead still runs. Kernels that let the next one begin with them (`begin_next`) may
follow one another: so before it waits, one reads only what was written before the last kernel of another kind.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Options of a kernel that calls `wait`."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": can, "launch_pdl": can}


@triton.jit
def wait(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()


@triton.jit
def begin_next(EARLY: tl.constexpr):
    """Let the next kernel begin as soon as there is room, up to where it waits."""
    if EARLY:
        gdc_launch_dependents()
