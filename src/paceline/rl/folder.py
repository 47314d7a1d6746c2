"""The folder of a run: config.toml, run.json, the streams metrics, rollouts and trace (.jsonl), checkpoints/, and
checkpoint.json with the step of the last checkpoint.

Invariants:
  - One process at a time writes here. It holds an flock on `.lock`, which the system releases when the process ends.
  - Streams only grow, except on resume, which truncates them to the lengths that the checkpoint recorded.
  - Every other file is written atomically.
  - Symbolic links in the folder are not followed.
  - Streams are valid JSON lines: NaN and infinity become null.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import IO, Any

from paceline.files import (
    RUN_FORMAT,
    check_run_format,
    lock_file,
    open_run_file,
    open_run_stream,
    parse_json,
    read_run_json,
    replace_file,
)
from paceline.report.table import finite, to_json

STREAMS = ("metrics", "rollouts", "trace")
CONFIG, INFO, LAST, LOCK = "config.toml", "run.json", "checkpoint.json", ".lock"
DERIVED = ("summary.json", "report.html", "tensorboard", "exports")  # results of the steps in the streams


class RunFolder:
    """The folder of a run, locked by this process. Get one by `create` or `open`, and close it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # The file is never deleted: another process may wait for it.
        self._lock = lock_file(path / LOCK)
        self._streams: dict[str, IO[bytes]] = {}

    @staticmethod
    def create(path: Path | str | None, config_toml: str, info: Mapping[str, Any]) -> RunFolder:
        """Create the folder of a new run; without a path, runs/TASK-DATE-TIME."""
        path = fresh_folder(config_toml) if path is None else Path(path)
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file; choose a folder for the run")
        path.mkdir(parents=True, exist_ok=True)
        check_unused(path)
        run = RunFolder(path)
        try:
            check_unused(path)  # again, under the lock: another process may have created a run here
            run.write_config(config_toml)
            run.write_json(INFO, {"format": RUN_FORMAT, **info})
        except BaseException:
            run.close()
            raise
        return run

    @staticmethod
    def open(path: Path | str) -> RunFolder:
        """Open the folder of an existing run."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} holds no run ({path / CONFIG} is missing); give --resume the folder of a run")
        check_run_format(path)
        return RunFolder(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def exports(self) -> Path:
        return self.path / "exports"

    # ---- streams ----

    def append(self, name: str, records: Iterable[Mapping[str, Any]]) -> None:
        """Append lines to a stream. They are not synced: they survive this process, but not a power failure."""
        stream, unwritten = self._stream(name), memoryview(b"".join(_line(record) for record in records))
        try:
            while unwritten:
                unwritten = unwritten[stream.write(unwritten) :]
        except OSError as error:
            raise OSError(error.errno, f"{stream.name}: can't write ({error.strerror})") from error

    def offsets(self) -> dict[str, int]:
        """Sync every stream and return its length in bytes, for a checkpoint."""
        lengths = {}
        for name in STREAMS:
            handle = self._stream(name).fileno()
            os.fsync(handle)
            lengths[name] = os.fstat(handle).st_size
        return lengths

    def truncate(self, offsets: Mapping[str, int]) -> None:
        """Truncate every stream to its length in a checkpoint; to 0 if the checkpoint does not have it."""
        for name in STREAMS:
            stream, end = self._stream(name), offsets.get(name, 0)
            length = os.fstat(stream.fileno()).st_size
            if length < end:
                path = self.path / f"{name}.jsonl"
                warnings.warn(
                    f"{path} has {length} bytes, but the checkpoint recorded {end}: the end of the file was lost; "
                    "the run continues without it",
                    RuntimeWarning,
                    stacklevel=2,
                )
                with open_run_file(path) as file:
                    end = file.read().rfind(b"\n") + 1  # the last line may be incomplete
            os.ftruncate(stream.fileno(), end)

    def read(self, name: str) -> Iterator[dict[str, Any]]:
        return read_stream(self.path, name)

    def _stream(self, name: str) -> IO[bytes]:
        assert name in STREAMS, f"unknown stream {name!r}; choose from {STREAMS}"
        if name not in self._streams:
            # Unbuffered: what `append` wrote is in the file.
            self._streams[name] = open_run_stream(self.path / f"{name}.jsonl")
        return self._streams[name]

    def move_records_aside(self, keep: Sequence[str] = ()) -> Path | None:
        """Move the streams (except those to `keep`) and the files derived from them to a new folder, interrupted-N, and
        return it. None if no stream has a record."""
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
        """Record that the checkpoint of this step is complete. It is stored outside of checkpoints/: a resume notices
        if that folder is gone."""
        self.write_json(LAST, {"step": step})

    def last_checkpoint(self) -> int | None:
        """The step of the last checkpoint; None if none was saved yet."""
        return last_checkpoint(self.path)

    def write_config(self, config_toml: str) -> None:
        replace_file(self.path / CONFIG, config_toml.encode())

    def write_json(self, name: str, content: Any) -> None:
        replace_file(self.path / name, to_json(finite(content)))

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()
        self._lock.close()


def last_checkpoint(run: Path) -> int | None:
    """The step of a run's last checkpoint; None if none was saved yet."""
    path = run / LAST
    try:
        return int(read_run_json(path)["step"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, OverflowError):
        raise ValueError(f'{path} is damaged; write the last checkpoint\'s step to it, as {{"step": 10}}') from None


def read_stream(path: Path, name: str) -> Iterator[dict[str, Any]]:
    """The records of a run's stream. The run may still write to it: an incomplete last line is skipped."""
    stream = path / f"{name}.jsonl"
    try:
        with open_run_file(stream) as file:
            for number, line in enumerate(file, 1):
                if line.endswith(b"\n"):
                    try:
                        yield parse_json(line)
                    except ValueError as error:
                        raise ValueError(f"{stream}, line {number}: {error}; correct the line") from None
    except FileNotFoundError:
        return


def check_unused(path: Path) -> None:
    if (path / CONFIG).exists():
        raise ValueError(f"{path} already holds a run; continue it with --resume {path}, or choose another folder")
    if others := sorted(entry.name for entry in path.iterdir() if not entry.name.startswith(".")):
        raise ValueError(f"{path} is not empty (it contains {others[0]}); choose another folder for the run")


def fresh_folder(config_toml: str) -> Path:
    """Create runs/TASK-DATE-TIME. Creating it here prevents that two runs get the same folder."""
    task = tomllib.loads(config_toml).get("task", {})
    name = "-".join(each["label"] for each in task) if isinstance(task, list) else task.get("name", "run")
    task = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(name).stem).strip("-.") or "run"
    name = f"{task}-{datetime.now():%Y%m%d-%H%M%S}"
    for attempt in count(1):
        path = Path("runs") / (name if attempt == 1 else f"{name}-{attempt}")
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            return path
    raise AssertionError("unreachable")


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError):  # rare: NaN, a numpy number, half a surrogate pair
        return json.dumps(finite(record), allow_nan=False).encode() + b"\n"
