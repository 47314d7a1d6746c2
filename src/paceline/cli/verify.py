"""`paceline verify`: run the exactness checks."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from paceline.cli.app import (
    ConfigArguments,
    ConfigFile,
    JsonFile,
    Model,
    Overrides,
    PromptsFile,
    comma_list,
    command,
    err,
    exit_if,
    out,
    results_so_far,
    save_json,
    settings,
    split_arguments,
    warn,
)
from paceline.cli.check_progress import CheckProgress
from paceline.report.table import check_writable, render

DRAFTERS = ("ngram", "suffix", "draft_model", "eagle3", "dspark", "hybrid")
MAX_TIES = 10  # printed
MAX_PROBLEMS = 8  # printed per check; the report has all


@command()
def verify(
    arguments: ConfigArguments = None,
    model: Model = None,
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Drafters: ngram, suffix, draft_model, eagle3, dspark, hybrid.", show_default="all available"
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Run fewer and shorter checks.")] = False,
    prompts_file: PromptsFile = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Check that speculation changes neither tokens nor distributions, for a model and its drafters.

    Without settings, it checks float32 on the CPU. With kernels that are not batch-invariant, in 16 bits or on a GPU,
    tokens may differ at near-ties, which are listed. Otherwise all tokens must be equal. The exit code is 0 if all
    checks pass, else 1. Ctrl-C prints the checks so far, with exit code 130; the JSON file then has `partial: true`.

    Examples:

    - `paceline verify configs/quickstart.toml model.device=cuda`
    - `paceline verify --model ./my-model --drafters ngram,suffix --quick --json report.json`
    """
    from paceline.bench.common import check_choices
    from paceline.bench.prompts import BUILTIN, read_prompts

    if drafters is not None:
        check_choices(DRAFTERS, drafters=comma_list(drafters))
    cfg = settings(*split_arguments(arguments, overrides, config), model__name=model)
    check_writable(json_file)
    prompts = read_prompts(prompts_file or BUILTIN)
    from paceline.build.drafter import available_drafters
    from paceline.chat.template import encode
    from paceline.model.store import load_tokenizer, resolve
    from paceline.verify.checks import CHECKS, make_report, run_checks

    tokenizer = load_tokenizer(resolve(cfg.model.name, err), cfg.model.chat_template)
    ids = [encode(tokenizer, prompt) for prompt in prompts]
    names = tuple(
        dict.fromkeys((*available_drafters(cfg), "draft_model")) if drafters is None else comma_list(drafters)
    )
    results: list[dict[str, Any]] = []
    with CheckProgress(err) as progress, results_so_far("interrupted; the checks so far:") as interrupted:
        report = run_checks(cfg, ids, names, quick, progress, results=results)
    if interrupted.is_set():
        done = [result["name"] for result in results]
        report = make_report(cfg, names, quick, results, [name for name in CHECKS if name not in done])
    save_json(json_file, report)
    show_report(report, f"{cfg.model.dtype} on {cfg.model.device}")
    exit_if(interrupted)
    if not report["passed"]:
        raise typer.Exit(1)


def show_report(report: dict[str, Any], precision: str) -> None:
    rows = [
        {
            "check": check["name"],
            "result": "passed" if check["passed"] else "FAILED",
            "seconds": check["seconds"],
            "figures": ", ".join(f"{key} {format_number(val)}" for key, val in check.items() if is_metric(key, val)),
        }
        for check in report["checks"]
    ]
    rows += [{"check": name, "result": "not run"} for name in report["not_run"]]
    out.print(render(rows, {"check": "check", "result": "result", "seconds": "seconds", "figures": "figures"}))
    ties = [{"level": check["name"][0], **tie} for check in report["checks"] for tie in check.get("near_ties", ())]
    if ties:
        show_ties(ties, precision)
    for check in report["checks"]:
        for problem in check["problems"][:MAX_PROBLEMS]:
            err.print(Text(f"check {check['name']}: {problem}", style="red"))
    for alarm in report["alarms"]:
        err.print(Text(f"ALARM: {alarm}", style="yellow"))
    num_done, num_not_run = len(report["checks"]), len(report["not_run"])
    if not all(check["passed"] for check in report["checks"]):
        err.print(f"{report['model']}: NOT exact; see the checks that failed", style="bold red", soft_wrap=True)
    elif num_not_run:
        warn(f"{report['model']}: partial result: {num_done} of {num_done + num_not_run} checks were run, none failed")
    else:
        how = f"up to {count_ties(ties)} of {precision}" if ties else "in every check"
        out.print(f"{report['model']}: exact {how}", style="bold green", soft_wrap=True)


def show_ties(ties: list[dict[str, Any]], precision: str) -> None:
    """Print the ties with the largest gaps; the report has all."""
    widest = sorted(ties, key=lambda tie: -abs(tie["gap_float32"]))[:MAX_TIES]
    columns = {
        "level": "level", "run": "run", "request": "prompt", "position": "position", "tokens": "tokens",
        "gap_float32": "gap in float32", "ranks_float32": "ranks", "gap": f"in {precision}", "ranks": "ranks",
    }  # fmt: skip
    out.print(render(widest, columns, f"{count_ties(ties)}: two tokens differ by less than rounding"))
    if len(ties) > len(widest):
        out.print(f"and {len(ties) - len(widest)} narrower ones (--json has all)")


def count_ties(ties: list[dict[str, Any]]) -> str:
    return f"{len(ties)} near-tie" + "s" * (len(ties) > 1)


def is_metric(key: str, value: Any) -> bool:
    return key not in ("name", "passed", "seconds") and isinstance(value, int | float)


def format_number(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else str(value)
