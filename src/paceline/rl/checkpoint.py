"""Checkpoints of a run. A crash at any time loses only the steps since the last checkpoint.

    checkpoints/step-000120/   buffer.safetensors, …: the tensors passed to `save`
                               learner/, …: folders whose writers were passed to `save`
                               state.json: the JSON state, and the size and SHA-256 of every file
                               best: an empty file in the best checkpoint so far

Invariants:
  - A folder named step-N is complete: it is written and synced under a hidden name, then renamed.
  - An existing checkpoint is not touched before its replacement is complete.
  - Only `save` changes files, and only it removes leftovers of crashed processes. Anyone may read at any time; one
    process at a time may write, which the run folder's lock ensures.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from paceline.files import open_run_file, read_run_json, sync
from paceline.model.tensor_file import TensorSpec, bytes_of, header_of

STATE, BEST = "state.json", "best"
CHUNK = 8 << 20
# Prefixes of hidden names: a checkpoint being written; one moved aside while the same step is saved again, which comes
# back if the save fails; one being deleted.
SCRATCH, ASIDE, DROPPED = ".new-", ".aside-", ".drop-"
Tensors = Mapping[str, Tensor]
Files = dict[str, dict[str, Any]]  # by name: num_bytes and sha256


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(self.path / f"{name}.safetensors")

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Wrap the code that loads this checkpoint: a missing key or file becomes a ValueError that names it."""
        remedy = "resume from another checkpoint, or with the version of Paceline that wrote this one"
        try:
            yield
        except KeyError as error:
            raise ValueError(f"{self.path}: the checkpoint lacks {error.args[0]!r}; {remedy}") from error
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(f"{self.path}: the checkpoint can't be read ({error}); {remedy}") from error


class Checkpoints:
    """The checkpoints in `folder`. Keeps the last `keep` and the best."""

    def __init__(self, folder: Path, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"train.keep_checkpoints = {keep}: must be >= 1")
        self.folder, self.keep = folder, keep

    def save(
        self,
        step: int,
        parts: Mapping[str, Tensors | Callable[[Path], Files]],
        state: Mapping[str, Any],
        *,
        best: bool = False,
    ) -> Path:
        """Write a checkpoint and return its folder. A part is either tensors, written to one file, or a function that
        writes and syncs files in a folder and returns them. `state` is JSON with string keys. Checkpoints of later
        steps are deleted: the run was resumed from an earlier one."""
        text = json.dumps(state)  # first, because it may raise TypeError
        name = f"step-{step:06d}"
        scratch, place, aside = (self.folder / f"{prefix}{name}" for prefix in (SCRATCH, "", ASIDE))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            scratch.mkdir()
            files: Files = {}
            for key, part in parts.items():
                if callable(part):
                    (scratch / key).mkdir()
                    files |= {f"{key}/{name}": file for name, file in part(scratch / key).items()}
                    sync(scratch / key)
                else:
                    files[f"{key}.safetensors"] = write_tensors(scratch / f"{key}.safetensors", part)
            content = {"step": step, "files": files, "state": json.loads(text)}
            content["checksum"] = _checksum(content)
            _write_synced(scratch / STATE, [json.dumps(content, indent=1).encode()])
            if best:
                _write_synced(scratch / BEST, [])
            sync(scratch)
            if place.exists():
                place.rename(aside)
            scratch.rename(place)
            sync(self.folder)
        except BaseException as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if aside.exists() and not place.exists():
                aside.rename(place)
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):  # a lost rank is no disk error
                raise OSError(
                    error.errno,
                    f"{self.folder}: can't write the checkpoint of step {step} ({error.strerror or error}); earlier "
                    "checkpoints are unchanged. Free disk space or repair the folder, then continue with --resume",
                ) from error
            raise
        try:
            self._prune(step)
        except OSError as error:  # the new checkpoint is complete, so the run continues
            warnings.warn(f"can't remove an old checkpoint: {error}", RuntimeWarning, stacklevel=2)
        return place

    def latest(self) -> Checkpoint | None:
        """The last intact checkpoint; None if there is no checkpoint at all."""
        steps = self._steps()
        found = self._first_intact(reversed(steps.values()))
        if steps and found is None:
            raise ValueError(
                f"{self.folder}: every checkpoint is damaged ({', '.join(path.name for path in steps.values())}); "
                "restore one from a copy, or start a new run"
            )
        return found

    def best(self) -> Checkpoint | None:
        """The last intact checkpoint that was saved as the best."""
        return self._first_intact(path for path in reversed(self._steps().values()) if (path / BEST).exists())

    def num_bytes(self) -> int:
        """Of the newest checkpoint; 0 if there is none."""
        newest = list(self._steps().values())[-1:]
        return sum(file.stat().st_size for path in newest for file in path.rglob("*") if file.is_file())

    def _first_intact(self, paths: Iterable[Path]) -> Checkpoint | None:
        for path in paths:
            try:
                return _read(path)
            except (FileNotFoundError, NotADirectoryError, ValueError) as error:
                warnings.warn(f"checkpoint {path} is damaged and skipped: {error}", RuntimeWarning, stacklevel=3)
        return None

    def _steps(self) -> dict[int, Path]:
        """The folder of each step's checkpoint, in order of the steps."""
        found: dict[int, Path] = {}
        for prefix in (ASIDE, ""):  # a checkpoint that was moved aside counts until its replacement exists
            for path in self.folder.glob(f"{prefix}step-*"):
                number = path.name.removeprefix(f"{prefix}step-")
                if number.isdecimal():
                    found[int(number)] = path
        return dict(sorted(found.items()))

    def _remove_leftovers(self) -> None:
        """Of a crashed process: checkpoints half written, half deleted, or moved aside."""
        for path in self.folder.glob(f"{ASIDE}*"):
            place = self.folder / path.name.removeprefix(ASIDE)
            if place.exists():
                self._drop(path)
            else:
                path.rename(place)
        for prefix in (SCRATCH, DROPPED):
            for path in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(path)

    def _prune(self, step: int) -> None:
        for path in self.folder.glob(f"{ASIDE}*"):
            self._drop(path)
        steps = self._steps()
        past = [number for number in steps if number <= step]
        marked = [number for number in past if (steps[number] / BEST).exists()]
        for number in steps.keys() - {*past[-self.keep :], *marked[-1:]}:
            self._drop(steps[number])

    def _drop(self, path: Path) -> None:
        """Rename, then delete: a partly deleted checkpoint never has its final name."""
        dropped = path.with_name(DROPPED + path.name.removeprefix(ASIDE))
        shutil.rmtree(dropped, ignore_errors=True)
        path.rename(dropped)
        shutil.rmtree(dropped, ignore_errors=True)  # the next save deletes what is left


# ---- files ----


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Write and sync a safetensors file; returns its size and hash. Tensors may be views, share memory, and be on any
    device: they are copied one at a time."""
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    header, starts = header_of(specs, metadata)

    def parts() -> Iterator[memoryview | bytes]:
        yield header
        for name in starts:
            data = bytes_of(tensors[name])
            for at in range(0, len(data), CHUNK):
                yield data[at : at + CHUNK]

    return _write_synced(path, parts())


def _write_synced(path: Path, parts: Iterable[memoryview | bytes]) -> dict[str, Any]:
    """Write and sync a file; returns its size and hash. Hashing runs on its own thread, in parallel with writing."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for part in parts:
            hashed = hasher.submit(digest.update, part)
            unwritten = memoryview(part)
            while unwritten:
                unwritten = unwritten[file.write(unwritten) :]
            num_bytes += len(part)
            hashed.result()
        os.fsync(file.fileno())
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read(path: Path) -> Checkpoint:
    """Read an intact checkpoint. ValueError or FileNotFoundError names what is damaged. Other OSErrors may be temporary
    (a busy or unmounted disk), so they are not damage."""
    try:
        content = read_run_json(path / STATE)
        intact = content.pop("checksum", None) == _checksum(content)
    except (ValueError, RecursionError):  # not JSON at all
        intact = False
    if not intact:
        raise ValueError(f"{STATE} is not as it was written")
    kinds = {"step": int, "files": dict, "state": dict}
    if wrong := [key for key, kind in kinds.items() if not isinstance(content.get(key), kind)]:
        raise ValueError(f"{STATE} lacks {wrong[0]!r}")
    for name, file_info in content["files"].items():
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{STATE} names {name!r}, which is outside of the checkpoint")
        if not isinstance(file_info, dict) or not file_info.keys() >= {"num_bytes", "sha256"}:
            raise ValueError(f"{STATE} has no size and hash of {name}")
        with open_run_file(path / name) as file:
            if os.fstat(file.fileno()).st_size != file_info["num_bytes"]:
                raise ValueError(f"{name} is not {file_info['num_bytes']} bytes long")
            if hashlib.file_digest(file, "sha256").hexdigest() != file_info["sha256"]:
                raise ValueError(f"{name} is not as it was written")
    return Checkpoint(content["step"], path, content["state"])
