"""`paceline train`, `eval` and `export`."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from paceline.build.config import load_config
from paceline.cli.app import (
    JsonFile,
    check_resumable,
    command,
    err,
    out,
    print_figures,
    save_json,
    stop_on_signal,
    warn,
)
from paceline.config import Config
from paceline.report.table import check_writable, render

if TYPE_CHECKING:
    from collections.abc import Callable

    from paceline.build.memory_plan import MemoryPlan
    from paceline.rl.callback import ProgressCallback
    from paceline.tasks.task import Problem

ConfigArguments = Annotated[
    list[str] | None, typer.Argument(metavar="[CONFIG.toml] [A.B=C]…", help="Config file, then settings.")
]


def split_arguments(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """The config file (the argument without `=`) and the settings."""
    files = [argument for argument in arguments or [] if "=" not in argument]
    if len(files) > 1:
        raise ValueError(f"two config files, {files[0]} and {files[1]}; give one, and settings as a.b=c")
    return Path(files[0]) if files else None, [argument for argument in arguments or [] if "=" in argument]


@command()
def train(
    arguments: ConfigArguments = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Resume a run.")] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="Folder for the new run.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the settings and print the plan; do not train.")
    ] = False,
) -> None:
    """Post-train a model with RL. Set `speculation.method` for speculative rollouts.

    Ctrl-C or SIGTERM stops with a checkpoint. `--resume RUN` continues.

    Examples:

    - `paceline train configs/quickstart.toml`
    - `paceline train configs/gsm8k.toml train.num_steps=50 speculation.audit_every=10`
    - `paceline train --resume runs/chain_sum-20260101-120000`
    """
    from paceline.cli.progress import TerminalProgress

    path, overrides = split_arguments(arguments)
    if resume is not None and (path is not None or run is not None):
        raise ValueError("--resume takes the run's own config.toml; give settings to change as a.b=c")
    if resume is not None:
        check_resumable(resume, "train")
    config = load_config(resume / "config.toml" if resume is not None else path, overrides)
    from paceline.build.learner import torchrun_rank
    from paceline.report.html import write_report

    if torchrun_rank():
        if not dry_run:
            run_other_rank(config)
        return
    if dry_run:
        show_plan(config)
        return
    callback = TerminalProgress(err, config)
    with callback:
        callback.note(f"{config.algorithm.name} on {config.task.name} with {config.model.name}")
        run_training = run_on_cluster if config.cluster.kind == "ray" else run_in_process
        folder, summary = run_training(config, callback, run, resume)
        report = write_report(folder)
    print_result(folder, config, summary, report)


def run_in_process(
    config: Config, callback: ProgressCallback, run: Path | None, resume: Path | None
) -> tuple[Path, dict[str, Any]]:
    """Run in this process and return the run's folder and summary. Under torchrun this is rank 0."""
    from paceline.build.learner import build_worker_group
    from paceline.build.run import build_trainer

    worker_group = build_worker_group(config)
    trainer = build_trainer(config, callback, run=run, resume=resume, worker_group=worker_group)
    note_folder(callback, trainer.folder.path)
    with contextlib.closing(trainer), stop_with_note(trainer.producer.stop):
        return trainer.folder.path, trainer.run()


def run_other_rank(config: Config) -> None:
    """Run a rank above 0. It prints nothing and ignores signals: rank 0 decides when to stop."""
    from paceline.build.learner import build_worker_group, run_worker

    worker_group = build_worker_group(config)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    run_worker(config, worker_group)


def run_on_cluster(
    config: Config, callback: ProgressCallback, run: Path | None, resume: Path | None
) -> tuple[Path, dict[str, Any]]:
    from paceline.build.cluster import ClusterRun

    cluster = ClusterRun(config, callback, run=run, resume=resume)
    note_folder(callback, cluster.folder)
    with contextlib.closing(cluster), stop_with_note(cluster.stop):
        return cluster.folder, cluster.run()


def note_folder(callback: ProgressCallback, folder: Path) -> None:
    callback.note(f"to watch it in a browser: paceline watch {folder}")


def stop_with_note(stop: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    def stop_and_print() -> None:
        warn("stopping: this step is discarded, the last complete step is kept")
        stop()

    return stop_on_signal(stop_and_print)


def print_result(folder: Path, config: Config, summary: dict[str, Any], report: Path) -> None:
    print_figures(summary_figures(summary, config.train.max_staleness > 0))
    out.print(f"run     {folder}\nreport  {report}", soft_wrap=True)
    if not summary["finished"]:
        warn(
            f"stopped after {summary['num_steps']} of {config.train.num_steps} steps; to continue: "
            f"paceline train --resume {folder}"
        )
        raise typer.Exit(130)


def summary_figures(summary: dict[str, Any], overlaps: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "held-out reward before": summary["reward_before"],
        "held-out reward after": summary["reward_after"],
        "steps": summary["num_steps"],
        "tokens generated": summary["num_tokens"],
        "mean acceptance length": summary["mean_acceptance_length"],
    }
    if summary["generation_speedup"] is not None:
        figures["audited speed-up, whole generation"] = f"{summary['generation_speedup']:.2f}x"
        for rows, ratio in summary["tail_speedup"].items():
            figures[f"audited speed-up, {rows} running"] = f"{ratio:.2f}x"
        same = summary["identical"] or summary["must_be_identical"]
        figures["audited tokens identical"] = (
            summary["identical"] if same else "no: near-ties, as the kernels are not batch-invariant"
        )
    hidden = () if overlaps else ("exposed_generation",)  # without overlap it equals generation
    for name, stage in summary["stages"].items():
        if stage["seconds"] >= 0.05 and name not in hidden:
            figures[f"time in {name}"] = f"{stage['seconds']:.1f} s  {stage['share']:6.1%}"
    return {name: value for name, value in figures.items() if value is not None}


def show_plan(config: Config) -> None:
    """Print the sizes of a run, its first prompt, and the reward of the first problem's answer."""
    from paceline.build.memory import cpu_plan, resolve_memory
    from paceline.build.model import check_device, check_training_dtype
    from paceline.build.task import build_task
    from paceline.model.store import load_tokenizer, resolve
    from paceline.tasks.prompt import encode

    check_device(config)
    check_training_dtype(config)
    task = build_task(config)
    directory = resolve(config.model.name, err)
    tokenizer = load_tokenizer(directory)
    problem = task.train[0]
    ids = encode(tokenizer, problem.prompt, config.task.chat)
    config, memory = resolve_memory(config)
    memory = memory or cpu_plan(config)
    train, samples = config.train, config.algorithm.num_generations
    rows = {
        "model": f"{config.model.name} ({directory})",
        "problems": f"{len(task.train)} to train on, {len(task.held_out)} held out",
        "step": f"{train.groups_per_step} problems x {samples} samples of up to {config.sampling.max_tokens} tokens",
        "steps": f"{train.num_steps} ({train.num_steps * train.groups_per_step / len(task.train):.2g} epochs)",
        "first prompt": f"{len(ids)} tokens",
        "reward of its answer": score_reference_answer(config, problem, tokenizer),
    }
    if "code" in config.reward.functions:
        from paceline.tasks.sandbox import isolation

        rows["programs run in sandbox"] = str(isolation(config.reward.sandbox))
    out.print(render([{"what": k, "is": v} for k, v in rows.items()], {"what": "plan", "is": ""}))
    if memory is not None:
        show_memory(memory)
    out.print(Text(tokenizer.decode(list(ids))), soft_wrap=True)
    err.print("dry run: nothing was trained", style="dim")


def show_memory(plan: MemoryPlan) -> None:
    from paceline.build.memory_text import plan_rows

    rows = plan_rows(plan) | ({} if plan.total_bytes is None else {"GPU": plan.total_bytes})
    cells = [{"what": name, "size": f"{size / 2**30:6.1f}"} for name, size in rows.items()]
    out.print(render(cells, {"what": "memory", "size": "GiB"}))


def score_reference_answer(config: Config, problem: Problem, tokenizer: Any) -> float | None:
    """The reward of a problem's own answer; None if it has none, as in an environment. Either way the reward functions
    are loaded, so that a wrong name is an error now and not in the run."""
    from paceline.build.task import build_rewarder
    from paceline.tasks.rewards import Sample

    answer = problem.columns.get("answer")
    with contextlib.closing(build_rewarder(config)) as rewarder:
        if not answer or problem.make_env is not None:
            return None
        ids = tuple(tokenizer.encode(str(answer)))
        score = rewarder.score([Sample("the first problem", problem.prompt, str(answer), ids, problem.columns)])[0]
    if score.failure is not None:
        raise ValueError(score.failure)
    return score.reward


@command("eval")
def eval_command(
    model: Annotated[str, typer.Argument(help="Known name, directory or hub id of the model.")],
    task: Annotated[str, typer.Argument(help="Config file, jsonl file, or reasoning-gym dataset.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]…", help="Settings to change.")] = None,
    num_samples: Annotated[int, typer.Option("-n", min=1, help="Samples per problem.")] = 1,
    json_file: JsonFile = None,
) -> None:
    """Compute mean reward, avg@n and pass@k on a task's held-out problems.

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
        if config.task.kind == "reasoning_gym" and ("/" in task or path.suffix):  # not the name of a dataset
            raise ValueError(
                f"{task}: not a .toml, .jsonl or .jsonl.gz file, and no reasoning-gym dataset; for a task of another "
                "kind set task.kind"
            )
    from paceline.build.engine import build_engine
    from paceline.build.run import build_collector
    from paceline.build.task import build_rewarder, build_task
    from paceline.rl.evaluator import evaluate

    problems = build_task(config).held_out
    if not problems:
        raise ValueError("task.held_out = 0: there are no problems to evaluate on; raise it")
    with (
        contextlib.closing(build_engine(config)) as engine,
        contextlib.closing(build_rewarder(config)) as rewarder,
        Progress(console=err, transient=True, disable=not err.is_terminal) as bars,
    ):
        bar = bars.add_task("evaluating")
        result = evaluate(
            build_collector(config, engine, rewarder),
            problems,
            num_samples,
            config.train.eval_temperature,
            config.train.seed,
            lambda done, total: bars.update(bar, completed=done, total=total),
        )
    if result["first_failure"] is not None:
        warn(f"not scored: {result['first_failure']}")
    print_figures(
        {
            "mean reward": result["reward"],
            f"avg@{num_samples}": result["avg_at_n"],
            **{f"pass@{k}": value for k, value in result["pass_at"].items()},
            "mean length": result["length_mean"],
            "problems": result["num_problems"],
            "not scored": result["num_failures"],
        }
    )
    save_json(json_file, {"model": model, "task": task, **result})


@command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    directory: Annotated[Path, typer.Argument(help="Output directory.")],
    best: Annotated[
        bool, typer.Option("--best", help="Export the best checkpoint by held-out reward, not the last.")
    ] = False,
    head: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also export the EAGLE-3 head of a run with draft.online.")
    ] = None,
) -> None:
    """Export a run's policy as a Hugging Face directory (config.json, safetensors, tokenizer).

    Examples:

    - `paceline export runs/chain_sum-20260101-120000 ./my-model --best`
    - `paceline export runs/chain_sum-20260101-120000 ./my-model --head ./my-head`
    """
    from paceline.build.export import export_policy

    if not (run / "config.toml").exists():
        raise ValueError(f"{run}: not a run (it has no config.toml)")
    export_policy(load_config(run / "config.toml"), run, directory, best, head)
    for output in (directory, head):
        if output is not None:
            out.print(str(output), soft_wrap=True)
