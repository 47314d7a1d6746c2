"""`paceline report` and `watch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.app import command, command_of, err, out
from paceline.report.table import check_writable


@command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Folder of a run; several are compared.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Output file.",
            show_default="report.html in the run's folder, comparison.html here for several runs",
        ),
    ] = None,
) -> None:
    """Write the report of a run, or a comparison of several runs, as one self-contained HTML file.

    A comparison has the curves of all runs, the settings that differ, and the figures at the end.

    Examples:

    - `paceline report runs/chain_sum-20260101-120000`
    - `paceline report runs/with-drafts runs/plain --out comparison.html`
    """
    check_writable(output)
    for run in runs:
        check_has_report(run)
    if len(runs) == 1:
        from paceline.report.html import write_report

        path = write_report(runs[0], output)
    else:
        from paceline.report.compare import write_comparison

        path = write_comparison(runs, output)
    out.print(str(path), soft_wrap=True)


@command()
def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    port: Annotated[
        int | None,
        typer.Option("--port", metavar="N", min=1, max=65535, help="Port on 127.0.0.1.", show_default="a free one"),
    ] = None,
) -> None:
    """Show the report of a run in a browser while the run trains.

    Prints an address on 127.0.0.1 with a random token; nobody without it can read the page. The page updates itself.
    Nothing is written to the run. Ctrl-C stops.

    Examples:

    - `paceline watch runs/chain_sum-20260101-120000`
    - `paceline watch runs/chain_sum-20260101-120000 --port 8000`
    """
    from paceline.report.watch import LivePage, WatchServer

    check_has_report(run)
    with WatchServer(LivePage(run), port or 0) as server:
        try:
            out.print(server.url, soft_wrap=True)
            err.print("Open this address in a browser. Ctrl-C stops.", style="dim")
            server.serve_forever()
        except KeyboardInterrupt:
            err.print("stopped", style="dim")


def check_has_report(run: Path) -> None:
    if command_of(run) == "train-draft":
        raise ValueError(f"{run}: a train-draft run has no report; its figures are in {run / 'summary.json'}")
