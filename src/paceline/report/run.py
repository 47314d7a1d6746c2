"""Reads a run's folder for the report.

An unfinished run is no error: a file that is missing or ends within a line is left out or read as far as possible, with
a message in `notes`. Links are not followed, with a note too: the page must not contain anything from outside of the
folder. NaN and infinities are read as missing values.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.files import check_run_format, number, open_run_file, read_metrics, read_run_json, read_run_lines
from paceline.report.rollouts import Rollouts, choose

Record = dict[str, Any]
# Of drafting in an engine step: draft tokens were verified (all, or only as a probe); proposed and not selected; not
# proposed although planned; not planned.
OUTCOMES = ("verified", "probe", "not selected", "nothing proposed", "not planned")
COUNTS = ("num_emitted", "num_proposed", "num_draft_tokens", "num_accepted_tokens")
AMOUNTS = ("draft_s", "forward_s", "sample_s", "total_s", "expected_accepted")
MAX_CONFIG = 1 << 20  # characters of config.toml
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64)  # engine steps are grouped by number of rows; these are the upper bounds


@dataclass(slots=True)
class Run:
    folder: Path
    info: Record = field(default_factory=dict)  # run.json
    config: str = ""  # the text of config.toml
    settings: Record = field(default_factory=dict)  # config.toml, parsed
    steps: list[Record] = field(default_factory=list)  # metrics.jsonl, ascending, one record per step
    summary: Record = field(default_factory=dict)  # summary.json; empty while the run is not finished
    # trace.jsonl by upper bound of rows (0: more rows): sums of COUNTS and AMOUNTS, and number of steps by OUTCOMES
    engine: dict[int, Counter[str]] = field(default_factory=dict)
    rollouts: Rollouts = field(default_factory=Rollouts)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.info.get("name") or self.folder.resolve().name)

    @property
    def numbers(self) -> list[int]:
        return [int(record["step"]) for record in self.steps]

    def setting(self, section: str, key: str) -> Any:
        found = self.settings.get(section)
        return found.get(key) if isinstance(found, dict) else None

    def series(self, *path: str) -> list[float | None]:
        """One figure for every step; None if a step does not have it."""
        return [number(record, *path) for record in self.steps]

    def total(self, *path: str) -> float:
        return sum(value or 0.0 for value in self.series(*path))

    @property
    def max_staleness(self) -> int:
        """The configured value, or the largest observed one if the config is missing."""
        configured = self.setting("train", "max_staleness")
        if isinstance(configured, int):
            return configured
        return int(max((value for value in self.series("staleness_max") if value is not None), default=0))


def check_run(folder: Path) -> None:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a run, the one with metrics.jsonl in it")
    if not (folder / "run.json").exists() and not (folder / "metrics.jsonl").exists():
        raise ValueError(
            f"{folder} is not the folder of a run: run.json and metrics.jsonl are missing; "
            "`paceline train` prints the folder it writes"
        )


def read_run(folder: Path, growing: bool = False, only_metrics: bool = False) -> Run:
    """`growing`: the run is being written, so a last line without its end is no error. `only_metrics`: leave out the
    two large files, rollouts.jsonl and trace.jsonl."""
    check_run(folder)
    run = Run(folder)
    run.info = _read_json(folder / "run.json", run.notes)
    check_run_format(folder, run.info)
    run.config, run.settings = _read_config(folder / "config.toml", run.notes)
    run.steps = _read_metrics(folder / "metrics.jsonl", run.notes, growing)
    if not only_metrics:
        run.engine = _read_trace(folder / "trace.jsonl", run.notes, growing)
        offsets = list(_rollout_offsets(folder / "rollouts.jsonl", run.notes, growing))
        run.rollouts = choose(folder / "rollouts.jsonl", offsets)
    if os.path.lexists(folder / "summary.json"):
        run.summary = _read_json(folder / "summary.json", run.notes)
    else:
        reason = "The" if growing else "summary.json is missing: the"
        run.notes.append(f"{reason} run has not finished. Figures are of the steps so far.")
    return run


@contextmanager
def _noting(path: Path, notes: list[str], growing: bool = False) -> Iterator[None]:
    """A file that can't be read becomes a note; a missing one too, unless it is still to be written. The note has no
    folder, as the page already shows it."""
    try:
        yield
    except FileNotFoundError:
        if not growing:
            notes.append(f"{path.name} is missing.")
    except ValueError as error:
        notes.append(f"{path.name} is left out: {str(error).removeprefix(f'{path}: ')}.")


def _read_json(path: Path, notes: list[str]) -> Record:
    with _noting(path, notes):
        return read_run_json(path)
    return {}


def _read_config(path: Path, notes: list[str]) -> tuple[str, Record]:
    """The text, and the parsed values without validation: a report needs only some of them."""
    text = ""
    with _noting(path, notes), open_run_file(path) as file:
        found = file.read(MAX_CONFIG + 1).decode("utf-8", errors="replace")
        if len(found) > MAX_CONFIG:
            raise ValueError(f"larger than {MAX_CONFIG >> 20} MB")
        text = found
    try:
        return text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        notes.append(f"config.toml can't be read: {error}.")
        return text, {}


def _read_metrics(path: Path, notes: list[str], growing: bool) -> list[Record]:
    damaged: list[int] = []
    steps: list[Record] = []
    with _noting(path, notes, growing):
        steps = read_metrics(path, damaged, growing)
    _note_damage(path, damaged, notes)
    return steps


def read_lines(path: Path, notes: list[str], growing: bool = False) -> Iterator[tuple[int, Record]]:
    """(offset, record) of each valid line; the others become a note."""
    damaged: list[int] = []
    with _noting(path, notes, growing):
        yield from read_run_lines(path, damaged, growing)
    _note_damage(path, damaged, notes)


def _note_damage(path: Path, damaged: Sequence[int], notes: list[str]) -> None:
    if damaged:
        which = ", ".join(map(str, damaged[:5])) + (" …" if len(damaged) > 5 else "")
        lines = "line" if len(damaged) == 1 else "lines"
        notes.append(f"{path.name}: {lines} {which} can't be read (cut off or damaged); left out.")


def _rollout_offsets(path: Path, notes: list[str], growing: bool) -> Iterator[tuple[tuple[int, int, int, int], int]]:
    """((step, group, sample, branch), offset) of each rollout."""
    for offset, record in read_lines(path, notes, growing):
        key = (record.get("step"), record.get("group"), record.get("sample"), record.get("branch", 0))
        if all(isinstance(part, int) for part in key):
            yield key, offset  # type: ignore[misc]


def _read_trace(path: Path, notes: list[str], growing: bool) -> dict[int, Counter[str]]:
    totals: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for _, record in read_lines(path, notes, growing):
        rows = number(record, "num_rows")
        if rows is None:
            continue
        total = totals[next((bound for bound in ROW_BOUNDS if rows <= bound), 0)]
        total.update({"num_steps": 1, _outcome(record): 1} | {key: int(number(record, key) or 0) for key in COUNTS})
        total.update({key: number(record, key) or 0.0 for key in AMOUNTS})
    return {bound: totals[bound] for bound in (*ROW_BOUNDS, 0) if bound in totals}


def _outcome(record: Record) -> str:
    if record.get("is_probe") is True:
        return "probe"
    if number(record, "num_draft_tokens"):
        return "verified"
    if number(record, "num_proposed"):
        return "not selected"
    return "nothing proposed" if number(record, "num_planned") else "not planned"


def mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
