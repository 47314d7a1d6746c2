"""Exports the policy and the head of a run as directories."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.build.learner import build_learner
from paceline.build.model import load_decoder
from paceline.build.run import build_online_head_trainer
from paceline.config import Config
from paceline.draft.online import OnlineHeadTrainer
from paceline.model import weights
from paceline.model.head_files import resolve_head, save_head
from paceline.model.hf_decoder import HFDecoder
from paceline.model.provenance import Provenance, read_provenance
from paceline.model.store import load_tokenizer, resolve
from paceline.rl.checkpoint import Checkpoints


def export_policy(config: Config, run: Path, directory: Path, best: bool, head: Path | None = None) -> None:
    """Write the policy of a run's last (or best) checkpoint as a Hugging Face directory. `head`: also write the EAGLE-3
    head that was trained online, to this directory."""
    from paceline.files import check_run_format

    check_run_format(run)
    checkpoints = Checkpoints(run / "checkpoints", config.train.keep_checkpoints)
    checkpoint = checkpoints.best() if best else checkpoints.latest()
    if checkpoint is None:
        raise ValueError(f"{run}: no {'validated ' if best else ''}checkpoint yet; there is nothing to export")
    source = resolve(config.model.name)
    for output in (directory, head):
        if output is not None and (output / "config.json").exists():
            raise ValueError(f"{output} already holds a model; give another directory")
    if head is not None and checkpoint.state.get("head") is None:
        raise ValueError(f"{run}: its head was not trained online (draft.online); leave out --head")
    learner = build_learner(config, source)
    with checkpoint.loading():
        learner.load(checkpoint.path / "learner")
    load_tokenizer(source).save_pretrained(directory)
    if isinstance(learner.decoder, HFDecoder):
        learner.decoder.save(directory)
    else:
        merged = load_decoder(config, source)
        weights.assign(merged, learner.weights())
        weights.save(merged, directory)
    if head is not None:
        head_trainer = build_online_head_trainer(config, learner)
        with checkpoint.loading():
            head_trainer.load_state_dict(checkpoint.tensors("head"), checkpoint.state["head"])
            length = checkpoint.state["alarms"]["mean_acceptance_length"]
        export_head(config, head_trainer, head, directory, length)


def export_head(
    config: Config, head_trainer: OnlineHeadTrainer, directory: Path, target: Path, length: float | None
) -> None:
    """Write the head of a run, for the policy in `target`. `length`: its last mean acceptance length, if known."""
    before = read_provenance(resolve_head(config.speculation.head, config.model.name))
    sampling, speculation = config.sampling, config.speculation
    tasks = ", ".join(f"{task.section.kind} {task.section.name}" for task in config.tasks)
    adapted = f"online with {config.algorithm.name} on {tasks}, temperature {sampling.temperature:g}"
    measured = {"mean_acceptance_length": length, "rule": speculation.rule, "method": speculation.method}
    provenance = Provenance(
        target=str(target),
        target_checksum=weights.checkpoint_checksum(target),
        data=f"{before.data}; then {adapted}" if before is not None else adapted,
        seed=config.train.seed,
        num_steps=head_trainer.version + (before.num_steps if before is not None else 0),
        num_tokens=head_trainer.num_tokens + (before.num_tokens if before is not None else 0),
        acceptance={"last batch": measured} if length is not None else {},
    )
    save_head(head_trainer.learner.head, directory, provenance, dtype=getattr(torch, config.model.dtype))
