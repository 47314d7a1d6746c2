"""Builds a training run: task, rewards, engine, learner and trainer."""

from __future__ import annotations

import datetime
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from paceline import __version__
from paceline.build.config import load_config, with_absolute_paths
from paceline.build.context import check_context, longest_prompt
from paceline.build.cost import hardware_name
from paceline.build.defaults import describe_speculation
from paceline.build.drafter import build_drafter, build_head, drafting_head, recorded_acceptance
from paceline.build.engine import build_engine
from paceline.build.export import build_exports
from paceline.build.learner import build_learner
from paceline.build.memory import other_memory_note, recorded_plan, resolve_memory
from paceline.build.model import check_training_dtype
from paceline.build.task import build_rewarder, build_task, check_prompts, problems_of
from paceline.build.vllm import build_vllm_engine
from paceline.config import Config
from paceline.config_io import dump_config
from paceline.draft.online import OnlineHeadTrainer
from paceline.engine.engine import LocalEngine
from paceline.engine.interface import Engine
from paceline.files import read_run_json
from paceline.model.decoder import Decoder
from paceline.model.store import resolve
from paceline.model.weights import ModelError
from paceline.rl.algorithms import make_algorithm
from paceline.rl.audit import Auditor
from paceline.rl.callback import ProgressCallback
from paceline.rl.check_settings import may_audit
from paceline.rl.checkpoint import Checkpoints
from paceline.rl.collect import AgentRewards, Collector
from paceline.rl.folder import RunFolder
from paceline.rl.learner import Learner
from paceline.rl.logs import Sink, TensorBoardSink, WandbSink
from paceline.rl.resume import changed_settings, find_checkpoint
from paceline.rl.trainer import Trainer
from paceline.rl.worker_group import WorkerGroup
from paceline.speculation.batch import Drafter
from paceline.tasks.rewards import Rewarder
from paceline.tasks.task import Task


def build_collector(config: Config, engine: Engine, rewarder: Rewarder) -> Collector:
    agent_rewards = {
        task.label: AgentRewards({str(k): v for k, v in task.reward.penalties.items()}, task.reward.weight_of("env"))
        for task in config.tasks
    }
    return Collector(engine, engine.tokenizer, rewarder, sampling=config.sampling.params(), agent_rewards=agent_rewards)


def build_online_head_trainer(config: Config, learner: Learner) -> OnlineHeadTrainer:
    """Trains a copy of the engine's head, in float32 or more, on the hidden states of the learner's model."""
    decoder = learner.decoder
    if learner.worker_group.size > 1 or not isinstance(decoder, Decoder):
        raise ValueError(
            f'draft.online = "{config.draft.online}": a head is trained in one process that has the whole policy, but '
            f'{learner.worker_group.size} ranks share it; use one rank, or set draft.online = "off"'
        )
    head = build_head(config, decoder.config, torch.promote_types(decoder.dtype, torch.float32))
    return OnlineHeadTrainer(head, decoder, config.draft, config.sampling.temperature)


def build_rollout_engine(config: Config) -> Engine:
    """The engine that generates the rollouts of a run, by engine.kind."""
    if config.engine.kind == "vllm":
        return build_vllm_engine(config)
    try:
        return build_engine(config)
    except ModelError as error:
        if config.learner.model == "transformers":
            raise ValueError(
                f'{error}. The local engine does not support this model: set engine.kind = "vllm"'
            ) from None
        raise


def build_auditor(config: Config, engine: Engine) -> Auditor | None:
    """None if audits are not possible: they need the rule `coupled`, and an engine in this process to time. None also
    if nothing is drafted, unless audits are asked for."""
    if not isinstance(engine, LocalEngine) or not may_audit(config):
        return None
    target = engine.paged.decoder

    def drafter() -> Drafter | None:
        return build_drafter(config, target, engine.tokenizer, drafting_head(config, engine.drafter))

    return Auditor(engine, drafter)


def build_trainer(
    config: Config,
    callback: ProgressCallback,
    *,
    run: Path | None = None,
    resume: Path | None = None,
    engine: Engine | None = None,
    rewarder: Rewarder | None = None,
    worker_group: WorkerGroup | None = None,
    restarts: Callable[[], Mapping[str, int]] | None = None,
) -> Trainer:
    """A new run in folder `run` (None: a new folder under runs/), or the run to `resume`. Errors in the settings are
    raised before the folder is created. `engine` and `rewarder` replace those that this would build. `worker_group` has
    the ranks of the learner."""
    check_training_dtype(config)
    config = with_absolute_paths(config)
    config, plan = resolve_memory(config, worker_group)
    if resume is not None:
        if (warning := other_memory_note(resume, plan)) is not None:
            callback.note(warning)
        for note in changed_settings(load_config(resume / "config.toml"), config):
            callback.note(note)
    check_libraries(config)
    algorithm = make_algorithm(config.algorithm, config.sampling.max_tokens)
    task = build_task(config)
    check_evaluation(config, task)
    rewarder = rewarder or build_rewarder(config)
    if rewarder.sandbox is not None:
        callback.note(f"programs run in sandbox: {rewarder.sandbox}")
    directory = resolve(config.model.name)
    engine = engine or build_rollout_engine(config)
    check_prompts(task, engine.tokenizer)
    if resume is None:
        for settings in config.tasks:
            problems = problems_of(settings, [*task.train, *task.held_out])
            check_context(config, directory, settings, longest_prompt(problems, engine.tokenizer))
    if resume is not None and (warning := other_kernels_note(resume, engine)) is not None:
        callback.note(warning)
    learner = build_learner(config, directory, worker_group)
    head_trainer = build_online_head_trainer(config, learner) if config.draft.online != "off" else None
    if resume is None:
        folder = RunFolder.create(
            run,
            run_toml(config),
            describe_run(config, f"{config.algorithm.name} on {task.name}", task.name)
            | ({"sandbox": rewarder.sandbox} if rewarder.sandbox is not None else {})
            | recorded_plan(plan)
            | recorded_kernels(engine),
        )
    else:
        folder = RunFolder.open(resume)
    checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints)
    try:
        checkpoint = find_checkpoint(folder, checkpoints, callback.note) if resume is not None else None
    except BaseException:
        folder.close()
        raise
    if head_trainer is None and checkpoint is not None and checkpoint.state.get("head") is not None:
        if config.speculation.uses_head:  # the head is no longer trained, but keeps its trained weights
            head_trainer = build_online_head_trainer(config, learner)
        else:
            callback.note("the head that this run trained is not used any more; earlier checkpoints still have it")
    trainer = Trainer(
        config,
        engine=engine,
        learner=learner,
        algorithm=algorithm,
        task=task,
        collector=build_collector(config, engine, rewarder),
        auditor=build_auditor(config, engine),
        folder=folder,
        checkpoints=checkpoints,
        exports=build_exports(config, folder, learner),
        sinks=build_sinks(config, folder.path, 1 + (checkpoint.step if checkpoint is not None else 0)),
        callback=callback,
        head_trainer=head_trainer,
        restarts=restarts,
        recorded_acceptance=recorded_acceptance(config, config.sampling.temperature),
        planned_sleep=None if plan is None else plan.sleeps,
    )
    if checkpoint is not None:
        with checkpoint.loading():
            trainer.load(checkpoint)
    if resume is not None and trainer.step >= config.train.num_steps:
        callback.note(f"{resume} is finished: {trainer.step} steps; to continue, raise train.num_steps")
    elif resume is not None:
        folder.write_config(run_toml(config))
    return trainer


def run_toml(config: Config) -> str:
    """A run's config.toml."""
    return dump_config(config, {"speculation": describe_speculation(config)})


def check_libraries(config: Config) -> None:
    for library in ("tensorboard", "wandb"):
        if getattr(config.train, library) and importlib.util.find_spec(library) is None:
            raise ValueError(
                f"train.{library} = true, but {library} is not installed; pip install {library}, or set "
                f"train.{library}=false"
            )


def check_evaluation(config: Config, task: Task) -> None:
    if config.train.eval_every and not task.held_out:
        held_out = " = ".join(f"{task.key}.held_out" for task in config.tasks)
        raise ValueError(
            f"train.eval_every needs held-out problems, but {held_out} = 0; raise it, or set train.eval_every = 0"
        )


def describe_run(config: Config, name: str, task: str) -> dict[str, Any]:
    return {
        "name": name,
        "task": task,
        "model": config.model.name,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "paceline": __version__,
        "torch": torch.__version__,
        "device": config.model.device,
        "hardware": hardware_name(config.model.device),
        "seed": config.train.seed,
    }


def recorded_kernels(engine: Engine) -> dict[str, Any]:
    return {"kernels": engine.paged.decoder.ops.describe()} if isinstance(engine, LocalEngine) else {}


def other_kernels_note(run: Path, engine: Engine) -> str | None:
    """A note for a run that is resumed with other kernels than it started with."""
    if not (run / "run.json").exists():
        return None
    started, now = read_run_json(run / "run.json").get("kernels"), recorded_kernels(engine).get("kernels")
    if not isinstance(started, dict) or now is None or started == now:
        return None
    other = ", ".join(key for key in sorted(started.keys() | now.keys()) if started.get(key) != now.get(key))
    return (
        f"the engine has other kernels than the run started with ({other}; see run.json): tokens may differ from here"
    )


def build_sinks(config: Config, folder: Path, purge_step: int) -> list[Sink]:
    sinks: list[Sink] = []
    if config.train.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", purge_step))
    if (train := config.train).wandb:
        name = train.wandb_name or folder.name
        sinks.append(WandbSink(folder, train.wandb_project, name, config.model_dump(mode="json")))
    return sinks
