"""A run is a folder: config.toml, run.json, the streams metrics, rollouts and trace (.jsonl), checkpoints/, and
checkpoint.json, which says which checkpoint was saved last.

What always holds: one process at a time writes here (an flock on `.lock`, gone with the process however it ends);
streams only grow, but for a resume, which cuts them back to where its checkpoint knew them; every other file is there
whole or not at all; no link in the folder is followed. Streams are valid JSON: what has no number (NaN, infinite) is
null.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import tomllib
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, Any

from paceline.files import open_run_file, open_run_stream, parse_json, read_run_json, replace_file
from paceline.report.table import to_json

STREAMS = ("metrics", "rollouts", "trace")
CONFIG, INFO, LAST, LOCK = "config.toml", "run.json", "checkpoint.json", ".lock"
DERIVED = ("summary.json", "report.html", "tensorboard")  # made of the streams' records


class RunFolder:
    """A run that this process holds. `create` and `open` make one; close it, or use it in a `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path / LOCK)
        self._streams: dict[str, IO[bytes]] = {}

    @staticmethod
    def create(path: Path | str | None, config_toml: str, info: Mapping[str, Any]) -> RunFolder:
        """A new run; without a path, in a folder of its own under runs/, named after its task and the time."""
        path = fresh_folder(config_toml) if path is None else Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; give a folder for the run")
        path.mkdir(parents=True, exist_ok=True)
        _check_unused(path)
        run = RunFolder(path)
        try:
            _check_unused(path)  # another process may have been quicker
            replace_file(path / CONFIG, config_toml.encode())
            run.write_json(INFO, info)
        except BaseException:
            run.close()
            raise
        return run

    @staticmethod
    def open(path: Path | str) -> RunFolder:
        """A run that is there, to go on with."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} holds no run ({path / CONFIG} is missing); give the folder of one to --resume")
        return RunFolder(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    # ---- streams ----

    def append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Add lines to a stream. They are the system's from here on: they outlive this process, if not a power cut."""
        stream, rest = self._stream(name), memoryview(b"".join(_line(record) for record in records))
        try:
            while rest:
                rest = rest[stream.write(rest) :]
        except OSError as error:
            raise OSError(error.errno, f"{stream.name}: can't write ({error.strerror})") from error

    def offsets(self) -> dict[str, int]:
        """How long every stream is, once all of it is on disk: for a checkpoint to remember."""
        lengths = {}
        for name in STREAMS:
            handle = self._stream(name).fileno()
            os.fsync(handle)
            lengths[name] = os.fstat(handle).st_size
        return lengths

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Cut every stream back to where a checkpoint knew it; one that it did not know is emptied."""
        for name in STREAMS:
            stream, end = self._stream(name), offsets.get(name, 0)
            length = os.fstat(stream.fileno()).st_size
            if length < end:
                path = self.path / f"{name}.jsonl"
                warnings.warn(
                    f"{path} has {length} bytes, though the checkpoint knew {end}: part of it was lost; going on with "
                    "what is there",
                    RuntimeWarning,
                    stacklevel=2,
                )
                with open_run_file(path) as file:
                    end = file.read().rfind(b"\n") + 1  # its last line may be torn
            os.ftruncate(stream.fileno(), end)

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        return read_stream(self.path, name)

    def _stream(self, name: str) -> IO[bytes]:
        assert name in STREAMS, f"no stream {name!r}; there are {STREAMS}"
        if name not in self._streams:
            # Appended to and unbuffered: what `append` wrote is in the file.
            self._streams[name] = open_run_stream(self.path / f"{name}.jsonl")
        return self._streams[name]

    def set_aside(self, keep: Sequence[str] = ()) -> Path | None:
        """Move all streams but those to keep, and what was made of them, to a folder of their own, interrupted-N, and
        return it. None: no stream has a record yet."""
        streams = [self.path / f"{name}.jsonl" for name in STREAMS if name not in keep]
        if not any(path.exists() and path.stat().st_size for path in streams):
            return None
        number = next(n for n in count(1) if not os.path.lexists(self.path / f"interrupted-{n}"))
        aside = self.path / f"interrupted-{number}"
        aside.mkdir()
        for path in [*streams, *(self.path / name for name in DERIVED)]:
            if path.exists():
                path.rename(aside / path.name)
        return aside

    # ---- files ----

    def record_checkpoint(self, step: int) -> None:
        """A checkpoint of this step stands. Said beside the checkpoints, so that a resume notices if they are gone."""
        self.write_json(LAST, {"step": step})

    def last_checkpoint(self) -> int | None:
        """The step of the checkpoint that was saved last; None: none was saved yet."""
        path = self.path / LAST
        try:
            return int(read_run_json(path)["step"])
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, OverflowError):
            raise ValueError(f'{path} is damaged; write the last checkpoint\'s step there, as {{"step": 10}}') from None

    def write_config(self, config_toml: str) -> None:
        """The settings from here on."""
        replace_file(self.path / CONFIG, config_toml.encode())

    def write_json(self, name: str, content: Any) -> None:
        """All of it or nothing."""
        replace_file(self.path / name, to_json(_finite(content)))

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_stream(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """The records of a run's stream, which may be growing: a last line that is not whole yet is not there yet."""
    place = path / f"{name}.jsonl"
    try:
        with open_run_file(place) as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    try:
                        yield parse_json(line)
                    except ValueError as error:
                        raise ValueError(f"{place}, line {number}: {error}; mend it") from None
    except FileNotFoundError:
        return


def _lock(path: Path) -> IO[bytes]:
    """Hold a file for this process, whose id it then says. Never deleted: another process may be waiting at it."""
    file = open_run_stream(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().decode(errors="replace").strip() or "unknown"
        file.close()
        raise ValueError(
            f"{path.parent} is in use by process {owner}; wait until it ends, stop it, or choose another folder"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n".encode())
    # A forked child would hold the lock too, and go on doing so should it outlive a run that was killed.
    held = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: mine.close() if (mine := held()) is not None else None)
    return file


def _check_unused(path: Path) -> None:
    if (path / CONFIG).exists():
        raise ValueError(f"{path} already holds a run; go on with it by --resume {path}, or choose another folder")
    if others := sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".")):
        raise ValueError(f"{path} is not empty (it has {others[0]}); choose another folder for the run")


def fresh_folder(config_toml: str) -> Path:
    """runs/TASK-DATE-TIME, made here and now, so that no two runs get the same."""
    task = tomllib.loads(config_toml).get("task", {}).get("name", "run")
    word = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(task).stem).strip("-.") or "run"
    name = f"{word}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in count(1):
        path = Path("runs") / (name if attempt == 1 else f"{name}-{attempt}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError):  # NaN, a number of numpy's, half a surrogate pair: all rare
        return json.dumps(_finite(record), allow_nan=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    """The same with null for what JSON has no number for, and numpy's numbers and arrays as Python's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
