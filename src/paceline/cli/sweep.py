"""`paceline sweep`: which drafter and draft length pay."""

from __future__ import annotations

import signal
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.app import (
    JsonFile,
    PromptsFile,
    app,
    comma_floats,
    comma_list,
    comma_numbers,
    err,
    friendly,
    out,
    terminable,
)
from paceline.cli.train import Settings, split_arguments
from paceline.config import load_config
from paceline.report.table import check_writable, render, write_json

if TYPE_CHECKING:
    from paceline.bench.sweep import Sweep


@app.command()
@friendly
def sweep(
    words: Settings = None,
    drafters: Annotated[
        str | None,
        typer.Option(help="Of ngram, suffix, draft_model, eagle3, hybrid.", show_default="all that the model has"),
    ] = None,
    k: Annotated[str, typer.Option("--k", help="Draft lengths.")] = "1,3,5,7",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,16",
    temperature: Annotated[str, typer.Option(help="Temperatures; 0 is greedy.")] = "0,0.6,1",
    num_prompts: Annotated[int, typer.Option(help="Prompts of the task, or of --prompts.")] = 4,
    num_samples: Annotated[int, typer.Option("-n", "--samples", help="Samples per prompt, as in RL groups.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Length limit of a completion.")] = 64,
    repeats: Annotated[int, typer.Option(help="Measured rounds per cell, after one warm-up.")] = 3,
    prompts_file: PromptsFile = None,
    json_file: JsonFile = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="A .png or .html file.")] = None,
) -> None:
    """Acceptance length, step cost and speed-up of draft lengths, drafters, batch sizes and temperatures, for your
    model and prompts; and the best setting.

    Each is measured against plain decoding by the same engine in the same round; figures are medians over repeats.
    Ctrl-C reports what was measured so far.

    Examples:

    - `paceline sweep configs/quickstart.toml`
    - `paceline sweep configs/gsm8k.toml --drafters eagle3,hybrid --k 2,3,4 --batch 1,2,4 --temperature 1`
    - `paceline sweep model.name=./my-model --prompts questions.jsonl --json out.json --plot out.html`
    """
    from paceline.bench import sweep as sweeps
    from paceline.bench.prompts import read_prompts
    from paceline.build import available_drafters
    from paceline.report import plot

    for path in (json_file, plot_file):
        check_writable(path)
    plot.check_format(plot_file)
    config = load_config(*split_arguments(words))
    settings = sweeps.Settings(
        drafters=available_drafters(config) if drafters is None else comma_list(drafters),
        draft_lengths=comma_numbers("--k", k),
        batches=comma_numbers("--batch", batch),
        temperatures=comma_floats("--temperature", temperature),
        num_prompts=num_prompts,
        num_samples=num_samples,
        max_tokens=max_tokens,
        repeats=repeats,
        config=config,
    )
    num = settings.most_prompts
    prompts = read_prompts(prompts_file)[:num] if prompts_file else sweeps.task_prompts(config, num)
    measured = sweeps.open_sweep(settings, prompts)
    interrupted = False
    try:
        with terminable():
            run_sweep(measured)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough: the report is not to be lost to a second one
        interrupted = True
        err.print("interrupted: what was measured so far follows", style="yellow")
    finally:
        measured.close()
    rows = measured.rows()
    best = sweeps.best_settings(rows)
    title = f"{config.model.name}: sweep, rule {config.speculation.rule}, {max_tokens} tokens"
    out.print(render(rows, sweeps.COLUMNS, title))
    out.print(render(best, sweeps.BEST_COLUMNS))
    show_notes(measured)
    if json_file is not None:
        content = {"interrupted": interrupted, "settings": measured.describe(), "rows": rows, "best": best}
        write_json(json_file, content)
    if plot_file is not None and measured.rounds:
        plot.save_sweep(rows, sweeps.COLUMNS, plot_file, title)
    if interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise typer.Exit(130)
    if measured.differing():
        raise typer.Exit(1)


def show_notes(sweep: Sweep) -> None:
    settings = sweep.settings
    out.print(
        "– accept: mean acceptance length; per step: tokens that a row gains in a step; cost: a step's time / a plain "
        "step's; draft: the share of it that drafting takes; speed-up is about per step / cost",
        style="dim",
        soft_wrap=True,
    )
    if any(case.history == "warm" for case in sweep.cases()):
        out.print(
            f"– cold: the drafter knows what is said in the same run; warm: it has read {settings.num_samples} other "
            "samples of each prompt before",
            style="dim",
            soft_wrap=True,
        )
    if not settings.claims_identity:
        rule = settings.config.speculation.rule
        out.print(
            f"– speculation.rule = {rule!r} samples the same distribution, not the same tokens: tokens per second are "
            "compared, identity is not claimed",
            style="dim",
            soft_wrap=True,
        )
    for case, (low, high) in sweep.unsteady().items():
        err.print(
            f"unsteady: {case} went from {low:.1f} to {high:.1f} tokens/s; the machine was busy with something else, "
            "so take its figures with care",
            style="yellow",
            soft_wrap=True,
        )
    for case in sweep.differing():
        err.print(
            f"DIFFERENT TOKENS: {case}: not what plain decoding emits, so its speed says nothing; please report it",
            style="bold red",
            soft_wrap=True,
        )


def run_sweep(sweep: Sweep) -> None:
    """With a bar on a terminal, else a line per run. The bar moves twice a second: more would cost the engine."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal) as bars:
        task = bars.add_task("starting", total=None)
        announced = False

        def progress(what: str, done_s: float, total_s: float | None) -> None:
            nonlocal announced
            if total_s is not None and not announced:
                announced = True
                bars.reset(task, total=total_s)  # the warm-up does not count
                size = f"{len(sweep.cases())} cells, {sweep.settings.repeats} rounds"
                err.print(f"{size}: about {timedelta(seconds=round(total_s))}; Ctrl-C shows what there is by then")
            bars.update(task, description=what, completed=done_s)
            if not err.is_terminal:
                err.print(what)

        sweep.run(progress)
