"""Send weights to vLLM's workers in buckets, through a file in shared memory.

A worker gets a bucket's path and the name, dtype and shape of each tensor; nothing is unpickled. A bucket is
valid until the next one is requested. The file is removed after the last one. It is locked while its process lives, so
that the next process can find and remove the file of a killed one.
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

from paceline.cluster import buckets
from paceline.model.weights import EMBED, LM_HEAD

MAX_BYTES = 256 << 20  # of a bucket, unless one tensor is larger
PREFIX = "paceline-weights-"
FOLDERS = ("/dev/shm", tempfile.gettempdir())  # the first may be small in a container


def write_buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: float = MAX_BYTES) -> Iterator[dict[str, Any]]:
    """Write weights bucket by bucket. Each item has the arguments of `read_bucket`."""
    file = _SharedFile()
    try:
        for tensors in buckets.split(weights, max_bytes):
            yield file.write(tensors)
    finally:
        file.remove()


def read_bucket(path: str, size: int, tensors: Iterable[Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Copies of a bucket's tensors: vLLM's loader may keep them until all tensors of a layer have arrived."""
    memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    for name, tensor in buckets.views(tensors, memory):
        yield name, tensor.to(device, copy=True)


def with_tied_head(weights: Iterator[tuple[str, Tensor]], hf_config: Any) -> Iterator[tuple[str, Tensor]]:
    """Send a tied LM head explicitly: on a CPU vLLM packs a copy of it, which would keep the old weights."""
    for name, tensor in weights:
        yield name, tensor
        if name == EMBED and getattr(hf_config, "tie_word_embeddings", False):
            yield LM_HEAD, tensor


def record_negative_zeros(
    weights: Iterator[tuple[str, Tensor]], negative_zeros: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Record the flat indices of -0.0 in each tensor: on a CPU vLLM's weights are read back by multiplication, which
    turns -0.0 into 0.0."""
    for name, tensor in weights:
        if tensor.is_floating_point() and tensor.device.type == "cpu":
            negative_zeros[name] = ((tensor == 0) & tensor.signbit()).flatten().nonzero()[:, 0]
        yield name, tensor


class _SharedFile:
    def __init__(self) -> None:
        self._path: Path | None = None
        self._lock = -1  # file descriptor
        self._memory = torch.empty(0, dtype=torch.uint8)

    def write(self, tensors: list[tuple[str, Tensor]]) -> dict[str, Any]:
        entries, memory = buckets.write(tensors, self._allocate)
        return {"path": str(self._path), "size": len(memory), "tensors": entries}

    def _allocate(self, size: int) -> Tensor:
        if self._path is None or size > len(self._memory):
            self.remove()
            self._path, self._lock = _create_file(size)
            self._memory = torch.from_file(str(self._path), shared=True, size=size, dtype=torch.uint8)
        return self._memory

    def remove(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._path = None


def _create_file(size: int) -> tuple[Path, int]:
    """A new locked file, readable by this user only. Its memory is allocated at once: writing to memory that can't be
    allocated would raise SIGBUS."""
    for folder in FOLDERS:
        remove_stale_files(Path(folder))
        try:
            descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
        except OSError:
            continue
        try:
            with suppress(OSError):  # no locks on this file system: then `remove_stale_files` removes nothing either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.posix_fallocate(descriptor, 0, size)
            Path(name).stat()  # another process may have removed it before it was locked
            return Path(name), descriptor
        except OSError:
            Path(name).unlink(missing_ok=True)
            os.close(descriptor)
    folders = " or ".join(FOLDERS)
    raise ValueError(f"weights for vLLM: not enough space for {size} bytes in {folders}; free some, or set TMPDIR")


def remove_stale_files(folder: Path) -> None:
    """Remove files of this user's ended processes. Locks show these; process ids do not, because containers with
    the same shared memory may have different ones."""
    for path in folder.glob(f"{PREFIX}*"):
        with suppress(OSError):  # another user's file, already removed, or locked
            descriptor = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(descriptor)
