"""The key figures at the top of a run's page, with their range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from paceline.files import number
from paceline.report.chart import show
from paceline.report.elements import definitions, factor, seconds
from paceline.report.figures import (
    acceptance_length,
    audited_speedups,
    audited_tails,
    audits,
    identical_audits,
    latest,
    reward_after,
    reward_before,
    speedup,
    tail_speedup,
)
from paceline.report.markup import escape
from paceline.report.run import Run, mean

KeyFigure = tuple[str, str, str]  # name, figure, note


def key_figures(run: Run) -> str:
    figures = [*_of_reward(run), *_of_speculation(run), *_of_training(run)]
    shown = [(name, f"{escape(figure)}<small>{escape(note)}</small>") for name, figure, note in figures]
    return definitions("key-figures", shown, "key-figures") if shown else ""


def _of_reward(run: Run) -> Iterator[KeyFigure]:
    before, after = reward_before(run), reward_after(run)
    if before is not None or after is not None:
        change = f"{after - before:+.3f} " if before is not None and after is not None else ""
        yield "held-out reward", f"{show(before)} → {show(after)}", f"{change}on held-out problems"
    elif (last := latest(run, "reward_mean")) is not None:
        yield "training reward", show(last), "mean of the last step; no evaluation"


def _of_speculation(run: Run) -> Iterator[KeyFigure]:
    if (length := acceptance_length(run)) is not None:
        of_steps = zip(run.series("mean_acceptance_length"), run.series("num_drafts"), strict=True)
        steps = between([value for value, num_drafts in of_steps if value is not None and num_drafts], "")
        yield "acceptance length", f"{length:.2f}", f"tokens per verified draft{steps and f'; {steps} by step'}"
    if (ratio := speedup(run)) is not None:
        yield "audited speed-up", *_of_audits(audited_speedups(run), ratio, "plain ÷ speculative time")
    if tail := {name: value for name, value in tail_speedup(run).items() if value is not None}:
        first, value = next(iter(tail.items()))
        what = f"with {first} running {'sequence' if first == '1' else 'sequences'}"
        yield "speed-up in the tail", *_of_audits(audited_tails(run, first), value, what)
    if audits(run):
        yield "identical audits", identical_audits(run), "the same tokens with and without drafts"


def _of_training(run: Run) -> Iterator[KeyFigure]:
    if (mismatch := mean(run.series("mismatch_mean"))) is not None:
        largest = max((value for value in run.series("mismatch_max") if value is not None), default=None)
        note = "mean |Δ logprob| of the same tokens" + (
            f"; largest {unbroken(show(largest))}" if largest is not None else ""
        )
        yield "engine and learner", show(mismatch), note
    if not run.steps:
        return
    planned = run.setting("train", "num_steps")
    of_planned = f"of {planned} planned, " if isinstance(planned, int) else ""
    wall = number(run.summary, "wall_s") or run.total("stages", "total")
    yield "steps", str(len(run.steps)), f"{of_planned}in {seconds(wall)}"
    if (memory := latest(run, "memory_gib")) is not None:
        of = "of the GPU" if str(run.setting("model", "device")).startswith("cuda") else "of the process"
        yield "memory", f"{memory:.1f} GiB", f"{of}, maximum"
    num_tokens = number(run.summary, "num_tokens") or run.total("num_tokens")
    rates = [rate for rate in run.series("tokens_per_s") if rate is not None]
    note = f"{show(mean(rates))} per second; {between(rates, '', show)} by step" if rates else ""
    yield "tokens generated", f"{num_tokens:,.0f}", note


def unbroken(figure: str) -> str:
    """With a hyphen that does not end a line: 8.0e-5 stays whole."""
    return figure.replace("-", "\N{NON-BREAKING HYPHEN}")


def _of_audits(ratios: Sequence[float], together: float, what: str) -> tuple[str, str]:
    """The median of the audited steps, and how far they differ; of a single one, or if only the summary has it, the
    ratio itself."""
    if len(ratios) < 2:
        return factor(together), f"{what}, {'one audited step' if ratios else 'of all audits'}"
    note = f"{what}: median of {len(ratios)} audits, {between(ratios, '×')}. All together {factor(together)}"
    return factor(median(ratios)), note


def between(values: Sequence[float], unit: str, form: Callable[[float], str] = "{:.2f}".format) -> str:
    """The range of values; "" if there is none."""
    return f"{form(min(values))}{unit} to {form(max(values))}{unit}" if values else ""
