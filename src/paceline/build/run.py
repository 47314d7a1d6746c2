"""A training run: task, rewards, learner and loop."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from paceline.build.drafter import build_drafter, build_head, drafting_head, recorded_acceptance
from paceline.build.engine import build_engine
from paceline.build.learner import build_learner
from paceline.config import ADAPTABLE, Config, dump_config, load_config

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pydantic import BaseModel

    from paceline.engine.interface import Engine
    from paceline.rl.adapt import Adapter
    from paceline.rl.audit import Auditor
    from paceline.rl.collect import Collector
    from paceline.rl.learner import Learner
    from paceline.rl.logs import Sink
    from paceline.rl.loop import Loop, Watcher
    from paceline.speculation.batch import Drafter
    from paceline.tasks.rewards import Judge, Rewarder
    from paceline.tasks.task import Task


def build_task(config: Config) -> Task:
    if config.task.kind == "reasoning_gym":
        from paceline.tasks.gym import GymTask

        return GymTask(config.task)
    if config.task.kind == "env":
        from paceline.tasks.episodes import EnvTask

        return EnvTask(config.task)
    from paceline.tasks.table import TableTask

    return TableTask(config.task)


def build_rewarder(config: Config) -> Rewarder:
    from paceline.tasks.rewards import Rewarder

    return Rewarder(config.reward, config.task)


def build_collector(config: Config, engine: Engine, rewarder: Judge) -> Collector:
    from paceline.rl.collect import Collector

    return Collector(
        engine,
        engine.tokenizer,
        rewarder,
        sampling=config.sampling.params(),
        chat=config.task.chat,
        env_timeout_s=config.train.env_timeout_s,
    )


def build_adapter(config: Config, learner: Learner) -> Adapter:
    """The head that follows the policy: a copy of the engine's, in full precision, beside the learner's model."""
    import torch

    from paceline.model.decoder import Decoder
    from paceline.rl.adapt import Adapter

    decoder = learner.decoder
    if learner.world.size > 1 or not isinstance(decoder, Decoder):
        raise ValueError(
            f'draft.online = "{config.draft.online}": the head learns beside one process that has the whole policy, '
            f"but {learner.world.size} ranks share it; train in one process, or without the head"
        )
    head = build_head(config, decoder.config, torch.promote_types(decoder.dtype, torch.float32))
    return Adapter(head, decoder, config.draft, config.sampling.temperature)


def build_rollout_engine(config: Config) -> Engine:
    """What generates a run's rollouts, by engine.kind."""
    if config.engine.kind == "vllm":
        from paceline.build.vllm import build_vllm_engine

        return build_vllm_engine(config)
    from paceline.model.weights import ModelError

    try:
        return build_engine(config)
    except ModelError as error:
        if config.learner.model == "transformers":
            raise ValueError(f'{error}. Our own engine does not know this model: set engine.kind = "vllm"') from None
        raise


def build_auditor(config: Config, engine: Engine) -> Auditor | None:
    """None for an engine that is not ours: an audit needs rule `coupled`, and one process to be timed in."""
    from paceline.engine.engine import LocalEngine
    from paceline.rl.audit import Auditor

    if not isinstance(engine, LocalEngine):
        return None
    target = engine.paged.decoder

    def drafter() -> Drafter | None:
        return build_drafter(config, target, engine.tokenizer, drafting_head(config, engine.drafter))

    return Auditor(engine, drafter)


def build_loop(
    config: Config,
    watcher: Watcher,
    *,
    run: Path | None = None,
    resume: Path | None = None,
    engine: Engine | None = None,
    rewarder: Judge | None = None,
    make_learner: Callable[[Config, Path], Learner] | None = None,
    restarts: Callable[[], Mapping[str, int]] | None = None,
) -> Loop:
    """A new run in folder `run` (None: a fresh one under runs/), or one to `resume`. What can be wrong with the
    settings is found before the folder is made. Who has an engine, a rewarder or a learner elsewhere gives it."""
    from paceline.model.store import resolve
    from paceline.rl.algorithms import make_algorithm
    from paceline.rl.checkpoint import Checkpoints
    from paceline.rl.folder import RunFolder
    from paceline.rl.loop import Loop
    from paceline.rl.resume import changes, find_checkpoint

    config = with_absolute_paths(config)
    if resume is not None:
        for note in changes(load_config(resume / "config.toml"), config):
            watcher.note(note)
    for library in ("tensorboard", "wandb"):
        if getattr(config.train, library) and importlib.util.find_spec(library) is None:
            raise ValueError(f"train.{library} = true, but {library} is not installed; pip install {library}")
    algorithm = make_algorithm(config.algorithm, config.sampling.max_tokens)
    task = build_task(config)
    if config.train.eval_every and not task.held_out:
        raise ValueError("train.eval_every needs held-out problems, but task.held_out = 0; raise it or don't validate")
    rewarder = rewarder or build_rewarder(config)
    if rewarder.sandbox is not None:
        watcher.note(f"programs run in sandbox: {rewarder.sandbox}")
    directory = resolve(config.model.name)
    engine = engine or build_rollout_engine(config)
    learner = (make_learner or build_learner)(config, directory)
    adapter = build_adapter(config, learner) if config.draft.online != "off" else None
    check_prompts(config, task, engine.tokenizer)
    if resume is None:
        folder = RunFolder.create(
            run,
            dump_config(config),
            describe_run(config, f"{config.algorithm.name} on {task.name}", task.name)
            | ({"sandbox": rewarder.sandbox} if rewarder.sandbox is not None else {}),
        )
    else:
        folder = RunFolder.open(resume)
    checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints)
    try:
        checkpoint = find_checkpoint(folder, checkpoints, watcher.note) if resume is not None else None
    except BaseException:
        folder.close()
        raise
    if adapter is None and checkpoint is not None and checkpoint.state.get("head") is not None:
        if config.speculation.method in ADAPTABLE:  # its head does not learn any more, but keeps what it has learned
            adapter = build_adapter(config, learner)
        else:
            watcher.note("the head that this run adapted is left behind; the checkpoints so far still have it")
    loop = Loop(
        config,
        engine=engine,
        learner=learner,
        algorithm=algorithm,
        task=task,
        collector=build_collector(config, engine, rewarder),
        auditor=build_auditor(config, engine),
        folder=folder,
        checkpoints=checkpoints,
        sinks=build_sinks(config, folder.path, checkpoint.step if checkpoint is not None else 0),
        watcher=watcher,
        adapter=adapter,
        restarts=restarts,
        recorded=recorded_acceptance(config, config.sampling.temperature),
    )
    if checkpoint is not None:
        with checkpoint.complete():
            loop.restore(checkpoint)
    if resume is not None and loop.step >= config.train.num_steps:
        watcher.note(f"{resume} is finished: {loop.step} steps; to go on, raise train.num_steps")
    elif resume is not None:
        folder.write_config(dump_config(config))
    return loop


def with_absolute_paths(config: Config) -> Config:
    """A run can be resumed from any folder."""
    from pathlib import Path

    model, task, reward, speculation = config.model, config.task, config.reward, config.speculation
    if Path(model.name).is_dir():
        model = model.model_copy(update={"name": str(Path(model.name).resolve())})
    if task.kind in ("jsonl", "dataset") and Path(task.name).exists():
        task = task.model_copy(update={"name": str(Path(task.name).resolve())})
    if reward.model is not None and Path(reward.model).is_dir():
        reward = reward.model_copy(update={"model": str(Path(reward.model).resolve())})
    changed = {
        "model": model,
        "task": task,
        "reward": reward,
        "speculation": _absolute(speculation, "head", "draft_model", "cost_table"),
        "draft": _absolute(config.draft, "data", "init"),
    }
    return config.model_copy(update=changed)


def _absolute(section: BaseModel, *keys: str) -> BaseModel:
    """Of these settings those that name something that is there."""
    from pathlib import Path

    given = {key: getattr(section, key) for key in keys}
    found = {key: str(Path(name).resolve()) for key, name in given.items() if name is not None and Path(name).exists()}
    return section.model_copy(update=found)


def check_prompts(config: Config, task: Task, tokenizer: Any) -> None:
    """Messages need a chat template: better known before the first step than at the hundredth."""
    if config.task.chat and tokenizer.chat_template:
        return
    why = "the model has no chat template" if config.task.chat else "task.chat = false"
    for problem in [*task.train, *task.held_out]:
        if not isinstance(problem.prompt, str):
            raise ValueError(f"task {problem.name}: its prompt is a list of messages, but {why}; give strings")


def describe_run(config: Config, name: str, task: str) -> dict[str, Any]:
    import datetime

    import torch

    from paceline import __version__

    return {
        "name": name,
        "task": task,
        "model": config.model.name,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "paceline": __version__,
        "torch": torch.__version__,
        "device": config.model.device,
        "seed": config.train.seed,
    }


def build_sinks(config: Config, folder: Path, purge_step: int) -> list[Sink]:
    from paceline.rl.logs import TensorBoardSink, WandbSink

    sinks: list[Sink] = []
    if config.train.tensorboard:
        sinks.append(TensorBoardSink(folder / "tensorboard", purge_step))
    if config.train.wandb:
        sinks.append(WandbSink(folder, folder.name, config.model_dump(mode="json")))
    return sinks
