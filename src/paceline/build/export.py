"""Exports the policy and the head of a run as directories.

A checkpoint is read and written tensor by tensor, on the CPU: no learner and no optimizer is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.build.drafter import build_head
from paceline.config import Config
from paceline.draft.online import check_base
from paceline.engine.interface import Engine
from paceline.files import check_run_format
from paceline.model import weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.draft_head import DraftHead
from paceline.model.head_files import resolve_head, save_head
from paceline.model.hf_decoder import HFDecoder, empty_hf, parameter_views
from paceline.model.hf_directory import Progress, new_directory, write_directory
from paceline.model.provenance import Provenance, read_provenance
from paceline.model.store import load_tokenizer, resolve
from paceline.model.tensor_file import TensorFile, TensorSpec
from paceline.rl.checkpoint import Checkpoint, Checkpoints
from paceline.rl.exports import Exports
from paceline.rl.folder import RunFolder
from paceline.rl.learner import Learner
from paceline.rl.stored_policy import StoredPolicy

GENERATION = "generation_config.json"


def export_policy(
    config: Config,
    run: Path,
    directory: Path,
    best: bool = False,
    head: Path | None = None,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write the policy of a run's last (or best) checkpoint as a Hugging Face directory. `head`: also write the
    head that was trained online, to this directory. `dtype` None: model.dtype."""
    checkpoint = policy_checkpoint(config, run, best)
    for output in (directory, head):
        if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(f"{output} exists and is not empty; give another directory")
    if head is not None and checkpoint.state.get("head") is None:
        raise ValueError(f"{run}: its head was not trained online (draft.online); leave out --head")
    source = resolve(config.model.name)
    written = getattr(torch, dtype or config.model.dtype)
    with open_policy(config, checkpoint) as policy:
        write_policy(config, source, policy.decoder, written, policy.weights(written), directory, progress=progress)
        if head is not None:
            assert isinstance(policy.decoder, Decoder), "heads are trained with our own decoder only"
            export_head(config, checkpoint, policy.decoder.config, head, directory)


def policy_checkpoint(config: Config, run: Path, best: bool) -> Checkpoint:
    """The last, or the best, checkpoint of a run."""
    check_run_format(run)
    checkpoints = Checkpoints(run / "checkpoints", config.train.keep_checkpoints)
    checkpoint = checkpoints.best() if best else checkpoints.latest()
    if checkpoint is None:
        raise ValueError(f"{run}: no {'validated ' if best else ''}checkpoint yet; there is no policy to read")
    return checkpoint


@contextmanager
def open_policy(config: Config, checkpoint: Checkpoint) -> Iterator[StoredPolicy]:
    """The policy of a checkpoint. `config`: of its run."""
    source = resolve(config.model.name)
    if config.learner.model == "transformers":
        decoder: Decoder | HFDecoder = empty_hf(source)
    else:
        with torch.device("meta"):
            decoder = Decoder(weights.read_config(source, config.model.yarn_factor))
    dtype = getattr(torch, config.model.dtype)
    with checkpoint.loading(), StoredPolicy(checkpoint.path / "learner", source, decoder, config.learner, dtype) as it:
        yield it


def load_policy_into(engine: Engine, config: Config, checkpoint: Checkpoint) -> None:
    """Give an engine, with the model that a run started with, the policy of the run's checkpoint. `config`: of the
    run."""
    with open_policy(config, checkpoint) as policy:
        engine.update_weights(policy.weights(policy.dtype), checkpoint.step)


def build_exports(config: Config, folder: RunFolder, learner: Learner) -> Exports | None:
    """The exports that a run writes while it trains. None without train.export_every."""
    if not config.train.export_every:
        return None
    source, dtype = resolve(config.model.name), getattr(torch, config.model.dtype)
    write = partial(write_policy, config, source, learner.decoder, dtype)
    return Exports(folder.exports, config.train.keep_exports, write)


def write_policy(
    config: Config,
    source: Path,
    decoder: Decoder | HFDecoder,
    dtype: torch.dtype,
    policy: Iterable[tuple[str, Tensor]],
    directory: Path,
    *,
    spare_bytes: int = 0,
    progress: Progress = lambda done, total: None,
) -> None:
    """Write a new Hugging Face directory, in `dtype`, with the tokenizer of `source`. `decoder`: the names, in the
    order of `policy`, and shapes of the tensors."""
    specs = weights.specs_of(parameter_views(decoder), dtype)
    if isinstance(decoder, HFDecoder):
        documents, buffers = _hf_documents(decoder, source, dtype), _stored_buffers(decoder, source)
    else:
        documents, buffers = {"config.json": weights.hf_config(decoder.config, dtype)}, {}
    specs |= {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in buffers.items()}
    tensors = chain(((name, tensor.to(dtype)) for name, tensor in policy), buffers.items())
    with new_directory(directory, sum(spec.num_bytes for spec in specs.values()), spare_bytes) as scratch:
        load_tokenizer(source, config.model.chat_template).save_pretrained(scratch)
        write_directory(scratch, tensors, specs, documents, progress=progress)


def _hf_documents(decoder: HFDecoder, source: Path, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """As transformers writes them."""
    changed = {"architectures": [type(decoder.model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    generation = {GENERATION: weights.read_json(source / GENERATION)} if (source / GENERATION).exists() else {}
    return {**generation, "config.json": json.loads(decoder.config.to_json_string()) | changed}


def _stored_buffers(decoder: HFDecoder, source: Path) -> dict[str, Tensor]:
    """Tensors of the model that are not trained: persistent buffers."""
    with weights.tensors_in(source, mapped=False) as (shapes, fetch):
        return {name: fetch(name) for name, _ in decoder.model.named_buffers() if name in shapes}


# ---- heads ----


def export_head(config: Config, checkpoint: Checkpoint, model: ModelConfig, directory: Path, target: Path) -> None:
    """Write the head that a run trained online, for the policy in `target`."""
    head, num_steps = load_trained_head(config, checkpoint, model)
    before = read_provenance(resolve_head(config.speculation.head, config.model.name))
    sampling, speculation = config.sampling, config.speculation
    tasks = ", ".join(f"{task.section.kind} {task.section.name}" for task in config.tasks)
    adapted = f"online with {config.algorithm.name} on {tasks}, temperature {sampling.temperature:g}"
    length = checkpoint.state["alarms"]["mean_acceptance_length"]  # the last one, if known
    measured = {"mean_acceptance_length": length, "rule": speculation.rule, "method": speculation.method}
    num_tokens = checkpoint.state["head"]["num_tokens"]
    provenance = Provenance(
        target=str(target),
        target_checksum=weights.checkpoint_checksum(target),
        data=f"{before.data}; then {adapted}" if before is not None else adapted,
        seed=config.train.seed,
        num_steps=num_steps + (before.num_steps if before is not None else 0),
        num_tokens=num_tokens + (before.num_tokens if before is not None else 0),
        acceptance={"last batch": measured} if length is not None else {},
    )
    dtype = getattr(torch, config.model.dtype)
    needed_bytes = sum(parameter.numel() for parameter in head.parameters()) * dtype.itemsize
    with new_directory(directory, needed_bytes) as scratch:
        save_head(head, scratch, provenance, dtype=dtype)


def load_trained_head(config: Config, checkpoint: Checkpoint, model: ModelConfig) -> tuple[DraftHead, int]:
    """The head of a checkpoint, and the number of optimizer steps that trained it."""
    dtype = torch.promote_types(getattr(torch, config.model.dtype), torch.float32)
    head = build_head(config.changed(model={"device": "cpu"}), model, dtype)
    check_base(head, checkpoint.state["head"])
    with TensorFile(checkpoint.path / "head.safetensors") as state, torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.copy_(state.get_tensor(f"parameter.{name}"))
        return head, int(state.get_tensor("version"))
