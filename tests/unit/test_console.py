"""No control character of untrusted text reaches the terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from rich.live import Live
from rich.progress import Progress, TextColumn
from rich.text import Text
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.cli import app
from paceline.cli.app import err, out
from paceline.cli.completions import CompletionPrinter
from paceline.cli.generate import show_prompt
from paceline.cli.progress import TerminalProgress
from paceline.report.table import render

TITLE, CLEAR, C1, DELETE, OVERRIDE = "\x1b]0;owned\x07", "\x1b[2J", "\x9b2J", "\x7f", "\u202e"
HOSTILE = f"a{TITLE}b{CLEAR}c{C1}d{DELETE}e{OVERRIDE}f\r\x08\x00"


def harmless(printed: str) -> bool:
    """Whether the text of HOSTILE was printed without its control characters. (Our own colours start with ESC too.)"""
    assert "owned" in printed, "HOSTILE was not printed"
    return not any(part in printed for part in ("\x1b]", CLEAR, "\x9b", "\x7f", "\u202e", "\r", "\x08", "\x00", "\x07"))


def test_only_control_characters_are_escaped():
    from paceline.console import escape_controls

    assert escape_controls("\x1b[31m\x9b\x7f\x00") == r"\x1b[31m\x9b\x7f\x00"
    assert escape_controls("\u202e\u2066") == r"\u202e\u2066"
    assert escape_controls("\udc9b") == r"\udc9b"  # from a file name that is not UTF-8
    plain = "tab\tand\nnewline, é, 日本, 🙂, שלום, zero\u200bwidth"
    assert escape_controls(plain) == plain


@pytest.mark.parametrize("console", [out, err])
@pytest.mark.parametrize(
    "what",
    [
        HOSTILE,
        Text(HOSTILE, "bold red"),
        Text.assemble(("error: ", "bold"), HOSTILE),
        render([{"a": HOSTILE}], {"a": f"heading {HOSTILE}"}, f"title {HOSTILE}"),
        f"[link=file://{CLEAR}]owned[/link]",
    ],
    ids=["text", "styled", "assembled", "table", "markup"],
)
def test_printed_text_is_harmless(console, what, capsys):
    console.print(what, soft_wrap=True)
    assert harmless("".join(capsys.readouterr()))


def test_newlines_and_tabs_are_kept(capsys):
    out.print(Text("def f():\n\treturn 1"))
    assert capsys.readouterr().out == "def f():\n        return 1\n"


def test_live_displays_are_harmless_and_still_move_the_cursor():
    from paceline.console import SafeConsole

    screen = io.StringIO()
    console = SafeConsole(file=screen, force_terminal=True)
    with Live(Text(HOSTILE), console=console, refresh_per_second=1, transient=True) as live:
        live.refresh()
    with Progress(TextColumn("{task.description}", markup=False), console=console, transient=True) as bars:
        bars.add_task(HOSTILE)
        bars.refresh()
    printed = screen.getvalue()
    assert "\x1b[2K" in printed, "rich's own control codes are missing"
    assert harmless(printed.replace("\r", ""))  # rich's control codes start with it


def test_prompts_and_completions(capsys):
    class Tokenizer:
        def decode(self, ids, **_):
            return "".join(HOSTILE[i] for i in ids)

    count = len(HOSTILE)
    completion = SimpleNamespace(
        token_ids=np.arange(count),
        provenance=np.array([i % 4 for i in range(count)]),
        finish_reason="stop",
        num_drafts=1,
    )
    show_prompt(HOSTILE)
    CompletionPrinter(out, Tokenizer()).show(completion)
    printed = capsys.readouterr().out
    assert harmless(printed) and printed.count("owned") == 2


def test_notes_and_alarms(capsys):
    callback = TerminalProgress(err, load_config(None, []))
    callback.note(f"ALARM: reward mine: ValueError: {HOSTILE}")
    callback.note(f"reward mine: ValueError: {HOSTILE}")
    assert harmless(capsys.readouterr().err)


def test_errors_with_text_of_a_file(tmp_path):
    table = tmp_path / "task.jsonl"
    table.write_text(json.dumps({HOSTILE: 1, "x\u009by": 2}) + "\n")
    result = CliRunner().invoke(app, ["train", "task.kind=jsonl", f"task.name={table}", "--dry-run"])
    assert result.exit_code == 2 and "needs `prompt`" in result.output and harmless(result.output)
    result = CliRunner().invoke(app, ["report", f"no-{HOSTILE}".replace("\x00", "")])
    assert result.exit_code == 2 and harmless(result.output)


def test_warnings_and_tracebacks():
    """Messages of uncaught exceptions may contain untrusted text."""
    program = f"""
import threading, warnings
from paceline import cli
def fail():
    raise ValueError({HOSTILE!r})
def boom():
    warnings.warn({HOSTILE!r})
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    raise RuntimeError({HOSTILE!r})
cli.app = boom
cli.main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 1
    for text in ("UserWarning", "ValueError", "RuntimeError", "Traceback"):
        assert text in done.stderr
    assert harmless(done.stderr)
