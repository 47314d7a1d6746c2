"""The current CUDA device of a thread."""

from __future__ import annotations

import torch


def use_device(device: torch.device | str) -> None:
    """Make it the current device of this thread, where Triton launches kernels and graphs are captured. A new thread
    starts with device 0. No-op for "cpu", and for "cuda" without an index."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
