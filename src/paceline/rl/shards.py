"""A learner's state as a folder of safetensors files: one per rank, with the rows that the rank holds.

The format is torch.distributed.checkpoint's HuggingFaceStorage: the header of each file has the offset of its part of
each tensor. Any number of ranks, or torch itself, can read it. There is no pickle. The files are written by
`checkpoint.write_tensors`, which syncs and hashes them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.model.sharding import first_row, is_sharded, local_tensor
from paceline.model.tensor_file import TensorFile
from paceline.rl.checkpoint import write_tensors

OFFSETS = "DCP_SHARDING_INFO"


def write_shard(folder: Path, rank: int, size: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write this rank's rows of the sharded tensors; rank 0 also writes the others. Returns the file's name, size and
    hash."""
    parts: dict[str, Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        part, first = local_tensor(tensor), [0] * tensor.ndim
        if is_sharded(tensor):
            first[0] = first_row(tensor)
        if part.numel() if is_sharded(tensor) else rank == 0:
            parts[name], offsets[name] = part, {"saved_offsets": first}
    path = folder / f"shard-{rank + 1:05d}-of-{size:05d}.safetensors"
    metadata = {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: json.dumps(offsets)}
    return {path.name: write_tensors(path, parts, metadata)}


class Shards(Mapping[str, Tensor]):
    """The full tensors of such a folder, each read on access. `mapped`: tensors in one file are mapped; else they are
    read into new memory, which is freed with the tensor."""

    def __init__(self, folder: Path, mapped: bool = True) -> None:
        self._files = ExitStack()
        self._parts: dict[str, list[tuple[int, Any]]] = {}  # by name: the first row, and the open file
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = self._files.enter_context(safe_open(path, "pt") if mapped else TensorFile(path))
            offsets = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
            for name in list(file.keys()):
                first = offsets.get(name, {}).get("saved_offsets") or [0]
                self._parts.setdefault(name, []).append((first[0], file))
        if not self._parts:
            raise ValueError(f"{folder}: no learner state found; restore the checkpoint from a copy")

    def __getitem__(self, name: str) -> Tensor:
        parts = sorted(self._parts[name], key=lambda part: part[0])
        tensors = [file.get_tensor(name) for _, file in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *failure: object) -> None:
        self._files.close()
