"""Prints untrusted text to the terminal.

Prompts, completions, model files, errors of reward functions and file names are untrusted. A control character in them
could clear the screen, change the window's title or overwrite earlier lines. `SafeConsole` prints control characters as
escapes (`\\x1b`) and does not interpret markup. Everything is printed through it, including warnings and tracebacks
(`guard_stderr`).
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 without tab and newline, DEL and C1; bidirectional embeddings, overrides and isolates, which reorder text; and
# single surrogates, which can't be encoded.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """Replace control characters by escapes: ESC becomes `\\x1b`. Tabs and newlines stay."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class SafeConsole(Console):
    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """rich calls this for everything that it prints, including live displays. Its own control codes are separate
        segments."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
                continue
            style = segment.style
            if style is not None and style.link:  # rich would print the link's target unescaped
                style = style.update_link(None)
            yield Segment(escape_controls(segment.text), style)


def guard_stderr(console: Console) -> None:
    """Print warnings and tracebacks of threads through this console."""

    def show_warning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        console.print(warnings.formatwarning(message, category, filename, lineno, line).rstrip("\n"), soft_wrap=True)

    def show_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            show_traceback(console, args.exc_type, args.exc_value, args.exc_traceback)

    warnings.showwarning = show_warning
    threading.excepthook = show_thread


def show_traceback(
    console: Console, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print a traceback in Python's format."""
    console.print("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), soft_wrap=True)
    sys.stderr.flush()
