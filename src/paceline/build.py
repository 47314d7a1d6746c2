"""The composition root: configuration in, objects out. The only place that branches on a `kind`."""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

from paceline.config import ADAPTABLE, Config, SpeculationSection, dump_config, load_config
from paceline.native import NativeUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from paceline.draft.start import Start
    from paceline.draft.trainer import DraftTrainer
    from paceline.draft.trainer import Watcher as DraftWatcher
    from paceline.engine.engine import LocalEngine
    from paceline.model.config import ModelConfig
    from paceline.model.decoder import Decoder
    from paceline.model.eagle3 import Eagle3Head
    from paceline.model.paged import PagedDecoder
    from paceline.model.sample import Sampler
    from paceline.rl.adapt import Adapter
    from paceline.rl.collect import Collector
    from paceline.rl.learner import Learner
    from paceline.rl.logs import Sink
    from paceline.rl.loop import Loop, Watcher
    from paceline.speculation.batch import Drafter
    from paceline.tasks.rewards import Rewarder
    from paceline.tasks.task import Task


def build_engine(config: Config) -> LocalEngine:
    """A local engine with its model, tokenizer, drafter and policy."""
    import torch

    from paceline.engine.engine import LocalEngine
    from paceline.model.store import load_tokenizer, resolve
    from paceline.speculation.policy import StaticPolicy

    if config.engine.threads is not None:
        torch.set_num_threads(config.engine.threads)
    directory = resolve(config.model.name)
    tokenizer = load_tokenizer(directory)
    decoder = build_decoder(config, directory)
    sampler = build_sampler(decoder)
    return LocalEngine(
        build_paged(config, decoder),
        sampler=sampler,
        drafter=build_drafter(config, decoder, tokenizer),
        policy=StaticPolicy(config.speculation.num_speculative_tokens, config.speculation.min_confidence),
        rule=config.speculation.rule,
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        prefix_sharing=config.engine.prefix_sharing,
        tokenizer=tokenizer,
    )


def check_device(config: Config) -> None:
    import torch

    device, dtype = config.model.device, config.model.dtype
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"model.device = {device!r}: this machine has no CUDA device; use 'cpu'")
    if device == "cpu" and getattr(torch, dtype).itemsize < 4:
        raise ValueError(f"model.dtype = {dtype!r}: on a CPU use 'float32' (or 'float64')")


def load_decoder(config: Config, directory: Any) -> Decoder:
    """The model as it is on disk, its context stretched where model.yarn_factor says so."""
    import torch

    from paceline.model.weights import load

    check_device(config)
    dtype, device = getattr(torch, config.model.dtype), config.model.device
    return load(directory, dtype, device, config.model.yarn_factor).requires_grad_(False)


def build_decoder(config: Config, directory: Any) -> Decoder:
    """The model for inference: packed for the CPU kernels where they can run, plain torch elsewhere."""
    decoder = load_decoder(config, directory)
    if config.engine.native and config.model.device == "cpu" and config.model.dtype == "float32":
        from paceline.model.kernels import pack_for_inference

        try:
            pack_for_inference(decoder)
        except NativeUnavailable as error:
            warnings.warn(f"engine.native: {error}\nGoing on in plain torch, several times slower.", stacklevel=2)
    return decoder


def build_sampler(decoder: Decoder) -> Sampler:
    from paceline.model.sample import Sampler

    return Sampler(native=decoder.embed.panels is not None)


def build_paged(config: Config, decoder: Decoder) -> PagedDecoder:
    from paceline.model.kv import BLOCK
    from paceline.model.paged import PagedDecoder

    num_tokens = config.engine.kv_tokens or default_kv_tokens(config, decoder.config)
    try:
        return PagedDecoder(decoder, -(-num_tokens // BLOCK))
    except (MemoryError, RuntimeError) as error:  # torch's own out-of-memory is a RuntimeError
        raise ValueError(
            f"engine.kv_tokens = {num_tokens}: no memory for that many tokens' KV; lower it ({str(error)[:80]})"
        ) from None


def default_kv_tokens(config: Config, model: ModelConfig) -> int:
    """Room for every row at the model's whole context or 4096 tokens each, but no more than 2 GiB; one whole context
    in any case."""
    each = min(model.max_positions, 4096)
    itemsize = {"float64": 8, "float32": 4}.get(config.model.dtype, 2)
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    return max(model.max_positions, min(config.engine.max_num_seqs * each, 2 * 2**30 // bytes_per_token))


def build_drafter(config: Config, target: Decoder, tokenizer: Any, head: Eagle3Head | None = None) -> Drafter | None:
    """A drafter for this target. `head`: an EAGLE-3 head that is already there, packed as the target is, instead of
    the one on disk."""
    speculation = config.speculation
    if speculation.method == "none":
        return None
    if speculation.method == "ngram":
        from paceline.drafters.ngram import NgramDrafter

        return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)
    if speculation.method == "suffix":
        from paceline.drafters.suffix import SuffixDrafter

        return SuffixDrafter(min_match=speculation.suffix_min_match, max_bytes=speculation.suffix_max_bytes)
    if speculation.method == "draft_model":
        from paceline.drafters.draft_model import DraftModelDrafter

        draft = _draft_decoder(config, target, tokenizer)
        coupled = speculation.rule == "coupled"
        return DraftModelDrafter(build_paged(config, draft), build_sampler(draft), coupled)
    from paceline.drafters.eagle3 import Eagle3Drafter
    from paceline.model.kv import BLOCK

    if head is None:
        head = pack_head(build_head(config, target.config), target)
    num_blocks = -(-(config.engine.kv_tokens or default_kv_tokens(config, target.config)) // BLOCK)
    eagle3 = Eagle3Drafter(
        head,
        target.embed,
        build_sampler(target),
        num_blocks,
        coupled=speculation.rule == "coupled",
        min_confidence=speculation.min_confidence,
    )
    if speculation.method == "eagle3":
        return eagle3
    from paceline.drafters.hybrid import HybridDrafter
    from paceline.drafters.suffix import SuffixDrafter

    history = SuffixDrafter(min_match=speculation.suffix_min_match, max_bytes=speculation.suffix_max_bytes)
    return HybridDrafter(history, eagle3, head_cost(head, target.config), speculation.hybrid_choice)


def drafting_head(config: Config, drafter: Any) -> Eagle3Head | None:
    """The EAGLE-3 head that this config's drafter drafts with, as it is now."""
    if config.speculation.method not in ADAPTABLE:
        return None
    head: Eagle3Head = drafter.head if config.speculation.method == "eagle3" else drafter.head.head
    return head


def available_drafters(config: Config) -> tuple[str, ...]:
    """What can draft for this model without further ado."""
    from paceline.model.head_files import resolve_head

    found = ["ngram", "suffix"]
    try:
        resolve_head(config.speculation.head, config.model.name)
        found += ["eagle3", "hybrid"]
    except ValueError:
        if config.speculation.head is not None:  # asked for, so it matters
            raise
    if config.speculation.draft_model is not None:
        found.append("draft_model")
    return tuple(found)


def build_head(config: Config, target: ModelConfig, dtype: torch.dtype | None = None) -> Eagle3Head:
    """The EAGLE-3 head that speculation.head names, or the one shipped for the model; plain, where the model is, and as
    precise unless `dtype` is given."""
    import torch

    from paceline.model.head_files import load_head, resolve_head
    from paceline.model.store import resolve
    from paceline.model.weights import checkpoint_checksum

    directory = resolve_head(config.speculation.head, config.model.name)
    return load_head(
        directory,
        target,
        dtype=dtype or getattr(torch, config.model.dtype),
        device=config.model.device,
        target_checksum=checkpoint_checksum(resolve(config.model.name)),
        any_target=config.speculation.any_target,
    )


def pack_head(head: Eagle3Head, target: Decoder) -> Eagle3Head:
    """For inference beside this target: packed if the target is."""
    head.requires_grad_(False)
    if target.embed.panels is not None:
        from paceline.model.kernels import pack_for_inference

        pack_for_inference(head)
    return head


def head_cost(head: Eagle3Head, target: ModelConfig) -> float:
    """What a drafted token costs, in steps of the target, where both are bound by reading their weights: as on a CPU,
    or on a GPU with few rows."""
    t = target
    per_layer = (
        t.hidden_size * t.head_dim * 2 * (t.num_heads + t.num_kv_heads) + 3 * t.hidden_size * t.intermediate_size
    )
    whole = t.num_layers * per_layer + t.vocab_size * t.hidden_size
    c = head.config.layer
    own = c.hidden_size * c.head_dim * (3 * c.num_heads + 4 * c.num_kv_heads) + 3 * c.hidden_size * c.intermediate_size
    return (own + head.config.draft_vocab_size * c.hidden_size) / whole


def _draft_decoder(config: Config, target: Decoder, tokenizer: Any) -> Decoder:
    """The model that speculation.draft_model names; "layers:N" is the target's own first N layers."""
    from paceline.model.decoder import first_layers
    from paceline.model.store import load_tokenizer, resolve

    name = config.speculation.draft_model
    assert name is not None  # the config checks it
    kind, _, count = name.partition(":")
    if kind == "layers":
        if not count.isdecimal() or not 1 <= int(count) <= target.config.num_layers:
            raise ValueError(
                f"speculation.draft_model = {name!r}: 'layers:N' takes the target's first N layers, N from 1 to "
                f"{target.config.num_layers}"
            )
        return first_layers(target, int(count))
    directory = resolve(name)
    draft = build_decoder(config, directory)
    if draft.config.vocab_size != target.config.vocab_size:
        raise ValueError(
            f"speculation.draft_model = {name!r} has {draft.config.vocab_size} tokens, the target "
            f"{target.config.vocab_size}: a draft model must share the target's vocabulary"
        )
    if load_tokenizer(directory).get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"speculation.draft_model = {name!r}: its tokenizer gives other ids than the target's; a draft model must "
            "share the target's vocabulary"
        )
    return draft


# ---- training ----


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


def build_collector(config: Config, engine: LocalEngine, rewarder: Rewarder) -> Collector:
    from paceline.rl.collect import Collector

    return Collector(
        engine,
        engine.tokenizer,
        rewarder,
        sampling=config.sampling.params(),
        chat=config.task.chat,
        env_timeout_s=config.train.env_timeout_s,
    )


def build_learner(config: Config, directory: Any) -> Learner:
    from paceline.rl.learner import Learner

    return Learner(
        load_decoder(config, directory),
        config.learner,
        num_steps=config.train.num_steps,
        temperature=config.sampling.temperature,
        keep_reference=config.algorithm.beta > 0,
        seed=config.train.seed,
    )


def build_adapter(config: Config, learner: Learner) -> Adapter:
    """The head that follows the policy: a copy of the engine's, in full precision, beside the learner's model."""
    import torch

    from paceline.rl.adapt import Adapter

    head = build_head(config, learner.decoder.config, torch.promote_types(learner.decoder.dtype, torch.float32))
    return Adapter(head, learner.decoder, config.draft, config.sampling.temperature)


def build_loop(config: Config, watcher: Watcher, *, run: Path | None = None, resume: Path | None = None) -> Loop:
    """A new run in folder `run` (None: a fresh one under runs/), or one to `resume`. What can be wrong with the
    settings is found before the folder is made."""
    from paceline.model.store import resolve
    from paceline.rl.algorithms import make_algorithm
    from paceline.rl.audit import Auditor
    from paceline.rl.checkpoint import Checkpoints
    from paceline.rl.folder import RunFolder
    from paceline.rl.loop import Loop
    from paceline.rl.resume import changes

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
    rewarder = build_rewarder(config)
    directory = resolve(config.model.name)
    engine = build_engine(config)
    learner = build_learner(config, directory)
    target = engine.paged.decoder
    adapter = build_adapter(config, learner) if config.draft.online != "off" else None
    check_prompts(config, task, engine.tokenizer)
    if resume is None:
        folder = RunFolder.create(
            run, dump_config(config), describe_run(config, f"{config.algorithm.name} on {task.name}", task.name)
        )
    else:
        folder = RunFolder.open(resume)
    checkpoints = Checkpoints(folder.checkpoints, config.train.keep_checkpoints)
    checkpoint = checkpoints.latest() if resume is not None else None
    if adapter is None and checkpoint is not None and checkpoint.state["head"] is not None:
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
        auditor=Auditor(
            engine, lambda: build_drafter(config, target, engine.tokenizer, drafting_head(config, engine.drafter))
        ),
        folder=folder,
        checkpoints=checkpoints,
        sinks=build_sinks(config, folder.path, checkpoint.step if checkpoint is not None else 0),
        watcher=watcher,
        adapter=adapter,
    )
    if checkpoint is not None:
        loop.restore(checkpoint)
    elif resume is not None:
        folder.truncate({})  # it never came to a checkpoint: from the start
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
    if speculation.head is not None and Path(speculation.head).is_dir():
        speculation = speculation.model_copy(update={"head": str(Path(speculation.head).resolve())})
    draft = {"data": config.draft.data, "init": config.draft.init}
    draft = {key: str(Path(name).resolve()) for key, name in draft.items() if name is not None and Path(name).exists()}
    changed = {"model": model, "task": task, "reward": reward, "speculation": speculation}
    return config.model_copy(update=changed | {"draft": config.draft.model_copy(update=draft)})


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


def export_policy(config: Config, run: Path, directory: Path, best: bool, head: Path | None = None) -> None:
    """The policy of a run's last (or best) checkpoint as a Hugging Face directory; and in directory `head`, if given,
    the EAGLE-3 head that was adapted to it."""
    from paceline.model import weights
    from paceline.model.store import load_tokenizer, resolve
    from paceline.rl.checkpoint import Checkpoints

    checkpoints = Checkpoints(run / "checkpoints", config.train.keep_checkpoints)
    checkpoint = checkpoints.best() if best else checkpoints.latest()
    if checkpoint is None:
        raise ValueError(f"{run}: no {'validated ' if best else ''}checkpoint yet; nothing to export")
    source = resolve(config.model.name)
    for place in (directory, head):
        if place is not None and (place / "config.json").exists():
            raise ValueError(f"{place} already holds a model; give another directory")
    if head is not None and checkpoint.state["head"] is None:
        raise ValueError(f"{run}: no head was adapted in it (draft.online); leave --head out")
    learner = build_learner(config, source)
    learner.restore(checkpoint.tensors("learner"))
    merged = load_decoder(config, source)
    weights.assign(merged, learner.weights())
    load_tokenizer(source).save_pretrained(directory)
    weights.save(merged, directory)
    if head is not None:
        adapter = build_adapter(config, learner)
        adapter.restore(checkpoint.tensors("head"), checkpoint.state["head"])
        save_adapted(config, adapter, head, directory, checkpoint.state["alarms"]["length"])


def save_adapted(config: Config, adapter: Adapter, directory: Path, target: Path, length: float | None) -> None:
    """The head of a run, for the policy in `target`; `length` is its last mean acceptance length, if known."""
    import torch

    from paceline.model.head_files import resolve_head, save_head
    from paceline.model.provenance import Provenance, read_provenance
    from paceline.model.weights import checkpoint_checksum

    before = read_provenance(resolve_head(config.speculation.head, config.model.name))
    task, sampling, speculation = config.task, config.sampling, config.speculation
    adapted = f"online beside {config.algorithm.name} on {task.kind} {task.name}, temperature {sampling.temperature:g}"
    measured = {"mean_acceptance_length": length, "rule": speculation.rule, "method": speculation.method}
    provenance = Provenance(
        target=str(target),
        target_checksum=checkpoint_checksum(target),
        data=f"{before.data}; then {adapted}" if before is not None else adapted,
        seed=config.train.seed,
        num_steps=adapter.version + (before.num_steps if before is not None else 0),
        num_tokens=adapter.num_tokens + (before.num_tokens if before is not None else 0),
        acceptance={"last batch": measured} if length is not None else {},
    )
    save_head(adapter.learner.head, directory, provenance, dtype=getattr(torch, config.model.dtype))


# ---- heads ----


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

    check_device(config)
    config = with_absolute_paths(config)
    directory = resolve(config.model.name)
    tokenizer = load_tokenizer(directory)
    start = build_start(config, directory)
    config = config.model_copy(update={"draft": start.section})
    section, sampling = config.draft, config.sampling.params()
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
        checkpoint = checkpoints.latest() if resume is not None else None
        if resume is not None and checkpoint is None:
            folder.truncate({"rollouts": whole_lines(folder)})  # it never came to a checkpoint: anew, but for these
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
