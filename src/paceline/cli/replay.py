"""`paceline replay` and `paceline advise`: drafters and policies over recorded rollouts, without a model."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.app import JsonFile, Overrides, app, comma_list, comma_numbers, err, friendly, out
from paceline.report.table import check_writable, render, write_json

if TYPE_CHECKING:
    from paceline.replay.reader import Reader
    from paceline.replay.rounds import Round
    from paceline.replay.run import Cell, Result
    from paceline.speculation.cost import CostTable

COLUMNS = {
    "setting": "", "epoch": "epoch", "tokens": "tokens", "steps": "steps", "mean_acceptance_length": "length",
    "acceptance_rate": "rate", "tokens_per_row_step": "per row", "makespan_s": "s", "plain_makespan_s": "plain s",
    "speedup": "speed-up", "draft_share": "drafting",
}  # fmt: skip
WIDE = 100  # characters; a narrower terminal gets fewer columns
LEFT_OUT = ("steps", "acceptance_rate", "draft_share")
GRID = ("static:1", "static:3", "static:5", "static:7", "auto:7")
READ_AHEAD = 4_000_000  # tokens that `advise` reads, unless all are asked for
MANY = 20_000  # tokens from which on starting processes for `advise` takes less than it saves
MOST_PROCESSES = 16
INT32_MAX = 2**31 - 1

Rollouts = Annotated[
    list[str],
    typer.Argument(
        metavar="ROLLOUTS…", help="jsonl (.gz, .xz), a folder of such files or a run's; - is standard input."
    ),
]
Cost = Annotated[str | None, typer.Option(metavar="FILE", help="A cost table: what steps take.")]
Hardware = Annotated[
    str | None, typer.Option(metavar="NAME", help="A shipped cost table.", show_default="vllm-h200-qwen3-8b")
]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="NAME", help="Directory, known name or hub id; for text without token ids.")
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1, max=INT32_MAX, help="How long a completion might become.", show_default="the longest that was cut off"
    ),
]
Prefill = Annotated[bool, typer.Option("--prefill", help="Prompts take time too; the cost table must know them.")]
Order = Annotated[str, typer.Option(help="Who begins first: arrival or longest.")]
Budget = Annotated[int, typer.Option(min=1, max=INT32_MAX, help="Query tokens in a step.")]
SkipBroken = Annotated[bool, typer.Option("--skip-broken", help="Leave out lines that can't be read, and count them.")]


@app.command()
@friendly
def replay(
    rollouts: Rollouts,
    cost: Cost = None,
    hardware: Hardware = None,
    drafter: Annotated[str, typer.Option(help="Of suffix, ngram; eagle3, hybrid where recorded.")] = "suffix",
    policy: Annotated[str, typer.Option(help="static:K, das, auto (or auto:K).")] = "static:3,auto",
    batch: Annotated[str, typer.Option(help="Sequences side by side.")] = "1,8,64",
    max_tokens: MaxTokens = None,
    max_num_batched_tokens: Budget = 8192,
    prefill: Prefill = False,
    order: Order = "arrival",
    tokenizer: Tokenizer = None,
    skip_broken: SkipBroken = False,
    epochs: Annotated[bool, typer.Option("--epochs", help="A row for every epoch, not cold and warm alone.")] = False,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """What drafters and policies would have brought on recorded rollouts, without a model.

    Recorded tokens stand for the model, a cost table for the machine. Acceptance is that of the live engine to the
    token (verification rule `coupled`); seconds are the table's. An epoch is how often a problem was seen: cold is the
    first time.

    Examples:

    - `paceline replay runs/mine --drafter suffix,ngram --policy static:3,auto --batch 1,8,64`
    - `zstdcat rollouts.jsonl.zst | paceline replay - --cost table.json --json out.json`
    - `paceline replay verl/rollouts --tokenizer Qwen/Qwen3-8B`
    """
    from paceline.build.replay import build_replay, check_names, check_overrides, frozen_costs
    from paceline.replay.run import Cell, Source
    from paceline.replay.run import replay as run

    check_writable(json_file)
    drafters, policies, batches = comma_list(drafter), comma_list(policy), comma_numbers("--batch", batch)
    for key, given in (("--drafter", drafters), ("--policy", policies)):
        if not given:
            raise ValueError(f"{key} is empty: name one or more")
    check_names(drafters, policies)
    check_overrides(tuple(overrides or ()))
    _check(batches, order)
    costs = frozen_costs(cost, hardware)
    reader = _reader(rollouts, tokenizer, skip_broken)
    make = functools.partial(
        build_replay, costs=costs, overrides=tuple(overrides or ()), max_num_batched_tokens=max_num_batched_tokens,
        prefill=prefill, order=order,
    )  # fmt: skip
    cells = [Cell(d, p, b) for b in batches for d in drafters for p in policies]
    for cell in cells:
        make(cell)  # mistakes in the settings before the work
    with _progress(reader, len(cells) + len(batches)) as progress:
        results = run(_with_heads(Source(reader, max_tokens), drafters), reader.is_pipe, cells, make, progress)
    columns = {key: head for key, head in COLUMNS.items() if out.width >= WIDE or key not in LEFT_OUT}
    for size in batches:
        rows = [row for result in results if result.cell.batch == size for row in _rows(result, epochs)]
        named = [{**row, "setting": f"{row['drafter']} {row['policy']}"} for row in rows]
        out.print(render(named, columns, f"{', '.join(rollouts)}: batch {size}, {costs.name}"))
    _notes(reader, costs, results)
    if json_file is not None:
        write_json(json_file, {
            "rollouts": rollouts, "cost": costs.name, "num_broken": reader.num_broken,
            "rows": [row for result in results for row in _rows(result, True)],
        })  # fmt: skip


@app.command()
@friendly
def advise(
    rollouts: Rollouts,
    cost: Cost = None,
    hardware: Hardware = None,
    batch: Annotated[str, typer.Option(help="Sequences side by side.")] = "1,8,32,128",
    generation_share: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Of an RL step's time.", show_default="by metrics.jsonl beside them, or 0.65"),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of the file, not some problems of it.")] = False,
    max_tokens: MaxTokens = None,
    max_num_batched_tokens: Budget = 8192,
    tokenizer: Tokenizer = None,
    skip_broken: SkipBroken = False,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Which drafter, how many tokens, what to expect of it, and when to leave it off; by replaying a small grid.

    Examples:

    - `paceline advise runs/mine`
    - `paceline advise rollouts.jsonl --hardware vllm-h200-qwen3-8b --batch 16,64,256 --generation-share 0.7`
    """
    from paceline.build.replay import MODEL_FREE, RECORDED, build_replay, check_overrides, frozen_costs
    from paceline.replay import advice
    from paceline.replay.run import Cell, Source
    from paceline.replay.run import replay as run

    check_writable(json_file)
    batches = comma_numbers("--batch", batch)
    _check(batches, "arrival")
    check_overrides(tuple(overrides or ()))
    costs = frozen_costs(cost, hardware)
    reader = _reader(rollouts, tokenizer, skip_broken)
    rounds, whole = advice.bounded(Source(reader, max_tokens), None if everything else READ_AHEAD)
    has_matches = any(recorded.matches is not None for recorded in rounds)
    drafters = (*MODEL_FREE, *(RECORDED if has_matches else ()))
    make = functools.partial(
        build_replay, costs=costs, overrides=tuple(overrides or ()), max_num_batched_tokens=max_num_batched_tokens
    )
    results: list[Result] = []
    num_processes = min(os.cpu_count() or 1, MOST_PROCESSES) if sum(r.num_emitted for r in rounds) >= MANY else 1
    notes: list[str] = [] if whole else [f"Only the file's first {READ_AHEAD:,} tokens were read; --all reads on."]
    with _bar(len(batches) * (1 + len(drafters) * len(GRID)), "replays") as step:
        for size in batches:
            some = advice.sample(rounds, None if everything else advice.tokens_to_look_at(size))
            if some.num_problems < some.num_problems_recorded:
                notes.append(
                    f"batch {size}: by {some.num_problems} of {some.num_problems_recorded} problems, "
                    f"{some.num_tokens:,} of {some.num_tokens_recorded:,} tokens; --all takes everything."
                )
            if (most := max(map(len, some.rounds))) < size:
                notes.append(f"batch {size}: the rounds have {most} requests at most, so it was never full.")
            done: set[Cell] = set()

            def progress(cell: Cell, num_bytes: int, done: set[Cell] = done) -> None:
                if cell not in done:
                    done.add(cell)
                    step(f"{cell.drafter} {cell.policy}, batch {cell.batch}", 1)

            cells = [Cell(drafter, policy, size) for drafter in drafters for policy in GRID]
            results += run(some.rounds, False, cells, make, progress, num_processes)
    share = generation_share if generation_share is not None else _recorded_share(rollouts)
    advised = advice.advise(results, 0.65 if share is None else share)
    if (caution := advice.caution(rounds)) is not None:
        advised["text"].append(caution)
    for line in advised["text"]:
        out.print(f"• {line}", soft_wrap=True)
    out.print()
    if advised["settings"] == {"speculation.method": "none"}:
        out.print("Do not speculate: no batch size gains from it.", style="bold")
    else:
        words = "  ".join(f"{key}={value}" for key, value in advised["settings"].items())
        out.print(f"One setting for all of them:  {words}", style="bold", soft_wrap=True)
    if share is None:
        notes.append("Generation was taken for 65% of a step; --generation-share says what it is.")
    for note in notes:
        out.print(note, style="dim", soft_wrap=True)
    _notes(reader, costs, results)
    if json_file is not None:
        grid = [row for result in results for row in _rows(result, True)]
        write_json(json_file, {**advised, "cost": costs.name, "notes": notes, "rows": grid})


def _with_heads(rounds: Iterable[Round], drafters: Sequence[str]) -> Iterable[Round]:
    """The same rounds; an error where a head is asked for and none is recorded."""
    from paceline.build.replay import RECORDED

    asked = [drafter for drafter in drafters if drafter in RECORDED]
    return _Checked(rounds, asked[0]) if asked else rounds


class _Checked:
    def __init__(self, rounds: Iterable[Round], drafter: str) -> None:
        self.rounds, self.drafter = rounds, drafter

    def __iter__(self) -> Iterator[Round]:
        for recorded in self.rounds:
            if recorded.matches is None:
                raise ValueError(
                    f'--drafter {self.drafter}: rollouts of version {recorded.version} have no "eagle3", what a head '
                    "would have got right; use suffix or ngram, or record it (docs/speculation.md)"
                )
            yield recorded


def _check(batches: Sequence[int], order: str) -> None:
    if not batches or min(batches) < 1:
        raise ValueError(f"--batch {','.join(map(str, batches))!r}: give one or more numbers from 1")
    if order not in ("arrival", "longest"):
        raise ValueError(f"--order {order!r}: must be arrival or longest")


def _reader(rollouts: list[str], tokenizer: str | None, skip_broken: bool) -> Reader:
    from paceline.build.replay import load_any_tokenizer
    from paceline.replay.formats import Formats
    from paceline.replay.reader import Reader

    return Reader(rollouts, Formats(load_any_tokenizer(tokenizer) if tokenizer is not None else None), skip_broken)


def _recorded_share(rollouts: Sequence[str]) -> float | None:
    from paceline.replay.advice import generation_share

    if len(rollouts) != 1 or rollouts[0] == "-":
        return None
    path = Path(rollouts[0])
    return generation_share((path if path.is_dir() else path.parent) / "metrics.jsonl")


def _rows(result: Result, every_epoch: bool) -> list[dict[str, Any]]:
    """Epochs (or cold and warm), then all together."""
    num_epochs = result.tally.num_epochs
    parts: dict[str, slice] = {}
    if every_epoch:
        parts = {str(epoch + 1): slice(epoch, epoch + 1) for epoch in range(num_epochs)}
    elif num_epochs > 1:
        parts = {"cold": slice(0, 1), "warm": slice(1, None)}
    parts["all"] = slice(None)
    cell = result.cell
    head = {"drafter": cell.drafter, "policy": cell.policy, "batch": cell.batch}
    return [{**head, "epoch": name, **result.figures(epochs)} for name, epochs in parts.items()]


def _notes(reader: Reader, costs: CostTable, results: Sequence[Result]) -> None:
    out.print(f"Costs: {costs.source or costs.name}", style="dim", soft_wrap=True)
    free = sorted({r.cell.drafter for r in results if r.cell.drafter != "hybrid"} - costs.drafts.keys())
    if free:
        out.print(f"The table does not know what drafting takes by {', '.join(free)}: taken for nothing.", style="dim")
    if reader.num_broken:
        first = reader.first_broken
        err.print(f"{reader.num_broken} broken lines were left out; the first: {first}", style="yellow")


@contextmanager
def _bar(total: int | None, unit: str) -> Iterator[Callable[[str, int], None]]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal) as bars:
        task = bars.add_task(unit, total=total)
        yield lambda description, advance: bars.update(task, description=description, advance=advance)


@contextmanager
def _progress(reader: Reader, num_cells: int) -> Iterator[Callable[[Cell, int], None]]:
    """By bytes of the file."""
    size = reader.num_bytes
    with _bar(size * num_cells if size is not None else None, "reading") as step:
        yield lambda cell, num_bytes: step(f"{cell.drafter} {cell.policy}, batch {cell.batch}", num_bytes)
