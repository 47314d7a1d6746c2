"""Plots of sweeps: lines over one axis, a heat map over two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.report.plot import to_png
from paceline.report.table import write_bytes

PANELS = ("rollout_speedup", "step_speedup")


def save_sweep(rows: Sequence[Mapping[str, Any]], axes: Sequence[str], path: Path, title: str) -> None:
    """Plot rollout and step speed-up over the first one or two axes."""
    axes = axes[:2]
    values = [list(dict.fromkeys(row[axis] for row in rows)) for axis in axes]

    def draw(panel: Any, column: int, _: int) -> None:
        cells = np.full([len(each) for each in reversed(values)], np.nan)
        for row in rows:
            place = tuple(each.index(row[axis]) for each, axis in zip(values, axes, strict=True))
            cells[place[::-1]] = row[PANELS[column]]
        if len(axes) > 1:
            draw_map(panel, cells, values[0], values[1], axes[0], axes[1])
        else:
            panel.plot(range(len(values[0])), cells, marker="o", color="#0b5394")
            panel.axhline(1, color="#1a1a1a", linewidth=0.8)
            panel.set_xticks(range(len(values[0])), values[0])
            panel.set_xlabel(axes[0])
            panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(PANELS[column].replace("_speedup", " speed-up"), fontsize=10)

    write_bytes(path, to_png(draw, len(PANELS), 1, (4.2 * len(PANELS), 3.6), title))


def draw_map(panel: Any, cells: np.ndarray, columns: Sequence[Any], lines: Sequence[Any], x: str, y: str) -> None:
    """Draw speed-ups as a heat map: blue above 1, red below."""
    limit = float(np.nanmax(np.abs(np.log(cells)))) or 1.0
    panel.imshow(np.log(cells), cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", origin="lower")
    for (i, j), value in np.ndenumerate(cells):
        shade = "white" if abs(np.log(value)) > 0.6 * limit else "black"
        panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade)
    panel.set_xticks(range(len(columns)), [str(each) for each in columns])
    panel.set_yticks(range(len(lines)), [str(each) for each in lines])
    panel.set_xlabel(x)
    panel.set_ylabel(y)
