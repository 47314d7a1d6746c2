"""Training of a head: sequences, vocabulary, learner and folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.build.engine import build_engine, check_device, load_decoder
from paceline.build.run import build_task, check_prompts, describe_run, with_absolute_paths
from paceline.config import Config, SpeculationSection, dump_config

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from paceline.draft.start import Start
    from paceline.draft.trainer import DraftTrainer
    from paceline.draft.trainer import Watcher as DraftWatcher


def build_draft_trainer(
    config: Config,
    watcher: DraftWatcher,
    *,
    run: Path | None = None,
    resume: Path | None = None,
    stopping: Callable[[], bool] = lambda: False,
) -> DraftTrainer:
    """A new run in folder `run` (None: a fresh one under runs/), or one to `resume`. Rollouts that it lacks are
    generated here, until `stopping` says so. What can be wrong with the settings is found before the folder is made."""
    import datetime
    from pathlib import Path

    import torch

    from paceline.draft.data import Reader, read_examples
    from paceline.draft.learner import DraftLearner
    from paceline.draft.rollouts import generate, rollout_examples, rollout_requests, whole_lines
    from paceline.draft.trainer import DraftTrainer, planned_steps
    from paceline.model.provenance import Provenance
    from paceline.model.store import load_tokenizer, resolve
    from paceline.model.weights import checkpoint_checksum
    from paceline.rl.checkpoint import Checkpoints
    from paceline.rl.folder import RunFolder
    from paceline.rl.resume import find_checkpoint

    check_device(config)
    config = with_absolute_paths(config)
    directory = resolve(config.model.name)
    tokenizer = load_tokenizer(directory)
    start = build_start(config, directory)
    config = config.model_copy(update={"draft": start.section})
    section, sampling = config.draft, config.sampling.params()
    if bad := [token for token in sampling.stop_token_ids if not 0 <= token < start.target.vocab_size]:
        raise ValueError(
            f"sampling.stop_token_ids = {bad}: the model has tokens 0 to {start.target.vocab_size - 1}; leave them out"
        )
    reader = Reader(tokenizer, start.target.vocab_size, config.task.chat)
    max_length = min(section.max_length, start.target.max_positions)
    requests = examples = None
    if section.data == "rollouts":
        task = build_task(config)
        check_prompts(config, task, tokenizer)
        requests = rollout_requests(task, section, tokenizer, sampling, config.task.chat)
        source, data = task.name, f"the target's own answers to {task.name} at temperature {sampling.temperature:g}"
    else:
        path = Path(section.data)
        examples = read_examples(path, reader, section.num_sequences, section.held_out, max_length, section.seed)
        source, data = path.stem, path.name
    if resume is None:
        run = run or Path("runs") / f"draft-{source}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
        info = describe_run(config, f"EAGLE-3 head on {source}", source) | {"command": "train-draft"}
        folder = RunFolder.create(run, dump_config(config), info)
    else:
        folder = RunFolder.open(resume)
    try:
        checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints)
        checkpoint = None
        if resume is not None:
            checkpoint = find_checkpoint(folder, checkpoints, watcher.note, keep=("rollouts",))
        if resume is not None and checkpoint is None:
            folder.truncate({"rollouts": whole_lines(folder)})  # the rollouts that are there are not generated again
        if requests is not None:

            def between(done: int, total: int) -> None:
                if stopping():
                    watcher.note(f"{done} of {total} rollouts are kept; go on with --resume {folder.path}")
                    raise KeyboardInterrupt
                watcher.progress("generating", done, total)

            plain = config.model_copy(update={"speculation": SpeculationSection()})
            records = generate(lambda: build_engine(plain), requests, folder, between)
            examples = rollout_examples(records, reader, max_length)
        assert examples is not None
        steps = planned_steps(section, examples)
        ends = (*start.target.eos_token_ids, *sampling.stop_token_ids)
        dtype = torch.float64 if config.model.dtype == "float64" else torch.float32
        head = start.head(examples.train, ends, dtype, config.model.device)
        trainer = DraftTrainer(
            section,
            decoder=load_decoder(config, directory),
            learner=DraftLearner(head, section, num_steps=len(steps), temperature=sampling.temperature),
            examples=examples,
            steps=steps,
            temperature=sampling.temperature,
            provenance=Provenance(config.model.name, checkpoint_checksum(directory), data, section.seed, 0, 0),
            folder=folder,
            checkpoints=checkpoints,
            watcher=watcher,
        )
        if checkpoint is not None:
            with checkpoint.complete():
                trainer.restore(checkpoint)
    except BaseException:
        folder.close()
        raise
    return trainer


def build_start(config: Config, directory: Path) -> Start:
    """The shape, or with draft.init the head, that training begins with."""
    from pathlib import Path

    from paceline.draft.start import Start
    from paceline.model.config import with_yarn
    from paceline.model.head_files import load_head, resolve_head
    from paceline.model.weights import ModelError, read_config

    target, init = read_config(directory), config.draft.init
    if config.model.yarn_factor is not None:
        target = with_yarn(target, config.model.yarn_factor)
    if init is None:
        return Start(config.draft, target)
    path = Path(init).expanduser()
    try:
        found = path if path.is_dir() else resolve_head(None, init)
    except ModelError as error:
        raise ValueError(f"draft.init = {init!r}: no such directory, and {error}") from None
    return Start(config.draft, target, load_head(found, target, any_target=True))  # whosever it was: it learns
