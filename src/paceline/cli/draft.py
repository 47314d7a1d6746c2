"""`paceline train-draft`: train a draft head on the model's own rollouts or on text."""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from paceline.build.config import load_config
from paceline.cli.app import (
    ConfigArguments,
    ConfigFile,
    JsonFile,
    Overrides,
    check_resumable,
    command,
    err,
    out,
    print_figures,
    save_json,
    split_arguments,
    stop_on_signal,
    warn,
)
from paceline.config import ARCHITECTURES, Config
from paceline.report.table import check_writable, render

DRAFT_KINDS = {"coupled": "coupled", "greedy": "greedy", "sampled": "sampled (rejection rule)"}


@command("train-draft")
def train_draft(
    arguments: ConfigArguments = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Resume a run.")] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="Folder for the new run.")] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Train a head of each architecture on the same data, and compare them.")
    ] = False,
    config_file: ConfigFile = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Train a draft head for a model: EAGLE-3 or DSpark (`draft.architecture`).

    The data are the model's completions of the task's prompts, or a jsonl file (`draft.data`). Ctrl-C or SIGTERM stops
    with a checkpoint. `--resume RUN` continues.

    Examples:

    - `paceline train-draft configs/draft.toml`
    - `paceline train-draft draft.data=chats.jsonl draft.num_sequences=20000 model.device=cuda`
    - `paceline train-draft configs/draft.toml --compare`
    - `paceline train-draft --resume runs/draft-chain_sum-20260101-120000`
    """
    path, given = split_arguments(arguments, overrides, config_file)
    check_writable(json_file)
    if resume is not None:
        if path is not None or given or run is not None or compare:
            raise ValueError("--resume uses the run's own settings; give no others")
        check_resumable(resume, "train-draft")
        path = resume / "config.toml"
    config = load_config(path, given)
    if compare:
        found: Mapping[str, Any] = train_each(config, run)
        out.print(comparison_table(found))
    else:
        found = train_one(config, run, resume)
    save_json(json_file, {"config": config.model_dump(mode="json"), **found})


def train_each(config: Config, run: Path | None) -> dict[str, Mapping[str, Any]]:
    """Train a head of each architecture on the same sequences, in the same order: the first run's rollouts are copied.
    Keys that are for one architecture only keep their values there."""
    from paceline.draft.head_init import without_other_keys

    if config.draft.init is not None:
        raise ValueError(
            f"--compare: draft.init = {config.draft.init!r} is a head of one architecture; leave one of the two out"
        )
    folder = run or Path("runs") / f"draft-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    summaries: dict[str, Mapping[str, Any]] = {}
    rollouts: Path | None = None
    for architecture in ARCHITECTURES:
        section = config.draft.model_copy(update={"architecture": architecture})
        each = config.model_copy(update={"draft": without_other_keys(section)})
        summaries[architecture] = train_one(each, folder / architecture, rollouts=rollouts)
        rollouts = folder / architecture / "rollouts.jsonl"
    return summaries


def train_one(
    config: Config, run: Path | None = None, resume: Path | None = None, rollouts: Path | None = None
) -> Mapping[str, Any]:
    """Train a head and print its summary. `rollouts`: sequences that need not be generated again."""
    from paceline.build.draft_run import HEAD_NAMES, build_draft_trainer

    stopping = threading.Event()
    callback = DraftProgress()

    def stop() -> None:
        callback.note("stopping after this step")
        stopping.set()

    with callback, stop_on_signal(stop):
        data = config.draft.data if config.draft.data != "rollouts" else f"its own completions of {config.task_names}"
        options = {"run": run, "resume": resume, "rollouts": rollouts, "stopping": stopping.is_set}
        trainer = build_draft_trainer(config, callback, **options)  # type: ignore[arg-type]
        with contextlib.closing(trainer):
            callback.note(f"{HEAD_NAMES[trainer.learner.head.architecture]} for {config.model.name} on {data}")
            if config.sampling.params().truncates:
                callback.note("acceptance is measured without sampling.top_k, top_p and min_p")
            if resume is not None and trainer.finished:
                callback.note(f"{resume} is finished: {trainer.step} steps")
            summary = trainer.run(stopping.is_set)
    print_summary(summary)
    if not summary["finished"]:
        warn(
            f"stopped after {summary['num_steps']} of {summary['num_planned_steps']} steps; to continue: "
            f"paceline train-draft --resume {summary['run']}"
        )
        raise typer.Exit(130)
    return summary


def comparison_table(summaries: Mapping[str, Mapping[str, Any]]) -> Any:
    """A row for each architecture: acceptance lengths after training, and the training's size."""
    rows = []
    for architecture, summary in summaries.items():
        lengths = {
            name: f"{summary['acceptance_after'][kind]['mean_acceptance_length']:.3f}"
            for kind, name in DRAFT_KINDS.items()
        }
        cost = {"steps": str(summary["num_steps"]), "seconds": f"{summary['seconds']:.1f}"}
        rows.append({"architecture": architecture, **lengths, **cost})
    return render(rows, {key: key for key in rows[0]}, "acceptance length on held-out sequences, on the same data")


def print_summary(summary: Mapping[str, Any]) -> None:
    if summary["acceptance_before"] is not None:
        out.print(acceptance_table(summary))
        if len(by_depth := summary["acceptance_after"]["coupled"]["acceptance_length_per_depth"]) > 1:
            out.print(depth_table(by_depth))
    values = {
        "steps": f"{summary['num_steps']} of {summary['num_planned_steps']}",
        "sequences": f"{summary['num_train']} to train on, {summary['num_held_out']} held out",
        "skipped, too short": summary["num_skipped"] or None,
        "truncated to draft.max_length": summary["num_truncated"] or None,
        "draft vocabulary": summary["draft_vocab_size"],
        "held-out tokens in it": f"{summary['coverage']:.2%}",
        "tokens trained on": summary["num_tokens"],
        "seconds": summary["seconds"],
    }
    print_figures({name: value for name, value in values.items() if value is not None})
    out.print(f"run   {summary['run']}", soft_wrap=True)
    if summary["head"] is not None:
        head = json.dumps(summary["head"], ensure_ascii=False)
        settings = f'speculation.method = "{summary["architecture"]}"\nspeculation.head = {head}'
        out.print(f"head  {summary['head']}\nto draft with it:\n{settings}", soft_wrap=True)


def acceptance_table(summary: Mapping[str, Any]) -> Any:
    """A row for each kind of draft, before and after training: mean acceptance length, and the share of drafts that
    were accepted up to each position."""
    rows = []
    for kind, name in DRAFT_KINDS.items():
        for when in ("before", "after"):
            found = summary[f"acceptance_{when}"][kind]
            shares = {f"at {i}": f"{share:.1%}" for i, share in enumerate(found["acceptance_per_position"], 1)}
            rows.append({"drafts": name, "": when, "length": f"{found['mean_acceptance_length']:.3f}", **shares})
    title = f"acceptance on held-out sequences, k = {summary['k']}, temperature {summary['temperature']:g}"
    return render(rows, {key: key for key in rows[0]}, title)


def depth_table(by_depth: Mapping[str, float]) -> Any:
    starts = list(by_depth)
    ends = [f" to {int(end) - 1}" for end in starts[1:]] + [" or more"]
    row = {f"after {start}{end}": f"{by_depth[start]:.3f}" for start, end in zip(starts, ends, strict=True)}
    return render([row], {key: key for key in row}, "acceptance length of coupled drafts, by tokens in the completion")


class DraftProgress:
    """Shows a progress bar on a terminal, and prints a line for every measurement."""

    def __init__(self) -> None:
        self._bars = Progress(
            TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"), console=err, transient=True, disable=not err.is_terminal,
        )  # fmt: skip
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> DraftProgress:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
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
        lengths = "  ".join(f"{kind} {found[kind]['mean_acceptance_length']:.3f}" for kind in DRAFT_KINDS)
        self._bars.console.print(Text(f"{when:>10}  acceptance length  {lengths}"), soft_wrap=True)
