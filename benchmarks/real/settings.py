"""What all parts of the study share: its settings, its folders, its results and its time limit."""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

import torch
from results import Results

import paceline
from paceline.build.config import load_config
from paceline.config import Config

CONFIG = Path(__file__).with_name("run.toml")
NUM_AUDITS = 5  # of a cell, if --rounds is not given
OPTIONS = ("problems", "num_steps", "steps", "rounds", "requests")  # recorded with the results


class LimitReached(Exception):
    """--limit-s: there is no time for another measurement."""


@dataclass
class Study:
    args: Namespace
    part: str
    results: Results
    started: float = field(default_factory=time.monotonic)

    def config(self, *overrides: str) -> Config:
        """The config of run.toml with the user's settings, and these in addition."""
        given = [f"model.name={self.args.model!r}", f"task.name={str(self.args.data)!r}", *self.args.settings]
        return load_config(CONFIG, [*given, *overrides])

    @property
    def left_s(self) -> float:
        return self.args.limit_s - (time.monotonic() - self.started)

    def reserve_s(self, on_gpu_s: float) -> float:
        """So many seconds on a GPU; runs on a CPU are those of tiny models."""
        return on_gpu_s if self.config().model.device != "cpu" else 0.0

    def check_time(self, needed_s: float) -> None:
        if self.left_s < needed_s:
            raise LimitReached

    def folder(self, kind: str, name: str) -> Path:
        """The folder of a run or a head, among the large files."""
        return Path(self.args.work) / kind / name

    def head(self, name: str) -> Path:
        path = self.folder("heads", name) / "head"
        if not (path / "config.json").exists():
            raise ValueError(f"{path}: there is no such head yet; run the part `heads` with the same --work first")
        return path

    def append(self, kind: str, row: dict) -> None:
        self.results.append(self.part, kind, row)

    def describe(self) -> dict:
        """Machine and settings, for the results."""
        config = self.config()
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        return {
            "device": device if config.model.device != "cpu" else "CPU",
            "torch": torch.__version__,
            "paceline": paceline.__version__,
            "model": Path(self.args.model).name,
            "dtype": config.model.dtype,
            "settings": list(self.args.settings),
            "options": {key: str(value) for key, value in vars(self.args).items() if key in OPTIONS},
        }


def free_memory() -> None:
    """Of a run that has ended, before the next one in this process."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
