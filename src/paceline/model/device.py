"""The current CUDA device of a thread, how torch allocates its memory, and copies to it."""

from __future__ import annotations

import os

import numpy as np
import torch
from torch import Tensor

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def use_device(device: torch.device | str) -> None:
    """Make it the current device of this thread, where Triton launches kernels and graphs are captured. A new thread
    starts with device 0. No-op for "cpu", and for "cuda" without an index."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def use_expandable_segments(device: torch.device | str) -> None:
    """Let torch extend its segments of GPU memory. Microbatches differ in size; in segments of fixed sizes, up to a
    fifth of the reserved memory would be lost between tensors. Call it before the first allocation. Settings of the
    environment take precedence."""
    if torch.device(device).type == "cuda" and not any(os.environ.get(name) for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def to_device(array: np.ndarray, device: torch.device | str, dtype: torch.dtype | None = None) -> Tensor:
    """Copy to the device without waiting for what it computes: from pinned memory, which torch keeps until then."""
    tensor, device = torch.as_tensor(array, dtype=dtype), torch.device(device)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
