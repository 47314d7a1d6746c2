"""A run's state on disk, so that a crash at any instant costs no more than what came after the last checkpoint.

    checkpoints/step-000120/   buffer.safetensors, …: whatever tensors it was given
                               learner/, …: whatever folders others wrote there
                               state.json: the rest, with the size and SHA-256 of every file
                               best: an empty file in the best one so far

What always holds:
  - A folder called step-N is whole: it was written and synced under a hidden name, then renamed.
  - Nothing that stands is touched before what replaces it stands.
  - Only `save` changes anything, and it alone clears away what dead writers left; so anyone may read at any time, and
    one process at a time may write (the run folder's lock sees to that).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from paceline.files import open_run_file, read_run_json

STATE, BEST = "state.json", "best"
CHUNK = 8 << 20
# Hidden names: being written; moved aside for another of the same step, to come back if that one never stood; to go.
SCRATCH, ASIDE, DROPPED = ".new-", ".aside-", ".drop-"
Tensors = Mapping[str, Tensor]
Files = dict[str, dict[str, Any]]  # by name: size and hash
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path
    state: dict[str, Any]

    def tensors(self, name: str) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self.path / f"{name}.safetensors")

    @contextmanager
    def complete(self) -> Iterator[None]:
        """To restore within. What this checkpoint lacks is then an error that names it."""
        from safetensors import SafetensorError

        remedy = "go on from another checkpoint, or with the version of Paceline that wrote this one"
        try:
            yield
        except KeyError as error:
            raise ValueError(f"{self.path}: the checkpoint lacks {error.args[0]!r}; {remedy}") from error
        except (FileNotFoundError, SafetensorError) as error:
            raise ValueError(f"{self.path}: the checkpoint can't be read ({error}); {remedy}") from error


class Checkpoints:
    """The checkpoints in `folder`: the last `keep` and the best."""

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
        """Write a checkpoint and return its folder. A part is tensors, a file; or who writes a folder of its own, and
        says which files, all of them synced, are there. `state` is what JSON can say, with strings for keys.
        Checkpoints of later steps belong to a course that was given up, and go."""
        text = json.dumps(state)  # before anything is written: may raise TypeError
        name = f"step-{step:06d}"
        scratch, place, aside = (self.folder / f"{prefix}{name}" for prefix in (SCRATCH, "", ASIDE))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
            scratch.mkdir()
            files: Files = {}
            for key, part in parts.items():
                if callable(part):
                    (scratch / key).mkdir()
                    files |= {f"{key}/{name}": written for name, written in part(scratch / key).items()}
                    _sync_folder(scratch / key)
                else:
                    files[f"{key}.safetensors"] = write_tensors(scratch / f"{key}.safetensors", part)
            content = {"step": step, "files": files, "state": json.loads(text)}
            content["checksum"] = _checksum(content)
            _write_synced(scratch / STATE, [json.dumps(content, indent=1).encode()])
            if best:
                _write_synced(scratch / BEST, [])
            _sync_folder(scratch)
            if place.exists():
                place.rename(aside)
            scratch.rename(place)
            _sync_folder(self.folder)
        except BaseException as error:
            shutil.rmtree(scratch, ignore_errors=True)
            if aside.exists() and not place.exists():
                aside.rename(place)
            if isinstance(error, OSError) and not isinstance(error, ConnectionError):  # that is no matter of disks
                raise OSError(
                    error.errno,
                    f"{self.folder}: can't write the checkpoint of step {step} ({error.strerror or error}); those "
                    "before it are untouched. Make room or mend the folder, then go on with --resume",
                ) from error
            raise
        try:
            self._prune(step)
        except OSError as error:  # the new one stands; an old one in the way is no reason to end a run
            warnings.warn(f"can't remove an old checkpoint: {error}", RuntimeWarning, stacklevel=2)
        return place

    def latest(self) -> Checkpoint | None:
        """The last one that is whole; None where there are none at all."""
        steps = self._steps()
        found = self._first_good(reversed(steps.values()))
        if steps and found is None:
            raise ValueError(
                f"{self.folder}: every checkpoint is damaged ({', '.join(path.name for path in steps.values())}); "
                "restore one from a copy, or start a new run"
            )
        return found

    def best(self) -> Checkpoint | None:
        """The last that was saved as the best so far, if it is whole."""
        return self._first_good(path for path in reversed(self._steps().values()) if (path / BEST).exists())

    def _first_good(self, paths: Iterable[Path]) -> Checkpoint | None:
        for path in paths:
            try:
                return _read(path)
            except (FileNotFoundError, NotADirectoryError, ValueError) as error:
                warnings.warn(f"checkpoint {path} is damaged and is passed over: {error}", RuntimeWarning, stacklevel=3)
        return None

    def _steps(self) -> dict[int, Path]:
        """Where the checkpoint of each step stands, in order."""
        found: dict[int, Path] = {}
        for prefix in (ASIDE, ""):  # one that was moved aside counts while its place is empty
            for path in self.folder.glob(f"{prefix}step-*"):
                number = path.name.removeprefix(f"{prefix}step-")
                if number.isdecimal():
                    found[int(number)] = path
        return dict(sorted(found.items()))

    def _tidy(self) -> None:
        """What a dead writer left: half written, half deleted, or moved aside."""
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
        """Away from its name in one stroke, so that half a checkpoint never bears it; then for good."""
        doomed = path.with_name(DROPPED + path.name.removeprefix(ASIDE))
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)  # what resists is tried again by the next save


# ---- files ----


def write_tensors(path: Path, tensors: Tensors, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A safetensors file, synced; its size and hash. Tensors may be views, share memory, and be on any device: each is
    copied in its turn."""
    # Wide elements first, so that every tensor is aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[memoryview | bytes]:
        yield struct.pack("<Q", len(text)) + text
        for name in order:
            flat = tensors[name].detach().cpu().contiguous()
            flat = flat.as_strided((flat.numel(),), (1,))  # tensors of one element or none may have any stride
            data = flat.view(torch.uint8).numpy().data
            for at in range(0, len(data), CHUNK):
                yield data[at : at + CHUNK]

    return _write_synced(path, parts())


def _write_synced(path: Path, parts: Iterable[memoryview | bytes]) -> dict[str, Any]:
    """Write and sync a file; its size and hash. Hashing goes on beside the writing, on a thread of its own."""
    digest, num_bytes = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for part in parts:
            hashed = hasher.submit(digest.update, part)
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]
            num_bytes += len(part)
            hashed.result()
        os.fsync(file.fileno())
    return {"num_bytes": num_bytes, "sha256": digest.hexdigest()}


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read(path: Path) -> Checkpoint:
    """A checkpoint that is as it was written; ValueError or FileNotFoundError names what is not. Another OSError may
    pass (a disk that is busy or not mounted), so it is no damage."""
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
    for name, written in content["files"].items():
        if name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{STATE} names {name!r}, which is outside of the checkpoint")
        if not isinstance(written, dict) or not written.keys() >= {"num_bytes", "sha256"}:
            raise ValueError(f"{STATE} does not say what {name} must be")
        with open_run_file(path / name) as file:
            if os.fstat(file.fileno()).st_size != written["num_bytes"]:
                raise ValueError(f"{name} is not {written['num_bytes']} bytes long")
            if hashlib.file_digest(file, "sha256").hexdigest() != written["sha256"]:
                raise ValueError(f"{name} is not as it was written")
    return Checkpoint(content["step"], path, content["state"])
