"""`paceline train`, `eval` and `export`."""

from __future__ import annotations

import contextlib
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from paceline.build.config import load_config
from paceline.build.defaults import describe_speculation
from paceline.cli.app import (
    ConfigArguments,
    ConfigFile,
    JsonFile,
    Overrides,
    check_resumable,
    command,
    command_of,
    err,
    out,
    print_figures,
    progress_of,
    save_json,
    split_arguments,
    stop_on_signal,
    warn,
)
from paceline.cli.gain import describe_gain
from paceline.config import Config
from paceline.report.table import check_writable, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.build.memory_plan import MemoryPlan
    from paceline.rl.callback import ProgressCallback

DTYPES = ("float32", "bfloat16", "float16", "float64")
CORRECT = "correct this and run --dry-run again to see the plan"


@command()
def train(
    arguments: ConfigArguments = None,
    resume: Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Resume a run.")] = None,
    run: Annotated[Path | None, typer.Option("--run", metavar="DIR", help="Folder for the new run.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the settings and print the plan; do not train.")
    ] = False,
    config_file: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Post-train a model with RL. Rollouts are speculative by default.

    Ctrl-C or SIGTERM stops with a checkpoint. `--resume RUN` continues.

    Examples:

    - `paceline train configs/quickstart.toml`
    - `paceline train configs/gsm8k.toml train.num_steps=50 speculation.audit_every=10`
    - `paceline train --resume runs/chain_sum-20260101-120000`
    """
    from paceline.cli.progress import TerminalProgress

    path, given = split_arguments(arguments, overrides, config_file)
    if resume is not None and (path is not None or run is not None):
        raise ValueError("--resume takes the run's own config.toml; give settings to change as a.b=c")
    if resume is not None:
        check_resumable(resume, "train")
    config = load_config(resume / "config.toml" if resume is not None else path, given)
    from paceline.build.learner import torchrun_rank
    from paceline.report.html import write_report

    if torchrun_rank():
        if not dry_run:
            run_other_rank(config)
        return
    if dry_run:
        show_plan(config, run, resume)
        return
    callback = TerminalProgress(err, config)
    with callback:
        if path is None and resume is None:
            callback.note(f"no config file: defaults ({config.task_names}, {config.train.num_steps} steps)")
        callback.note(f"{config.algorithm.name} on {config.task_names} with {config.model.name}")
        callback.note(describe_speculation(config))
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
    with saved_steps_in_errors(trainer.folder.path), contextlib.closing(trainer), stop_with_note(trainer.producer.stop):
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
    with saved_steps_in_errors(cluster.folder), contextlib.closing(cluster), stop_with_note(cluster.stop):
        return cluster.folder, cluster.run()


def note_folder(callback: ProgressCallback, folder: Path) -> None:
    callback.note(f"to watch it in a browser: paceline watch {folder}")


def stop_with_note(stop: Callable[[], None]) -> contextlib.AbstractContextManager[None]:
    def stop_and_print() -> None:
        warn("stopping: a step that is still generating is discarded, complete steps are kept")
        stop()

    return stop_on_signal(stop_and_print)


@contextlib.contextmanager
def saved_steps_in_errors(folder: Path) -> Iterator[None]:
    """Add to an error that ends a run which steps are saved, and how to continue."""
    from paceline.rl.folder import last_checkpoint

    try:
        yield
    except Exception as error:
        last = None
        with contextlib.suppress(ValueError, OSError):  # it must not hide the error
            last = last_checkpoint(folder)
        if last:
            saved = "step 1 is saved" if last == 1 else f"steps 1 to {last} are saved"
            error.add_note(f"{saved}; fix this, then: paceline train --resume {folder}")
        raise


def print_result(folder: Path, config: Config, summary: dict[str, Any], report: Path) -> None:
    print_figures(summary_figures(summary, config.train.max_staleness > 0))
    from paceline.model.head_files import ships_head

    for line in describe_gain(config, summary, ships_head(config.model.name)):
        out.print(line, soft_wrap=True, highlight=False)
    out.print(f"run     {folder}\nreport  {report}", soft_wrap=True)
    if not summary["finished"]:
        warn(
            f"stopped after {summary['num_steps']} of {config.train.num_steps} steps; to continue: "
            f"paceline train --resume {folder}"
        )
        raise typer.Exit(130)


def summary_figures(summary: dict[str, Any], overlaps: bool) -> dict[str, Any]:
    last, after, reward = summary["last_eval"], "after", summary["reward_after"]
    if last is not None and 0 < (last["step"] or 0) < summary["num_steps"]:
        after, reward = f"at step {last['step']}", last["reward"]
    figures: dict[str, Any] = {
        "held-out reward before": summary["reward_before"],
        f"held-out reward {after}": reward,
        **{f"held-out reward after, {label}": task["reward_after"] for label, task in summary.get("tasks", {}).items()},
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
    elif summary["estimated_speedup"] is not None:
        figures["estimated speed-up of generation, not audited"] = f"{summary['estimated_speedup']:.2f}x"
    if summary["num_steps"]:
        figures["time of the RL steps"] = f"{summary['wall_s']:.1f} s, without evaluation and audits"
    hidden = () if overlaps else ("exposed_generation",)  # without overlap it equals generation
    for name, stage in summary["stages"].items():
        if stage["seconds"] >= 0.05 and name not in hidden:
            figures[f"time in {name}"] = f"{stage['seconds']:.1f} s  {stage['share']:6.1%} of the RL steps"
    return {name: value for name, value in figures.items() if value is not None}


def show_plan(config: Config, run: Path | None = None, resume: Path | None = None) -> None:
    """Print what a run will do. If something would stop it, print no plan, so that the errors are seen: raises
    ValueError with all of them."""
    from paceline.doctor.plan import plan_run

    with progress_of("checking") as progress:
        plan = plan_run(config, run, resume, progress, err)
    if plan.errors:
        raise ValueError("\n".join([*(found.text for found in plan.errors), CORRECT]))
    out.print(render([{"what": k, "is": v} for k, v in plan.rows.items()], {"what": "plan", "is": ""}))
    if plan.memory is not None:
        show_memory(plan.memory)
    if plan.first_prompt is not None:
        out.print(Text(plan.first_prompt), soft_wrap=True)
    for note in plan.notes:
        warn(note)
    for found in plan.findings:
        if found.status == "degraded":
            warn(f"warning: {found.text}")
    err.print("dry run: nothing was trained", style="dim")


def show_memory(plan: MemoryPlan) -> None:
    """Print the parts that are not 0.0 GiB, and their sum."""
    from paceline.build.memory_text import plan_rows

    rows = plan_rows(plan) | ({} if plan.total_bytes is None else {"GPU": plan.total_bytes})
    cells = [
        {"what": name, "size": f"{size / 2**30:6.1f}"}
        for name, size in rows.items()
        if size >= 0.05 * 2**30 or name == "sum"
    ]
    out.print(render(cells, {"what": "memory", "size": "GiB"}))


@command("eval")
def eval_command(
    model: Annotated[str, typer.Argument(help="Known name, directory or hub id of the model, or folder of a run.")],
    task: Annotated[str, typer.Argument(help="Config file, jsonl file, or reasoning-gym dataset.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[A.B=C]…", help="Settings to change.")] = None,
    num_samples: Annotated[int, typer.Option("-n", min=1, help="Samples per problem.")] = 1,
    best: Annotated[bool, typer.Option("--best", help="Of a run: its best checkpoint, not the last.")] = False,
    overrides: Overrides = None,
    json_file: JsonFile = None,
) -> None:
    """Compute mean reward, avg@n and pass@k on a task's held-out problems.

    A run is evaluated with the policy of its last checkpoint. No optimizer is loaded.

    Examples:

    - `paceline eval smollm2-135m configs/quickstart.toml -n 4`
    - `paceline eval ./exported gsm8k.jsonl task.held_out=100 reward.functions='["math"]'`
    - `paceline eval runs/mine configs/gsm8k.toml --best`
    """
    from rich.progress import Progress

    check_writable(json_file)
    run = run_config(Path(model)) if (Path(model) / "run.json").exists() else None
    if best and run is None:
        raise ValueError(f"--best: {model} is not a run; leave it out")
    path, (other, changed) = Path(task), split_arguments(arguments, overrides)
    if other is not None:
        raise ValueError(f"{other}: not a setting of the form a.b=c; eval takes a model, one task and settings")
    given = [f"model.name={model!r}"] if run is None else model_settings(run)
    if path.suffix == ".toml":
        config = load_config(path, [*given, *changed])
    else:
        kind = "jsonl" if task.endswith((".jsonl", ".jsonl.gz")) else "reasoning_gym"
        config = load_config(None, [*given, f"task.kind={kind}", f"task.name={task!r}", *changed])
        is_dataset = config.only_task("eval").section.kind == "reasoning_gym"
        if is_dataset and ("/" in task or path.suffix):  # not the name of a dataset
            raise ValueError(
                f"{task}: not a .toml, .jsonl or .jsonl.gz file, and no reasoning-gym dataset; for a task of another "
                "kind set task.kind"
            )
    from paceline.build.engine import build_engine
    from paceline.build.export import load_policy_into, policy_checkpoint
    from paceline.build.run import build_collector
    from paceline.build.task import build_rewarder, build_task
    from paceline.rl.evaluator import evaluate

    checkpoint = None if run is None else policy_checkpoint(run, Path(model), best)
    built = build_task(config)
    problems = built.held_out
    if not problems:
        raise ValueError("task.held_out = 0: there are no problems to evaluate on; raise it")
    with (
        contextlib.closing(built),
        contextlib.closing(build_engine(config)) as engine,
        contextlib.closing(build_rewarder(config)) as rewarder,
        contextlib.closing(build_collector(config, engine, rewarder)) as collector,
        Progress(console=err, transient=True, disable=not err.is_terminal) as bars,
    ):
        if run is not None and checkpoint is not None:
            load_policy_into(engine, run, checkpoint)
        bar = bars.add_task("evaluating")
        result = evaluate(
            collector,
            problems,
            num_samples,
            config.train.eval_temperature,
            config.train.seed,
            lambda done, total: bars.update(bar, completed=done, total=total),
            task_weights=config.task_weights,
        )
    if result["first_failure"] is not None:
        warn(f"a reward failed: {result['first_failure']}")
    print_figures(
        {
            "mean reward": result["reward"],
            f"avg@{num_samples}": result["avg_at_n"],
            **{f"pass@{k}": value for k, value in result["pass_at"].items()},
            "mean length": result["length_mean"],
            "problems": result["num_problems"],
            "not scored": result["num_failures"],
            "scored 0 because a reward failed": result["num_zero_scored"],
            **{f"mean reward, {label}": each["reward"] for label, each in result.get("tasks", {}).items()},
        }
    )
    save_json(json_file, {"model": model, "task": task, **result})


def run_config(run: Path) -> Config:
    """The settings of a training run. Raises ValueError for other folders, and for runs of other commands."""
    if not (run / "config.toml").exists():
        raise ValueError(f"{run}: not a run (it has no config.toml)")
    if (other := command_of(run)) != "train":
        raise ValueError(f"{run}: a run of `paceline {other}`, which trains no policy; give a run of `paceline train`")
    return load_config(run / "config.toml")


def model_settings(config: Config) -> list[str]:
    """The section `model`, as overrides."""
    values = config.model.model_dump(exclude_none=True)
    return [f"model.{key}={json.dumps(value)}" for key, value in values.items()]


@command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    directory: Annotated[Path, typer.Argument(help="Output directory.")],
    best: Annotated[
        bool, typer.Option("--best", help="Export the best checkpoint by held-out reward, not the last.")
    ] = False,
    head: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also export the head of a run with draft.online.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export only the LoRA adapter, as a directory of PEFT.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(help="Dtype of the weights: float32, bfloat16, float16 or float64.", show_default="model.dtype"),
    ] = None,
) -> None:
    """Export a run's policy as a Hugging Face directory (config.json, safetensors, tokenizer).

    Runs on the CPU, tensor by tensor: memory is needed for the largest tensor, not for the model. LoRA adapters are
    merged, except with `--adapter`: then the output is adapter_config.json and adapter_model.safetensors.

    Examples:

    - `paceline export runs/chain_sum-20260101-120000 ./my-model --best`
    - `paceline export runs/chain_sum-20260101-120000 ./my-model --head ./my-head`
    - `paceline export runs/chain_sum-20260101-120000 ./my-adapter --adapter`
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from paceline.bench.common import check_choices

    if dtype is not None:
        check_choices(DTYPES, dtype=dtype)
    config = run_config(run)
    if adapter:
        from paceline.build.adapter import export_adapter

        export_adapter(config, run, directory, best, head, dtype)
        out.print(str(directory), soft_wrap=True)
        return
    from paceline.build.export import export_policy

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bars:
        bar = bars.add_task("checking the checkpoint", total=None)

        def progress(done: int, total: int) -> None:
            bars.update(bar, description="exporting", completed=done, total=total)

        export_policy(config, run, directory, best, head, dtype, progress)
    for output in (directory, head):
        if output is not None:
            out.print(str(output), soft_wrap=True)
