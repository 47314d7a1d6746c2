"""`paceline sweep`: find the fastest drafter and draft length for a model and prompts."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.build.config import load_config
from paceline.cli.app import (
    ConfigArguments,
    ConfigFile,
    JsonFile,
    Overrides,
    PlotFile,
    PromptsFile,
    check_outputs,
    comma_floats,
    comma_list,
    comma_numbers,
    command,
    err,
    exit_if,
    out,
    print_note,
    results_so_far,
    save_json,
    split_arguments,
    warn,
)
from paceline.report.table import render

if TYPE_CHECKING:
    from paceline.bench.sweep import Sweep


@command()
def sweep(
    arguments: ConfigArguments = None,
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Drafters: ngram, suffix, draft_model, eagle3, dspark, hybrid.", show_default="all available"
        ),
    ] = None,
    k: Annotated[str, typer.Option("--k", help="Draft lengths.")] = "1,3,5,7",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,16",
    temperature: Annotated[str, typer.Option(help="Temperatures; 0 is greedy.")] = "0,0.6,1",
    num_prompts: Annotated[int, typer.Option(help="Number of prompts, from the task or --prompts.")] = 4,
    num_samples: Annotated[int, typer.Option("-n", "--samples", help="Samples per prompt, as in an RL group.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens per completion.")] = 64,
    repeats: Annotated[int, typer.Option(help="Rounds per configuration, after one warm-up round.")] = 3,
    prompts_file: PromptsFile = None,
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Measure acceptance length, step cost and speed-up of drafters and draft lengths, and print the best ones.

    Every configuration is compared with plain decoding in the same engine and round. Results are medians over rounds.
    Ctrl-C prints the results so far.

    Examples:

    - `paceline sweep configs/quickstart.toml`
    - `paceline sweep configs/gsm8k.toml --drafters eagle3,hybrid --k 2,3,4 --batch 1,2,4 --temperature 1`
    """
    from paceline.bench import sweep as sweeps
    from paceline.bench.common import describe
    from paceline.bench.prompts import read_prompts
    from paceline.build.drafter import available_drafters
    from paceline.report import plot

    check_outputs(json_file, plot_file)
    config = load_config(*split_arguments(arguments, overrides, config_file))
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
    num = num_prompts * (num_samples if 0 in settings.temperatures else 1)  # that the sweep can use
    prompts = read_prompts(prompts_file)[:num] if prompts_file else sweeps.task_prompts(config, num)
    measured = sweeps.open_sweep(settings, prompts)
    with contextlib.closing(measured), results_so_far("interrupted; results so far:") as interrupted:
        run_sweep(measured)
    rows = measured.rows()
    best = sweeps.best_settings(rows)
    title = f"{config.model.name}: sweep, rule {config.speculation.rule}, {max_tokens} tokens"
    out.print(render(rows, sweeps.COLUMNS, title))
    out.print(render(best, sweeps.BEST_COLUMNS))
    show_notes(measured)
    content = {"interrupted": interrupted.is_set(), "settings": describe(settings), "rows": rows, "best": best}
    save_json(json_file, content)
    if plot_file is not None and measured.rounds:
        plot.save_sweep(rows, sweeps.COLUMNS, plot_file, title)
    exit_if(interrupted)
    if measured.differing():
        raise typer.Exit(1)


def show_notes(sweep: Sweep) -> None:
    settings = sweep.settings
    print_note(
        "– accept: mean acceptance length; per step: tokens per row and step; cost: step time / plain step time; "
        "draft: share of drafting in the step time; speed-up is about per step / cost"
    )
    if any(case.history == "warm" for case in sweep.cases()):
        print_note(
            f"– cold: the drafter's history is the same run; warm: it also has {settings.num_samples} earlier samples "
            "of each prompt"
        )
    if not settings.claims_identity:
        print_note(
            f"– speculation.rule = {settings.config.speculation.rule!r} samples the same distribution, not the same "
            "tokens: tokens per second are compared, tokens are not"
        )
    for case, (low, high) in sweep.unsteady().items():
        warn(
            f"unsteady: {case} varied from {low:.1f} to {high:.1f} tokens/s; other processes may have run on this "
            "machine, so its results are not reliable"
        )
    for case in sweep.differing():
        err.print(
            f"DIFFERENT TOKENS: {case}: not those of plain decoding, so its speed is not valid; please report this bug",
            style="bold red",
            soft_wrap=True,
        )


def run_sweep(sweep: Sweep) -> None:
    """Show a progress bar on a terminal, else print a line per run. The bar refreshes twice a second only, to leave the
    CPU to the engine."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal) as bars:
        task = bars.add_task("starting", total=None)
        announced = False

        def progress(what: str, done_s: float, total_s: float | None) -> None:
            nonlocal announced
            if total_s is not None and not announced:
                announced = True
                bars.reset(task, total=total_s)  # after the warm-up
                size = f"{len(sweep.cases())} configurations, {sweep.settings.repeats} rounds"
                err.print(f"{size}: about {timedelta(seconds=round(total_s))}; Ctrl-C prints the results so far")
            bars.update(task, description=what, completed=done_s)
            if not err.is_terminal:
                err.print(what)

        sweep.run(progress)
