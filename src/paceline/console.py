"""The terminal, and foreign text on it.

Prompts, completions, model files, reward functions' errors and file names come from outside. A control character in
them could clear the screen, change the window's title or rewrite the lines above. `SafeConsole` prints such characters
as escapes (`\\x1b`) and reads no markup in text. Everything that is printed goes through it, warnings and tracebacks
too (`guard_stderr`).
"""

from __future__ import annotations

import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterable
from types import TracebackType
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

# C0 without tab and newline, DEL and C1; what reorders text (bidirectional embeddings, overrides and isolates); and
# halves of surrogate pairs, which no terminal's encoding has.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    """The text with control characters written out: ESC is `\\x1b`. Tabs and newlines stay."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class SafeConsole(Console):
    def __init__(self, *, stderr: bool = False, file: TextIO | None = None, force_terminal: bool | None = None) -> None:
        super().__init__(
            stderr=stderr, file=file, force_terminal=force_terminal, highlight=False, markup=False, emoji=False
        )

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """All that is printed comes through here, live displays included. rich's own control codes are segments of
        their own kind."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
                continue
            style = segment.style
            if style is not None and style.link:  # its target would be printed as it is
                style = style.update_link(None)
            yield Segment(escape_controls(segment.text), style)


def guard_stderr(console: Console) -> None:
    """From here on warnings and the tracebacks of threads are printed by this console."""

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
    """As Python would print it."""
    console.print("".join(traceback.format_exception(kind, error, trace)).rstrip("\n"), soft_wrap=True)
    sys.stderr.flush()
