"""`paceline train-draft`: an EAGLE-3 head for a model, from the model's own rollouts or from text."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from paceline.cli.app import JsonFile, app, check_resumable, err, friendly, out, stoppable
from paceline.cli.train import Settings, split_arguments
from paceline.config import load_config
from paceline.report.table import check_writable, render, write_json

NAMES = {"coupled": "coupled", "greedy": "greedy", "sampled": "sampled (rejection rule)"}


@app.command("train-draft")
@friendly
def train_draft(
    words: Settings = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run.")] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="Folder of the new run.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Train an EAGLE-3 head that drafts for a model.

    It learns from what the model answers to the task's prompts, or from a jsonl file (`draft.data`). Ctrl-C or SIGTERM
    ends it with a checkpoint; `--resume RUN` goes on as if nothing had happened.

    Examples:

    - `paceline train-draft configs/draft.toml`
    - `paceline train-draft configs/draft.toml draft.num_epochs=8 draft.loss=acceptance`
    - `paceline train-draft draft.data=chats.jsonl draft.num_sequences=20000 model.device=cuda`
    - `paceline train-draft --resume runs/draft-chain_sum-20260101-120000`
    """
    path, overrides = split_arguments(words)
    check_writable(json_file)
    if resume is not None:
        if words or run is not None:
            raise ValueError("--resume goes on with the run's own settings; give no others")
        check_resumable(resume, "train-draft")
        path = resume / "config.toml"
    config = load_config(path, overrides)
    from paceline.build import build_draft_trainer

    stopping = threading.Event()
    watcher = DraftProgress()

    def stop() -> None:
        watcher.note("stopping after the step under way")
        stopping.set()

    with watcher, stoppable(stop):
        watcher.note(f"EAGLE-3 head for {config.model.name} on {source_of(config.draft.data, config.task.name)}")
        trainer = build_draft_trainer(config, watcher, run=run, resume=resume, stopping=stopping.is_set)
        with contextlib.closing(trainer):
            if config.sampling.params().truncates:
                watcher.note("acceptance is measured without sampling.top_k, top_p and min_p")
            if resume is not None and trainer.finished:
                watcher.note(f"{resume} is finished: {trainer.step} steps")
            summary = trainer.run(stopping.is_set)
    show(summary)
    if json_file is not None:
        write_json(json_file, {"config": config.model_dump(mode="json"), **summary})
    if not summary["finished"]:
        err.print(
            f"stopped after {summary['steps']} of {summary['num_steps']} steps; go on with: "
            f"paceline train-draft --resume {summary['run']}",
            style="yellow",
            soft_wrap=True,
        )
        raise typer.Exit(130)


def source_of(data: str, task: str) -> str:
    return f"its own answers to {task}" if data == "rollouts" else data


def show(summary: Mapping[str, Any]) -> None:
    if summary["before"] is not None:
        out.print(acceptance_table(summary))
    figures = {
        "steps": f"{summary['steps']} of {summary['num_steps']}",
        "sequences": f"{summary['num_train']} to train on, {summary['num_held_out']} held out",
        "skipped, too short": summary["num_skipped"] or None,
        "cut to draft.max_length": summary["num_cut"] or None,
        "draft vocabulary": summary["draft_vocab_size"],
        "of held-out tokens it can say": f"{summary['coverage']:.2%}",
        "tokens learned from": summary["tokens"],
        "seconds": summary["seconds"],
    }
    rows = [{"figure": name, "value": value} for name, value in figures.items() if value is not None]
    out.print(render(rows, {"figure": "figure", "value": "value"}))
    out.print(f"run   {summary['run']}", soft_wrap=True)
    if summary["head"] is not None:
        use = f'speculation.method = "eagle3"\nspeculation.head = {json.dumps(summary["head"], ensure_ascii=False)}'
        out.print(f"head  {summary['head']}\nto draft with it:\n{use}", soft_wrap=True)


def acceptance_table(summary: Mapping[str, Any]) -> Any:
    """A row for each kind of draft, before and after: tokens a step emits on average, and how many drafts were right
    up to each position."""
    rows = []
    for kind, name in NAMES.items():
        for when in ("before", "after"):
            found = summary[when][kind]
            shares = {f"at {i}": f"{share:.1%}" for i, share in enumerate(found["acceptance_per_position"], 1)}
            rows.append({"drafts": name, "": when, "length": f"{found['mean_acceptance_length']:.3f}", **shares})
    title = f"acceptance on held-out sequences, k = {summary['k']}, temperature {summary['temperature']:g}"
    return render(rows, {key: key for key in rows[0]}, title)


class DraftProgress:
    """What goes on now as a bar, and a line for every measurement that stays; without a terminal only the lines."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"), console=err, transient=True, disable=not err.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> DraftProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def progress(self, stage: str, done: int, total: int) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, figures="")
        for name, task in self._tasks.items():
            self._bars.update(task, visible=name == stage)
        self._bars.update(self._tasks[stage], completed=done, total=total)

    def note(self, text: str) -> None:
        self._bars.console.print(Text(text, style="yellow"), soft_wrap=True)

    def step(self, metrics: Mapping[str, Any]) -> None:
        if "training" in self._tasks:
            figures = f"loss {metrics['loss']:.3f}  overlap {metrics['overlap'][0]:.3f}"
            self._bars.update(self._tasks["training"], figures=figures)
        if (before := metrics.get("acceptance_before")) is not None:
            self._line("before", before)
        if (found := metrics.get("acceptance")) is not None:
            self._line(f"step {metrics['step'] + 1}", found)

    def _line(self, when: str, found: Mapping[str, Any]) -> None:
        lengths = "  ".join(f"{kind} {found[kind]['mean_acceptance_length']:.3f}" for kind in NAMES)
        self._bars.console.print(Text(f"{when:>10}  accepted  {lengths}"), soft_wrap=True)
