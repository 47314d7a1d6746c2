"""A learner's state as a folder of safetensors files, one per rank, each with the rows that its rank holds.

The layout is that of torch.distributed.checkpoint's HuggingFaceStorage: every file says in its header at which offset
its part of each tensor begins, so that any number of ranks, or torch itself, reads what any other number wrote, and
there is no pickle. It is written by our own writer, for a checkpoint's files are synced, and hashed as they are
written.
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

from paceline.model.sharding import first_row, is_divided, local
from paceline.rl.checkpoint import write_tensors

OFFSETS = "DCP_SHARDING_INFO"


def write_shard(folder: Path, rank: int, size: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """This rank's rows of what is divided, and at rank 0 what is not; the file's name, size and hash."""
    parts: dict[str, Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        part, first = local(tensor), [0] * tensor.ndim
        if is_divided(tensor):
            first[0] = first_row(tensor)
        if part.numel() if is_divided(tensor) else rank == 0:
            parts[name], offsets[name] = part, {"saved_offsets": first}
    path = folder / f"shard-{rank + 1:05d}-of-{size:05d}.safetensors"
    metadata = {"format": "pt", "DCP_VERSION": "1.0", OFFSETS: json.dumps(offsets)}
    return {path.name: write_tensors(path, parts, metadata)}


class Shards(Mapping[str, Tensor]):
    """The whole tensors of such a folder, each put together when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = ExitStack()
        self._parts: dict[str, list[tuple[int, Any]]] = {}  # by name: the first row, and the open file
        for path in sorted(folder.glob("*.safetensors")):
            file: Any = self._files.enter_context(safe_open(path, "pt"))
            offsets = json.loads((file.metadata() or {}).get(OFFSETS, "{}"))
            for name in list(file.keys()):
                first = offsets.get(name, {}).get("saved_offsets") or [0]
                self._parts.setdefault(name, []).append((first[0], file))
        if not self._parts:
            raise ValueError(f"{folder}: no learner's state is there; restore the checkpoint from a copy")

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
