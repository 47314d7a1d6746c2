"""`paceline verify` climbs the exactness ladder; `paceline doctor` examines the machine."""

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
from paceline.report.table import check_writable, render, write_json


@app.command()
@friendly
def verify(
    model: Model = None,
    drafters: Annotated[
        str | None, typer.Option(help="Of ngram, suffix, draft_model, eagle3, hybrid; else all there are.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A shorter ladder, about a minute.")] = False,
    prompts_file: PromptsFile = None,
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
    named = comma_list(drafters) if drafters is not None else dict.fromkeys((*available_drafters(cfg), "draft_model"))
    with err.status("verifying") as status:
        certificate = run_ladder(cfg, ids, tuple(named), quick, lambda what: status.update(f"rung {what}"))
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
