"""The commands of `paceline`; each module adds its own. A command parses its options, builds objects, runs them and
prints results. Heavy libraries are imported in functions, so that `--help` and errors in the settings appear at
once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline import __version__

# Each module adds its commands.
from paceline.cli import (  # noqa: F401
    bench,
    config,
    doctor,
    draft,
    generate,
    replay,
    replay_advice,
    report,
    serve,
    simulate,
    sweep,
    train,
    verify,
)
from paceline.cli.app import app, command, err, out
from paceline.console import guard_stderr, show_traceback

__all__ = ["app", "main"]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


@command()
def pull(
    model: Annotated[str, typer.Argument(help="Known name, directory, hub id or GGUF file.")] = "smollm2-135m",
    dtype: Annotated[str | None, typer.Option(help="Weights of a GGUF file: float32 (default) or bfloat16.")] = None,
) -> None:
    """Download a model or import a GGUF file, and print its directory.

    Examples:

    - `paceline pull smollm2-135m`
    - `paceline pull ./qwen2.5-0.5b-instruct-q8_0.gguf`
    """
    from paceline.bench.common import check_choices
    from paceline.model.store import import_gguf, resolve

    path = Path(model).expanduser()
    is_gguf = path.suffix == ".gguf" and not path.is_dir()
    if dtype is not None:
        check_choices(("float32", "bfloat16"), dtype=dtype)
        if not is_gguf:
            raise ValueError(f"--dtype {dtype} is only for GGUF files, and {model!r} is none; set model.dtype instead")
    out.print(str(import_gguf(path, dtype or "float32", err) if is_gguf else resolve(model, err)), soft_wrap=True)


def main() -> None:
    guard_stderr(err)
    try:
        app()
    except Exception as error:  # a bug, or PACELINE_DEBUG is set; the message may contain untrusted text
        show_traceback(err, type(error), error, error.__traceback__)
        sys.exit(1)
