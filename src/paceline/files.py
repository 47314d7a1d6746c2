"""Reads and writes files that may be untrusted: data files, and files in a run's folder.

Reading a document or a line takes a bounded amount of memory. Decompression bombs are rejected early. Every error in a
file is a ValueError that names the file. Links in a run's folder are not followed.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import itertools
import json
import lzma
import os
import secrets
import stat
import weakref
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

MAX_JSON = 64 << 20  # bytes of one JSON document
MAX_LINE = 64 << 20  # bytes of one line of jsonl
# An archive is a decompression bomb if it unpacks to more than BOMB_BYTES and to more than BOMB_RATIO times the bytes
# that were read. For real jsonl the ratio is 5 to 50.
BOMB_BYTES, BOMB_RATIO = 4 << 20, 200
ENDINGS = (".gz", ".xz")
RUN_FORMAT = 3  # of the files in a run's folder; increased when a key of them changes
BAD_ARCHIVE = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


# ---- reading ----


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Bytes may start with a byte order mark. The ValueError does not name the file: the caller does."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("not valid JSON (nested too deep)") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason})") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError that names the file."""
    try:
        with path.open("rb") as file:
            return _object_in(file, path)
    except OSError as error:
        raise ValueError(f"{path}: can't be read ({error.strerror})") from None


def read_text(path: Path) -> str:
    """A plain file of UTF-8 text, of bounded size. Links are followed: people link their own files."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path}: not a plain file")
        text = file.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise ValueError(f"{path}: larger than {MAX_JSON >> 20} MB, so not what it should be")
    return text.decode()


def read_run_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run's folder. Raises FileNotFoundError if there is no such file, else
    ValueError."""
    with open_run_file(path) as file:
        return _object_in(file, path)


def check_run_format(folder: Path, info: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError if another version of Paceline wrote this run's folder. `info`: its run.json, if it was read
    already. A folder without run.json passes."""
    if info is None:
        if not os.path.lexists(folder / "run.json"):
            return
        info = read_run_json(folder / "run.json")
    if info and (found := info.get("format", 1)) != RUN_FORMAT:
        age = "a newer" if isinstance(found, int) and found > RUN_FORMAT else "an older"
        raise ValueError(
            f"{folder} was written by {age} version of Paceline (format {found}; this one reads {RUN_FORMAT}): start a "
            "new run, or use the version that wrote it"
        )


def _object_in(file: IO[bytes], path: Path) -> dict[str, Any]:
    text = file.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise ValueError(f"{path}: larger than {MAX_JSON >> 20} MB; is it the right file?")
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def open_run_file(path: Path) -> io.BufferedReader:
    """Open a file of a run's folder for reading. Raises ValueError for a link: an untrusted folder could make a report
    contain private files. Also for a pipe or a device, which could block or never end."""
    return cast(io.BufferedReader, _open_unlinked(path, "rb"))


def open_run_stream(path: Path) -> IO[bytes]:
    """Open or create a file of a run's folder for appending, unbuffered. Raises ValueError for a link."""
    return _open_unlinked(path, "ab+", buffering=0)


def _open_unlinked(path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    # O_NONBLOCK: opening a pipe would wait for the other end.
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)

    try:
        file: IO[bytes] = open(path, mode, buffering, opener=opener)  # noqa: SIM115
    except OSError as error:
        if path.is_symlink():
            raise ValueError(
                f"{path}: a link; links in a run's folder are not followed: put the file itself there"
            ) from None
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path}: can't be opened ({error.strerror})") from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError(f"{path}: not a plain file")
    return file


def read_run_lines(
    path: Path, damaged: list[int] | None = None, growing: bool = False
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(offset, JSON object) of each line of a jsonl file in a run's folder. Left out are lines that are cut off,
    damaged, or longer than MAX_LINE; their numbers are added to `damaged`, but not that of a last line that a `growing`
    file has no end of yet. Raises FileNotFoundError if there is no such file, ValueError if it can't be opened."""
    with open_run_file(path) as file:
        start = 0
        for number in itertools.count(1):
            line = part = file.readline(MAX_LINE)
            size = len(line)
            while part and not part.endswith(b"\n"):  # a longer line, or the last one
                part = file.readline(MAX_LINE)
                size += len(part)
            if not size:
                return
            is_whole, is_unfinished = size == len(line), not part
            record = _object_or_none(line) if is_whole else None
            if record is not None:
                yield start, record
            elif damaged is not None and not (is_whole and line.isspace()) and not (growing and is_unfinished):
                damaged.append(number)
            start += size


def _object_or_none(line: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(line.decode("utf-8", errors="replace"))
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def read_metrics(path: Path, damaged: list[int] | None = None, growing: bool = False) -> list[dict[str, Any]]:
    """The RL steps in a metrics.jsonl, ascending. If a step was written twice, the later line counts. Errors and the
    other arguments are those of `read_run_lines`."""
    lines = [line for _, line in read_run_lines(path, damaged, growing) if type(line.get("step")) is int]
    by_step = {line["step"]: line for line in lines if abs(line["step"]) < 2**53}
    return [by_step[step] for step in sorted(by_step)]


def number(record: Any, *path: str) -> float | None:
    """A number inside nested records. None if it is missing, not finite, or too large for a chart (1e100)."""
    for key in path:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    if isinstance(record, int | float) and not isinstance(record, bool) and abs(record) < 1e100:
        return float(record)
    return None


def open_maybe_packed(file: BinaryIO, name: str) -> IO[bytes]:
    """The content of a file. If the name ends in .gz or .xz, it is unpacked."""
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    return cast(IO[bytes], lzma.LZMAFile(file)) if name.endswith(".xz") else file


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The non-blank lines of a file, which may be compressed, with their numbers from 1."""
    with path.open("rb") as raw:
        file: IO[bytes] = raw
        if path.name.endswith(ENDINGS):
            file = io.BufferedReader(_Unpacked(raw, path), 2 * BOMB_BYTES)
        number = 0
        while True:
            number += 1
            try:
                line = file.readline(MAX_LINE + 1)
            except BAD_ARCHIVE as error:
                raise ValueError(f"{path}: the archive is damaged or cut off ({error})") from None
            if not line:
                return
            if len(line) > MAX_LINE:
                raise ValueError(f"{path}, line {number}: longer than {MAX_LINE >> 20} MB; is it jsonl?")
            if not line.isspace():
                yield number, line


class _Unpacked(io.RawIOBase):
    """The content of an archive; raises ValueError for a decompression bomb. It is read in blocks of more than
    BOMB_BYTES, so that a bomb is found before its content is used."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self._raw, self._path = raw, path
        self._file = open_maybe_packed(raw, path.name)
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        self._num_bytes += len(block)
        if self._num_bytes > max(BOMB_BYTES, BOMB_RATIO * self._raw.tell()):
            raise ValueError(
                f"{self._path}: the archive unpacks to more than {BOMB_RATIO} times its size, unlike real data; unpack "
                "it yourself if you trust it"
            )
        return len(block)


# ---- writing ----


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: to a temporary file in the same folder, which is then renamed. A link is replaced, not
    followed."""
    scratch = path.absolute().parent / f".{path.name}-{secrets.token_hex(8)}"
    # Not mkstemp: its files are for secrets, and to ask for the process's umask other threads' files must wait.
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # otherwise a power cut could leave an empty file
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(path: Path) -> IO[bytes]:
    """Lock a file for this process, until it is closed, and write the process id to it. Raises ValueError if another
    process holds the lock."""
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
    # A forked child must not inherit the lock: it may outlive a run that was killed.
    reference = weakref.ref(file)
    os.register_at_fork(after_in_child=lambda: held.close() if (held := reference()) is not None else None)
    return file


def is_plain_name(name: object) -> bool:
    """Whether this is the name of a file directly in a folder, not a path."""
    return isinstance(name, str) and bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "\0"}
