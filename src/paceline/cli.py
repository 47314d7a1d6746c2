"""The commands. Each is thin: parse, build, run, print. Heavy libraries are imported where they are used, so that
`--help` and mistakes in the settings answer at once."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from paceline import __version__
from paceline.config import Config, load_config
from paceline.native import NativeUnavailable
from paceline.report.table import check_writable, render, write_json

if TYPE_CHECKING:
    from paceline.bench.prompts import Prompt
    from paceline.bench.rollout import Bench, Case
    from paceline.types import Completion

app = typer.Typer(
    name="paceline",
    help="RL post-training for language models with exact speculative rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Engines side by side.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
Command = TypeVar("Command", bound=Callable[..., None])

Model = Annotated[str | None, typer.Option("--model", help="Known name, Hugging Face directory, or hub id.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="One setting, as in the TOML file; repeatable.")
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result here.")]


def friendly(command: Command) -> Command:
    """A user's mistake is one red message and exit code 2; Ctrl-C is 130. PACELINE_DEBUG=1 shows the traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BrokenPipeError:  # the reader (`| head`) has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (ValueError, NativeUnavailable, OSError, MemoryError) as error:
            if os.environ.get("PACELINE_DEBUG"):
                raise
            err.print(
                Text.assemble(("error: ", "bold red"), (str(error) or "not enough memory", "red")), soft_wrap=True
            )
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            err.print("interrupted", style="yellow")
            raise typer.Exit(130) from None

    return wrapped  # type: ignore[return-value]


def settings(path: Path | None, overrides: Sequence[str] | None, **flags: Any) -> Config:
    """The config of --config and --set, with the flags that were given on top."""
    # A JSON string or number is a TOML one; `section__key` spells section.key.
    given = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    return load_config(path, [*(overrides or []), *given])


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


@app.command()
@friendly
def pull(
    model: Annotated[str, typer.Argument(help="Known name (smollm2-135m), directory, or hub id.")] = "smollm2-135m",
) -> None:
    """Bring a model to this machine and print its directory.

    Example: `paceline pull smollm2-135m`
    """
    from paceline.model.store import resolve

    out.print(str(resolve(model, err)), soft_wrap=True)


# ---- generate ----


@app.command()
@friendly
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; `-` reads one from stdin.")] = None,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="jsonl with `prompt` or `question`; `-` is stdin.")
    ] = None,
    num_samples: Annotated[int, typer.Option("-n", min=1, help="Samples per prompt.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Without the model's chat template.")] = False,
    model: Model = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    method: Annotated[str | None, typer.Option(help="Drafter: none, ngram, suffix, draft_model.")] = None,
    k: Annotated[int | None, typer.Option("--k", help="Tokens drafted per step.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Length limit of a completion.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens, whatever the drafter.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Generate, and show which tokens were drafted and accepted.

    Examples:

    - `paceline generate "Why is the sky blue?"`
    - `paceline generate -n 4 --method suffix --k 6 --temperature 0.8 "Write a haiku."`
    - `paceline generate --prompts questions.jsonl --set engine.max_num_seqs=8 --json out.json`
    """
    from paceline.bench.prompts import encode
    from paceline.speculation.metrics import summarise
    from paceline.types import Request, noise_key

    cfg = settings(
        config,
        overrides,
        model__name=model,
        speculation__method=method,
        speculation__num_speculative_tokens=k,
        sampling__max_tokens=max_tokens,
        sampling__temperature=temperature,
        sampling__seed=seed,
    )
    check_writable(json_file)
    asked = gather_prompts(prompts or [], prompts_file)
    from paceline.build import build_engine

    engine = build_engine(cfg)
    params = cfg.sampling.params()
    requests = [
        Request(i * num_samples + j, ids, params, noise_key(cfg.sampling.seed, i, j), f"prompt {i}")
        for i, ids in enumerate(encode(engine.tokenizer, prompt, raw) for prompt in asked)
        for j in range(num_samples)
    ]
    start = time.perf_counter()
    with err.status("generating") as status:
        completions = engine.generate(
            requests, lambda done, total: status.update(f"generating: {done} of {total} done")
        )
    seconds = time.perf_counter() - start
    metrics = summarise(completions, engine.drain_trace())
    show_completions(engine.tokenizer, asked, completions, num_samples)
    num_tokens = sum(len(c.token_ids) for c in completions)
    figures = {
        "completions": len(completions),
        "tokens": num_tokens,
        "tokens_per_s": num_tokens / seconds,
        **{name: value for name, value in metrics.items() if name in SHOWN_METRICS},
    }
    out.print(render([{"k": k, "v": v} for k, v in figures.items()], {"k": "figure", "v": "value"}))
    if json_file is not None:
        write_json(
            json_file,
            {
                "model": cfg.model.name,
                "config": cfg.model_dump(mode="json"),
                "seconds": seconds,
                "tokens_per_s": num_tokens / seconds,
                "metrics": metrics,
                "completions": [
                    completion_record(engine.tokenizer, asked[i // num_samples], i // num_samples, c)
                    for i, c in enumerate(completions)
                ],
            },
        )
    engine.close()


SHOWN_METRICS = (
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "mean_acceptance_length",
    "mean_acceptance_length_per_request",
    "draft_acceptance_rate",
    "acceptance_rate_per_position",
)


def gather_prompts(words: Sequence[str], file: Path | None) -> list[Prompt]:
    from paceline.bench.prompts import parse_prompts, read_prompts

    asked: list[Prompt] = [sys.stdin.read() if word == "-" else word for word in words]
    if file is not None:
        asked += parse_prompts(sys.stdin, "stdin") if str(file) == "-" else read_prompts(file)
    if not asked:
        raise ValueError("no prompt; give one as an argument, `-` for stdin, or --prompts FILE")
    if not all(asked):
        raise ValueError("a prompt is empty")
    return asked


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Each token's share of the text. A character made of several tokens belongs to the last of them."""
    shares: list[str] = []
    done = ""
    for i in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:i], skip_special_tokens=True)
        if text.endswith("\ufffd") and i < len(ids):
            shares.append("")
            continue
        shares.append(text[len(done) :])
        done = text
    return shares


def show_completions(
    tokenizer: Any, asked: Sequence[Prompt], completions: Sequence[Completion], num_samples: int
) -> None:
    from paceline.bench.prompts import shown
    from paceline.types import Provenance

    styles = {
        Provenance.SAMPLED: "",
        Provenance.ACCEPTED: "bold green",
        Provenance.CORRECTED: "yellow",
        Provenance.BONUS: "cyan",
    }
    for i, completion in enumerate(completions):
        if i % num_samples == 0:
            out.print(Text(f"❯ {shown(asked[i // num_samples])}", style="bold"), soft_wrap=True)
        text = Text()
        for piece, origin in zip(
            pieces(tokenizer, completion.token_ids.tolist()), completion.provenance.tolist(), strict=True
        ):
            text.append(piece, styles[Provenance(origin)])
        text.append(f"  [{completion.finish_reason}, {len(completion.token_ids)} tokens]", "dim")
        out.print(text, soft_wrap=True)
        out.print()
    if any(c.num_drafts for c in completions):
        legend = Text("tokens: ")
        legend.append("drafted and accepted", styles[Provenance.ACCEPTED])
        legend.append(" · ")
        legend.append("draft corrected", styles[Provenance.CORRECTED])
        legend.append(" · ")
        legend.append("bonus after a whole draft", styles[Provenance.BONUS])
        legend.append(" · sampled without a draft")
        out.print(legend)


def completion_record(tokenizer: Any, prompt: Prompt, index: int, completion: Completion) -> dict[str, Any]:
    from paceline.types import Provenance

    return {
        "prompt_index": index,
        "prompt": prompt,
        "prompt_ids": list(completion.request.prompt_ids),
        "text": tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True),
        "token_ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
        "raw_logprobs": completion.raw_logprobs.tolist(),
        "provenance": [Provenance(origin).name.lower() for origin in completion.provenance.tolist()],
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "num_drafts": completion.num_drafts,
        "num_draft_tokens": completion.num_draft_tokens,
        "num_accepted_tokens": completion.num_accepted_tokens,
    }


# ---- bench ----


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
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="jsonl with `prompt` or `question`.")
    ] = None,
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


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM (a scheduler's time limit) ends a bench as Ctrl-C does: with its children, and with a report."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def comma_numbers(option: str, text: str) -> tuple[int, ...]:
    words = comma_list(text)
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{option} {text!r}: give numbers separated by commas, such as 1,4,16")
    return tuple(map(int, words))


# ---- verify ----


@app.command()
@friendly
def verify(
    model: Model = None,
    drafters: Annotated[str, typer.Option(help="Of ngram, suffix, draft_model.")] = "ngram,suffix,draft_model",
    quick: Annotated[bool, typer.Option("--quick", help="A shorter ladder, about a minute.")] = False,
    prompts_file: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="jsonl with `prompt` or `question`.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Climb the exactness ladder: does speculation change anything, on this model, with these drafters?

    Exit code 0 when every rung holds, 1 when one does not.

    Examples:

    - `paceline verify --model smollm2-135m`
    - `paceline verify --model ./my-model --drafters ngram,suffix --quick --json certificate.json`
    """
    from paceline.bench.prompts import BUILTIN, encode, read_prompts

    cfg = settings(config, overrides, model__name=model)
    check_writable(json_file)
    asked = read_prompts(prompts_file) if prompts_file else BUILTIN
    from paceline.model.store import load_tokenizer, resolve
    from paceline.verify.ladder import run_ladder

    tokenizer = load_tokenizer(resolve(cfg.model.name, err))
    ids = [encode(tokenizer, prompt) for prompt in asked]
    with err.status("verifying") as status:
        certificate = run_ladder(cfg, ids, comma_list(drafters), quick, lambda what: status.update(f"rung {what}"))
    rows = [
        {
            "rung": rung["name"],
            "result": "passed" if rung["passed"] else "FAILED",
            "seconds": rung["seconds"],
            "figures": ", ".join(f"{key} {brief(value)}" for key, value in rung.items() if is_figure(key, value)),
        }
        for rung in certificate["rungs"]
    ]
    out.print(render(rows, {"rung": "rung", "result": "result", "seconds": "seconds", "figures": "figures"}))
    if json_file is not None:
        write_json(json_file, certificate)
    if not certificate["passed"]:
        err.print(f"{cfg.model.name}: NOT exact; see the rungs that failed", style="bold red")
        raise typer.Exit(1)
    out.print(f"{cfg.model.name}: exact on every rung", style="bold green")


def is_figure(key: str, value: Any) -> bool:
    return key not in ("name", "passed", "seconds") and isinstance(value, int | float)


def brief(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


# ---- doctor ----


@app.command()
@friendly
def doctor(json_file: JsonFile = None) -> None:
    """What this machine can run, and why not. Exit code 1 when something required is missing."""
    from paceline import doctor as examination

    check_writable(json_file)
    with err.status("examining"):
        findings = examination.examine()
    report = examination.as_json(findings)
    columns = {"name": "", "status": "", "detail": "", "remedy": "remedy"}
    table = render(report["rows"], columns)
    colours = {"ok": "green", "degraded": "yellow", "missing": "dim"}
    for cell in table.columns[1]._cells:
        if isinstance(cell, Text):
            cell.style = colours.get(cell.plain, "")
    out.print(table)
    if json_file is not None:
        write_json(json_file, report)
    if not report["ok"]:
        err.print("something required is missing; see the remedies", style="bold red")
        raise typer.Exit(1)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
