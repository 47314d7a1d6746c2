"""What the trainer reports while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ProgressCallback(Protocol):
    """Shows the progress of a run, for example on a terminal."""

    def progress(self, stage: str, done: int, total: int) -> None: ...
    def step(self, metrics: Mapping[str, Any]) -> None: ...  # after every step
    def note(self, text: str) -> None: ...  # a message to the user
