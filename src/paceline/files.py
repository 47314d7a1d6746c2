"""Files that others made, read within bounds; and files in a run's folder, which may be another's too.

What always holds: reading one document or one line takes a bounded amount of memory, an archive that is a bomb is
refused early, every mistake is a ValueError that names the file, and no link in a run's folder is followed.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import secrets
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

MAX_JSON = 64 << 20  # bytes of one JSON document
MAX_LINE = 64 << 20  # bytes of one line of jsonl
# An archive is a bomb where it has expanded to more than BOMB_BYTES, and that is more than BOMB_RATIO times what was
# read of it. Real jsonl is at 5 to 50.
BOMB_BYTES, BOMB_RATIO = 4 << 20, 200
ENDINGS = (".gz", ".xz")
BAD_ARCHIVE = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)


# ---- reading ----


def parse_json(text: str | bytes) -> Any:
    """The content of a JSON text; bytes may begin with a byte order mark. ValueError says what is wrong, not where."""
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except RecursionError:
        raise ValueError("not valid JSON (nested too deep)") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason})") from None
    except ValueError as error:
        raise ValueError(f"not valid JSON ({error})") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError names the file."""
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
    """The JSON object in a file of a run's folder. FileNotFoundError where it is not there; else ValueError."""
    with open_run_file(path) as file:
        return _object_in(file, path)


def _object_in(file: IO[bytes], path: Path) -> dict[str, Any]:
    text = file.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise ValueError(f"{path}: larger than {MAX_JSON >> 20} MB, so not what it should be")
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def open_run_file(path: Path) -> io.BufferedReader:
    """A file of a run's folder, for reading. A link is refused, wherever it leads: a folder that came from elsewhere
    could have private files read into a report. So is what would block or never end (a pipe, a device)."""
    return cast(io.BufferedReader, _open_unlinked(path, "rb"))


def open_run_stream(path: Path) -> IO[bytes]:
    """A file of a run's folder to append to, unbuffered; made where it is not there. A link is refused."""
    return _open_unlinked(path, "ab+", buffering=0)


def _open_unlinked(path: Path, mode: str, buffering: int = -1) -> IO[bytes]:
    # Without O_NONBLOCK opening a pipe would wait for the other end.
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


def open_maybe_packed(file: BinaryIO, name: str) -> IO[bytes]:
    """What is in a file, by the ending of its name: .gz and .xz are unpacked."""
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    return cast(IO[bytes], lzma.LZMAFile(file)) if name.endswith(".xz") else file


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(number, line) of the lines of a file, plain or packed, that are not blank. The number counts from 1."""
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
    """What is in an archive; ValueError where that is a bomb. Read in blocks of more than BOMB_BYTES, so that one is
    found before anything is made of it."""

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
                f"{self._path}: the archive unpacks to more than {BOMB_RATIO} times its size, which no true data does; "
                "unpack it yourself if you trust it"
            )
        return len(block)


# ---- writing ----


def replace_file(path: Path, content: bytes) -> None:
    """All of it or nothing: written beside its place, then moved there. A link at that place is replaced, not
    followed."""
    scratch = path.absolute().parent / f".{path.name}-{secrets.token_hex(8)}"
    # Not mkstemp: its files are for secrets, and to ask for the process's umask other threads' files must wait.
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave an empty file in its place
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def is_plain_name(name: object) -> bool:
    """Whether this names a file in a folder itself: no path, nothing above it, nothing elsewhere."""
    return isinstance(name, str) and bool(name) and name not in (".", "..") and not set(name) & {"/", "\\", "\0"}
