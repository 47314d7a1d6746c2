"""Sinks for a step's metrics besides metrics.jsonl: TensorBoard and Weights & Biases. They log the numbers only."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.files import replace_file


class Sink(Protocol):
    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


def scalars(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """{"stages": {"generation": 1}} as ("stages/generation", 1.0). NaN and infinity are left out."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            yield prefix + name, float(value)


class TensorBoardSink:
    """`purge_step`: on resume, the next step. TensorBoard then hides what was logged for this step and later ones."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"train.tensorboard = true, but TensorBoard is not installed ({error}); "
                "pip install tensorboard, or set train.tensorboard=false"
            ) from None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in scalars(metrics):
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """A Weights & Biases run. Its id is stored in `folder`: a resumed run continues it."""

    def __init__(self, folder: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"train.wandb = true, but wandb is not installed ({error}); pip install wandb, or set train.wandb=false"
            ) from None
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "wandb_id"
        if not path.exists():
            replace_file(path, secrets.token_hex(4).encode())
        self._run = wandb.init(
            project=project, name=name, config=dict(config), dir=str(folder), id=path.read_text(), resume="allow"
        )

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(metrics)), step=step)  # wandb ignores a step that it already has

    def close(self) -> None:
        self._run.finish()
