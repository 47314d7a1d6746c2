"""Engines that go wrong, built in the processes of Ray's actors."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from paceline.build import build_engine
from paceline.config import Config
from paceline.engine.engine import LocalEngine


def good(config: Config) -> LocalEngine:
    return build_engine(config)


def flips_a_bit(config: Config) -> LocalEngine:
    """What arrives is not what was sent."""
    engine = build_engine(config)
    update = engine.update_weights

    def wrong(weights: Any, *args: Any) -> Any:
        def flipped() -> Iterator[Any]:
            for i, (name, tensor) in enumerate(weights):
                if i == 0:
                    tensor.view(-1).view(torch.uint8)[0] ^= 1
                yield name, tensor

        return update(flipped(), *args)

    engine.update_weights = wrong  # type: ignore[method-assign]
    return engine


def dies_in_a_broadcast(config: Config, once: Path) -> LocalEngine:
    """After its first tensor; but only the first time that any engine comes there, which the file tells."""
    engine = build_engine(config)
    update = engine.update_weights

    def deadly(weights: Any, *args: Any) -> Any:
        def cut() -> Iterator[Any]:
            for pair in weights:
                yield pair
                if not once.exists():
                    once.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        return update(cut(), *args)

    engine.update_weights = deadly  # type: ignore[method-assign]
    return engine
