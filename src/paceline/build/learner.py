"""The learner of a run, alone or shared by the ranks that torchrun or a cluster started."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from paceline.build.engine import check_device, load_decoder
from paceline.config import Config

if TYPE_CHECKING:
    from paceline.model.decoder import Decoder
    from paceline.model.hf_decoder import HFDecoder
    from paceline.rl.learner import Learner
    from paceline.rl.world import World


def build_learner(config: Config, directory: Any, world: World | None = None) -> Learner:
    from paceline.rl.learner import Learner

    # Several ranks divide it among their devices: whole it is nowhere but in the host's memory.
    shared = world is not None and world.size > 1
    return Learner(
        load_policy(config, directory, "cpu" if shared else config.model.device),
        config.learner,
        num_steps=config.train.num_steps,
        temperature=config.sampling.temperature,
        keep_reference=config.algorithm.beta > 0,
        seed=config.train.seed,
        world=world,
    )


def load_policy(config: Config, directory: Any, device: str) -> Decoder | HFDecoder:
    """The model that is trained, by learner.model."""
    import torch

    check_device(config)
    if config.learner.model == "transformers":
        from paceline.model.hf_decoder import load_hf

        return load_hf(directory, getattr(torch, config.model.dtype), device)
    return load_decoder(config, directory, device)


def torchrun_rank() -> int:
    """Which of the ranks that torchrun started this process is; 0 where it did not."""
    return int(os.environ["RANK"]) if {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() else 0


def build_world(config: Config) -> World:
    """All ranks that torchrun started, met; or this process alone."""
    from paceline.rl.world import World

    size = int(os.environ.get("WORLD_SIZE", "1")) if "MASTER_ADDR" in os.environ else 1
    if size == 1:
        return World()
    if config.cluster.kind != "none":
        raise ValueError(
            f'cluster.kind = "{config.cluster.kind}": it starts its processes itself; start paceline without torchrun, '
            'or set cluster.kind = "none"'
        )
    check_device(config)
    is_cuda = config.model.device.startswith("cuda")
    return World.join(torchrun_rank(), size, "env", f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if is_cuda else "cpu")


def follow(config: Config, world: World) -> None:
    """The whole life of a rank above 0."""
    import torch

    from paceline.model.store import resolve
    from paceline.rl.algorithms import make_algorithm

    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    algorithm = make_algorithm(config.algorithm, config.sampling.max_tokens)
    learner = build_learner(config, resolve(config.model.name), world)
    learner.follow(algorithm.loss, algorithm.weights)
