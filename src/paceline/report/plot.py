"""Pictures for the bench and the sweep.

The bench as grouped bars: one panel per model, one group per batch size, one bar per engine and mode. The sweep as
lines: one panel per temperature and batch size, speed-up over draft length, one line per drafter. Steps as lines: time
over batch size, one line per draft length, its roofline dashed beneath.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.report.table import Columns, Row, render_html, write_bytes

# Of draft lengths, in turn.
STEPS = ("#1a1a1a", "#0b5394", "#c55a11", "#2e7d32", "#8e44ad", "#5f6368")
# Blues, oranges and greys that stay apart for colour-blind readers; one hue per engine, lighter with each mode.
HUES = {"paceline": "#0b5394", "vllm": "#c55a11", "hf": "#5f6368"}
# Of drafters; dashed lines are cold histories.
LINES = {"ngram": "#5f6368", "suffix": "#0b5394", "draft_model": "#8e44ad", "eagle3": "#c55a11", "hybrid": "#2e7d32"}
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1a1a1a;max-width:60em;margin:2em auto;padding:0 1em}
img{max-width:100%}
table{border-collapse:collapse}
th,td{padding:.25em .8em;text-align:right;border-bottom:1px solid #ddd}
th:first-child,td:first-child{text-align:left}
"""


def check_format(path: Path | None) -> None:
    if path is not None and path.suffix not in (".png", ".html"):
        raise ValueError(f"--plot {path}: write a .png or a .html file")


def save(rows: Sequence[Row], columns: Columns, path: Path, title: str) -> None:
    _write(bars_png(rows, title), "tokens per second by batch size", rows, columns, path, title)


def save_sweep(rows: Sequence[Row], columns: Columns, path: Path, title: str) -> None:
    _write(lines_png(rows, title), "speed-up by draft length", rows, columns, path, title)


def save_steps(rows: Sequence[Row], columns: Columns, path: Path, title: str) -> None:
    _write(steps_png(rows, title), "step time by batch size", rows, columns, path, title)


def _write(picture: bytes, alt: str, rows: Sequence[Row], columns: Columns, path: Path, title: str) -> None:
    if path.suffix == ".png":
        write_bytes(path, picture)
        return
    encoded = base64.b64encode(picture).decode()
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        f"<img alt='{alt}' src='data:image/png;base64,{encoded}'>"
        f"{render_html(rows, columns)}</html>"
    )
    write_bytes(path, page.encode())


def bars_png(rows: Sequence[Row], title: str) -> bytes:
    measured = [row for row in rows if row["tokens_per_s"] is not None]
    models = list(dict.fromkeys(row["model"] for row in measured)) or [""]

    def draw(axis, column: int, _: int) -> None:  # type: ignore[no-untyped-def]
        _panel(axis, [row for row in measured if row["model"] == models[column]])
        axis.set_title(models[column])

    return _png(draw, len(models), 1, (4 + 4.5 * len(models), 4.5), title)


def lines_png(rows: Sequence[Row], title: str) -> bytes:
    measured = [row for row in rows if row["speedup"] is not None and row["drafter"] != "none"]
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    top = 1.05 * max((row["speedup"] for row in measured), default=1.0)

    def draw(axis, column: int, line: int) -> None:  # type: ignore[no-untyped-def]
        batch, temperature = batches[column], temperatures[line]
        _lines(axis, [row for row in measured if (row["temperature"], row["batch"]) == (temperature, batch)])
        axis.set_ylim(0, max(top, 1.1))
        axis.set_title(f"temperature {temperature:g}, batch {batch}", fontsize=10)

    size = 1 + 3.6 * len(batches), 0.8 + 3.2 * len(temperatures)
    return _png(draw, len(batches), len(temperatures), size, title)


def steps_png(rows: Sequence[Row], title: str) -> bytes:
    measured = [row for row in rows if row["step_ms"] is not None]
    return _png(lambda axis, column, line: _steps(axis, measured), 1, 1, (7.5, 4.5), title)


def _png(draw: Callable[..., None], num_columns: int, num_lines: int, size: tuple[float, float], title: str) -> bytes:
    """A grid of panels; `draw(axis, column, line)` fills one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(num_lines, num_columns, figsize=size, squeeze=False)
    for line in range(num_lines):
        for column in range(num_columns):
            draw(axes[line][column], column, line)
    figure.suptitle(title)
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    plt.close(figure)
    return out.getvalue()


def _lines(axis, rows: Sequence[Row]) -> None:  # type: ignore[no-untyped-def]
    for drafter, history in dict.fromkeys((row["drafter"], row["history"]) for row in rows):
        mine = [row for row in rows if (row["drafter"], row["history"]) == (drafter, history)]
        axis.plot(
            [row["num_speculative_tokens"] for row in mine],
            [row["speedup"] for row in mine],
            marker="o",
            markersize=4,
            color=LINES.get(drafter, "#1a1a1a"),
            linestyle="--" if history == "cold" else "-",
            label=f"{drafter} {history}" if history else drafter,
        )
    axis.axhline(1, color="#1a1a1a", linewidth=0.8)  # plain decoding
    axis.set_xticks(sorted({row["num_speculative_tokens"] for row in rows}))
    axis.set_xlabel("draft length k")
    axis.set_ylabel("speed-up (median)")
    axis.spines[["top", "right"]].set_visible(False)
    if rows:
        axis.legend(fontsize=8, frameon=False, loc="lower left")


def _steps(axis, rows: Sequence[Row]) -> None:  # type: ignore[no-untyped-def]
    batches = sorted({row["batch"] for row in rows})
    for i, k in enumerate(sorted({row["num_speculative_tokens"] for row in rows})):
        mine = sorted((row for row in rows if row["num_speculative_tokens"] == k), key=lambda row: row["batch"])
        places, colour = [batches.index(row["batch"]) for row in mine], STEPS[i % len(STEPS)]
        label = f"k = {k}" if k else "plain"
        axis.plot(places, [row["step_ms"] for row in mine], marker="o", markersize=4, color=colour, label=label)
        axis.plot(places, [row["roofline_ms"] for row in mine], color=colour, linestyle="--", linewidth=0.8)
    axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("batch size")
    axis.set_ylabel("ms per step (dashed: roofline)")
    axis.spines[["top", "right"]].set_visible(False)
    if rows:
        axis.legend(fontsize=8, frameon=False, loc="upper left")


def _panel(axis, rows: Sequence[Row]) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.colors import to_rgb

    batches = sorted({row["batch"] for row in rows})
    series = list(dict.fromkeys((row["engine"], row["mode"], row["num_speculative_tokens"]) for row in rows))
    width = 0.8 / max(len(series), 1)
    shade: dict[str, int] = {}
    for i, (engine, mode, k) in enumerate(series):
        lighter = 0.28 * shade.get(engine, 0)
        shade[engine] = shade.get(engine, 0) + 1
        colour = tuple(c + (1 - c) * min(lighter, 0.75) for c in to_rgb(HUES.get(engine, "#2e7d32")))
        mine = {
            r["batch"]: r["tokens_per_s"]
            for r in rows
            if (r["engine"], r["mode"], r["num_speculative_tokens"]) == (engine, mode, k)
        }
        places = [batches.index(batch) + (i - (len(series) - 1) / 2) * width for batch in mine]
        label = f"{engine} {mode}" + (f" k={k}" if k else "")
        bars = axis.bar(places, list(mine.values()), width * 0.92, color=colour, label=label)
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axis.set_xlabel("batch size")
    axis.set_ylabel("tokens per second (median)")
    axis.spines[["top", "right"]].set_visible(False)
    if series:
        axis.legend(fontsize=8, frameon=False, loc="upper left")
