"""Simulated generation time of the recorded RL runs under every policy and batch size, on a cost table.

    python benchmarks/history/makespan.py [ROLLOUTS…] [--drafter suffix] [--jobs 2] [--json FILE] [--markdown FILE]
    python benchmarks/history/makespan.py --order longest        compares longest-expected-first with order of arrival

A round is an RL step: its requests arrive together, and it ends when the longest is finished. The makespan is the sum
of the rounds' times, separately for cold epochs (without history of the problems) and warm ones. Prompts take no time.

- plain: no speculation. static:K: always K tokens. auto: up to 7.
- das-printed and das: up to 7, with the paper's formula for budgets as printed, and corrected.

Small batches take many steps, so they use fewer problems (PROBLEMS; `--problems` overrides). These problems are in
different steps of an epoch: each epoch is replayed as one round, because warm rounds would otherwise be smaller than
cold ones.

The check at the end: `auto` is never slower than plain, and always within 2% of the best fixed length. If only `auto`
has changed, `--reuse FILE` takes all other results from an earlier --json.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from acceptance import RUNS, figures, first_problems, markdown, name_of, progress_bar
from printed_budgets import printed
from rich.console import Console

from paceline.build.replay import DEFAULT_HARDWARE, MAX_DRAFT_LENGTH, MODEL_FREE, build_replay, frozen_costs
from paceline.config import HEAD_METHODS
from paceline.replay.engine import Replay
from paceline.replay.rounds import Round
from paceline.replay.run import NO_DRAFTER, Cell
from paceline.report.table import check_writable, render, write_bytes, write_json
from paceline.speculation.das import DasPolicy

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LONGEST_BATCHES = (16, 32, 64)  # smaller than the number of requests of a round
PROBLEMS = {2: 2, 8: 4, 32: 16}  # the number of problems up to a batch size; all problems above the last
STATIC = ("static:1", "static:3", "static:5", "static:7")
POLICIES = ("plain", *STATIC, "das-printed", "das", "auto")
Table = tuple[str, list[dict[str, str]], dict[str, str]]  # title, rows, columns
SPANS = {"cold": slice(0, 1), "warm": slice(1, None), "all": slice(None)}
NEAR_STATIC, NOT_BELOW_PLAIN = 0.98, 0.999  # the least speed of `auto` relative to both; probes take 0.1% of its time
GOALS = "goals: -50% at T=0.6 warm, -35% at T=1 warm"


@dataclass(frozen=True, slots=True)
class Task:
    """One replay."""

    rollouts: str
    num_problems: int | None  # None: all
    batch: int
    policy: str
    order: str
    drafter: str
    hardware: str

    @property
    def run(self) -> str:
        return name_of(Path(self.rollouts))


def join_rounds(rounds: Sequence[Round]) -> Round:
    """One round with all requests, of the first round's version."""
    sizes = [len(r.tokens) for r in rounds]
    offsets = np.cumsum(sizes) - sizes
    before = np.cumsum([len(r) for r in rounds]) - [len(r) for r in rounds]

    def column(of: Callable[[Round], np.ndarray]) -> np.ndarray:
        return np.concatenate([of(r) for r in rounds])

    return Round(
        version=rounds[0].version,
        tokens=column(lambda r: r.tokens),
        start=np.concatenate([r.start + offset for r, offset in zip(rounds, offsets, strict=True)]),
        num_prompt=column(lambda r: r.num_prompt),
        num_total=column(lambda r: r.num_total),
        limit=column(lambda r: r.limit),
        problems=[problem for r in rounds for problem in r.problems],
        epochs=column(lambda r: r.epochs),
        previous_turn=np.concatenate(
            [np.where(r.previous_turn < 0, -1, r.previous_turn + n) for r, n in zip(rounds, before, strict=True)]
        ),
        head_accepted=None
        if rounds[0].head_accepted is None
        else np.concatenate([r.head_accepted for r in rounds if r.head_accepted is not None]),
        num_bytes=sum(r.num_bytes for r in rounds),
    )


@functools.cache  # per process: all policies of a batch size replay the same rounds
def rounds_of(rollouts: str, num_problems: int | None) -> list[Round]:
    rounds = first_problems(Path(rollouts), num_problems)
    if num_problems is None:
        return rounds
    epochs: dict[int, list[Round]] = {}
    for recorded in rounds:
        assert (recorded.epochs == recorded.epochs[0]).all()
        epochs.setdefault(int(recorded.epochs[0]), []).append(recorded)
    return [join_rounds(of_epoch) for of_epoch in epochs.values()]


def engine_of(task: Task) -> Replay:
    costs = frozen_costs(None, task.hardware)
    if task.policy == "plain":
        return build_replay(Cell(NO_DRAFTER, "static:0", task.batch), costs, order=task.order)
    known = task.policy.removesuffix("-printed")
    engine = build_replay(Cell(task.drafter, known, task.batch), costs, order=task.order)
    if task.policy == "das-printed":
        engine.policy = DasPolicy(costs, MAX_DRAFT_LENGTH, solve=printed)
    return engine


def replay_task(task: Task) -> dict[str, Any]:
    engine = engine_of(task)
    for recorded in rounds_of(task.rollouts, task.num_problems):
        engine.run_round(recorded)
    found: dict[str, Any] = {"run": task.run, **{k: v for k, v in asdict(task).items() if k != "rollouts"}}
    for name, span in SPANS.items():
        found[name] = {"makespan_s": float(engine.stats.total_s[span].sum()), **figures(engine.stats, span)}
    return found


def replay_all(tasks: Sequence[Task], jobs: int) -> Iterator[dict[str, Any]]:
    """Yields results in the order in which they finish."""
    if jobs == 1:
        yield from map(replay_task, tasks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(replay_task, task) for task in tasks]):
            yield done.result()


# -- results ----------------------------------------------------------------------------------------------------------


def percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}%"


class Grid:
    """Results by run, batch size, policy and order."""

    def __init__(self, cells: Iterable[dict[str, Any]]) -> None:
        self.cells = list(cells)
        self._at = {(c["run"], c["batch"], c["policy"], c["order"]): c for c in self.cells}

    def seconds(self, run: str, batch: int, policy: str, span: str, order: str = "arrival") -> float:
        return float(self._at[run, batch, policy, order][span]["makespan_s"])

    def tables(self) -> list[Table]:
        """For every run: cold, warm and all epochs. Rows are batch sizes, columns are policies: the seconds of plain
        decoding, and the relative difference of the others' makespans."""
        settings = dict.fromkeys((c["policy"], c["order"]) for c in self.cells)
        columns = {"batch": "batch", "problems": "problems", "plain_s": "plain, s"}
        columns |= {f"{p} {order}": p if order == "arrival" else f"{p}, {order} first" for p, order in settings}
        del columns["plain arrival"]
        found = []
        for run, span in dict.fromkeys((c["run"], span) for c in self.cells for span in SPANS):
            rows: dict[int, dict[str, str]] = {}
            for c in self.cells:
                if c["run"] == run:
                    row = rows.setdefault(c["batch"], {"batch": str(c["batch"])})
                    row["problems"] = str(c["num_problems"] or "all")
                    plain_s = self.seconds(run, c["batch"], "plain", span)
                    row["plain_s"] = f"{plain_s:.1f}"
                    row[f"{c['policy']} {c['order']}"] = percent(c[span]["makespan_s"] / plain_s)
            found.append((f"{run}, {span}: makespan relative to plain", list(rows.values()), columns))
        return found

    def auto_against_others(self) -> list[dict[str, Any]]:
        """The speed of `auto` relative to the best fixed length, plain decoding and DAS."""
        found = []
        for run, batch in dict.fromkeys((c["run"], c["batch"]) for c in self.cells):
            for span in SPANS:
                auto_s = self.seconds(run, batch, "auto", span)
                best = min(STATIC, key=lambda policy: self.seconds(run, batch, policy, span))
                found.append(
                    {
                        "run": run,
                        "batch": batch,
                        "span": span,
                        "best_static": best,
                        "of_best_static": self.seconds(run, batch, best, span) / auto_s,
                        "of_plain": self.seconds(run, batch, "plain", span) / auto_s,
                        "of_das": self.seconds(run, batch, "das", span) / auto_s,
                        "of_das_printed": self.seconds(run, batch, "das-printed", span) / auto_s,
                    }
                )
        return found


AUTO_COLUMNS = {
    "run": "run", "batch": "batch", "span": "", "best_static": "best static", "of_best_static": "auto / best static",
    "of_plain": "auto / plain", "of_das": "auto / das", "of_das_printed": "auto / das-printed",
}  # fmt: skip


def holds(row: Mapping[str, Any]) -> bool:
    return row["of_best_static"] >= NEAR_STATIC and row["of_plain"] >= NOT_BELOW_PLAIN - 1e-9


def check_auto(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    missed = [row for row in rows if not holds(row)]
    lines = [
        f"Required, auto >= {NEAR_STATIC} x every static and >= {NOT_BELOW_PLAIN} x plain, cold, warm and all: "
        f"{'HOLDS' if not missed else 'MISSED'} at {len(rows) - len(missed)} of {len(rows)}"
    ]
    for row in missed:
        lines.append(
            f"  missed: {row['run']} batch {row['batch']} {row['span']}: {row['of_best_static']:.3f} of "
            f"{row['best_static']}, {row['of_plain']:.3f} of plain"
        )
    for run in dict.fromkeys(row["run"] for row in rows):
        warm = [
            f"{percent(1 / row['of_plain'])} at {row['batch']}"
            for row in rows
            if row["run"] == run and row["span"] == "warm"
        ]
        lines.append(f"{run}, warm, makespan of auto relative to plain by batch size: {', '.join(warm)} ({GOALS})")
    return lines


def order_lines(grid: Grid) -> list[str]:
    """The makespan of longest-expected-first relative to order of arrival."""
    lines = []
    for run, batch, policy in dict.fromkeys((c["run"], c["batch"], c["policy"]) for c in grid.cells):
        of = functools.partial(grid.seconds, run, batch, policy)
        changes = [f"{span} {percent(of(span, 'longest') / of(span))}" for span in SPANS]
        lines.append(f"{run}, batch {batch}, {policy}: longest first relative to arrival: {', '.join(changes)}")
    return lines


def tasks_of(args: argparse.Namespace) -> list[Task]:
    longest = args.order == "longest"
    batches = [int(b) for b in args.batch.split(",")] if args.batch else LONGEST_BATCHES if longest else BATCHES
    found = []
    for path in args.rollouts:
        for batch in batches:
            problems = args.problems or next((num for bound, num in PROBLEMS.items() if batch <= bound), None)
            task = Task(str(path), problems, batch, "plain", "arrival", args.drafter, args.hardware)
            for policy in ("plain", "auto") if longest else POLICIES:
                for order in ("arrival", "longest") if longest else ("arrival",):
                    found.append(replace(task, policy=policy, order=order))
    return found


def key_of(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[key] for key in ("run", "num_problems", "batch", "policy", "order", "drafter", "hardware"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rollouts", nargs="*", type=Path, default=RUNS, help="default: both runs in benchmarks/data")
    parser.add_argument("--batch", help="default: 1,2,4 … 256; with --order longest 16,32,64")
    parser.add_argument("--drafter", choices=(*MODEL_FREE, *HEAD_METHODS), default="suffix")
    parser.add_argument("--order", choices=("arrival", "longest"), default="arrival")
    parser.add_argument("--hardware", default=DEFAULT_HARDWARE, help=f"cost table (default: {DEFAULT_HARDWARE})")
    parser.add_argument("--problems", type=int, help="use only the first N problems, at every batch size")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--reuse", type=Path, help="an earlier --json file: take all results but auto's from it")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    check_writable(args.json)
    check_writable(args.markdown)
    frozen_costs(None, args.hardware)  # reports a wrong name before any work
    tasks = tasks_of(args)
    wanted = {key_of({**asdict(task), "run": task.run}): task for task in tasks}
    cells = {}
    if args.reuse:
        earlier = json.loads(args.reuse.read_text())["cells"]
        cells = {key_of(c): c for c in earlier if key_of(c) in wanted and c["policy"] != "auto"}
    with progress_bar() as progress:
        bar = progress.add_task("makespan", total=len(wanted), completed=len(cells))
        for cell in replay_all([task for key, task in wanted.items() if key not in cells], args.jobs):
            cells[key_of(cell)] = cell
            progress.advance(bar)
            if args.json:
                write_json(args.json, {"cells": list(cells.values())})
    grid = Grid(cells[key] for key in wanted)
    report(grid, args)


def report(grid: Grid, args: argparse.Namespace) -> None:
    tables, against = grid.tables(), []
    if args.order == "longest":
        lines = order_lines(grid)
    else:
        against = grid.auto_against_others()
        rows = [{k: f"{v:.3f}" if isinstance(v, float) else str(v) for k, v in row.items()} for row in against]
        tables.append(("speed of auto / speed of others", rows, AUTO_COLUMNS))
        lines = check_auto(against)
    lines = [f"Drafter {args.drafter}, costs {args.hardware}.", *lines]
    console = Console(width=120)
    for title, rows, columns in tables:
        console.print(render(rows, columns, title))
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if args.json:
        write_json(args.json, {"cells": grid.cells, "auto": against, "lines": lines})
    if args.markdown:
        parts = [markdown(*table) for table in tables]
        write_bytes(args.markdown, "\n".join([*parts, *(f"- {line.strip()}" for line in lines), ""]).encode())


if __name__ == "__main__":
    main()
