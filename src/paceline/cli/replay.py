"""`paceline replay`: compare drafters and policies on recorded rollouts, without a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.app import (
    JsonFile,
    Overrides,
    comma_list,
    comma_numbers,
    command,
    err,
    out,
    print_note,
    save_json,
    split_settings,
    warn,
)
from paceline.report.table import check_writable, render

if TYPE_CHECKING:
    from paceline.replay.reader import Reader
    from paceline.replay.rounds import Round
    from paceline.replay.run import Cell, Result
    from paceline.speculation.cost import CostTable

COLUMNS = {
    "setting": "", "epoch": "epoch", "num_tokens": "tokens", "num_steps": "steps", "mean_acceptance_length": "length",
    "draft_acceptance_rate": "rate", "tokens_per_row_step": "per row", "makespan_s": "s", "plain_makespan_s": "plain s",
    "speedup": "speed-up", "draft_share": "drafting",
}  # fmt: skip
LEGEND = {
    "epoch": "cold is a problem's first epoch, warm are the later ones",
    "num_tokens": "tokens of the completions",
    "num_steps": "engine steps",
    "mean_acceptance_length": "acceptance length, the tokens per draft: accepted ones and one more",
    "draft_acceptance_rate": "share of the draft tokens that is accepted",
    "tokens_per_row_step": "tokens per sequence and engine step",
    "makespan_s": "seconds of generation with drafts",
    "plain_makespan_s": "seconds without drafts",
    "speedup": "plain s / s",
    "draft_share": "share of s in which the drafter works",
}
MIN_FULL_WIDTH = 100  # characters; a narrower terminal does not show WIDE_ONLY
WIDE_ONLY = ("num_steps", "draft_acceptance_rate", "draft_share")
MAX_NUM_BATCHED_TOKENS = 8192
INT32_MAX = 2**31 - 1

Rollouts = Annotated[
    list[str],
    typer.Argument(
        metavar="ROLLOUTS… [A.B=C]…",
        help="Jsonl files (also .gz, .xz), a folder of them, or a run; `-`: stdin. And settings.",
    ),
]
Cost = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="JSON file with a cost table.", show_default="of the run, if it is one"),
]
Hardware = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Name of a shipped cost table.", show_default="vllm-h200-qwen3-8b, except for a run"
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Tokenizer for text without token ids: directory, known name or hub id."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1, max=INT32_MAX, help="Maximum tokens per completion.", show_default="the longest truncated completion"
    ),
]
Prefill = Annotated[
    bool, typer.Option("--prefill", help="Count the time of prompts; needs a cost table measured with them.")
]
Order = Annotated[str, typer.Option(help="Which requests start first: arrival or longest.")]
Budget = Annotated[
    int | None, typer.Option(min=1, max=INT32_MAX, help="Maximum query tokens in a step.", show_default="8192")
]
SkipBroken = Annotated[bool, typer.Option("--skip-broken", help="Skip and count broken lines.")]


@command()
def replay(
    rollouts: Rollouts,
    cost: Cost = None,
    hardware: Hardware = None,
    drafter: Annotated[str, typer.Option(help="Drafters: suffix, ngram; eagle3, hybrid if recorded.")] = "suffix",
    policy: Annotated[str, typer.Option(help="Policies: static:K, das, auto, das:K, auto:K.")] = "static:3,auto",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,64",
    max_tokens: MaxTokens = None,
    max_num_batched_tokens: Budget = None,
    prefill: Prefill = False,
    order: Order = "arrival",
    tokenizer: Tokenizer = None,
    skip_broken: SkipBroken = False,
    epochs: Annotated[
        bool, typer.Option("--epochs", help="Print the results of every epoch, not only cold and warm.")
    ] = False,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Compare drafters and policies on recorded rollouts, without a model.

    Recorded tokens replace the model, and a cost table gives the step times. Acceptance is exactly that of the live
    engine with rule `coupled`. Epoch n has the n-th occurrence of every problem. The first epoch is called cold, the
    others warm.

    Examples:

    - `paceline replay runs/mine --drafter suffix,ngram --policy static:3,auto --batch 1,8,64`
    - `zstdcat rollouts.jsonl.zst | paceline replay - --cost table.json --json out.json`
    - `paceline replay verl/rollouts --tokenizer Qwen/Qwen3-8B`
    """
    from paceline.bench.common import check_choices, check_given, check_numbers
    from paceline.build.replay import build_replay, check_names, check_overrides
    from paceline.build.replay_costs import choose_costs, recorded_run
    from paceline.replay.run import Cell, RoundSource
    from paceline.replay.run import replay as run

    check_writable(json_file)
    drafters, policies, batches = comma_list(drafter), comma_list(policy), comma_numbers("--batch", batch)
    check_given(drafter=drafters, policy=policies)
    check_numbers(1, batch=batches)
    check_choices(("arrival", "longest"), order=order)
    check_names(drafters, policies)
    rollouts, given = split_settings(rollouts, overrides)
    check_overrides(tuple(given))
    costs = choose_costs(cost, hardware, recorded_run(rollouts))
    reader = open_reader(rollouts, tokenizer, skip_broken)
    make = functools.partial(
        build_replay, costs=costs.table, overrides=tuple(given),
        max_num_batched_tokens=max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS, prefill=prefill, order=order,
    )  # fmt: skip
    cells = [Cell(d, p, b) for b in batches for d in drafters for p in policies]
    for cell in cells:
        make(cell)  # raises errors in the settings before the work
    out.print(costs.describe(), soft_wrap=True)
    with _progress(reader, len(cells) + len(batches)) as progress:
        results = run(_with_heads(RoundSource(reader, max_tokens), drafters), reader.is_pipe, cells, make, progress)
    columns = {key: head for key, head in COLUMNS.items() if out.width >= MIN_FULL_WIDTH or key not in WIDE_ONLY}
    for size in batches:
        rows = [row for result in results if result.cell.batch == size for row in epoch_rows(result, epochs)]
        named = [{**row, "setting": f"{row['drafter']} {row['policy']}"} for row in rows]
        out.print(render(named, columns, f"{', '.join(rollouts)}: batch {size}"))
    for key, meaning in LEGEND.items():
        if key in columns:
            print_note(f"{columns[key]}: {meaning}")
    print_replay_notes(reader, costs.table, results)
    rows = [row for result in results for row in epoch_rows(result, True)]
    save_json(
        json_file, {"rollouts": rollouts, "cost": costs.table.name, "num_broken": reader.num_broken, "rows": rows}
    )


def _with_heads(rounds: Iterable[Round], drafters: Sequence[str]) -> Iterable[Round]:
    """The same rounds. Iteration raises ValueError if a drafter needs recorded head acceptance and there is none."""
    from paceline.build.replay import WITH_HEAD

    with_head = [drafter for drafter in drafters if drafter in WITH_HEAD]
    return _CheckedRounds(rounds, with_head[0]) if with_head else rounds


class _CheckedRounds:
    def __init__(self, rounds: Iterable[Round], drafter: str) -> None:
        self.rounds, self.drafter = rounds, drafter

    def __iter__(self) -> Iterator[Round]:
        for recorded in self.rounds:
            if recorded.head_accepted is None:
                raise ValueError(
                    f"--drafter {self.drafter}: rollouts of version {recorded.version} have no `head_accepted`, the "
                    "accepted lengths of a head's drafts; use suffix or ngram, or record them (see "
                    "docs/how-to/speculation.md)"
                )
            yield recorded


def open_reader(rollouts: list[str], tokenizer: str | None, skip_broken: bool) -> Reader:
    from paceline.build.replay import load_any_tokenizer
    from paceline.replay.formats import Formats
    from paceline.replay.reader import Reader

    if not rollouts:
        raise ValueError("no rollouts; give a jsonl file, a folder of them, or a run")
    return Reader(rollouts, Formats(load_any_tokenizer(tokenizer) if tokenizer is not None else None), skip_broken)


def epoch_rows(result: Result, every_epoch: bool) -> list[dict[str, Any]]:
    """A row per epoch, or for cold and warm epochs, then a row for all."""
    num_epochs = result.stats.num_epochs
    parts: dict[str, slice] = {}
    if every_epoch:
        parts = {str(epoch + 1): slice(epoch, epoch + 1) for epoch in range(num_epochs)}
    elif num_epochs > 1:
        parts = {"cold": slice(0, 1), "warm": slice(1, None)}
    parts["all"] = slice(None)
    cell = result.cell
    head = {"drafter": cell.drafter, "policy": cell.policy, "batch": cell.batch}
    return [{**head, "epoch": name, **result.summary(epochs)} for name, epochs in parts.items()]


def print_replay_notes(reader: Reader, costs: CostTable, results: Sequence[Result]) -> None:
    free = sorted({r.cell.drafter for r in results if r.cell.drafter != "hybrid"} - costs.drafts.keys())
    if free:
        print_note(f"The cost table has no draft times of {', '.join(free)}: assumed to be 0.")
    if reader.num_broken:
        warn(f"{reader.num_broken} broken lines were skipped; the first: {reader.first_broken}")


@contextmanager
def progress_bar(total: int | None, unit: str) -> Iterator[Callable[[str, int], None]]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal) as bars:
        task = bars.add_task(unit, total=total)
        yield lambda description, advance: bars.update(task, description=description, advance=advance)


@contextmanager
def _progress(reader: Reader, num_cells: int) -> Iterator[Callable[[Cell, int], None]]:
    """Progress in bytes of the file."""
    size = reader.num_bytes
    with progress_bar(size * num_cells if size is not None else None, "reading") as step:
        yield lambda cell, num_bytes: step(f"{cell.drafter} {cell.policy}, batch {cell.batch}", num_bytes)
