"""HTML elements that all pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.report.chart import show
from paceline.report.markup import escape

LONG_TABLE = 25  # rows; a longer table scrolls in itself


def section(name: str, title: str, *parts: str) -> str:
    content = "".join(parts)
    return f'<section id="{name}"><h2>{escape(title)}</h2>{content}</section>' if content else ""


def folded(name: str, title: str, content: str) -> str:
    return f'<section id="{name}"><details><summary>{title}</summary>{content}</details></section>'


def charts(*figures: str, small: bool = False) -> str:
    present = "".join(figures)
    return f'<div class="charts{" small" if small else ""}">{present}</div>' if present else ""


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], num_text: int = 1, caption: str = "") -> str:
    """Cells are HTML. The first `num_text` columns are text, the others are numbers, aligned right."""
    kinds = ["text" if i < num_text else "num" for i in range(len(head))]
    title = f'<h3 class="caption">{escape(caption)}</h3>' if caption else ""  # not in the table, which may scroll
    top = "".join(f'<th class="{kind}" scope="col">{escape(name)}</th>' for kind, name in zip(kinds, head, strict=True))
    rows = list(rows)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    kind = "scroll tall" if len(rows) > LONG_TABLE else "scroll"
    return (
        f'{title}<div class="{kind}" tabindex="0" role="region" aria-label="{escape(caption or head[0])}">'
        f"<table{' class=wrap' if num_text > 1 else ''}>"
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"
        if body
        else ""
    )


def definitions(kind: str, items: Iterable[tuple[str, str]], name: str = "") -> str:
    """(name, HTML) of each item. `name`: the list's id."""
    content = "".join(f"<div><dt>{escape(term)}</dt><dd>{value}</dd></div>" for term, value in items)
    return f'<dl class="{kind}"{f" id={name}" if name else ""}>{content}</dl>'


def factor(value: float | None) -> str:
    return f"{value:.2f}×" if value is not None else "–"


def seconds(value: float | None) -> str:
    if value is None:
        return "–"
    if value < 90:
        return f"{show(value)} s"
    minutes, remainder = divmod(round(value), 60)
    return f"{minutes // 60} h {minutes % 60:02} min" if minutes >= 60 else f"{minutes} min {remainder:02} s"
