"""`paceline train`, `report`, `eval` and `export`: from a config to a better model, and what became of it."""

from __future__ import annotations

import contextlib
import functools
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from paceline.cli.app import JsonFile, app, check_resumable, err, friendly, made_by, out, stoppable
from paceline.config import Config, load_config
from paceline.report.table import check_writable, render, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.rl.loop import Watcher
    from paceline.tasks.task import Problem

Settings = Annotated[list[str] | None, typer.Argument(metavar="[CONFIG.toml] [A.B=C]…", help="A file, then settings.")]


def split_arguments(words: list[str] | None) -> tuple[Path | None, list[str]]:
    """A word without `=` is the config file; the rest are settings."""
    files = [word for word in words or [] if "=" not in word]
    if len(files) > 1:
        raise ValueError(f"two config files, {files[0]} and {files[1]}; give one, and settings as a.b=c")
    return Path(files[0]) if files else None, [word for word in words or [] if "=" in word]


@app.command()
@friendly
def train(
    words: Settings = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run.")] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="Folder of the new run.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, show the plan, train nothing.")] = False,
) -> None:
    """Post-train a model with RL; rollouts are speculative where `speculation.method` says so.

    Ctrl-C or SIGTERM ends it with a checkpoint; `--resume RUN` goes on as if nothing had happened.

    Examples:

    - `paceline train configs/quickstart.toml`
    - `paceline train configs/gsm8k.toml train.num_steps=50 speculation.audit_every=10`
    - `paceline train --resume runs/chain_sum-20260101-120000`
    """
    from paceline.cli.progress import TerminalWatcher

    path, overrides = split_arguments(words)
    if resume is not None and (path is not None or run is not None):
        raise ValueError("--resume takes the run's own config.toml; give settings to change as a.b=c")
    if resume is not None:
        check_resumable(resume, "train")
    config = load_config(resume / "config.toml" if resume is not None else path, overrides)
    from paceline.build import torchrun_rank
    from paceline.report.html import write_report

    if torchrun_rank():
        if not dry_run:
            follow_along(config)
        return
    if dry_run:
        show_plan(config)
        return
    watcher = TerminalWatcher(err, config)
    with watcher:
        watcher.note(f"{config.algorithm.name} on {config.task.name} with {config.model.name}")
        run_it = run_on_cluster if config.cluster.kind == "ray" else run_here
        folder, summary = run_it(config, watcher, run, resume)
        report = write_report(folder)
    finish(folder, config, summary, report)


def run_here(config: Config, watcher: Watcher, run: Path | None, resume: Path | None) -> tuple[Path, dict[str, Any]]:
    """The run's folder and its summary. Where torchrun started several ranks, this is the first, and they follow."""
    from paceline.build import build_learner, build_loop, build_world

    make_learner = functools.partial(build_learner, world=build_world(config))
    loop = build_loop(config, watcher, run=run, resume=resume, make_learner=make_learner)
    with contextlib.closing(loop), stopping(loop.producer.stop):
        return loop.folder.path, loop.run()


def follow_along(config: Config) -> None:
    """A rank above 0: silent, and deaf to signals, for when to stop is decided by the first."""
    from paceline.build import build_world, follow

    world = build_world(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(config, world)


def run_on_cluster(
    config: Config, watcher: Watcher, run: Path | None, resume: Path | None
) -> tuple[Path, dict[str, Any]]:
    from paceline.build import ClusterRun

    with contextlib.closing(ClusterRun(config, watcher, run=run, resume=resume)) as cluster, stopping(cluster.stop):
        return cluster.folder, cluster.run()


def stopping(stop: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    def ask() -> None:
        err.print("stopping: the step under way is given up, the last whole one is kept", style="yellow")
        stop()

    return stoppable(ask)


def finish(folder: Path, config: Config, summary: dict[str, Any], report: Path) -> None:
    out.print(closing_table(summary, config.train.max_staleness > 0))
    out.print(f"run     {folder}\nreport  {report}", soft_wrap=True)
    if not summary["finished"]:
        err.print(
            f"stopped after {summary['steps']} of {config.train.num_steps} steps; go on with: "
            f"paceline train --resume {folder}",
            style="yellow",
            soft_wrap=True,
        )
        raise typer.Exit(130)


def closing_table(summary: dict[str, Any], overlaps: bool) -> Any:
    figures: dict[str, Any] = {
        "held-out reward before": summary["reward_before"],
        "held-out reward after": summary["reward_after"],
        "steps": summary["steps"],
        "tokens generated": summary["tokens"],
        "mean acceptance length": summary["mean_acceptance_length"],
    }
    if summary["generation_speedup"] is not None:
        figures["audited speed-up, whole rollout"] = f"{summary['generation_speedup']:.2f}x"
        for rows, ratio in summary["tail_speedup"].items():
            figures[f"audited speed-up, {rows} running"] = f"{ratio:.2f}x"
        figures["audited tokens identical"] = summary["identical"]
    hidden = () if overlaps else ("exposed",)  # where nothing overlaps it is generation once more
    for name, stage in summary["stages"].items():
        if stage["seconds"] >= 0.05 and name not in hidden:
            figures[f"time in {name}"] = f"{stage['seconds']:.1f} s  {stage['share']:6.1%}"
    rows = [{"figure": name, "value": value} for name, value in figures.items() if value is not None]
    return render(rows, {"figure": "figure", "value": "value"})


def show_plan(config: Config) -> None:
    """What a run would do: the first problem as the model sees it, its reward for its own answer, and the sizes."""
    from paceline.build import build_task, check_device
    from paceline.model.store import load_tokenizer, resolve
    from paceline.tasks.prompt import encode

    task = build_task(config)
    directory = resolve(config.model.name, err)
    tokenizer = load_tokenizer(directory)
    problem = task.train[0]
    ids = encode(tokenizer, problem.prompt, config.task.chat)
    check_device(config)
    train, samples = config.train, config.algorithm.num_generations
    rows = {
        "model": f"{config.model.name} ({directory})",
        "problems": f"{len(task.train)} to train on, {len(task.held_out)} held out",
        "a step": f"{train.groups_per_step} problems x {samples} samples of up to {config.sampling.max_tokens} tokens",
        "steps": f"{train.num_steps} ({train.num_steps * train.groups_per_step / len(task.train):.2g} epochs)",
        "first prompt": f"{len(ids)} tokens",
        "its own answer scores": score_own_answer(config, problem, tokenizer),
    }
    if "code" in config.reward.functions:
        from paceline.tasks.sandbox import isolation

        rows["programs run in sandbox"] = str(isolation(config.reward.sandbox))
    out.print(render([{"what": k, "is": v} for k, v in rows.items()], {"what": "plan", "is": ""}))
    out.print(Text(tokenizer.decode(list(ids))), soft_wrap=True)
    err.print("dry run: nothing was trained", style="dim")


def score_own_answer(config: Config, problem: Problem, tokenizer: Any) -> float | None:
    """What a problem's own answer is worth; None where it has none, as in an environment."""
    from paceline.build import build_rewarder
    from paceline.tasks.rewards import Sample

    answer = problem.columns.get("answer")
    if not answer or problem.make_env is not None:
        return None
    ids = tuple(tokenizer.encode(str(answer)))
    with contextlib.closing(build_rewarder(config)) as rewarder:
        score = rewarder.score([Sample("the first problem", problem.prompt, str(answer), ids, problem.columns)])[0]
    if score.failure is not None:
        raise ValueError(score.failure)
    return score.reward


@app.command()
@friendly
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    output: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: report.html in it.")] = None,
) -> None:
    """Write a run's report: one HTML page that needs nothing else.

    Example: `paceline report runs/chain_sum-20260101-120000`
    """
    from paceline.report.html import write_report

    check_writable(output)
    if made_by(run) == "train-draft":
        raise ValueError(f"{run}: a train-draft run has no report; its figures are in {run / 'summary.json'}")
    out.print(str(write_report(run, output)), soft_wrap=True)


@app.command("eval")
@friendly
def eval_command(
    model: Annotated[str, typer.Argument(help="Known name, Hugging Face directory, or hub id.")],
    task: Annotated[str, typer.Argument(help="A config file, a jsonl file, or a reasoning-gym dataset.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]…", help="Settings.")] = None,
    num_samples: Annotated[int, typer.Option("-n", min=1, help="Samples per problem.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Mean reward, avg@n and pass@k on a task's held-out problems.

    Examples:

    - `paceline eval smollm2-135m configs/quickstart.toml -n 4`
    - `paceline eval ./exported gsm8k.jsonl task.held_out=100 reward.functions='["math"]'`
    """
    from rich.progress import Progress

    check_writable(json_file)
    if (Path(model) / "run.json").exists():
        raise ValueError(f"{model} is a run, not a model; first: paceline export {model} DIR, then evaluate DIR")
    path = Path(task)
    given = [f"model.name={model!r}"]
    if path.suffix == ".toml":
        config = load_config(path, [*given, *(overrides or [])])
    else:
        kind = "jsonl" if task.endswith((".jsonl", ".jsonl.gz")) else "reasoning_gym"
        config = load_config(None, [*given, f"task.kind={kind}", f"task.name={task!r}", *(overrides or [])])
        if config.task.kind == "reasoning_gym" and ("/" in task or path.suffix):  # no dataset is called so
            raise ValueError(
                f"{task}: not a .toml, .jsonl or .jsonl.gz file, and no reasoning-gym dataset; for a task of another "
                "kind set task.kind"
            )
    from paceline.build import build_collector, build_engine, build_rewarder, build_task
    from paceline.rl.evaluate import evaluate

    problems = build_task(config).held_out
    if not problems:
        raise ValueError("task.held_out = 0: there is nothing to evaluate on")
    engine = build_engine(config)
    rewarder = build_rewarder(config)
    try:
        with Progress(console=err, transient=True, disable=not err.is_terminal) as bars:
            bar = bars.add_task("evaluating")
            result = evaluate(
                build_collector(config, engine, rewarder),
                problems,
                num_samples,
                config.train.eval_temperature,
                config.train.seed,
                lambda done, total: bars.update(bar, completed=done, total=total),
            )
    finally:
        rewarder.close()
        engine.close()
    shown = {
        "mean reward": result["reward"],
        f"avg@{num_samples}": result["avg_at_n"],
        **{f"pass@{k}": value for k, value in result["pass_at"].items()},
        "mean length": result["length_mean"],
        "problems": result["num_problems"],
        "not scored": result["failures"],
    }
    if result["first_failure"] is not None:
        err.print(f"not scored: {result['first_failure']}", style="yellow", soft_wrap=True)
    out.print(render([{"figure": k, "value": v} for k, v in shown.items()], {"figure": "figure", "value": "value"}))
    if json_file is not None:
        write_json(json_file, {"model": model, "task": task, **result})


@app.command()
@friendly
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    directory: Annotated[Path, typer.Argument(help="Where the Hugging Face directory goes.")],
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by validation, not the last.")] = False,
    head: Annotated[
        Path | None, typer.Option(metavar="DIR", help="And where the EAGLE-3 head goes that was adapted to it.")
    ] = None,
) -> None:
    """Write a run's policy as a plain Hugging Face directory (config.json, safetensors, tokenizer).

    Examples:

    - `paceline export runs/chain_sum-20260101-120000 ./my-model --best`
    - `paceline export runs/chain_sum-20260101-120000 ./my-model --head ./my-head`, for a run with draft.online
    """
    from paceline.build import export_policy

    if not (run / "config.toml").exists():
        raise ValueError(f"{run}: not a run, config.toml is missing there")
    export_policy(load_config(run / "config.toml"), run, directory, best, head)
    for place in (directory, head):
        if place is not None:
            out.print(str(place), soft_wrap=True)
