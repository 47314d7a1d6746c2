"""Rows (a list of dicts) as a table on the terminal, as HTML, and as a file that is written atomically."""

from __future__ import annotations

import html
import json
import math
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

    from paceline.console import escape_controls  # before the layout: escaped text is longer

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
    """Raises ValueError if the file can't be written. Called before the work, so that no result is lost."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")
    folder = path.resolve().parent
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"{path}: can't write into the folder {folder} ({error.strerror})") from None


def finite(value: Any) -> Any:
    """The same value with None for NaN and infinity, which JSON does not have, and Python's numbers and lists for
    numpy's."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(content: Any) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, to_json(content))


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file that the user named, atomically. A device or a pipe is written to, not replaced; a link is
    followed. (In a run's folder links are not followed: `files.replace_file`.)"""
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    replace_file(path, content)
