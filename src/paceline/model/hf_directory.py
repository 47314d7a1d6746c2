"""Writes Hugging Face directories: safetensors in files of limited size, with an index if there are several, and JSON
documents. Tensors are written one by one: memory is needed for one of them only."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.files import lock_file, sync
from paceline.model.tensor_file import TensorSpec, write_file

MAX_SHARD_BYTES = 5 * 10**9
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SCRATCH, LOCK = ".new-", ".lock"  # the prefix of a directory that is being written, and a file in it
Progress = Callable[[int, int], None]  # bytes done, and all bytes


def write_directory(
    directory: Path,
    tensors: Iterator[tuple[str, Tensor]],
    specs: Mapping[str, TensorSpec],
    documents: Mapping[str, dict[str, Any]],
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write tensors, then the JSON `documents` in order. The last document marks the directory as complete. `specs` are
    those of the tensors, in the same order."""
    directory.mkdir(parents=True, exist_ok=True)
    *_, last = documents
    (directory / last).unlink(missing_ok=True)
    for stale in (*directory.glob("model*.safetensors"), directory / INDEX):
        stale.unlink(missing_ok=True)
    done, total = 0, sum(spec.num_bytes for spec in specs.values())

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal done
        for name, tensor in tensors:
            done += tensor.nbytes
            progress(done, total)
            yield name, tensor

    shards, each = _shards(specs, max_shard_bytes), counted()
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for file, names in zip(files, shards, strict=True):
        write_file(directory / file, {name: specs[name] for name in names}, islice(each, len(names)))
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    for name, content in documents.items():
        _write_json(directory / name, content)


def _shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    """The tensors' names, in order, split into files of at most `max_bytes`."""
    shards: list[list[str]] = [[]]
    bytes_left = max_bytes
    for name, spec in specs.items():
        if spec.num_bytes > bytes_left and shards[-1]:
            shards.append([])
            bytes_left = max_bytes
        shards[-1].append(name)
        bytes_left -= spec.num_bytes
    return shards


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


# ---- atomic directories ----


@contextmanager
def new_directory(directory: Path, needed_bytes: int, spare_bytes: int = 0) -> Iterator[Path]:
    """An empty directory to write to. It gets its name when the block ends, so `directory` is complete or does not
    exist. What a killed process has left is replaced. Raises OSError if the disk has no room for `needed_bytes`, or if
    less than `spare_bytes` would be left."""
    directory = directory.resolve()  # a link's target gets the files
    scratch = directory.with_name(SCRATCH + directory.name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    size = f"it needs {needed_bytes / 1e9:.2f} GB"
    if _free_bytes(directory) < needed_bytes + spare_bytes:
        spare = f", and {spare_bytes / 1e9:.2f} GB must be left for the next checkpoint" if spare_bytes else ""
        raise OSError(errno.ENOSPC, f"{directory}: {size}{spare}, but {_free_space(directory)}")
    scratch.mkdir(exist_ok=True)
    lock = lock_file(scratch / LOCK)
    try:
        for left in scratch.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left.name != LOCK:
                left.unlink()
        yield scratch
        for path in (*scratch.rglob("*"), scratch):
            sync(path)
        scratch.rename(directory)
        sync(directory.parent)
        (directory / LOCK).unlink()
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        # The library tokenizers has no type of its own for such errors.
        if (isinstance(error, OSError) and not isinstance(error, ConnectionError)) or "os error" in str(error):
            reason = getattr(error, "strerror", None) or error
            raise OSError(
                getattr(error, "errno", None),
                f"{directory}: can't be written ({reason}); {size}, and {_free_space(directory)}. It is removed",
            ) from error
        raise
    finally:
        lock.close()


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory.parent).free


def _free_space(directory: Path) -> str:
    return (
        f"{directory.parent} has {_free_bytes(directory) / 1e9:.2f} GB free; free disk space, or choose a directory on "
        "another disk"
    )
