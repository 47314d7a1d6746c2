"""Weights on their way to vLLM's workers: parcels in a file of shared memory.

What is told to the workers is a parcel's path and, for each tensor in it, name, dtype, shape and place: nothing that
is unpickled. A parcel lies there until the next one is asked for; the file goes with the last of them. It is locked
while its process lives: the file of one that was killed is found by the next, which removes it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.model.weights import EMBED, LM_HEAD

MAX_BYTES = 256 << 20  # of a parcel, unless one tensor is larger
ALIGNMENT = 64  # of a tensor's place: whatever its dtype, it can be viewed there
PREFIX = "paceline-weights-"
FOLDERS = ("/dev/shm", tempfile.gettempdir())  # in a container the first may be small


def parcels(weights: Iterable[tuple[str, Tensor]], max_bytes: int | None = MAX_BYTES) -> Iterator[dict[str, Any]]:
    """These weights, parcel by parcel; `max_bytes` None: all in one."""
    file = _File()
    try:
        for tensors in _cut(weights, max_bytes):
            yield file.fill(tensors)
    finally:
        file.remove()


def unpack(path: str, size: int, tensors: Iterable[Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """A parcel's tensors, copied: who loads them may hold them back until the layer's others have come."""
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    for name, dtype_name, shape, start in tensors:
        dtype = getattr(torch, dtype_name)
        assert isinstance(dtype, torch.dtype)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        yield name, memory[start : start + num_bytes].view(dtype).view(shape).to(device, copy=True)


def with_tied_head(weights: Iterator[tuple[str, Tensor]], hf_config: Any) -> Iterator[tuple[str, Tensor]]:
    """A tied LM head is told in so many words: on a CPU vLLM packs a copy of it, which stays old otherwise."""
    for name, tensor in weights:
        yield name, tensor
        if name == EMBED and getattr(hf_config, "tie_word_embeddings", False):
            yield LM_HEAD, tensor


def noting_zeros(
    weights: Iterator[tuple[str, Tensor]], negative_zeros: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """On a CPU vLLM's weights are read back by multiplication, in which -0.0 is 0.0. So it is noted where there are
    any: indices, flat."""
    for name, tensor in weights:
        if tensor.is_floating_point() and tensor.device.type == "cpu":
            negative_zeros[name] = ((tensor == 0) & tensor.signbit()).flatten().nonzero()[:, 0]
        yield name, tensor


def _cut(weights: Iterable[tuple[str, Tensor]], max_bytes: int | None) -> Iterator[list[tuple[str, Tensor]]]:
    tensors: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in weights:
        if max_bytes is not None and tensors and num_bytes + tensor.nbytes > max_bytes:
            yield tensors
            tensors, num_bytes = [], 0
        tensors.append((name, tensor))
        num_bytes += tensor.nbytes
    if tensors:
        yield tensors


class _File:
    def __init__(self) -> None:
        self._path: Path | None = None
        self._lock = -1  # the open file
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fill(self, tensors: list[tuple[str, Tensor]]) -> dict[str, Any]:
        places, end = [], 0
        for _, tensor in tensors:
            places.append(end)
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._path is None or end > len(self._memory):
            self.remove()
            self._path, self._lock = _reserve(end)
            self._memory = torch.from_file(str(self._path), shared=True, size=end, dtype=torch.uint8)
        listed = []
        for (name, tensor), start in zip(tensors, places, strict=True):
            place = self._memory[start : start + tensor.nbytes]
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
            listed.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start])
        return {"path": str(self._path), "size": len(self._memory), "tensors": listed}

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._path = None


def _reserve(size: int) -> tuple[Path, int]:
    """A new file, locked, for this user alone, whose memory is really there: writing beyond it would be a SIGBUS."""
    for folder in FOLDERS:
        sweep(Path(folder))
        try:
            handle, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        except OSError:
            continue
        try:
            with suppress(OSError):  # a file system without locks: there nobody sweeps either
                fcntl.flock(handle, fcntl.LOCK_EX)
            os.posix_fallocate(handle, 0, size)
            Path(name).stat()  # somebody may have swept it before it was locked
            return Path(name), handle
        except OSError:
            Path(name).unlink(missing_ok=True)
            os.close(handle)
    raise ValueError(f"weights for vLLM: no room for {size} bytes in {' or '.join(FOLDERS)}; free some, or set TMPDIR")


def sweep(folder: Path) -> None:
    """Remove this user's files there whose process is no more. Going by locks, not by process ids: containers that
    share their memory do not share those."""
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's, or gone
            handle = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)
