"""Safetensors files that are written and read tensor by tensor, so that memory is needed for one tensor only.

The library `safetensors` writes a file from all its tensors at once. It reads by mapping the file: pages that were read
count as the process's memory until the file is closed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class TensorSpec(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def header_of(
    specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The header of a file with these tensors, and where each of them starts in the file, in the file's order."""
    order = sorted(specs, key=lambda name: -specs[name].dtype.itemsize)  # wide elements first: every tensor is aligned
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        spec = specs[name]
        starts[name], end = end, end + spec.num_bytes
        header[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    text = struct.pack("<Q", len(text)) + text
    return text, {name: len(text) + start for name, start in starts.items()}


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, which may be a view and on any device."""
    flat = tensor.detach().cpu().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # tensors of at most one element may have any stride
    return flat.view(torch.uint8).numpy().data


def write_file(path: Path, specs: Mapping[str, TensorSpec], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write and sync a file with these tensors, which come in any order."""
    header, starts = header_of(specs, {"format": "pt"})
    with path.open("wb", buffering=0) as file:
        _write(file, header)
        for name, tensor in tensors:
            assert TensorSpec(tensor.dtype, tuple(tensor.shape)) == specs[name], name
            file.seek(starts.pop(name))
            _write(file, bytes_of(tensor))
        assert not starts, f"no tensors {sorted(starts)}"
        os.fsync(file.fileno())


def _write(file: Any, content: bytes | memoryview) -> None:
    unwritten = memoryview(content)
    while unwritten:
        unwritten = unwritten[file.write(unwritten) :]


class TensorFile:
    """Like an open `safe_open`, but `get_tensor` reads the file into new memory. The file stays readable if it is
    deleted meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped: Any = safe_open(path, "pt")  # checks the header; no page of a tensor is read
        self.keys, self.metadata, self.get_slice = self._mapped.keys, self._mapped.metadata, self._mapped.get_slice
        self._file = path.open("rb", buffering=0)
        (length,) = struct.unpack("<Q", self._file.read(8))
        self._header, self._start = json.loads(self._file.read(length)), 8 + length

    def get_tensor(self, name: str) -> Tensor:
        entry = self._header[name]
        if entry["dtype"] not in TORCH_DTYPES:
            raise SafetensorError(f"{name} has the dtype {entry['dtype']}, which is not supported")
        tensor = torch.empty(entry["shape"], dtype=TORCH_DTYPES[entry["dtype"]])
        unread = bytes_of(tensor)  # of the same memory
        try:
            self._file.seek(self._start + entry["data_offsets"][0])
            while unread:
                count = self._file.readinto(unread)
                if not count:
                    raise SafetensorError(f"{self.path} ends in {name}")
                unread = unread[count:]
        except OSError as error:  # to tell it from an error of the file that is written meanwhile
            raise SafetensorError(f"{self.path}: {error.strerror}") from error
        return tensor

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *failure: object) -> None:
        self._file.close()
