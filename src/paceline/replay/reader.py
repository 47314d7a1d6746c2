"""Read rollout files line by line: plain, .gz, .xz, or standard input. Only one line is in memory at a time.

An invalid line is an error that names the file and the line number; with `skip_broken` it is counted instead.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from paceline.files import (
    BAD_ARCHIVE,
    MAX_LINE,
    check_run_format,
    number,
    open_maybe_packed,
    parse_json,
    read_metrics,
)
from paceline.replay.formats import Formats
from paceline.replay.rounds import Record

TOO_LONG = b"{}\n"  # replaces a line of more than MAX_LINE bytes
ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.xz")


class Reader:
    """Iterates over the records of files in the given order, and of a folder's files in the order of the numbers in
    their names. "-" is standard input."""

    def __init__(self, paths: Sequence[str], formats: Formats | None = None, skip_broken: bool = False) -> None:
        self.paths = [path for given in paths for path in _files(given)]
        self.formats = formats or Formats()
        self.skip_broken = skip_broken
        self.num_broken = 0
        self.first_broken = ""

    @property
    def is_pipe(self) -> bool:
        """Whether the input can be read only once."""
        return any(path == "-" or not Path(path).is_file() for path in self.paths)

    @property
    def num_bytes(self) -> int | None:
        """Total size on disk; None for a pipe."""
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
            raise ValueError(f"{', '.join(self.paths)}: contains no rollouts{broken if self.num_broken else ''}")

    def _records(self, path: str) -> Iterator[Record]:
        name = "standard input" if path == "-" else path
        step = _step_of(path)
        if path == "-" and sys.stdin is None:
            raise ValueError("standard input is closed; give a file, or a pipe")
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as raw:
            at, is_seekable = 0, raw.seekable()
            for number, line in _lines(raw, path, name):
                try:
                    record = self.formats.record(_parsed(line), step)
                except ValueError as error:
                    if number == 1 and line.startswith(b"PAR1"):
                        raise ValueError(
                            f"{name} is a parquet file, as TRL writes them; convert it to jsonl: "
                            "pandas.read_parquet(FILE).to_json(NEW, orient='records', lines=True)"
                        ) from None
                    message = f"{name}, line {number}: {error}{_truncation_hint(line)}"
                    if not self.skip_broken:
                        raise ValueError(f"{message} (--skip-broken skips such lines)") from None
                    self.num_broken += 1
                    self.first_broken = self.first_broken or message
                    continue
                before, at = at, raw.tell() if is_seekable and path != "-" else at + len(line)
                record.num_bytes = at - before
                yield record


def _files(given: str) -> list[str]:
    path = Path(given)
    if given == "-" or not path.is_dir():
        if given != "-" and not path.exists():
            raise ValueError(f"{given}: no such file; give rollouts as jsonl (also .gz, .xz), a folder of them, or -")
        if path.name.startswith("rollouts.jsonl"):
            _check_complete(path.parent)
        return [given]
    check_run_format(path)
    _check_complete(path)
    candidates = [path / f"rollouts{ending}" for ending in ENDINGS]  # of a run's folder
    found = [file for file in candidates if file.is_file()][:1]
    found = found or sorted((f for f in path.iterdir() if f.name.endswith(ENDINGS)), key=lambda f: _numbers(f.name))
    if not found:
        raise ValueError(f"{given}: no rollouts in this folder; expected rollouts.jsonl or other .jsonl files")
    return [str(file) for file in found]


def _check_complete(run: Path) -> None:
    """Raise ValueError if this is the folder of a run that logged only some of its rollouts: its batches would look
    smaller than they were, and most problems would not come back in the next epoch."""
    try:
        steps = read_metrics(run / "metrics.jsonl")
    except (OSError, ValueError):  # not a run's folder, or not readable
        return
    num_samples, num_logged = (
        int(sum(number(step, key) or 0 for step in steps if "num_rollouts_logged" in step))
        for key in ("num_samples", "num_rollouts_logged")
    )
    if num_logged < num_samples:
        raise ValueError(
            f"{run / 'rollouts.jsonl'} has only {num_logged} of the {num_samples} rollouts of its run, because of "
            'train.log_rollouts; give a run with train.log_rollouts = "all"'
        )


def _numbers(name: str) -> list[tuple[int, str]]:
    """Sort key that puts step2 before step10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _step_of(path: str) -> int | None:
    """The number at the end of a file's name: 12.jsonl of verl, train_data_step12.jsonl of NeMo RL."""
    found = re.search(r"(\d{1,15})\.jsonl(\.gz|\.xz)?$", path)
    return int(found[1]) if found else None


def _lines(raw: BinaryIO, path: str, name: str) -> Iterator[tuple[int, bytes]]:
    """(line number, line) of each line that is not blank; TOO_LONG instead of a line that is too long."""
    if path.endswith((".gz", ".xz")) and not cast(io.BufferedReader, raw).peek(1):
        raise ValueError(f"{path} is empty and not a valid archive: was it cut off, or is it still being written?")
    file = open_maybe_packed(raw, path)
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
            yield number, TOO_LONG  # before the rest of the line is read, which may never end
            while len(line) > MAX_LINE and not line.endswith(b"\n"):
                line = file.readline(MAX_LINE + 1)
        elif not line.isspace():
            yield number, line


def _parsed(line: bytes) -> dict[str, object]:
    if line is TOO_LONG:
        raise ValueError(f"longer than {MAX_LINE >> 20} MB; is it jsonl, with one rollout per line?")
    found = parse_json(line)
    if not isinstance(found, dict):
        raise ValueError("not a JSON object; expected one rollout per line")
    return found


def _truncation_hint(line: bytes) -> str:
    """A hint for the last line of a file that ends within it."""
    is_complete = line.endswith(b"\n") or line.rstrip().endswith(b"}")
    return "" if is_complete else "; the file ends within this line: was it cut off, or is it still being written?"
