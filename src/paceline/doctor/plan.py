"""`paceline train --dry-run`: what a run will do, and everything that would stop it.

It adds to `check_run` what depends on the task: prompts and the model's context, reward functions, memory, disk space.
Nothing is trained, and no run folder is created. A check that can't be made because an earlier one failed is left out.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.build import memory_parts
from paceline.build.adapter import with_adapter_settings
from paceline.build.cluster import build_plan
from paceline.build.config import load_config, with_absolute_paths
from paceline.build.context import check_context, longest_prompt
from paceline.build.defaults import describe_policy
from paceline.build.memory import cpu_plan, read_head, read_model, resolve_memory
from paceline.build.model import itemsize
from paceline.build.run import check_evaluation, check_libraries
from paceline.build.task import build_task, build_task_rewarder, check_prompts, problems_of
from paceline.chat.messages import prompt_preview
from paceline.config import Config, TaskSettings
from paceline.doctor.agent import try_agent
from paceline.doctor.finding import DEGRADED, MISSING, Finding, Progress, no_progress
from paceline.doctor.run import check_run, problem
from paceline.files import number, read_metrics
from paceline.model.head_files import resolve_head, ships_head
from paceline.model.hf_shape import read_shape
from paceline.model.store import load_tokenizer, resolve
from paceline.rl.algorithms import make_algorithm
from paceline.rl.audit_schedule import SHARE
from paceline.rl.check_settings import may_audit
from paceline.rl.folder import check_unused, last_checkpoint
from paceline.rl.resume import changed_settings
from paceline.speculation.batch import Load
from paceline.speculation.cost_files import cost_table_of
from paceline.tasks.rewards import Sample
from paceline.tasks.task import Problem, Task

if TYPE_CHECKING:
    from paceline.build.memory_plan import MemoryPlan

NUM_RECENT = 10  # steps of a run to resume, from which the time of the next ones is estimated
OTHER_TEXT = "I do not know."  # what reward functions get besides the first problem's answer
Found = TypeVar("Found")


@dataclass
class RunPlan:
    rows: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # as the run itself prints them
    memory: MemoryPlan | None = None
    first_prompt: str | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        return [found for found in self.findings if found.status == MISSING and found.required]

    def attempt(self, name: str, check: Callable[[], Found]) -> Found | None:
        """The result of a check. None if it raises a user's error, which becomes a finding, unless an earlier check
        found the same."""
        try:
            return check()
        except (ValueError, OSError, MemoryError) as error:
            found = problem(name, error)
            if found.detail not in [each.detail for each in self.findings]:
                self.findings.append(found)
            return None


def plan_run(
    config: Config,
    run: Path | None = None,
    resume: Path | None = None,
    progress: Progress = no_progress,
    console: Any = None,
) -> RunPlan:
    """Of a new run in folder `run`, or of a run to `resume`. `console` shows the download of a model."""
    plan = RunPlan(rows=described(config))
    config = plan.attempt("adapter", lambda: with_adapter_settings(config)) or config
    if resume is not None:
        plan.notes = plan.attempt("resume", lambda: resume_notes(config, resume)) or []
    elif run is not None and run.is_dir():
        plan.attempt("folder", lambda: check_unused(run))
    progress("model")
    directory = plan.attempt("model", lambda: resolve(config.model.name, console))
    if directory is None and config.speculation.uses_head:  # otherwise `check_run` reads the head
        plan.attempt("head", lambda: resolve_head(config.speculation.head, config.model.name))
    found = check_run(config, progress, only_required=True)
    plan.findings += [each for each in found if directory is not None or each.name != "run: model"]
    plan.attempt("algorithm", lambda: make_algorithm(config.algorithm, config.sampling.max_tokens))
    plan.attempt("libraries", lambda: check_libraries(config))
    progress("task")
    task = plan.attempt("task", lambda: build_task(config))
    if task is not None:
        plan.rows |= described_task(config, task)
        plan.findings += repeated_problems(config, task)
        plan.attempt("evaluation", lambda: check_evaluation(config, task))
    if directory is None or any(each.name in ("run: model", "run: device") for each in plan.errors):
        return plan
    path = config.model.chat_template
    tokenizer = plan.attempt("chat template", lambda: load_tokenizer(directory, path))
    if tokenizer is None:
        return plan
    sizes = plan.attempt("memory", lambda: resolve_memory(config))
    if sizes is not None:
        config, memory = sizes
        plan.memory = memory or plan.attempt("memory", lambda: cpu_plan(config))
    length = None
    if task is not None:
        progress("prompts")
        plan.attempt("prompts", lambda: check_prompts(task, tokenizer))
        for settings in config.tasks:
            length = max(length or 0, plan_task(plan, config, settings, task, tokenizer, directory) or 0)
        progress("reward functions")
        with contextlib.closing(task):
            for settings in config.tasks:
                first = problems_of(settings, task.train)[0]
                if settings.section.kind == "agent":
                    progress("agent")
                    plan_agent(plan, config, settings, first, tokenizer, directory)
                plan_rewards(plan, config, settings, first, tokenizer)
    progress("disk")
    plan.rows["checkpoints"] = described_checkpoints(config)
    if config.train.export_every:
        plan.rows["exports"] = described_exports(config)
    plan.attempt("disk", lambda: plan.rows.update(check_disk(config, resume or run or Path("runs"))))
    time = plan.attempt("time", lambda: remaining_time(config, resume) if resume is not None else None)
    time = time or plan.attempt("time", lambda: estimated_time(config, length or 0))
    plan.rows["time"] = time or "unknown"
    return plan


def plan_task(
    plan: RunPlan, config: Config, settings: TaskSettings, task: Task, tokenizer: Any, directory: Path
) -> int | None:
    """Checks the prompts of a task; returns the length of the longest one."""
    problems = problems_of(settings, [*task.train, *task.held_out])
    length = plan.attempt("prompts", lambda: longest_prompt(problems, tokenizer))
    if length is not None:
        plan.rows[row("prompts", settings)] = f"up to {length} tokens"
        longest = length
        plan.attempt("context", lambda: check_context(config, directory, settings, longest))
    text = plan.attempt("prompts", lambda: first_prompt(problems[0], tokenizer))
    plan.first_prompt = "\n".join(filter(None, [plan.first_prompt, text])) or None
    return length


def plan_agent(
    plan: RunPlan, config: Config, settings: TaskSettings, first: Problem, tokenizer: Any, directory: Path
) -> None:
    context = read_shape(directory).max_positions
    text = plan.attempt("agent", lambda: try_agent(settings.section, first, tokenizer, OTHER_TEXT, context))
    if text is not None:
        plan.rows[row("agent", settings)] = text


def plan_rewards(plan: RunPlan, config: Config, settings: TaskSettings, first: Problem, tokenizer: Any) -> None:
    num = config.algorithm.num_generations
    rewards = plan.attempt("reward", lambda: check_rewards(settings, num, first, tokenizer))
    if rewards:
        plan.rows[row("rewards", settings)] = rewards.described()
        plan.findings += equal_rewards(settings, first, rewards)


def row(name: str, settings: TaskSettings) -> str:
    return name if settings.label is None else f"{name}, {settings.label}"


# ---- what a run will do ----


def described(config: Config) -> dict[str, str]:
    """The rows of the plan that follow from the settings."""
    algorithm, train = config.algorithm, config.train
    return {
        "algorithm": f"{algorithm.name}, {algorithm.num_generations} samples per problem",
        "model": f"{config.model.name}, {config.model.dtype}" + (", LoRA" if config.learner.lora_rank else ""),
        "device": config.model.device,
        "engine": described_engine(config),
        "cluster": described_cluster(config),
        "drafter": described_drafter(config),
        "policy": describe_policy(config) if config.speculation.method != "none" else "none: nothing is drafted",
        "staleness": (
            f"up to {train.max_staleness} policy versions, inflight = {train.inflight}"
            if train.max_staleness
            else "0: generation and training take turns"
        ),
        "step": (
            f"{train.groups_per_step} problems x {algorithm.num_generations} samples of up to "
            f"{config.sampling.max_tokens} tokens"
        ),
        "evaluation": f"before, after, and every {train.eval_every} steps" if train.eval_every else "none",
        "audits": described_audits(config),
    }


def described_audits(config: Config) -> str:
    every = config.speculation.audit_every
    if every:
        return f"every {every} steps; on average {1 + 2 / every:.3g} times the generation time"
    if not may_audit(config):
        return "none"
    return f"at most {SHARE:.0%} of the run's time; none in a short run"


def described_engine(config: Config) -> str:
    engine = config.engine
    name = "vLLM" if engine.kind == "vllm" else "local"
    parallel = f", tensor_parallel_size = {engine.tensor_parallel_size}" if engine.tensor_parallel_size > 1 else ""
    return f"{name}, up to {engine.max_num_seqs} sequences in a step{parallel}"


def described_cluster(config: Config) -> str:
    if config.cluster.kind == "none":
        return "none: one process, or the ranks of torchrun"
    cluster, bundles = config.cluster, build_plan(config).bundles
    cpus, gpus = (sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU"))
    where = "on this machine" if cluster.address is None else f"at {cluster.address}"
    return (
        f"Ray {where}, {cluster.layout}: {cluster.num_engines} engines, {cluster.num_learners} learner ranks, "
        f"{cluster.num_reward_workers} reward workers; {cpus:g} CPUs, {gpus:g} GPUs"
    )


def described_drafter(config: Config) -> str:
    speculation = config.speculation
    if speculation.method == "none":
        return "none: no speculation"
    details = [f"num_speculative_tokens = {speculation.num_speculative_tokens}", f"rule = {speculation.rule}"]
    if speculation.method == "draft_model":
        details.insert(0, str(speculation.draft_model))
    if speculation.uses_head:
        shipped = "shipped for the model" if ships_head(config.model.name) else "missing: none ships for the model"
        details.insert(0, f"head {speculation.head or shipped}")
        details += [f"trained online: {config.draft.online}"] if config.draft.online != "off" else []
    return f"{speculation.method}, {', '.join(details)}"


def described_task(config: Config, task: Task) -> dict[str, str]:
    train, rows = config.train, {}
    num_groups = train.num_steps * train.groups_per_step
    epochs = []
    for settings, share in shares(config):
        problems, held_out = problems_of(settings, task.train), problems_of(settings, task.held_out)
        of_groups = "" if settings.label is None else f", {share:.3g} of the groups"
        rows[row("problems", settings)] = f"{len(problems)} to train on, {len(held_out)} held out{of_groups}"
        epochs.append(f"{num_groups * share / len(problems):.2g}")
    return rows | {"steps": f"{train.num_steps} ({', '.join(epochs)} epochs)"}


def shares(config: Config) -> list[tuple[TaskSettings, float]]:
    """Of each task: the share of the groups."""
    total = sum(settings.weight for settings in config.tasks)
    return [(settings, settings.weight / total) for settings in config.tasks]


def repeated_problems(config: Config, task: Task) -> Iterator[Finding]:
    """A warning if a step has more problems of a task than it has to train on."""
    for settings, share in shares(config):
        num, step = len(problems_of(settings, task.train)), math.floor(config.train.groups_per_step * share)
        of = "" if settings.label is None else f" of {settings.label}"
        if step > num:
            detail = (
                f"a step has {step} problems{of}, but there are only {num} to train on, so every step repeats problems"
            )
            remedy = f"lower it to at most {math.floor(num / share)}, or add problems"
            setting = f"train.groups_per_step = {config.train.groups_per_step}"
            yield Finding("run: task", DEGRADED, f"{setting}: {detail}", remedy)


# ---- resuming ----


def resume_notes(config: Config, run: Path) -> list[str]:
    """What resuming a run prints: the settings that change, and whether there is something to do. ValueError for a
    setting that must not change."""
    notes = list(changed_settings(load_config(run / "config.toml"), with_absolute_paths(config)))
    done, num_steps = last_checkpoint(run), config.train.num_steps
    if done is None:
        return [*notes, f"{run} was interrupted before its first checkpoint: it starts again"]
    if done >= num_steps:
        return [*notes, f"{run} is finished: {done} of {num_steps} steps are done; to continue, raise train.num_steps"]
    return [*notes, f"{done} of {num_steps} steps are done"]


def remaining_time(config: Config, run: Path) -> str | None:
    """By the last steps of the run. None if it has finished none."""
    left = max(0, config.train.num_steps - (last_checkpoint(run) or 0))
    if not left:
        return "none: all steps are done"
    path = run / "metrics.jsonl"
    steps = read_metrics(path, damaged=[]) if path.exists() else []
    recent = [total for step in steps[-NUM_RECENT:] if (total := number(step, "stages", "total")) is not None]
    if not recent:
        return None
    step_s = statistics.mean(recent)
    return (
        f"about {timedelta(seconds=round(left * step_s))} for the {left} steps that are left, without evaluation and "
        f"audits: the run's last steps took {step_s:.3g} s"
    )


# ---- time ----


def estimated_time(config: Config, prompt_tokens: int) -> str:
    """From the cost table in the settings, if there is one: an upper bound of plain generation. It has no times of
    training."""
    name = config.speculation.cost_table
    if name is None or config.engine.kind != "local":
        return "unknown until the first step"
    num = config.train.groups_per_step * config.algorithm.num_generations
    rows, length = min(num, config.engine.max_num_seqs), config.sampling.max_tokens
    step_s = cost_table_of(name).step_s(Load(rows, rows, rows * (prompt_tokens + length // 2)))
    return (
        f"generation up to {-(-num // rows) * length * step_s:.3g} s per step without drafts, by the cost table "
        f"{Path(name).name}; training: unknown until the first step"
    )


# ---- prompts ----


def first_prompt(first: Problem, tokenizer: Any) -> str:
    return str(tokenizer.decode(list(first.encode(tokenizer))))


# ---- rewards ----


@dataclass(frozen=True)
class Rewards:
    by_text: dict[str, float]
    sandbox: str | None

    def described(self) -> str:
        shown = [f"{reward:.3g} for {prompt_preview(text)[:40]!r}" for text, reward in self.by_text.items()]
        return ", ".join(shown) + (f"; programs run in sandbox: {self.sandbox}" if self.sandbox is not None else "")


def check_rewards(settings: TaskSettings, num: int, first: Problem, tokenizer: Any) -> Rewards | None:
    """Scores one group as the run does: the first problem's own answer, and other text, in place of completions. Raises
    ValueError if a reward function is wrong or fails. An environment's rewards need its turns: then the functions are
    only loaded, and the result is None."""
    answer = first.columns.get("answer")
    texts = [OTHER_TEXT] * num if not answer else [str(answer)] + [OTHER_TEXT] * (num - 1)
    with contextlib.closing(build_task_rewarder(settings)) as rewarder:
        if first.make_agent is not None:
            return None
        samples = [
            Sample(f"the first problem, sample {i}", first.prompt, text, tuple(tokenizer.encode(text)), first.columns)
            for i, text in enumerate(texts)
        ]
        scores = rewarder.score(samples)
        sandbox = rewarder.sandbox
    failures = [score.failure for score in scores if score.failure is not None]
    if failures:
        raise ValueError(
            f"{settings.reward_key}.functions = {settings.reward.functions}: a reward failed for {len(failures)} of "
            f"{num} samples, the first: {failures[0]}; correct the function, or the task's columns "
            f"({', '.join(first.columns) or 'it has none'})"
        )
    return Rewards({text: score.reward for text, score in zip(texts, scores, strict=True)}, sandbox)


def equal_rewards(settings: TaskSettings, first: Problem, rewards: Rewards) -> Iterator[Finding]:
    """A warning if the first problem's own answer gets the same reward as other text."""
    values = list(rewards.by_text.values())
    if len(values) < 2 or len(set(values)) > 1:
        return
    answer = first.columns["answer"]
    pattern, key = settings.reward.answer_pattern, settings.reward_key
    yield Finding(
        "run: reward",
        DEGRADED,
        f"the reference answer {prompt_preview(str(answer))[:40]!r} gets the same reward ({values[0]:.3g}) as other "
        "text. If all samples of a problem do, nothing can be learned",
        f"check {key}.functions = {settings.reward.functions}"
        + (" (the column `answer` is a string)" if isinstance(answer, str) else "")
        + (f", and whether {key}.answer_pattern = {pattern!r} matches an answer" if pattern is not None else ""),
    )


# ---- checkpoints ----


def described_checkpoints(config: Config) -> str:
    train = config.train
    best = " and the best" if train.eval_every else ""
    when = f"every {train.checkpoint_every} steps" if train.checkpoint_every else "at the end"
    return f"{when}; the last {train.keep_checkpoints}{best} are kept"


def described_exports(config: Config) -> str:
    keep = config.train.keep_exports
    kept = "all" if keep is None else f"the last {keep}"
    return f"every {config.train.export_every} steps, and after the last one; {kept} are kept"


def check_disk(config: Config, run: Path) -> dict[str, str]:
    """The row about disk space. Raises ValueError if there is less than the checkpoints and exports need."""
    if config.learner.model != "paceline":
        return {"disk": "unknown: with learner.model = transformers"}
    train = config.train
    model = read_model(config)
    size = memory_parts.checkpoint_bytes(config, model, read_head(config, model))
    saved = -(-train.num_steps // train.checkpoint_every) if train.checkpoint_every else 1
    # While a checkpoint is written, those that it replaces still exist.
    num = min(saved, train.keep_checkpoints + 1) + (train.eval_every > 0)
    total = num * size
    needed, keys = f"{num} checkpoints of {size / 1e9:.2f} GB", f"train.keep_checkpoints = {train.keep_checkpoints}"
    if train.export_every:
        exports = -(-train.num_steps // train.export_every)
        exports = exports if train.keep_exports is None else min(exports, train.keep_exports + 1)
        size = memory_parts.num_weights(model) * itemsize(config)
        total += exports * size
        needed += f" and {exports} exports of {size / 1e9:.2f} GB"
        keys += ", train.keep_exports" + (" not set" if train.keep_exports is None else f" = {train.keep_exports}")
    needed += f" need {total / 1e9:.2f} GB"
    place = next(folder for folder in (run.resolve(), *run.resolve().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if total > free:
        raise ValueError(
            f"{keys}: {needed}, but {place} has {free / 1e9:.2f} GB free; keep fewer, free disk space, or give --run a "
            "folder on another disk"
        )
    return {"disk": f"{needed}; {place} has {free / 1e9:.2f} GB free"}
