"""Buckets: several tensors, packed into one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: every tensor of a bucket can be viewed in place, whatever its dtype


def split(weights: Iterable[tuple[str, Tensor]], max_bytes: float) -> Iterator[list[tuple[str, Tensor]]]:
    """The tensors of each bucket of up to max_bytes. A larger tensor gets a bucket of its own."""
    tensors: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if tensors and size + tensor.nbytes > max_bytes:
            yield tensors
            tensors, size = [], 0
        tensors.append((name, tensor))
        size += _aligned(tensor.nbytes)
    if tensors:
        yield tensors


def write(tensors: Sequence[tuple[str, Tensor]], allocate: Callable[[int], Tensor]) -> tuple[list[list[Any]], Tensor]:
    """Copy tensors into a new bucket. `allocate` gets the number of bytes and returns a uint8 buffer of at least this
    size. Returns [name, dtype, shape] of each tensor, and the buffer."""
    buffer = allocate(sum(_aligned(tensor.nbytes) for _, tensor in tensors))
    entries = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors]
    for (_, view), (_, tensor) in zip(views(entries, buffer), tensors, strict=True):
        view.copy_(tensor.detach())
    return entries, buffer


def views(entries: Iterable[Sequence[Any]], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a bucket, as views of its buffer."""
    start = 0
    for name, dtype_name, shape in entries:
        dtype = getattr(torch, dtype_name)
        assert isinstance(dtype, torch.dtype)
        end = start + prod(shape) * dtype.itemsize
        yield name, buffer[start:end].view(dtype).view(shape)
        start = _aligned(end)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
