"""Engines with faults, for Ray actors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.build.engine import build_engine
from paceline.config import Config
from paceline.engine.engine import LocalEngine


def working(config: Config) -> LocalEngine:
    return build_engine(config)


def flips_a_bit(config: Config) -> LocalEngine:
    """It changes one bit of the weights that it receives."""
    engine = build_engine(config)
    update = engine.update_weights

    def update_flipped(weights: Any, *args: Any) -> Any:
        def flipped() -> Iterator[Any]:
            for i, (name, tensor) in enumerate(weights):
                if i == 0:
                    tensor.view(-1).view(torch.uint8)[0] ^= 1
                yield name, tensor

        return update(flipped(), *args)

    engine.update_weights = update_flipped  # type: ignore[method-assign]
    return engine


def dies_in_a_broadcast(config: Config, marker: Path) -> LocalEngine:
    """Its process dies after the first tensor of the first weight update. The file marks that this has happened."""
    engine = build_engine(config)
    update = engine.update_weights

    def update_and_die(weights: Any, *args: Any) -> Any:
        def interrupted() -> Iterator[Any]:
            for pair in weights:
                yield pair
                if not marker.exists():
                    marker.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        return update(interrupted(), *args)

    engine.update_weights = update_and_die  # type: ignore[method-assign]
    return engine
