"""`paceline bench`: engines side by side."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.app import (
    ConfigFile,
    JsonFile,
    Overrides,
    PromptsFile,
    app,
    comma_list,
    comma_numbers,
    err,
    friendly,
    out,
    settings,
    terminable,
)
from paceline.report.table import check_writable, render, write_json

if TYPE_CHECKING:
    from paceline.bench.rollout import Bench, Case

bench_app = typer.Typer(help="Engines side by side.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.command()
@friendly
def rollout(
    model: Annotated[str, typer.Option(help="One or more models, separated by commas.")] = "smollm2-135m",
    engines: Annotated[str, typer.Option(help="Of paceline, hf, vllm.")] = "paceline,hf,vllm",
    modes: Annotated[str, typer.Option(help="Of plain, ngram, suffix, draft_model.")] = "plain",
    k: Annotated[str, typer.Option("--k", help="Draft lengths of the modes that draft.")] = "4",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,16",
    max_tokens: Annotated[int, typer.Option(help="Tokens per completion; EOS is ignored.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Measured rounds per cell, after one warm-up.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of every engine.")] = 2,
    num_generations: Annotated[int, typer.Option(help="Samples per prompt within a batch, as in RL groups.")] = 1,
    seed: Annotated[int, typer.Option()] = 0,
    prompts_file: PromptsFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="A .png or .html file.")] = None,
) -> None:
    """Tokens per second of engines, drafters and batch sizes, in one interleaved run.

    Every engine has its own process with the same threads, prompts and lengths; figures are medians over repeats.
    Ctrl-C stops the engines and reports what was measured so far.

    Examples:

    - `paceline bench rollout --engines paceline,hf --modes plain,ngram,suffix`
    - `paceline bench rollout --engines paceline,vllm --batch 1,4,16 --json out.json --plot out.html`
    - `paceline bench rollout --engines paceline --modes plain,suffix --num-generations 8 --batch 16`
    """
    from paceline.bench.prompts import BUILTIN, read_prompts
    from paceline.bench.rollout import COLUMNS, Bench, Settings
    from paceline.report import plot

    for path in (json_file, plot_file):
        check_writable(path)
    plot.check_format(plot_file)
    chosen = Settings(
        models=comma_list(model),
        engines=comma_list(engines),
        modes=comma_list(modes),
        draft_lengths=comma_numbers("--k", k),
        batches=comma_numbers("--batch", batch),
        max_tokens=max_tokens,
        temperature=temperature,
        repeats=repeats,
        threads=threads,
        num_generations=num_generations,
        seed=seed,
        config=settings(config, overrides),
    )
    bench = Bench(chosen, read_prompts(prompts_file) if prompts_file else BUILTIN)
    interrupted = False
    try:
        with terminable():
            run_bench(bench)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough: the report is not to be lost to a second one
        interrupted = True
        err.print("interrupted: stopping the engines; what was measured so far follows", style="yellow")
    finally:
        bench.close()
    rows = bench.rows()
    title = f"rollout, {chosen.config.model.dtype}, {threads} threads, temperature {temperature:g}, {max_tokens} tokens"
    hidden = () if len(chosen.models) > 1 else ("model",)
    columns = {key: heading for key, heading in COLUMNS.items() if key not in hidden}
    out.print(render(rows, columns, f"{model}: {title}"))
    for note in bench.describe_notes():
        out.print(note, style="dim", soft_wrap=True)
    if json_file is not None:
        write_json(json_file, {"interrupted": interrupted, "settings": bench.describe(), "rows": rows})
    if plot_file is not None and bench.rounds:
        plot.save(rows, COLUMNS, plot_file, title)
    if interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise typer.Exit(130)
    if not bench.rounds:
        raise ValueError("nothing could be measured; the notes say why")


def run_bench(bench: Bench) -> None:
    """With a bar on a terminal, else a line per round. The bar moves twice a second: more would cost the engines."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal) as bars:
        task = bars.add_task("starting", total=bench.num_rounds)

        def progress(case: Case, what: str) -> None:
            description = f"{case.engine} {case.mode}, batch {case.batch}, {what}"
            bars.update(task, description=description, advance=1)
            if not err.is_terminal:
                err.print(description)

        bench.run(progress)
