"""Device memory of a benchmark: free what is unused, and recognise the error when it runs out."""

from __future__ import annotations

import gc

import torch


def reset_memory(device: torch.device) -> None:
    """Free the memory of what was measured before, also if that failed, and start a new peak."""
    gc.collect()  # graphs and their runner are in reference cycles
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_allocated_gib(device: torch.device) -> float | None:
    """The most memory that tensors took since `reset_memory`, weights included; None on a CPU. torch reserves more if
    what it reserved before does not fit the next tensor."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None


def peak_memory_gib(device: torch.device) -> float | None:
    """The most memory that torch reserved since `reset_memory`, weights included; None on a CPU."""
    return torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that caused it, is out of memory: a failed graph capture raises another error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False
