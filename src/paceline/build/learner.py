"""Builds the learner of a run: one process, or the ranks that torchrun or a cluster started."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from paceline.build.adapter import with_adapter_settings
from paceline.build.memory import resolve_memory
from paceline.build.model import check_device, check_training_dtype, has_kernels, load_decoder, prepare_device
from paceline.config import Config
from paceline.model.attention import has_varlen
from paceline.model.decoder import Decoder, with_shared_weights
from paceline.model.hf_decoder import HFDecoder, load_hf
from paceline.model.peft_files import read_adapter
from paceline.model.store import resolve
from paceline.rl.algorithms import make_algorithm
from paceline.rl.learner import Learner
from paceline.rl.worker_group import WorkerGroup


def build_learner(
    config: Config, directory: Any, worker_group: WorkerGroup | None = None, base: Decoder | None = None
) -> Learner:
    """`base`: a decoder of the same model; the learner trains adapters beside its weights instead of loading them."""
    # Several ranks shard the model over their devices, so the whole model is loaded to host memory.
    is_sharded = worker_group is not None and worker_group.size > 1
    init = config.learner.lora_init
    return Learner(
        load_policy(config, directory, "cpu" if is_sharded else config.model.device, base),
        config.learner,
        adapter=None if init is None else read_adapter(Path(init)),
        num_steps=config.train.num_steps,
        temperature=config.sampling.temperature,
        keep_reference=config.algorithm.beta > 0,
        seed=config.train.seed,
        worker_group=worker_group,
    )


def load_policy(config: Config, directory: Any, device: str, base: Decoder | None = None) -> Decoder | HFDecoder:
    """The model to train, by learner.model. `base`: a decoder that it shares its weights with."""
    if config.learner.model == "transformers":
        prepare_device(config, device)
        return load_hf(directory, getattr(torch, config.model.dtype), device)
    decoder = load_decoder(config, directory, device) if base is None else with_shared_weights(base)
    if config.model.device.startswith("cuda"):
        use_train_kernels(decoder)
        warn_of_other_bits(config, decoder.config.head_dim)
    return decoder


def use_train_kernels(decoder: Decoder) -> None:
    """Train with the fused CUDA kernels, if they support the model."""
    if has_kernels(decoder):
        from paceline.model.cuda.train_ops import TrainOps

        decoder.ops = TrainOps()


def warn_of_other_bits(config: Config, head_dim: int) -> None:
    """Warn where learner.deterministic does not hold: only the backward pass of flash attention is deterministic."""
    is_promised = config.learner.deterministic and config.model.dtype == "bfloat16"
    if is_promised and not has_varlen(torch.device(config.model.device), torch.bfloat16, head_dim):
        warnings.warn(
            f"learner.deterministic = true: flash attention does not support this GPU or head_dim = {head_dim}. Equal "
            "inputs may give other bits.",
            stacklevel=2,
        )


def torchrun_rank() -> int:
    """The rank of this process under torchrun; 0 without torchrun."""
    return int(os.environ["RANK"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else 0


def build_worker_group(config: Config) -> WorkerGroup:
    """Join the ranks that torchrun started. Without torchrun, the group has this process alone."""
    size = int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1
    if size == 1:
        return WorkerGroup()
    if config.cluster.kind != "none":
        raise ValueError(
            f'cluster.kind = "{config.cluster.kind}": starts its processes itself; start paceline without torchrun, or '
            'set cluster.kind = "none"'
        )
    check_device(config)
    is_cuda = config.model.device.startswith("cuda")
    device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if is_cuda else "cpu"
    return WorkerGroup.join(torchrun_rank(), size, "env", device)


def run_worker(config: Config, worker_group: WorkerGroup) -> None:
    """Run a rank above 0 until rank 0 ends it."""
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    check_training_dtype(config)
    algorithm = make_algorithm(config.algorithm, config.sampling.max_tokens)
    config, _ = resolve_memory(with_adapter_settings(config), worker_group)
    learner = build_learner(config, resolve(config.model.name), worker_group)
    learner.run_worker(algorithm.loss, algorithm.weights)
