"""Plots of sweeps: lines over one axis, a heat map over two."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.report.table import write_bytes


def save_sweep(rows: Sequence[Mapping[str, Any]], axes: Sequence[str], path: Path, title: str) -> None:
    """Plot rollout and step speed-up over the first one or two axes."""
    axes = axes[:2]
    values = [list(dict.fromkeys(row[axis] for row in rows)) for axis in axes]
    maps = {}
    for name in ("rollout_speedup", "step_speedup"):
        cells = np.full([len(each) for each in reversed(values)], np.nan)
        for row in rows:
            cells[tuple(each.index(row[axis]) for each, axis in zip(values, axes, strict=True))[::-1]] = row[name]
        maps[name.replace("_speedup", " speed-up")] = cells
    if len(axes) > 1:
        save_maps(maps, values[0], values[1], axes[0], axes[1], path, title)
        return
    figure, panels = _panels(len(maps))
    for panel, (name, speedups) in zip(panels, maps.items(), strict=True):
        panel.plot(range(len(values[0])), speedups, marker="o", color="#0b5394")
        panel.axhline(1, color="#1a1a1a", linewidth=0.8)
        panel.set_xticks(range(len(values[0])), values[0])
        panel.set_xlabel(axes[0])
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(name)
    figure.suptitle(title)
    _save(figure, path)


def save_maps(
    maps: Mapping[str, np.ndarray], columns: Sequence[Any], lines: Sequence[Any], x: str, y: str, path: Path, title: str
) -> None:
    """Plot one heat map per entry of `maps`: blue above 1, red below."""
    figure, panels = _panels(len(maps))
    for panel, (name, cells) in zip(panels, maps.items(), strict=True):
        limit = float(np.nanmax(np.abs(np.log(cells)))) or 1.0
        panel.imshow(np.log(cells), cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto", origin="lower")
        for (i, j), value in np.ndenumerate(cells):
            shade = "white" if abs(np.log(value)) > 0.6 * limit else "black"
            panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade)
        panel.set_xticks(range(len(columns)), [str(each) for each in columns])
        panel.set_yticks(range(len(lines)), [str(each) for each in lines])
        panel.set_xlabel(x)
        panel.set_ylabel(y)
        panel.set_title(name, fontsize=10)
    figure.suptitle(title)
    _save(figure, path)


def _panels(num: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(num, 4)
    figure, axes = plt.subplots(
        -(-num // columns), columns, figsize=(4.2 * columns, 3.6 * -(-num // columns)), squeeze=False
    )
    for unused in axes.ravel()[num:]:
        unused.set_visible(False)
    return figure, list(axes.ravel()[:num])


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=130)
    plt.close(figure)
    write_bytes(path, png.getvalue())
