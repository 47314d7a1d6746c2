"""Shared by all commands: the app, the consoles, common options, error messages and signal handling."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.text import Text

from paceline.build.config import load_config
from paceline.config import Config
from paceline.console import SafeConsole
from paceline.files import check_run_format, read_run_json
from paceline.native import NativeUnavailable
from paceline.report.table import check_writable, render, write_json

app = typer.Typer(
    name="paceline",
    help="RL post-training for language models with exact speculative rollouts.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = SafeConsole()
err = SafeConsole(stderr=True)
Command = TypeVar("Command", bound=Callable[..., None])

Model = Annotated[str | None, typer.Option("--model", help="Known name, directory or hub id of the model.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Read settings from a TOML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Set one config key, as the argument A.B=C does.")
]
ConfigArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[CONFIG.toml] [A.B=C]…", help="Config file, then settings.")
]
PromptsFile = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Read prompts from a jsonl file with `prompt` or `question`."),
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result to a JSON file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Write a plot to a .png or .html file.")]


def command(name: str | None = None, group: typer.Typer = app) -> Callable[[Command], Command]:
    """Add a command to the app or to a group of it. Its errors are reported by `_report_errors`."""
    return lambda function: group.command(name)(_report_errors(function))


def _report_errors(function: Command) -> Command:
    """Print a user's error as one red message, with exit code 2. Ctrl-C gives exit code 130. With PACELINE_DEBUG=1
    errors show the traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except BrokenPipeError:  # the reader (for example `| head`) has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except (ValueError, NativeUnavailable, OSError, MemoryError) as error:
            if os.environ.get("PACELINE_DEBUG"):
                raise
            err.print(
                Text.assemble(("error: ", "bold red"), (str(error) or "not enough memory", "red")), soft_wrap=True
            )
            for note in getattr(error, "__notes__", ()):
                warn(note)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            warn("interrupted")
            raise typer.Exit(130) from None

    return wrapped  # type: ignore[return-value]


def split_arguments(
    arguments: Sequence[str] | None, overrides: Sequence[str] | None = None, file: Path | None = None
) -> tuple[Path | None, list[str]]:
    """The config file and the settings of a command without other arguments. `overrides` are those of --set, and win;
    `file` is that of --config."""
    given = list(arguments or ())
    files = [str(file)] * (file is not None) + [argument for argument in given if not KEY.match(argument)]
    if len(files) > 1:
        raise ValueError(f"two config files, {files[0]} and {files[1]}; give one, and settings as a.b=c")
    return Path(files[0]) if files else None, [a for a in given if KEY.match(a)] + list(overrides or ())


def split_settings(
    arguments: Sequence[str] | None, overrides: Sequence[str] | None = None
) -> tuple[list[str], list[str]]:
    """The other arguments, and the settings, of a command with arguments of its own, such as prompts. A setting starts
    with a key of a known section; a key that the section does not have is an error later."""
    given = list(arguments or ())
    found = [argument for argument in given if SETTING.match(argument)]
    return [argument for argument in given if argument not in found], found + list(overrides or ())


KEY = re.compile(r"[^/=]*=")  # a setting, or a mistaken one; the path of a file may have `=` too
SETTING = re.compile(rf"({'|'.join(Config.model_fields)})(\.[\w-]+)+=")


def settings(
    path: Path | None,
    overrides: Sequence[str] | None,
    defaults: Mapping[str, Mapping[str, Any]] = {},
    **flags: Any,
) -> Config:
    """The config of --config and --set, overridden by the flags that are not None. `defaults`: see `load_config`."""
    # JSON strings and numbers are valid TOML. The flag `section__key` sets section.key.
    given = [f"{key.replace('__', '.')}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    return load_config(path, [*(overrides or []), *given], defaults)


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Raise ValueError before the work if a result could not be written."""
    from paceline.report import plot

    check_writable(json_file)
    check_writable(plot_file)
    plot.check_format(plot_file)


def save_json(path: Path | None, content: Any) -> None:
    """Write the file of --json, if it is given."""
    if path is not None:
        write_json(path, content)


def warn(text: str) -> None:
    err.print(text, style="yellow", soft_wrap=True)


def print_note(text: str) -> None:
    out.print(text, style="dim", soft_wrap=True)


@contextlib.contextmanager
def progress_of(verb: str) -> Iterator[Callable[[str], None]]:
    """A function that shows what is done now: a status line on a terminal, else a line for each."""
    with err.status(verb) as status:

        def progress(what: str) -> None:
            status.update(f"{verb} {what}")
            if not err.is_terminal:
                err.print(f"{verb} {what}")

        yield progress


def print_figures(figures: Mapping[str, Any]) -> None:
    rows = [{"figure": name, "value": value} for name, value in figures.items()]
    out.print(render(rows, {"figure": "figure", "value": "value"}))


@contextlib.contextmanager
def results_so_far(message: str) -> Iterator[threading.Event]:
    """Ctrl-C or SIGTERM (for example a scheduler's time limit) ends the block, prints the message and sets the event.
    Then Ctrl-C is ignored until `exit_if`: a second one must not prevent the report."""

    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    interrupted = threading.Event()
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield interrupted
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupted.set()
        warn(message)
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_if(interrupted: threading.Event) -> None:
    if interrupted.is_set():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        raise typer.Exit(130)


@contextlib.contextmanager
def stop_on_signal(stop: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `stop`, which ends the run at a step boundary. A second SIGINT raises
    KeyboardInterrupt."""

    def handler(signum: int, frame: object) -> None:
        stop()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))


def comma_numbers(option: str, text: str) -> tuple[int, ...]:
    items = comma_list(text)
    if not all(item.isdecimal() for item in items):
        raise ValueError(f"{option} {text!r}: give numbers separated by commas, such as 1,4,16")
    return tuple(map(int, items))


def comma_floats(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(map(float, comma_list(text))))
    except ValueError:
        raise ValueError(f"{option} {text!r}: give numbers separated by commas, such as 0,0.6,1") from None


def command_of(run: Path) -> str:
    """The command that created a run's folder."""
    try:
        return str(read_run_json(run / "run.json").get("command", "train"))
    except (FileNotFoundError, NotADirectoryError):
        return "train"


def check_resumable(run: Path, command: str) -> None:
    """Raise ValueError if this command can't resume the run."""
    if not (run / "config.toml").exists():
        raise ValueError(f"--resume {run}: not a run (it has no config.toml)")
    check_run_format(run)
    if (other := command_of(run)) != command:
        raise ValueError(f"--resume {run}: a run of another command; use: paceline {other} --resume {run}")
