"""The content of a training checkpoint: everything that a run needs to continue bit for bit."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from paceline.config import Config
from paceline.engine.interface import Engine, SpeculationState
from paceline.rl.alarms import Alarms
from paceline.rl.callback import ProgressCallback
from paceline.rl.checkpoint import Checkpoint
from paceline.rl.evaluator import Evaluator
from paceline.rl.folder import RunFolder
from paceline.rl.learner import Learner
from paceline.rl.observer import HeadTrainer
from paceline.rl.order import Cursor
from paceline.rl.pending import pack_batches, unpack_batches
from paceline.rl.produce import Producer, ProducerState, PublishedWeights
from paceline.rl.publisher import published_tensors
from paceline.rl.recorder import Recorder
from paceline.rl.records import pack_groups, unpack_groups


class TrainerParts(Protocol):
    """The attributes of a Trainer that a checkpoint saves and restores."""

    config: Config
    engine: Engine
    learner: Learner
    producer: Producer
    head_trainer: HeadTrainer | None
    alarms: Alarms
    evaluator: Evaluator
    recorder: Recorder
    folder: RunFolder
    callback: ProgressCallback
    base: str

    @property
    def step(self) -> int: ...


def checkpoint_content(trainer: TrainerParts) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts and the JSON state for `Checkpoints.save`."""
    producer, head_trainer, speculation = trainer.producer.state(), trainer.head_trainer, trainer.config.speculation
    buffer, buffer_metadata = pack_batches(producer.batches, producer.traces)
    surplus, surplus_metadata = pack_groups(producer.surplus)
    heads = {each.head.version: each.head for each in producer.published if each.head is not None}
    parts = {
        "learner": trainer.learner.save,
        **{
            name: {key: torch.from_numpy(np.ascontiguousarray(array)) for key, array in arrays.items()}
            for name, arrays in producer.speculation_state.items()
        },
        "buffer": buffer,
        "surplus": surplus,
        **{f"weights-{each.version}": dict(each.weights()) for each in producer.published},
        **{f"head-{version}": dict(head.weights()) for version, head in heads.items()},
        **({"head": head_trainer.state_dict()} if head_trainer is not None else {}),
    }
    state = {
        "step": trainer.step,
        "base_checksum": trainer.base,
        "position": producer.cursor.position,
        "put_back": producer.cursor.put_back_indices,
        "stream_offsets": trainer.folder.offsets(),
        "buffer": buffer_metadata,
        "surplus": surplus_metadata,
        "published": [[each.version, each.head and each.head.version] for each in producer.published],
        "head": head_trainer.metadata() if head_trainer is not None else None,
        "alarms": trainer.alarms.state_dict(),
        "speculation_state": list(producer.speculation_state),
        "speculation_method": speculation.method,
        "speculation_policy": speculation.policy,
        **trainer.evaluator.state_dict(),
        **trainer.recorder.state_dict(),
    }
    return parts, state


def load_checkpoint(trainer: TrainerParts, checkpoint: Checkpoint) -> None:
    """All checks that may fail come before the first change of the run folder."""
    state = checkpoint.state
    if state["base_checksum"] != trainer.base:
        raise ValueError(
            f"model.name = {trainer.config.model.name!r}: its weights are not those that this run started with; "
            "restore them, or start a new run"
        )
    trainer.learner.load(checkpoint.path / "learner")
    assert trainer.step == state["step"], "the learner's version is the step of the checkpoint"
    if trainer.head_trainer is not None and state["head"] is not None:
        trainer.head_trainer.load_state_dict(checkpoint.tensors("head"), state["head"])
    trainer.alarms.load_state_dict(state["alarms"])
    trainer.engine.load_state_dict(_speculation_state(trainer, checkpoint))
    batches, traces = unpack_batches(checkpoint.tensors("buffer"), state["buffer"])
    trainer.producer.load_state(
        ProducerState(
            batches,
            Cursor(state["position"], tuple(state["put_back"])),
            unpack_groups(checkpoint.tensors("surplus"), state["surplus"]),
            trainer.engine.state_dict(),
            _older_versions(trainer, checkpoint),
            traces,
        )
    )
    trainer.evaluator.load_state_dict(state)
    trainer.recorder.load_state_dict(state)
    trainer.folder.truncate(state["stream_offsets"])


def _speculation_state(trainer: TrainerParts, checkpoint: Checkpoint) -> SpeculationState:
    """The state of the engine's drafter, speculation policy and length model, as far as it fits the settings."""
    state, speculation = checkpoint.state, trainer.config.speculation
    unusable = set()
    if state["speculation_method"] != speculation.method:
        trainer.callback.note(
            f'speculation.method = "{speculation.method}": the new drafter starts without the state of the old one'
        )
        unusable = {"drafter", "policy"}
    if state["speculation_policy"] != speculation.policy:
        unusable.add("policy")
    # The parts of further engines have a number: drafter, drafter-1, …
    names = [name for name in state["speculation_state"] if _kind(name) not in unusable]
    saved = {name: {key: x.numpy() for key, x in checkpoint.tensors(name).items()} for name in names}
    current = trainer.engine.state_dict()
    different = [name for name in saved if name in current and saved[name].keys() != current[name].keys()]
    if any(_kind(name) == "drafter" for name in different):
        trainer.callback.note(
            "the drafter on this device has another implementation: it starts without the state of the old one"
        )
        saved = {name: arrays for name, arrays in saved.items() if _kind(name) != "drafter"}
    return saved


def _older_versions(trainer: TrainerParts, checkpoint: Checkpoint) -> list[PublishedWeights]:
    """Published versions that future batches begin with."""
    published = []
    for version, head_version in checkpoint.state["published"]:
        head = None
        if trainer.head_trainer is not None and head_version is not None:
            head = published_tensors(head_version, checkpoint.tensors(f"head-{head_version}"))
        published.append(published_tensors(version, checkpoint.tensors(f"weights-{version}"), head))
    return published


def _kind(name: str) -> str:
    return name.partition("-")[0]
