"""`paceline bench`: engines side by side, and what steps take."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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

bench_app = typer.Typer(help="Engines side by side, and what steps take.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@bench_app.command()
@friendly
def rollout(
    model: Annotated[str, typer.Option(help="One or more models, separated by commas.")] = "smollm2-135m",
    engines: Annotated[str, typer.Option(help="Of paceline, hf, vllm.")] = "paceline,hf,vllm",
    modes: Annotated[
        str,
        typer.Option(
            help="Of plain, ngram, suffix, draft_model, eagle3, hybrid; with a policy: suffix+auto, hybrid+das."
        ),
    ] = "plain",
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
    - `paceline bench rollout --engines paceline --modes plain,eagle3,eagle3+auto,hybrid+das --k 3 --json out.json`
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


@bench_app.command()
@friendly
def step(
    model: Annotated[str, typer.Option(help="A shape: qwen3-8b, qwen3-0.6b or smollm2-135m.")] = "qwen3-8b",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32",
    k: Annotated[
        str, typer.Option("--k", help="Draft lengths; 0 is plain, which the others are compared with.")
    ] = "0,3",
    drafter: Annotated[str, typer.Option(help="eagle3, or history (which has heard it all before).")] = "eagle3",
    policy: Annotated[str, typer.Option(help="static, or auto: what pays of at most k tokens a row.")] = "static",
    imposed_acceptance: Annotated[
        float | None,
        typer.Option(metavar="L", help="For timing only: drafted tokens stand by lot, L tokens a step in the mean."),
    ] = None,
    imposed_spread: Annotated[
        float, typer.Option(help="With it: how far chances of tokens differ, which auto sees; 0: all are alike.")
    ] = 0.25,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of every prompt.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Tokens of every completion.")] = 256,
    draft_vocab: Annotated[int, typer.Option(help="The head's vocabulary, at most.")] = 32000,
    head_dtype: Annotated[
        str, typer.Option(help="The head's large products: model, float8, or auto (float8 where it is faster).")
    ] = "auto",
    eager: Annotated[bool, typer.Option("--eager", help="The same kernels without CUDA graphs.")] = False,
    plain_torch: Annotated[bool, typer.Option("--plain-torch", help="Neither graphs nor kernels.")] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu for small shapes.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64.")] = "bfloat16",
    copy_rate: Annotated[float, typer.Option(help="Bytes per second, for the roofline; an H200's.")] = 4.26e12,
    matmul_rate: Annotated[float, typer.Option(help="FLOPs per second, for the roofline; an H200's.")] = 775e12,
    json_file: JsonFile = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="A .png or .html file.")] = None,
) -> None:
    """What the engine's decode steps take, by batch size and draft length, beside what the machine allows.

    The model has the shape that was asked for and random weights, made on the device. Figures are medians of whole
    engine steps in which every row verifies k tokens. Ctrl-C reports what was measured so far.

    Examples:

    - `paceline bench step --model qwen3-8b --batch 1,8,32,64,128,256 --k 0`
    - `paceline bench step --batch 1,8,32,128 --k 0,3 --imposed-acceptance 3.32 --json out.json --plot out.html`
    - `paceline bench step --batch 1,8,32 --k 0,3 --drafter history --imposed-acceptance 2`
    - `paceline bench step --model smollm2-135m --device cpu --dtype float32 --batch 1,4 --prompt-tokens 64`
    """
    from paceline.bench import step as steps
    from paceline.bench.roofline import Rates
    from paceline.report import plot

    for path in (json_file, plot_file):
        check_writable(path)
    plot.check_format(plot_file)
    chosen = steps.Settings(
        model=model,
        batches=comma_numbers("--batch", batch),
        draft_lengths=comma_numbers("--k", k),
        drafter=drafter,
        policy=policy,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        imposed_acceptance=imposed_acceptance,
        imposed_spread=imposed_spread,
        eager=eager,
        plain_torch=plain_torch,
        draft_vocab_size=draft_vocab,
        head_dtype=head_dtype,
        device=device,
        dtype=dtype,
        rates=Rates(copy_rate, matmul_rate),
    )
    rows: list[dict[str, Any]] = []
    interrupted = False
    try:
        with terminable():
            for row in steps.measure(chosen, err.print):
                rows.append(row)
                if row["note"]:
                    place = f"batch {row['batch']}, k {row['num_speculative_tokens']}"
                    err.print(f"{place}: {row['note']}", style="yellow", soft_wrap=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough: the report is not to be lost to a second one
        interrupted = True
        err.print("interrupted: what was measured so far follows", style="yellow")
    title = steps.title(chosen)
    out.print(render(rows, steps.columns(chosen), title))
    for note in steps.notes(chosen):
        out.print(f"– {note}", style="dim", soft_wrap=True)
    if imposed_acceptance is not None:
        out.print(steps.IMPOSED, style="bold yellow", soft_wrap=True)
    if json_file is not None:
        write_json(json_file, {"interrupted": interrupted, "settings": steps.describe(chosen), "rows": rows})
    measured = [row for row in rows if row["step_ms"] is not None]
    if plot_file is not None and measured:
        plot.save_steps(rows, steps.columns(chosen), plot_file, title)
    if interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise typer.Exit(130)
    if not measured:
        raise ValueError("nothing could be measured; the notes say why")


def run_bench(bench: Bench) -> None:
    """With a bar on a terminal, else a line per round. The bar moves twice a second: more would cost the engines."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal) as bars:
        task = bars.add_task("starting", total=bench.num_rounds)

        def progress(case: Case, what: str) -> None:
            description = f"{case.engine} {case.mode}, batch {case.batch}, {what}"
            bars.update(task, description=description, advance=1)
            if not err.is_terminal:
                err.print(description)

        bench.run(progress)
