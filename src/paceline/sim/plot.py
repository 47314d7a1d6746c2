"""Pictures of sweeps and maps: lines over one axis, a heat map over two."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.report.table import write_bytes


def save_sweep(rows: Sequence[Mapping[str, Any]], axes: Sequence[str], path: Path, title: str) -> None:
    """Rollout and step speed-up over the first axis, or over the first two."""
    names = ("rollout_speedup", "step_speedup")
    figure, panels = _panels(len(names))
    first = list(dict.fromkeys(row[axes[0]] for row in rows))
    second = list(dict.fromkeys(row[axes[1]] for row in rows)) if len(axes) > 1 else [None]
    for panel, name in zip(panels, names, strict=True):
        cells = np.full((len(second), len(first)), np.nan)
        for row in rows:
            cells[second.index(row[axes[1]]) if len(axes) > 1 else 0, first.index(row[axes[0]])] = row[name]
        if len(axes) > 1:
            heat(panel, cells, first, second, axes[0], axes[1])
        else:
            panel.plot(range(len(first)), cells[0], marker="o", color="#0b5394")
            panel.axhline(1, color="#1a1a1a", linewidth=0.8)
            panel.set_xticks(range(len(first)), first)
            panel.set_xlabel(axes[0])
            panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(name.replace("_speedup", " speed-up"))
    figure.suptitle(title)
    _save(figure, path)


def save_maps(
    maps: Mapping[str, np.ndarray], columns: Sequence[Any], lines: Sequence[Any], x: str, y: str, path: Path, title: str
) -> None:
    """A panel for each."""
    figure, panels = _panels(len(maps))
    for panel, (name, cells) in zip(panels, maps.items(), strict=True):
        heat(panel, cells, columns, lines, x, y)
        panel.set_title(name, fontsize=10)
    figure.suptitle(title)
    _save(figure, path)


def heat(panel: Any, cells: np.ndarray, columns: Sequence[Any], lines: Sequence[Any], x: str, y: str) -> None:
    """Blue above 1, red below."""
    far = float(np.nanmax(np.abs(np.log(cells)))) or 1.0
    panel.imshow(np.log(cells), cmap="RdBu", vmin=-far, vmax=far, aspect="auto", origin="lower")
    for (i, j), value in np.ndenumerate(cells):
        shade = "white" if abs(np.log(value)) > 0.6 * far else "black"
        panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=shade)
    panel.set_xticks(range(len(columns)), [str(each) for each in columns])
    panel.set_yticks(range(len(lines)), [str(each) for each in lines])
    panel.set_xlabel(x)
    panel.set_ylabel(y)


def _panels(num: int) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    columns = min(num, 4)
    figure, axes = plt.subplots(
        -(-num // columns), columns, figsize=(4.2 * columns, 3.6 * -(-num // columns)), squeeze=False
    )
    for spare in axes.ravel()[num:]:
        spare.set_visible(False)
    return figure, list(axes.ravel()[:num])


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.tight_layout()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    plt.close(figure)
    write_bytes(path, picture.getvalue())
