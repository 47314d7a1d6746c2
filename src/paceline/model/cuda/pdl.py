"""Programmatic dependent launch (PDL): a kernel may start before the previous kernel has finished (Hopper and later).

Until it waits, a kernel does what does not depend on the previous kernel: it starts up, and it loads data that was
written earlier. Rules:

- Every program calls `pdl_wait` before it reads what the previous kernel wrote, before it writes, and before it ends.
  Otherwise the next kernel could start while the previous one still runs.
- Kernels that call `pdl_launch_dependents` may follow each other. So before it waits, a kernel reads only data that was
  written before the last kernel that does not call it.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel that calls `pdl_wait`."""
    has_pdl = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": has_pdl, "launch_pdl": has_pdl}


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the previous kernel has finished."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start as soon as the device has room for it. It runs until its `pdl_wait`."""
    if PDL:
        gdc_launch_dependents()
