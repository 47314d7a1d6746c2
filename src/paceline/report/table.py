"""Rows (a list of dicts) as a table on the terminal, as HTML, and as a file that is there whole or not at all."""

from __future__ import annotations

import html
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.files import replace_file

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]
Columns = Mapping[str, str]  # key -> heading


def cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, list | tuple):
        return " ".join(map(cell, value))
    return str(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def render(rows: Sequence[Row], columns: Columns, title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from paceline.console import escape_controls  # here too, so that a column is as wide as what it shows

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, collapse_padding=True)
    for key, heading in columns.items():
        numeric = any(is_number(row.get(key)) for row in rows)
        short = all(len(cell(row.get(key))) <= 20 for row in rows)
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=short)
    for row in rows:
        table.add_row(*(Text(escape_controls(cell(row.get(key)))) for key in columns))
    return table


def render_html(rows: Sequence[Row], columns: Columns) -> str:
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in columns.values())
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell(row.get(key)))}</td>" for key in columns) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def check_writable(path: Path | None) -> None:
    """Before the work, not after it: is there a folder to write this file into?"""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    folder = path.resolve().parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{path}: can't write into the folder {folder} ({error.strerror})") from None


def to_json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, to_json(content))


def write_bytes(path: Path, content: bytes) -> None:
    """To where a user said: all of it or nothing. What is no plain file (a device, a pipe) is written to, not replaced;
    a link keeps pointing where it points. (In a run's folder links are not followed: `files.replace_file`.)"""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    replace_file(path, content)
