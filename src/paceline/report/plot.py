"""The bench as grouped bars: one panel per model, one group per batch size, one bar per engine and mode."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path

from paceline.report.table import Columns, Row, render_html, write_bytes

# Blues, oranges and greys that stay apart for colour-blind readers; one hue per engine, lighter with each mode.
HUES = {"paceline": "#0b5394", "vllm": "#c55a11", "hf": "#5f6368"}
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
    picture = bars_png(rows, title)
    if path.suffix == ".png":
        write_bytes(path, picture)
        return
    encoded = base64.b64encode(picture).decode()
    page = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1>"
        f"<img alt='tokens per second by batch size' src='data:image/png;base64,{encoded}'>"
        f"{render_html(rows, columns)}</html>"
    )
    write_bytes(path, page.encode())


def bars_png(rows: Sequence[Row], title: str) -> bytes:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    measured = [row for row in rows if row["tokens_per_s"] is not None]
    models = list(dict.fromkeys(row["model"] for row in measured)) or [""]
    figure, axes = plt.subplots(1, len(models), figsize=(4 + 4.5 * len(models), 4.5), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        _panel(axis, [row for row in measured if row["model"] == model])
        axis.set_title(model)
    figure.suptitle(title)
    figure.tight_layout()
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=150)
    plt.close(figure)
    return out.getvalue()


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
