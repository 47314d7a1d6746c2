"""The commands of `paceline`. A command parses its options, builds objects, runs them and prints results. Heavy
libraries are imported in functions, so that `--help` and errors in the settings appear at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline import __version__
from paceline.cli import bench, draft, generate, replay, simulate, sweep, train, verify  # each adds its commands
from paceline.cli.app import app, command, err, out
from paceline.console import guard_stderr, show_traceback

__all__ = ["app", "bench", "draft", "generate", "main", "replay", "simulate", "sweep", "train", "verify"]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


@command()
def pull(
    model: Annotated[str, typer.Argument(help="Known name, directory or hub id of the model.")] = "smollm2-135m",
) -> None:
    """Download a model and print its directory.

    Example: `paceline pull smollm2-135m`
    """
    from paceline.model.store import resolve

    out.print(str(resolve(model, err)), soft_wrap=True)


def main() -> None:
    guard_stderr(err)
    try:
        app()
    except Exception as error:  # a bug, or PACELINE_DEBUG is set; the message may contain untrusted text
        show_traceback(err, type(error), error, error.__traceback__)
        sys.exit(1)
