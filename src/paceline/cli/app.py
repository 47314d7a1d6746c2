"""What all commands share: the app, its consoles, its manners, and the options they have in common."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.text import Text

from paceline.config import Config, load_config
from paceline.console import SafeConsole
from paceline.files import read_run_json
from paceline.native import NativeUnavailable

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

Model = Annotated[str | None, typer.Option("--model", help="Known name, Hugging Face directory, or hub id.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="One setting, as in the TOML file; repeatable.")
]
PromptsFile = Annotated[
    Path | None, typer.Option("--prompts", metavar="FILE", help="jsonl with `prompt` or `question`.")
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


@contextlib.contextmanager
def stoppable(ask: Callable[[], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks for a stop at the next good moment; a second SIGINT does not ask."""

    def stop(signum: int, frame: object) -> None:
        ask()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def comma_list(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def comma_numbers(option: str, text: str) -> tuple[int, ...]:
    words = comma_list(text)
    if not all(word.isdecimal() for word in words):
        raise ValueError(f"{option} {text!r}: give numbers separated by commas, such as 1,4,16")
    return tuple(map(int, words))


def comma_floats(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(dict.fromkeys(map(float, comma_list(text))))
    except ValueError:
        raise ValueError(f"{option} {text!r}: give numbers separated by commas, such as 0,0.6,1") from None


def made_by(run: Path) -> str:
    """The command that a run's folder is of."""
    try:
        return str(read_run_json(run / "run.json").get("command", "train"))
    except (FileNotFoundError, NotADirectoryError):
        return "train"


def check_resumable(run: Path, command: str) -> None:
    """Whether this command can go on with a folder."""
    if not (run / "config.toml").exists():
        raise ValueError(f"--resume {run}: not a run, config.toml is missing there")
    if (other := made_by(run)) != command:
        raise ValueError(f"--resume {run}: a run of another command; go on with: paceline {other} --resume {run}")
