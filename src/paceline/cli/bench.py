"""`paceline bench`: compare engines and learners, and measure engine steps."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.app import (
    ConfigArguments,
    ConfigFile,
    JsonFile,
    Overrides,
    PlotFile,
    PromptsFile,
    app,
    check_outputs,
    comma_list,
    comma_numbers,
    command,
    err,
    exit_if,
    out,
    print_note,
    results_so_far,
    save_json,
    settings,
    split_arguments,
    warn,
)
from paceline.report.table import render

if TYPE_CHECKING:
    from paceline.bench.rollout import Bench, Case

bench_app = typer.Typer(help="Compare engines and learners, and measure engine steps.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@command(group=bench_app)
def rollout(
    arguments: ConfigArguments = None,
    model: Annotated[str, typer.Option(help="Models to compare.")] = "smollm2-135m",
    engines: Annotated[str, typer.Option(help="Engines to compare: paceline, hf, vllm.")] = "paceline,hf,vllm",
    modes: Annotated[
        str,
        typer.Option(
            help="Modes to compare: plain, ngram, suffix, draft_model, eagle3, dspark, hybrid; with a policy: "
            "suffix+auto, hybrid+das."
        ),
    ] = "plain",
    k: Annotated[str, typer.Option("--k", help="Draft lengths.")] = "4",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,16",
    max_tokens: Annotated[int, typer.Option(help="Tokens per completion; EOS is ignored.")] = 64,
    temperature: Annotated[float, typer.Option(help="Temperature; 0 is greedy.")] = 1.0,
    repeats: Annotated[int, typer.Option(help="Rounds per configuration, after one warm-up round.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of each engine.")] = 2,
    num_generations: Annotated[int, typer.Option(help="Samples per prompt in a batch, as in an RL group.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    prompts_file: PromptsFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Compare the tokens per second of engines, drafters and batch sizes.

    Every engine runs in its own process, with the same threads, prompts and lengths. Rounds are interleaved;
    results are medians. Ctrl-C stops the engines and prints the results so far.

    Examples:

    - `paceline bench rollout --engines paceline,hf --modes plain,ngram,suffix`
    - `paceline bench rollout --engines paceline,vllm --batch 1,4,16 --json out.json --plot out.html`
    """
    from paceline.bench.prompts import BUILTIN, read_prompts
    from paceline.bench.rollout import COLUMNS, Bench, Settings
    from paceline.report import plot

    check_outputs(json_file, plot_file)
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
        config=settings(*split_arguments(arguments, overrides, config)),
    )
    bench = Bench(chosen, read_prompts(prompts_file or BUILTIN))
    message = "interrupted: stopping the engines; results so far:"
    with contextlib.closing(bench), results_so_far(message) as interrupted:
        run_bench(bench)
    rows = bench.rows()
    title = f"rollout, {chosen.config.model.dtype}, {threads} threads, temperature {temperature:g}, {max_tokens} tokens"
    hidden = () if len(chosen.models) > 1 else ("model",)
    columns = {key: heading for key, heading in COLUMNS.items() if key not in hidden}
    out.print(render(rows, columns, f"{model}: {title}"))
    for note in bench.describe_notes():
        print_note(note)
    save_json(json_file, {"interrupted": interrupted.is_set(), "settings": bench.describe(), "rows": rows})
    if plot_file is not None and bench.rounds:
        plot.save(rows, COLUMNS, plot_file, title)
    exit_if(interrupted)
    if not bench.rounds:
        raise ValueError("nothing could be measured; see the notes")


@command(group=bench_app)
def step(
    model: Annotated[str, typer.Option(help="Model shape, such as qwen3-8b or smollm2-135m.")] = "qwen3-8b",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8,32",
    k: Annotated[str, typer.Option("--k", help="Draft lengths; with 0 (no drafts), print speed-ups over it.")] = "0,3",
    drafter: Annotated[
        str, typer.Option(help="Drafter: eagle3, dspark, or history (which already has every completion).")
    ] = "eagle3",
    policy: Annotated[str, typer.Option(help="Policy: static, or auto with at most k tokens per sequence.")] = "static",
    imposed_acceptance: Annotated[
        float | None,
        typer.Option(metavar="L", help="For timing only: accept draft tokens at random, with mean length L."),
    ] = None,
    imposed_spread: Annotated[
        float, typer.Option(help="Spread of the imposed acceptance probabilities, below 1; 0: all equal.")
    ] = 0.25,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Tokens per completion.")] = 256,
    lora_rank: Annotated[
        int, typer.Option(help="Rank of LoRA adapters beside the weights; 0: none, as with merged weights.")
    ] = 0,
    draft_vocab: Annotated[int, typer.Option(help="Maximum size of the head's vocabulary.")] = 32000,
    head_layers: Annotated[int, typer.Option(help="Layers of a DSpark head.")] = 2,
    markov_rank: Annotated[int, typer.Option(help="Rank of a DSpark head's Markov term.")] = 256,
    head_dtype: Annotated[
        str, typer.Option(help="Dtype of the head's large matrix products: model, float8 or auto.")
    ] = "auto",
    eager: Annotated[bool, typer.Option("--eager", help="Do not use CUDA graphs.")] = False,
    invariant: Annotated[
        bool | None,
        typer.Option("--invariant/--no-invariant", help="Batch-invariant kernels.", show_default="where supported"),
    ] = None,
    plain_torch: Annotated[
        bool, typer.Option("--plain-torch", help="Use neither CUDA graphs nor Triton kernels.")
    ] = False,
    device: Annotated[str, typer.Option(help="Device: cuda, or cpu for small shapes.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="Dtype: bfloat16, float16, float32 or float64.")] = "bfloat16",
    copy_rate: Annotated[float, typer.Option(help="Memory bandwidth for the roofline, bytes per second.")] = 4.26e12,
    matmul_rate: Annotated[float, typer.Option(help="Compute for the roofline, FLOPs per second.")] = 775e12,
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Measure decode steps by batch size and draft length, and compare them with the roofline.

    The model has random weights. Results are medians of whole engine steps in which every sequence verifies k draft
    tokens. Ctrl-C prints the results so far.

    Examples:

    - `paceline bench step --batch 1,8,32,128 --k 0,3 --imposed-acceptance 3.32 --json out.json --plot out.html`
    - `paceline bench step --model smollm2-135m --device cpu --dtype float32 --batch 1,4 --prompt-tokens 64`
    """
    from paceline.bench import step_settings as steps
    from paceline.bench.roofline import Rates
    from paceline.report import plot

    check_outputs(json_file, plot_file)
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
        invariant=invariant,
        lora_rank=lora_rank,
        draft_vocab_size=draft_vocab,
        head_layers=head_layers,
        markov_rank=markov_rank,
        head_dtype=head_dtype,
        device=device,
        dtype=dtype,
        rates=Rates(copy_rate, matmul_rate),
    )
    from paceline.bench.step import measure

    rows: list[dict[str, Any]] = []
    with results_so_far("interrupted; results so far:") as interrupted:
        for row in measure(chosen, err.print):
            rows.append(row)
            if row["note"]:
                warn(f"batch {row['batch']}, k {row['num_speculative_tokens']}: {row['note']}")
    title = steps.title(chosen)
    out.print(render(rows, steps.columns(chosen), title))
    for note in steps.notes(chosen):
        print_note(f"– {note}")
    if imposed_acceptance is not None:
        out.print(steps.IMPOSED, style="bold yellow", soft_wrap=True)
    save_json(json_file, {"interrupted": interrupted.is_set(), "settings": steps.describe(chosen), "rows": rows})
    measured = [row for row in rows if row["step_ms"] is not None]
    if plot_file is not None and measured:
        plot.save_steps(rows, steps.columns(chosen), plot_file, title)
    exit_if(interrupted)
    if not measured:
        raise ValueError("nothing could be measured; see the notes")


@command(group=bench_app)
def learner(
    arguments: ConfigArguments = None,
    model: Annotated[str, typer.Option(help="Model shape, with random weights, or directory.")] = "qwen3-1.7b",
    variants: Annotated[
        str | None,
        typer.Option(help="Variants: paceline, hf-compiled, hf-eager.", show_default="all; on a CPU not hf-compiled"),
    ] = None,
    sequences: Annotated[int, typer.Option(help="Rollouts of an update.")] = 256,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 96,
    completion_tokens: Annotated[int, typer.Option(help="Tokens per completion.")] = 512,
    per_prompt: Annotated[int, typer.Option(help="Rollouts per prompt.")] = 8,
    tokens_per_microbatch: Annotated[int | None, typer.Option(help="Sets learner.tokens_per_microbatch.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Sets learner.lora_rank.")] = None,
    masters: Annotated[str, typer.Option(help="Master weights of the hf variants: float32 or none.")] = "float32",
    updates: Annotated[int, typer.Option(help="Timed updates, after an untimed one.")] = 3,
    profile: Annotated[bool, typer.Option("--profile", help="Print the slowest kernels of paceline.")] = False,
    device: Annotated[str, typer.Option(help="Device: cuda, or cpu for small shapes.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="Dtype: bfloat16, float32 or float64.")] = "bfloat16",
    config: ConfigFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Compare the time of a policy update with transformers, on random tokens.

    Every variant runs in its own process; results are medians.

    Example: `paceline bench learner --model qwen3-8b --lora-rank 16 --profile --json out.json`
    """
    from paceline.bench import learner_settings as texts
    from paceline.bench.learner import measure

    check_outputs(json_file, None)
    given = settings(
        *split_arguments(arguments, overrides, config),
        learner__tokens_per_microbatch=tokens_per_microbatch,
        learner__lora_rank=lora_rank,
    )
    chosen = texts.Settings(
        model=model,
        variants=texts.default_variants(device) if variants is None else comma_list(variants),
        sequences=sequences,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        per_prompt=per_prompt,
        updates=updates,
        masters=masters,
        profile=profile,
        device=device,
        dtype=dtype,
        learner=given.learner,
    )
    rows: list[dict[str, Any]] = []
    with results_so_far("interrupted; results so far:") as interrupted:
        for row in measure(chosen, err.print):
            rows.append(row)
            if row["note"]:
                warn(f"{row['variant']}: not measured: {row['note']}")
    out.print(render(rows, texts.COLUMNS, texts.title(chosen)))
    for note in texts.notes(chosen):
        print_note(f"– {note}")
    for row in rows:
        if row["profile"]:
            out.print(render(row["profile"]["kernels"], texts.KERNEL_COLUMNS, texts.profile_title(row["profile"])))
    save_json(json_file, {"interrupted": interrupted.is_set(), "settings": texts.describe(chosen), "rows": rows})
    exit_if(interrupted)
    if all(row["update_s"] is None for row in rows):
        raise ValueError("nothing could be measured; see the notes")


def run_bench(bench: Bench) -> None:
    """Show a progress bar on a terminal, else print a line per round. The bar refreshes twice a second only, to leave
    the CPU to the engines."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=err, transient=True, refresh_per_second=2, disable=not err.is_terminal) as bars:
        task = bars.add_task("starting", total=len(bench.cases()) * (1 + bench.settings.repeats))

        def progress(case: Case, what: str) -> None:
            description = f"{case.engine} {case.mode}, batch {case.batch}, {what}"
            bars.update(task, description=description, advance=1)
            if not err.is_terminal:
                err.print(description)

        bench.run(progress)
