"""`paceline doctor`: inspect the machine and the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.table import Table
from rich.text import Text

from paceline.build.config import load_config
from paceline.cli.app import (
    ConfigArguments,
    ConfigFile,
    JsonFile,
    Overrides,
    command,
    err,
    out,
    progress_of,
    save_json,
    split_arguments,
)
from paceline.report.table import check_writable

if TYPE_CHECKING:
    from paceline.doctor import Finding

STATUS_COLOURS = {"ok": "green", "degraded": "yellow", "missing": "red", "optional": "dim"}


@command()
def doctor(
    arguments: ConfigArguments = None,
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Check what this machine can run. With settings, also check that a run finds its model, head, vLLM, Ray nodes and
    a way to transfer weights.

    The exit code is 1 if something required is missing.

    Examples:

    - `paceline doctor`
    - `paceline doctor configs/gsm8k.toml cluster.kind=ray cluster.num_engines=4 speculation.audit_every=0`
    """
    path, given = split_arguments(arguments, overrides, config_file)
    config = load_config(path, given) if path is not None or given else None
    check_writable(json_file)
    from paceline import doctor as checks

    with progress_of("checking") as progress:
        findings = checks.check_machine(progress) + (checks.check_run(config, progress) if config is not None else [])
    report = checks.as_json(findings)
    out.print(findings_table(findings))
    save_json(json_file, report)
    if not report["ok"]:
        err.print("something required is missing; see the remedies", style="bold red")
        raise typer.Exit(1)


def findings_table(findings: Sequence[Finding]) -> Table:
    """A row per check, with the remedy below what was found. What is missing but not required is called optional. It
    fits into 80 columns."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for found in findings:
        status = "optional" if found.status == "missing" and not found.required else found.status
        text = Text(found.detail)
        if found.remedy:
            text.append(f"\n→ {found.remedy}", "dim")
        table.add_row(Text(found.name), Text(status, STATUS_COLOURS[status]), text)
    return table
