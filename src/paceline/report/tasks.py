"""The section of a run's page about its tasks, if it has several: each chart has a line for each task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.files import number
from paceline.report.chart import lines, show
from paceline.report.curves import CURVES, SHARE
from paceline.report.elements import charts, section, table
from paceline.report.figures import held_out_rewards
from paceline.report.markup import escape
from paceline.report.run import Run
from paceline.report.series import Series, Values, color_and_style


def tasks(run: Run) -> str:
    by_step = [record["tasks"] for record in run.steps if isinstance(record.get("tasks"), dict)]
    labels = list(dict.fromkeys(label for by_label in by_step for label in by_label))

    def chart(title: str, unit: str, values: Callable[[str], Values], style: str, **options: Any) -> str:
        series = []
        for i, label in enumerate(labels):
            colour, own_style = color_and_style(i)
            series.append(Series(label, values(label), colour, f"{style} {own_style}".strip()))
        return lines(title, unit, run.numbers, series, **options)

    def metric(title: str, unit: str, name: str, **options: Any) -> str:
        return chart(title, unit, lambda label: run.series("tasks", label, name), "", **options)

    def of_curve(name: str) -> str:
        curve = CURVES[name]
        return metric(f"{curve.title} by task", curve.unit, name, **curve.options)

    held_out = CURVES["eval.reward"]
    return section(
        "tasks",
        "Tasks",
        charts(
            of_curve("reward_mean"),
            chart(f"{held_out.title} by task", held_out.unit, lambda label: held_out_rewards(run, label), "points"),
            metric("Solved by task", "share of samples with a reward of at least 1", "solved_ratio", **SHARE),
            of_curve("length_mean"),
            of_curve("truncated_ratio"),
            of_curve("mean_acceptance_length"),
            metric("Share of groups", "of a step's groups", "share", **SHARE),
        ),
        table(
            ["step", "task", "mean reward", "avg@n", "pass@k", "mean length (tokens)"],
            _held_out_rows(run),
            num_text=2,
            caption="Held-out problems by task",
        ),
    ) if labels else ""  # fmt: skip


def _held_out_rows(run: Run) -> list[list[str]]:
    rows = []
    for record in run.steps:
        for name, when in (("eval_before", f"{record['step']} (before)"), ("eval", str(record["step"]))):
            found = record.get(name)
            by_label = found.get("tasks") if isinstance(found, dict) else None
            for label, result in by_label.items() if isinstance(by_label, dict) else ():
                figures = (number(result, key) for key in ("reward", "avg_at_n", "pass_at_k", "length_mean"))
                rows.append([when, escape(label), *map(show, figures)])
    return rows
