"""What a run learned, as directories that others load."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.build.engine import load_decoder
from paceline.build.learner import build_learner
from paceline.build.run import build_adapter
from paceline.config import Config

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.rl.adapt import Adapter


def export_policy(config: Config, run: Path, directory: Path, best: bool, head: Path | None = None) -> None:
    """The policy of a run's last (or best) checkpoint as a Hugging Face directory; and in directory `head`, if given,
    the EAGLE-3 head that was adapted to it."""
    from paceline.model import weights
    from paceline.model.hf_decoder import HFDecoder
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
    if head is not None and checkpoint.state.get("head") is None:
        raise ValueError(f"{run}: no head was adapted in it (draft.online); leave --head out")
    learner = build_learner(config, source)
    with checkpoint.complete():
        learner.load(checkpoint.path / "learner")
    load_tokenizer(source).save_pretrained(directory)
    if isinstance(learner.decoder, HFDecoder):
        learner.decoder.save(directory)
    else:
        merged = load_decoder(config, source)
        weights.assign(merged, learner.weights())
        weights.save(merged, directory)
    if head is not None:
        adapter = build_adapter(config, learner)
        with checkpoint.complete():
            adapter.restore(checkpoint.tensors("head"), checkpoint.state["head"])
            length = checkpoint.state["alarms"]["length"]
        save_adapted(config, adapter, head, directory, length)


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
