"""Builds a run that trains a head: sequences, vocabulary, learner and folder."""

from __future__ import annotations

import datetime
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from paceline.build.config import with_absolute_paths
from paceline.build.engine import build_engine
from paceline.build.learner import use_train_kernels
from paceline.build.model import check_device, load_decoder
from paceline.build.run import describe_run
from paceline.build.task import build_task, check_prompts
from paceline.config import Config
from paceline.config_io import dump_config
from paceline.draft.data import Reader, read_examples
from paceline.draft.head_init import HeadInit
from paceline.draft.learner import DraftLearner
from paceline.draft.rollouts import generate, num_complete_bytes, rollout_examples, rollout_requests
from paceline.draft.trainer import DraftTrainer, planned_steps
from paceline.model.config import with_yarn
from paceline.model.head_files import load_head, resolve_head
from paceline.model.provenance import Provenance
from paceline.model.store import load_tokenizer, resolve
from paceline.model.weights import ModelError, checkpoint_checksum, read_config
from paceline.rl.callback import ProgressCallback
from paceline.rl.checkpoint import Checkpoints
from paceline.rl.folder import RunFolder
from paceline.rl.resume import find_checkpoint

HEAD_NAMES = {"eagle3": "EAGLE-3 head", "dspark": "DSpark head"}


def build_draft_trainer(
    config: Config,
    callback: ProgressCallback,
    *,
    run: Path | None = None,
    resume: Path | None = None,
    rollouts: Path | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> DraftTrainer:
    """A new run in folder `run` (None: a new folder under runs/), or the run to `resume`. Generates missing rollouts,
    until `stopping` returns True; a new run begins with those of `rollouts`, a file of a run with the same settings.
    Errors in the settings are raised before the folder is created."""
    check_device(config)
    config = with_absolute_paths(config)
    directory = resolve(config.model.name)
    tokenizer = load_tokenizer(directory, config.model.chat_template)
    head_init = build_head_init(config, directory)
    config = config.model_copy(update={"draft": head_init.section})
    section, sampling = config.draft, config.sampling.params()
    if bad := [token for token in sampling.stop_token_ids if not 0 <= token < head_init.target.vocab_size]:
        raise ValueError(
            f"sampling.stop_token_ids = {bad}: the model has tokens 0 to {head_init.target.vocab_size - 1}; remove them"
        )
    reader = Reader(tokenizer, head_init.target.vocab_size, chat_of(config))
    max_length = min(section.max_length, head_init.target.max_positions)
    requests = examples = None
    if section.data == "rollouts":
        task = build_task(config)
        check_prompts(task, tokenizer)
        requests = rollout_requests(task, config.task_weights, section, tokenizer, sampling)
        source, data = task.name, f"the target's own completions of {task.name} at temperature {sampling.temperature:g}"
    else:
        path = Path(section.data)
        examples = read_examples(path, reader, section.num_sequences, section.held_out, max_length, section.seed)
        source, data = path.stem, path.name
    if resume is None:
        run = run or Path("runs") / f"draft-{source}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        name = f"{HEAD_NAMES[section.architecture]} on {source}"
        info = describe_run(config, name, source) | {"command": "train-draft"}
        folder = RunFolder.create(run, dump_config(config), info)
        if requests is not None and rollouts is not None:
            shutil.copyfile(rollouts, folder.path / "rollouts.jsonl")
    else:
        folder = RunFolder.open(resume)
    try:
        checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints)
        checkpoint = None
        if resume is not None:
            checkpoint = find_checkpoint(folder, checkpoints, callback.note, keep=("rollouts",))
        if resume is not None and checkpoint is None:
            folder.truncate({"rollouts": num_complete_bytes(folder)})  # keep complete rollouts
        if requests is not None:

            def on_progress(done: int, total: int) -> None:
                if stopping():
                    callback.note(f"{done} of {total} rollouts are kept; continue with --resume {folder.path}")
                    raise KeyboardInterrupt
                callback.progress("generating", done, total)

            plain = config.changed(speculation={"method": "none"})
            records = generate(lambda: build_engine(plain), requests, folder, on_progress)
            examples = rollout_examples(records, reader, max_length)
        assert examples is not None
        steps = planned_steps(section, examples)
        eos_ids = (*head_init.target.eos_token_ids, *sampling.stop_token_ids)
        dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
        head = head_init.head(examples.train, eos_ids, dtype, config.model.device)
        decoder = load_decoder(config, directory)
        if config.model.device.startswith("cuda"):
            use_train_kernels(decoder)  # of the forward pass
        trainer = DraftTrainer(
            section,
            decoder=decoder,
            learner=DraftLearner(head, section, num_steps=len(steps), temperature=sampling.temperature),
            examples=examples,
            steps=steps,
            temperature=sampling.temperature,
            provenance=Provenance(config.model.name, checkpoint_checksum(directory), data, section.seed, 0, 0),
            folder=folder,
            checkpoints=checkpoints,
            callback=callback,
        )
        if checkpoint is not None:
            with checkpoint.loading():
                trainer.restore(checkpoint)
    except BaseException:
        folder.close()
        raise
    return trainer


def chat_of(config: Config) -> bool:
    """Whether the sequences of a file are chats."""
    (chat, *other) = {task.section.chat for task in config.tasks}
    if other and config.draft.data != "rollouts":
        raise ValueError(
            f"draft.data = {config.draft.data!r}: task.chat says whether its sequences are chats, but differs between "
            f"the tasks ({config.task_names}); choose one: task={config.tasks[0].label}"
        )
    return chat


def build_head_init(config: Config, directory: Path) -> HeadInit:
    """The shape of a new head, or with draft.init a head to continue from."""
    target, init = read_config(directory), config.draft.init
    if config.model.yarn_factor is not None:
        target = with_yarn(target, config.model.yarn_factor)
    if init is None:
        return HeadInit(config.draft, target)
    path = Path(init).expanduser()
    try:
        found = path if path.is_dir() else resolve_head(None, init)
    except ModelError as error:
        raise ValueError(f"draft.init = {init!r}: no such directory, and {error}") from None
    # any_target: the head may come from another target, because it is trained again.
    return HeadInit(config.draft, target, load_head(found, target, any_target=True))
