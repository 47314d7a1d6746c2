"""Plots of `paceline bench` and `paceline sweep`.

The bench: grouped bars, one panel per model, one group per batch size, one bar per engine and mode. The sweep: lines,
one panel per temperature and batch size, speed-up over draft length, one line per drafter. Step times: lines over the
batch size, one per draft length, with the roofline as a dashed line.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.report.table import Columns, Row, render_html, write_bytes

LENGTH_COLOURS = ("#1a1a1a", "#0b5394", "#c55a11", "#2e7d32", "#8e44ad", "#5f6368")  # of draft lengths, in order
# Blue, orange and grey, which colour-blind readers can distinguish. Further modes of an engine are lighter.
ENGINE_COLOURS = {"paceline": "#0b5394", "vllm": "#c55a11", "hf": "#5f6368"}
DRAFTER_COLOURS = {
    "ngram": "#5f6368", "suffix": "#0b5394", "draft_model": "#8e44ad", "eagle3": "#c55a11",
    "dspark": "#7f6000", "hybrid": "#2e7d32",
}  # fmt: skip
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


def _write(png: bytes, alt: str, rows: Sequence[Row], columns: Columns, path: Path, title: str) -> None:
    if path.suffix == ".png":
        write_bytes(path, png)
        return
    encoded = base64.b64encode(png).decode()
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        f"<img alt='{alt}' src='data:image/png;base64,{encoded}'>"
        f"{render_html(rows, columns)}</html>"
    )
    write_bytes(path, page.encode())


def save(rows: Sequence[Row], columns: Columns, path: Path, title: str) -> None:
    measured = [row for row in rows if row["tokens_per_s"] is not None]
    models = list(dict.fromkeys(row["model"] for row in measured)) or [""]

    def draw(axis, column: int, _: int) -> None:  # type: ignore[no-untyped-def]
        _panel(axis, [row for row in measured if row["model"] == models[column]])
        axis.set_title(models[column])

    png = to_png(draw, len(models), 1, (4 + 4.5 * len(models), 4.5), title)
    _write(png, "tokens per second by batch size", rows, columns, path, title)


def save_sweep(rows: Sequence[Row], columns: Columns, path: Path, title: str) -> None:
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
    png = to_png(draw, len(batches), len(temperatures), size, title)
    _write(png, "speed-up by draft length", rows, columns, path, title)


def save_steps(rows: Sequence[Row], columns: Columns, path: Path, title: str) -> None:
    measured = [row for row in rows if row["step_ms"] is not None]
    png = to_png(lambda axis, column, line: _steps(axis, measured), 1, 1, (7.5, 4.5), title)
    _write(png, "step time by batch size", rows, columns, path, title)


def to_png(draw: Callable[..., None], num_columns: int, num_lines: int, size: tuple[float, float], title: str) -> bytes:
    """A grid of panels. `draw(axis, column, line)` draws one."""
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
        matching = [row for row in rows if (row["drafter"], row["history"]) == (drafter, history)]
        axis.plot(
            [row["num_speculative_tokens"] for row in matching],
            [row["speedup"] for row in matching],
            marker="o",
            markersize=4,
            color=DRAFTER_COLOURS.get(drafter, "#1a1a1a"),
            linestyle="--" if history == "cold" else "-",
            label=f"{drafter} {history}" if history else drafter,
        )
    axis.axhline(1, color="#1a1a1a", linewidth=0.8)  # plain decoding
    axis.set_xticks(sorted({row["num_speculative_tokens"] for row in rows}))
    _label(axis, "draft length k", "speed-up (median)", "lower left" if rows else None)


def _steps(axis, rows: Sequence[Row]) -> None:  # type: ignore[no-untyped-def]
    batches = sorted({row["batch"] for row in rows})
    for i, k in enumerate(sorted({row["num_speculative_tokens"] for row in rows})):
        matching = sorted((row for row in rows if row["num_speculative_tokens"] == k), key=lambda row: row["batch"])
        xs, colour = [batches.index(row["batch"]) for row in matching], LENGTH_COLOURS[i % len(LENGTH_COLOURS)]
        label = f"k = {k}" if k else "plain"
        axis.plot(xs, [row["step_ms"] for row in matching], marker="o", markersize=4, color=colour, label=label)
        axis.plot(xs, [row["roofline_ms"] for row in matching], color=colour, linestyle="--", linewidth=0.8)
    axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axis.set_ylim(bottom=0)
    _label(axis, "batch size", "ms per step (dashed: roofline)", "upper left" if rows else None)


def _panel(axis, rows: Sequence[Row]) -> None:  # type: ignore[no-untyped-def]
    from matplotlib.colors import to_rgb

    batches = sorted({row["batch"] for row in rows})
    series = list(dict.fromkeys((row["engine"], row["mode"], row["num_speculative_tokens"]) for row in rows))
    width = 0.8 / max(len(series), 1)
    num_modes: dict[str, int] = {}  # of each engine, so far
    for i, (engine, mode, k) in enumerate(series):
        lighter = 0.28 * num_modes.get(engine, 0)
        num_modes[engine] = num_modes.get(engine, 0) + 1
        colour = tuple(c + (1 - c) * min(lighter, 0.75) for c in to_rgb(ENGINE_COLOURS.get(engine, "#2e7d32")))
        rate_by_batch = {
            r["batch"]: r["tokens_per_s"]
            for r in rows
            if (r["engine"], r["mode"], r["num_speculative_tokens"]) == (engine, mode, k)
        }
        xs = [batches.index(batch) + (i - (len(series) - 1) / 2) * width for batch in rate_by_batch]
        label = f"{engine} {mode}" + (f" k={k}" if k else "")
        bars = axis.bar(xs, list(rate_by_batch.values()), width * 0.92, color=colour, label=label)
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    _label(axis, "batch size", "tokens per second (median)", "upper left" if series else None)


def _label(axis, x: str, y: str, legend: str | None) -> None:  # type: ignore[no-untyped-def]
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.spines[["top", "right"]].set_visible(False)
    if legend is not None:
        axis.legend(fontsize=8, frameon=False, loc=legend)
