"""LoRA adapters in PEFT's format: the one that a run starts with, and the one that it exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.build.export import open_policy, policy_checkpoint
from paceline.config import Config
from paceline.model import lora
from paceline.model.decoder import Decoder
from paceline.model.hf_directory import new_directory
from paceline.model.peft_files import read_adapter, write_adapter
from paceline.model.weights import specs_of


def with_adapter_settings(config: Config) -> Config:
    """With rank, alpha and targets of the adapter that learner.lora_init names. ValueError if they are set to other
    values."""
    learner = config.learner
    if learner.lora_init is None:
        return config
    adapter = read_adapter(Path(learner.lora_init))
    own: dict[str, Any] = {
        "lora_rank": adapter.rank, "lora_alpha": adapter.alpha, "lora_targets": list(adapter.targets)
    }  # fmt: skip
    for key, value in own.items():
        given = getattr(learner, key)
        if key in learner.model_fields_set and (sorted(given) if isinstance(given, list) else given) != (
            sorted(value) if isinstance(value, list) else value
        ):
            raise ValueError(
                f"learner.{key} = {given!r}: the adapter learner.lora_init = {learner.lora_init!r} has {value!r}; "
                f"remove learner.{key}"
            )
    return config.changed(learner=own)


def export_adapter(
    config: Config, run: Path, directory: Path, best: bool = False, head: Path | None = None, dtype: str | None = None
) -> None:
    """Write the LoRA adapter of a run's last (or best) checkpoint as a directory of PEFT. `dtype` None: model.dtype."""
    if head is not None:
        raise ValueError("--head: a head is for a whole model; export it without --adapter")
    learner, written = config.learner, getattr(torch, dtype or config.model.dtype)
    if not learner.lora_rank:
        raise ValueError(f"{run}: it trained all weights (learner.lora_rank = 0); leave out --adapter")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ValueError(f"{directory} exists and is not empty; give another directory")
    with open_policy(config, policy_checkpoint(config, run, best)) as policy:
        assert isinstance(policy.decoder, Decoder)
        specs = specs_of(lora.adapter_views(policy.decoder), written)
        with new_directory(directory, sum(spec.num_bytes for spec in specs.values())) as scratch:
            write_adapter(
                scratch, policy.adapters(written), specs, learner.lora_rank, learner.lora_alpha, learner.lora_targets,
                config.model.name,
            )  # fmt: skip
