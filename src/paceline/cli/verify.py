"""`paceline verify` climbs the exactness ladder; `paceline doctor` examines the machine, and what a run asks of it."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from paceline.cli.app import (
    ConfigFile,
    JsonFile,
    Model,
    Overrides,
    PromptsFile,
    app,
    comma_list,
    err,
    friendly,
    out,
    settings,
)
from paceline.cli.train import Settings, split_arguments
from paceline.config import load_config
from paceline.report.table import check_writable, render, write_json

DRAFTERS = ("ngram", "suffix", "draft_model", "eagle3", "hybrid")
MAX_TIES = 10  # shown
MAX_PROBLEMS = 8  # shown of each rung; the certificate has all


@app.command()
@friendly
def verify(
    model: Model = None,
    drafters: Annotated[
        str | None, typer.Option(help="Of ngram, suffix, draft_model, eagle3, hybrid; else all there are.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A shorter ladder, about two and a half minutes on two cores.")
    ] = False,
    prompts_file: PromptsFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Climb the exactness ladder: does speculation change anything, on this model, with these drafters?

    In 16 bits and on a GPU tokens may differ at near-ties, which are listed; anywhere else no token may.

    Exit code 0 when every rung holds, 1 when one does not.

    Examples:

    - `paceline verify --model smollm2-135m`
    - `paceline verify --model ./my-model --drafters ngram,suffix --quick --json certificate.json`
    """
    from paceline.bench.prompts import BUILTIN, read_prompts

    cfg = settings(config, overrides, model__name=model)
    check_writable(json_file)
    asked = read_prompts(prompts_file) if prompts_file else BUILTIN
    from paceline.build import available_drafters
    from paceline.model.store import load_tokenizer, resolve
    from paceline.tasks.prompt import encode
    from paceline.verify.ladder import run_ladder

    tokenizer = load_tokenizer(resolve(cfg.model.name, err))
    ids = [encode(tokenizer, prompt) for prompt in asked]
    named = _drafters(drafters) if drafters is not None else dict.fromkeys((*available_drafters(cfg), "draft_model"))
    with err.status("verifying") as status:

        def tell(what: str) -> None:
            status.update(f"rung {what}")
            if not err.is_terminal:  # then nobody sees a status, and a log shows how far it came
                err.print(f"rung {what}")

        certificate = run_ladder(cfg, ids, tuple(named), quick, tell)
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
    ties = [{"rung": rung["name"][0], **tie} for rung in certificate["rungs"] for tie in rung.get("near_ties", ())]
    precision = f"{cfg.model.dtype} on {cfg.model.device}"
    if ties:
        show_ties(ties, precision)
    if json_file is not None:
        write_json(json_file, certificate)
    for rung in certificate["rungs"]:
        for problem in rung["problems"][:MAX_PROBLEMS]:
            err.print(Text(f"rung {rung['name']}: {problem}", style="red"))
    for alarm in certificate["alarms"]:
        err.print(Text(f"ALARM: {alarm}", style="yellow"))
    if not certificate["passed"]:
        err.print(f"{cfg.model.name}: NOT exact; see the rungs that failed", style="bold red", soft_wrap=True)
        raise typer.Exit(1)
    how = f"up to {counted(ties)} of {precision}" if ties else "on every rung"
    out.print(f"{cfg.model.name}: exact {how}", style="bold green")


def show_ties(ties: list[dict[str, Any]], precision: str) -> None:
    """The widest ones; all are in the certificate."""
    widest = sorted(ties, key=lambda tie: -abs(tie["gap_float32"]))[:MAX_TIES]
    columns = {
        "rung": "rung", "run": "run", "request": "prompt", "position": "position", "tokens": "tokens",
        "gap_float32": "gap in float32", "ranks_float32": "ranks", "gap": f"in {precision}", "ranks": "ranks",
    }  # fmt: skip
    out.print(render(widest, columns, f"{counted(ties)}: two tokens within rounding of each other"))
    if len(ties) > len(widest):
        out.print(f"and {len(ties) - len(widest)} narrower ones (--json has all)")


def counted(ties: list[dict[str, Any]]) -> str:
    return f"{len(ties)} near-tie" + "s" * (len(ties) > 1)


def is_figure(key: str, value: Any) -> bool:
    return key not in ("name", "passed", "seconds") and isinstance(value, int | float)


def brief(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)


@app.command()
@friendly
def doctor(words: Settings = None, json_file: JsonFile = None) -> None:
    """What this machine can run, and why not; with settings, also whether a run of theirs finds what it asks for:
    model, head, vLLM, Ray and its nodes, a way for weights. Exit code 1 when something required is missing.

    Examples:

    - `paceline doctor`
    - `paceline doctor configs/gsm8k.toml cluster.kind=ray cluster.address=auto cluster.num_engines=4`
    """
    path, overrides = split_arguments(words)
    config = load_config(path, overrides) if words else None
    check_writable(json_file)
    from paceline import doctor as examination

    with err.status("examining"):
        findings = examination.examine() + (examination.examine_run(config) if config is not None else [])
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


def _drafters(text: str) -> tuple[str, ...]:
    named = comma_list(text)
    if unknown := [name for name in named if name not in DRAFTERS]:
        raise ValueError(f"--drafters: there is no drafter {unknown[0]!r}; choose from {', '.join(DRAFTERS)}")
    if not named:
        raise ValueError(f"--drafters {text!r} names none, and would show nothing; choose from {', '.join(DRAFTERS)}")
    return named
