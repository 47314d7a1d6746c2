"""`paceline report A B …`: one page that compares runs: curves over each other, the settings that differ, and the
figures at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from paceline.files import number
from paceline.report import figures
from paceline.report.chart import key, lines, show
from paceline.report.curves import CURVES
from paceline.report.elements import charts, factor, paragraph, seconds, section, table
from paceline.report.html import document, to_bytes
from paceline.report.key_figures import between
from paceline.report.markup import escape
from paceline.report.run import Run, mean, read_run
from paceline.report.series import Series, color_and_style
from paceline.report.table import check_writable, write_bytes

MAX_RUNS = 12
DEFAULT_NAME = "comparison.html"
# Section -> paths of its curves
SECTIONS = {
    "Reward and length": ("reward_mean", "eval.reward", "length_mean", "truncated_ratio"),
    "Time": ("stages.total", "stages.generation", "stages.training", "tokens_per_s"),
    "Speculation": ("mean_acceptance_length", "draft_acceptance_rate", "audit.speedup"),
    "Learning": (
        "loss", "grad_norm", "kl", "entropy", "clip_ratio", "learning_rate", "staleness_mean", "mismatch_mean",
    ),
}  # fmt: skip
ABSENT = "–"


def write_comparison(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the page to `out`, or to comparison.html in the current folder."""
    path = out or Path(DEFAULT_NAME)
    check_writable(path)
    write_bytes(path, to_bytes(render_comparison(read_runs(folders))))
    return path


def read_runs(folders: Sequence[Path]) -> list[Run]:
    if len(folders) > MAX_RUNS:
        raise ValueError(f"{len(folders)} runs: a comparison shows at most {MAX_RUNS}; give fewer")
    times = Counter(folder.resolve() for folder in folders)
    if twice := [str(path) for path, count in times.items() if count > 1]:
        raise ValueError(f"{twice[0]} is given twice; give each run once")
    return [read_run(folder, only_metrics=True) for folder in folders]


def render_comparison(runs: Sequence[Run]) -> str:
    names = labels([run.folder for run in runs])
    settings = [[breakable(name), *map(escape, cells)] for name, *cells in differing_settings(runs)]
    figure_rows = [[escape(name), *map(escape, cells)] for name, *cells in end_figures(runs)]
    parts = {
        "runs": ("Runs", section("runs", "Runs", _overview(runs, names))),
        "settings": (
            "Settings",
            section("settings", "Settings that differ", table(["setting", *names], settings, num_text=1 + len(runs))
                    or paragraph("All settings are the same.")),
        ),
        "figures": ("Figures", section("figures", "Figures", table(["figure", *names], figure_rows))),
    }  # fmt: skip
    for title, paths in SECTIONS.items():
        name = title.split()[0].lower()
        drawn = [_curve(runs, names, path) for path in paths]
        parts[name] = (title, section(name, title, charts(*drawn)))
    title = f"{len(runs)} runs"
    header = f'<header><p class="kind">Paceline comparison</p><h1>{title}</h1></header>'
    return document(title, header, "", parts)


def breakable(name: str) -> str:
    """The name of a setting, which may be broken into lines between its words."""
    return escape(name).replace(".", ".<wbr>").replace("_", "_<wbr>")


def labels(folders: Sequence[Path]) -> list[str]:
    """The last part of each path; where that is not unique, as many parts as needed."""
    paths = [folder.resolve().parts for folder in folders]
    depths = [1] * len(paths)
    while True:
        names = ["/".join(path[-depth:]) for path, depth in zip(paths, depths, strict=True)]
        counts = Counter(names)
        if all(count == 1 for count in counts.values()):
            return names
        depths = [depth + (counts[name] > 1) for depth, name in zip(depths, names, strict=True)]


def differing_settings(runs: Sequence[Run]) -> list[list[str]]:
    """[key, its value in each run] of every key of config.toml that differs."""
    flat = [dict(_flatten(run.settings)) for run in runs]
    keys = dict.fromkeys(key for settings in flat for key in settings)
    rows = [[key, *(settings.get(key, ABSENT) for settings in flat)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        elif name == "task" and isinstance(value, list):  # several tasks
            tasks = (each for each in value if isinstance(each, Mapping))
            yield from _flatten({str(each.get("label")): each for each in tasks}, "task.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)


def end_figures(runs: Sequence[Run]) -> list[list[str]]:
    """[name, the figure of each run] of every figure that a run has."""
    rows = [[name, *(figure(run) or ABSENT for run in runs)] for name, figure in FIGURES.items()]
    return [row for row in rows if set(row[1:]) != {ABSENT}]


def _shown(figure: Callable[[Run], float | None], form: Callable[[float], str] = show) -> Callable[[Run], str]:
    def text(run: Run) -> str:
        value = figure(run)
        return "" if value is None else form(value)

    return text


def _mean_of(*path: str) -> Callable[[Run], float | None]:
    return lambda run: mean(run.series(*path))


def _audited(run: Run) -> str:
    ratios = figures.audited_speedups(run)
    if len(ratios) > 1:
        return f"{factor(median(ratios))} ({between(ratios, '×')})"
    return factor(value) if (value := figures.speedup(run)) is not None else ""


def _tail(run: Run) -> str:
    return factor(value) if (value := figures.tail_speedup(run).get("1")) is not None else ""


FIGURES: dict[str, Callable[[Run], str]] = {
    "steps": lambda run: str(len(run.steps)),
    "finished": lambda run: "yes" if run.summary.get("finished") is True else "no",
    "held-out reward before": _shown(figures.reward_before),
    "held-out reward after": _shown(figures.reward_after),
    "training reward, last step": _shown(lambda run: figures.latest(run, "reward_mean")),
    "completion length, last step": _shown(lambda run: figures.latest(run, "length_mean")),
    "tokens generated": _shown(lambda run: run.total("num_tokens") or None),
    "time": _shown(lambda run: number(run.summary, "wall_s") or run.total("stages", "total") or None, seconds),
    "time per step, mean": _shown(_mean_of("stages", "total"), seconds),
    "generation per step, mean": _shown(_mean_of("stages", "generation"), seconds),
    "training per step, mean": _shown(_mean_of("stages", "training"), seconds),
    "tokens per second, mean": _shown(_mean_of("tokens_per_s")),
    "acceptance length": _shown(figures.acceptance_length, "{:.2f}".format),
    "audited speed-up, median (range)": _audited,
    "audited speed-up, 1 running": _tail,
    "identical audits": lambda run: figures.identical_audits(run) if figures.audits(run) else "",
    "mean |Δ logprob|, engine and learner": _shown(_mean_of("mismatch_mean")),
    "memory": _shown(lambda run: figures.latest(run, "memory_gib"), "{:.1f} GiB".format),
}


def _overview(runs: Sequence[Run], names: Sequence[str]) -> str:
    """How each run is drawn, what it is, and what its own report warns about."""
    facts = ("name", "task", "model", "device", "started", "paceline", "torch")
    present = [fact for fact in facts if any(fact in run.info for run in runs)]
    rows = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        color, style = color_and_style(i)
        cells = (escape(str(run.info.get(fact, ABSENT))) for fact in present)
        rows.append([key(f"{style} c{color}") + escape(name), *cells])
    messages = [
        f"{name}: {text}"
        for run, name in zip(runs, names, strict=True)
        for text in [*figures.warnings(run), *run.notes]
    ]
    items = "".join(f"<li>{escape(message)}</li>" for message in messages)
    notes = f'<aside class="note"><b>Warnings and notes</b><ul>{items}</ul></aside>' if items else ""
    return table(["run", *present], rows, num_text=len(present) + 1) + notes


def _curve(runs: Sequence[Run], names: Sequence[str], path: str) -> str:
    """One line for each run that has the metric, over the steps of all runs."""
    curve = CURVES[path]
    steps = sorted({step for run in runs for step in run.numbers})
    series = []
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        values = figures.held_out_rewards(run) if path == "eval.reward" else run.series(*path.split("."))
        by_step = dict(zip(run.numbers, values, strict=True))
        color, style = color_and_style(i)
        kind = f"points {style}" if curve.is_rare else style
        series.append(Series(name, [by_step.get(step) for step in steps], color, kind))
    unit = f"{curve.unit}, {curve.line}" if curve.line else curve.unit
    return lines(curve.title, unit, steps, series, **curve.options)
