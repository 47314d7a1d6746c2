"""Hugging Face directories of the policy that a run writes while it trains: exports/step-000120.

Invariants, under the run folder's lock:
  - A folder named step-N is complete. `write` makes it under a hidden name and renames it.
  - It has the policy after step N of the run's records: if the run was resumed from an earlier checkpoint, folders of
    this and later steps are replaced.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from torch import Tensor

from paceline.model.hf_directory import SCRATCH

DROPPED = ".drop-"  # prefix of an export that is being deleted


class Write(Protocol):
    """Writes a new directory, atomically. Raises OSError if it can't, or if less than `spare_bytes` would be left."""

    def __call__(
        self,
        weights: Iterable[tuple[str, Tensor]],
        directory: Path,
        *,
        spare_bytes: int,
        progress: Callable[[int, int], None],
    ) -> None: ...


class Exports:
    """The exports in `folder`. Keeps the last `keep`, or all if it is None."""

    def __init__(self, folder: Path, keep: int | None, write: Write) -> None:
        self.folder, self.keep, self._write = folder, keep, write

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def save(
        self,
        step: int,
        weights: Iterable[tuple[str, Tensor]],
        spare_bytes: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self.folder.mkdir(exist_ok=True)
        for prefix in (SCRATCH, DROPPED):  # of a killed process
            for leftover in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(leftover)
        steps = self._steps()
        self._drop([path for number, path in steps.items() if number >= step])
        self._write(weights, self.place(step), spare_bytes=spare_bytes, progress=progress)
        if self.keep is not None:
            self._drop(list(self._steps().values())[: -self.keep])

    def _steps(self) -> dict[int, Path]:
        numbers = {path.name.removeprefix("step-"): path for path in self.folder.glob("step-*")}
        return {int(number): numbers[number] for number in sorted(filter(str.isdecimal, numbers), key=int)}

    def _drop(self, paths: Iterable[Path]) -> None:
        """Rename, then delete: a partly deleted export never has its final name."""
        for path in paths:
            dropped = path.rename(path.with_name(DROPPED + path.name))
            shutil.rmtree(dropped)
