"""A run's folder, read into a small model for the report.

Nothing here fails because a run is unfinished: a file that is missing or ends in the middle of a line costs what it
would have held, and `notes` says so. So does a link: it is not followed, for the page must not hold what is outside of
the folder. Numbers that are no numbers (NaN, infinities) are read as absent.
"""

from __future__ import annotations

import os
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.files import MAX_LINE, open_run_file, parse_json, read_run_json
from paceline.report.rollouts import Rollouts, choose

Record = dict[str, Any]
OUTCOMES = ("verified", "probe", "refused", "nothing found", "not asked")  # of drafting, in a step
MAX_CONFIG = 1 << 20  # characters of config.toml
ROW_BOUNDS = (1, 2, 4, 8, 16, 32, 64)  # engine steps are gathered by their number of rows, up to each of these


@dataclass(slots=True)
class EngineTotals:
    """Engine steps of like size, added up."""

    num_steps: int = 0
    num_emitted: int = 0
    num_proposed: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    expected_accepted: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)  # what became of drafting, step by step; see OUTCOMES
    draft_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    total_s: float = 0.0


@dataclass(slots=True)
class Run:
    folder: Path
    info: Record = field(default_factory=dict)  # run.json
    config: str = ""  # config.toml as it was written
    settings: Record = field(default_factory=dict)  # and parsed
    steps: list[Record] = field(default_factory=list)  # metrics.jsonl, ascending, one record per step
    summary: Record = field(default_factory=dict)  # summary.json; empty while the run goes on
    engine: dict[int, EngineTotals] = field(default_factory=dict)  # trace.jsonl by upper bound of rows; 0: beyond
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
        """One figure over the steps; None where a step has none."""
        return [number(record, *path) for record in self.steps]

    @property
    def max_staleness(self) -> int:
        """As configured; what was observed, where the config is gone."""
        configured = self.setting("train", "max_staleness")
        if isinstance(configured, int):
            return configured
        return int(max((lag for lag in self.series("lag_max") if lag is not None), default=0))


def number(record: Any, *path: str) -> float | None:
    """A finite number inside nested records, or None. What is beyond all measure (1e100) can't be drawn and is None."""
    for key in path:
        if not isinstance(record, Mapping):
            return None
        record = record.get(key)
    if isinstance(record, int | float) and not isinstance(record, bool) and abs(record) < 1e100:
        return float(record)
    return None


def read_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder of a run, the one with metrics.jsonl in it")
    if not (folder / "run.json").exists() and not (folder / "metrics.jsonl").exists():
        raise ValueError(
            f"{folder} is not the folder of a run: run.json and metrics.jsonl are missing; "
            "`paceline train` prints the folder it writes"
        )
    run = Run(folder)
    run.info = _read_json(folder / "run.json", run.notes)
    run.config, run.settings = _read_config(folder / "config.toml", run.notes)
    by_step = {r["step"]: r for r in read_lines(folder / "metrics.jsonl", run.notes) if _is_step(r.get("step"))}
    run.steps = [by_step[step] for step in sorted(by_step)]  # of a step written twice, the later one counts
    run.engine = _read_trace(folder / "trace.jsonl", run.notes)
    places = list(_places(folder / "rollouts.jsonl", run.notes))
    run.rollouts = choose(folder / "rollouts.jsonl", places)
    if os.path.lexists(folder / "summary.json"):
        run.summary = _read_json(folder / "summary.json", run.notes)
    else:
        run.notes.append("summary.json is not there: the run has not ended yet. Figures are of the steps so far.")
    return run


def _read_json(path: Path, notes: list[str]) -> Record:
    try:
        return read_run_json(path)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
    except ValueError as error:
        notes.append(_left_out(path, error))
    return {}


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and abs(value) < 2**53


def _left_out(path: Path, error: ValueError) -> str:
    """The error without the folder, which the page names already."""
    return f"{path.name} is left out: {str(error).removeprefix(f'{path}: ')}."


def _read_config(path: Path, notes: list[str]) -> tuple[str, Record]:
    """The text as it stands, and parsed without judging it: a report must also open for runs of other versions."""
    try:
        with open_run_file(path) as file:
            text = file.read(MAX_CONFIG + 1).decode("utf-8", errors="replace")
    except FileNotFoundError:
        notes.append("config.toml is missing.")
        return "", {}
    except ValueError as error:
        notes.append(_left_out(path, error))
        return "", {}
    if len(text) > MAX_CONFIG:
        notes.append(f"config.toml is left out: larger than {MAX_CONFIG >> 20} MB.")
        return "", {}
    try:
        return text, tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        notes.append(f"config.toml can't be read: {error}.")
        return text, {}


def read_lines(path: Path, notes: list[str]) -> Iterator[Record]:
    return (record for _, record in _read_lines_at(path, notes))


def _read_lines_at(path: Path, notes: list[str]) -> Iterator[tuple[int, Record]]:
    """(offset, record) of each whole line. Lines that are torn or broken are left out, and counted in a note."""
    try:
        opened = open_run_file(path)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
        return
    except ValueError as error:
        notes.append(_left_out(path, error))
        return
    offset, broken = 0, []
    with opened as file:
        # A line that is longer than MAX_LINE comes in pieces, which are broken lines.
        for count, line in enumerate(iter(lambda: file.readline(MAX_LINE), b""), 1):
            try:
                record = parse_json(line.decode("utf-8", errors="replace"))
            except ValueError:
                record = None
            if isinstance(record, dict):
                yield offset, record
            elif line.strip():
                broken.append(count)
            offset += len(line)
    if broken:
        which = ", ".join(map(str, broken[:5])) + (" …" if len(broken) > 5 else "")
        lines = "line" if len(broken) == 1 else "lines"
        notes.append(f"{path.name}: {lines} {which} can't be read (cut off or broken) and left out.")


def _places(path: Path, notes: list[str]) -> Iterator[tuple[tuple[int, int, int], int]]:
    """((step, group, sample), offset) of each rollout."""
    for offset, record in _read_lines_at(path, notes):
        key = (record.get("step"), record.get("group"), record.get("sample"))
        if all(isinstance(part, int) for part in key):
            yield key, offset  # type: ignore[misc]


def _read_trace(path: Path, notes: list[str]) -> dict[int, EngineTotals]:
    totals: defaultdict[int, EngineTotals] = defaultdict(EngineTotals)
    for record in read_lines(path, notes):
        rows = number(record, "num_rows")
        if rows is None:
            continue
        mine = totals[next((bound for bound in ROW_BOUNDS if rows <= bound), 0)]
        mine.num_steps += 1
        mine.outcomes[_outcome(record)] += 1
        for key in ("num_emitted", "num_proposed", "num_draft_tokens", "num_accepted_tokens"):
            setattr(mine, key, getattr(mine, key) + int(number(record, key) or 0))
        for key in ("draft_s", "forward_s", "sample_s", "total_s", "expected_accepted"):
            setattr(mine, key, getattr(mine, key) + (number(record, key) or 0.0))
    return {bound: totals[bound] for bound in (*ROW_BOUNDS, 0) if bound in totals}


def _outcome(record: Record) -> str:
    if str(record.get("reason", "")).startswith("probes"):
        return "probe"
    if number(record, "num_draft_tokens"):
        return "verified"
    if number(record, "num_proposed"):
        return "refused"
    return "nothing found" if number(record, "num_planned") else "not asked"


def mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
