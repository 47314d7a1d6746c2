"""Rollout files, line by line: plain, .gz or .xz, or standard input. Never more than a line is held.

Mistakes are errors that name the file and the line; with `skip_broken` they are counted instead.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, BinaryIO, cast

from paceline.files import BAD_ARCHIVE, MAX_LINE, open_maybe_packed, parse_json
from paceline.replay.formats import Formats
from paceline.replay.rounds import Record

TOO_LONG = b"{}\n"
ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz")


class Reader:
    """Files in the order given, a folder's in the order of the numbers in their names; "-" is standard input."""

    def __init__(self, paths: Sequence[str], formats: Formats | None = None, skip_broken: bool = False) -> None:
        self.paths = [path for given in paths for path in _files(given)]
        self.formats = formats or Formats()
        self.skip_broken = skip_broken
        self.num_broken = 0
        self.first_broken = ""

    @property
    def is_pipe(self) -> bool:
        """Whether it can be read only once."""
        return any(path == "-" or not Path(path).is_file() for path in self.paths)

    @property
    def num_bytes(self) -> int | None:
        """On disk, in all; None where nobody knows."""
        return None if self.is_pipe else sum(Path(path).stat().st_size for path in self.paths)

    def __iter__(self) -> Iterator[Record]:
        self.num_broken, self.first_broken = 0, ""
        num_records = 0
        for path in self.paths:
            for record in self._records(path):
                num_records += 1
                yield record
        if not num_records:
            broken = f" ({self.num_broken} broken lines were skipped, the first: {self.first_broken})"
            raise ValueError(f"{', '.join(self.paths)}: holds no rollouts{broken if self.num_broken else ''}")

    def _records(self, path: str) -> Iterator[Record]:
        name = "standard input" if path == "-" else path
        step = _step_of(path)
        if path == "-" and sys.stdin is None:
            raise ValueError("standard input is closed; give a file, or a pipe")
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as raw:
            at, can_tell = 0, raw.seekable()
            for number, line in _lines(raw, path, name):
                try:
                    record = self.formats.record(_parsed(line), step)
                except ValueError as error:
                    if number == 1 and line.startswith(b"PAR1"):
                        raise ValueError(
                            f"{name} is a parquet file, as TRL writes them; make it jsonl: "
                            "pandas.read_parquet(FILE).to_json(NEW, orient='records', lines=True)"
                        ) from None
                    self._broken(f"{name}, line {number}: {error}{_cut(line)}")
                    continue
                before, at = at, raw.tell() if can_tell and path != "-" else at + len(line)
                record.num_bytes = at - before
                yield record

    def _broken(self, message: str) -> None:
        if not self.skip_broken:
            raise ValueError(f"{message} (--skip-broken leaves such lines out)") from None
        self.num_broken += 1
        self.first_broken = self.first_broken or message


def _files(given: str) -> list[str]:
    path = Path(given)
    if given == "-" or not path.is_dir():
        if given != "-" and not path.exists():
            raise ValueError(f"{given}: no such file; give rollouts as jsonl (also .gz, .xz), a folder of them, or -")
        return [given]
    own = [path / f"rollouts{ending}" for ending in ENDINGS]  # a run's folder
    found = [file for file in own if file.is_file()][:1]
    found = found or sorted((f for f in path.iterdir() if f.name.endswith(ENDINGS)), key=lambda f: _numbers(f.name))
    if not found:
        raise ValueError(f"{given}: a folder without rollouts; expected rollouts.jsonl or other .jsonl files")
    return [str(file) for file in found]


def _numbers(name: str) -> list[tuple[int, str]]:
    """step2 before step10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _step_of(path: str) -> int | None:
    """The number that ends a file's name: 12.jsonl of verl, train_data_step12.jsonl of NeMo RL."""
    found = re.search(r"(\d{1,15})\.jsonl(\.gz|\.xz)?$", path)
    return int(found[1]) if found else None


def _opened(raw: BinaryIO, path: str) -> IO[bytes]:
    if path.endswith((".gz", ".xz")) and not cast(io.BufferedReader, raw).peek(1):
        raise ValueError(
            f"{path} is empty, not even an archive of nothing: was it cut off, or is it still to be written?"
        )
    return open_maybe_packed(raw, path)


def _lines(raw: BinaryIO, path: str, name: str) -> Iterator[tuple[int, bytes]]:
    """(its number, a line) of those that are not blank; TOO_LONG for one that is."""
    file = _opened(raw, path)
    number = 0
    while True:
        number += 1
        try:
            line = file.readline(MAX_LINE + 1)
        except BAD_ARCHIVE as error:
            raise ValueError(f"{name}, line {number}: the archive is damaged or cut off ({error})") from None
        if not line:
            return
        if len(line) > MAX_LINE:
            yield number, TOO_LONG  # before the rest of it is read, which may be without end
            while len(line) > MAX_LINE and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE + 1)
        elif not line.isspace():
            yield number, line


def _parsed(line: bytes) -> dict[str, object]:
    if line is TOO_LONG:
        raise ValueError(f"longer than {MAX_LINE >> 20} MB; is it jsonl, one rollout a line?")
    found = parse_json(line)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object; expected one rollout a line")
    return found


def _cut(line: bytes) -> str:
    """What a last line that does not end may tell."""
    whole = line.endswith(b"\n") or line.rstrip().endswith(b"}")
    return "" if whole else "; the file ends within it: was it cut off, or is it still being written?"
