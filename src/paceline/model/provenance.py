"""Where a head comes from: what it was trained for and on, by whom, and how well it did. A file beside its weights.

`target_checksum` is `weights.checkpoint_checksum` of the directory that the target was loaded from, so a head is known
to belong to a checkpoint however that is loaded. None: the head is good for any target of its shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch

import paceline
from paceline.model.weights import ModelError, read_json

FILE = "provenance.json"


def _versions() -> dict[str, str]:
    return {"paceline": paceline.__version__, "torch": torch.__version__}


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


@dataclass(frozen=True, slots=True)
class Provenance:
    target: str  # what the user called it
    target_checksum: str | None
    data: str  # in words: which prompts, whose answers, at which temperature
    seed: int
    num_steps: int
    num_tokens: int
    # As measured, by what it was measured on. An entry with `temperature` and `k` gives mean acceptance lengths at
    # these by kind of draft: "coupled", "greedy", "sampled".
    acceptance: Mapping[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=_today)
    versions: Mapping[str, str] = field(default_factory=_versions)

    def to_json(self) -> dict[str, Any]:
        return {key: dict(value) if isinstance(value, Mapping) else value for key, value in self._items()}

    def first_position_rate(self, temperature: float, kind: str) -> float | None:
        """How often the first token of a draft was accepted, on the data where it was accepted least; between two
        recorded temperatures interpolated. None where nothing comparable is on record.

        The first position is compared because its rate depends neither on the draft length nor on how a policy chooses
        it. The record has mean lengths: the rate is that which, alike at all k positions, gives this length."""
        by_temperature: dict[float, float] = {}
        for entry in self.acceptance.values():
            if isinstance(entry, Mapping) and {"temperature", "k", kind} <= entry.keys():
                rate = _rate(float(entry[kind]), int(entry["k"]))
                at = float(entry["temperature"])
                by_temperature[at] = min(rate, by_temperature.get(at, 1.0))
        known = sorted(by_temperature)
        if not known or not known[0] <= temperature <= known[-1]:
            return None
        return float(np.interp(temperature, known, [by_temperature[at] for at in known]))

    def _items(self) -> list[tuple[str, Any]]:
        return [(entry.name, getattr(self, entry.name)) for entry in dataclasses.fields(self)]


def _rate(mean_length: float, k: int) -> float:
    """a with a + a² + … + a^k = mean_length - 1, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        if sum(middle**j for j in range(1, k + 1)) < mean_length - 1:
            low = middle
        else:
            high = middle
    return low


KINDS: dict[str, tuple[type, ...]] = {
    "target": (str,),
    "target_checksum": (str, NoneType),
    "data": (str,),
    "seed": (int,),
    "num_steps": (int,),
    "num_tokens": (int,),
    "acceptance": (dict,),
    "created": (str,),
    "versions": (dict,),
}


def read_provenance(directory: Path | str) -> Provenance | None:
    """None where there is no such file: heads of other trainers have none."""
    path = Path(directory) / FILE
    if not path.exists():
        return None
    content = read_json(path)
    remedy = "restore the file, or remove it and with it what is known about the head"
    for key, kinds in KINDS.items():
        if key not in content:
            raise ModelError(f"{path}: {key} is missing; {remedy}")
        if not isinstance(content[key], kinds) or isinstance(content[key], bool):
            words = " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)
            raise ModelError(f"{path}: {key} = {content[key]!r}: must be {words}; {remedy}")
    if spare := sorted(content.keys() - KINDS.keys()):
        raise ModelError(f"{path}: {spare[0]} is unknown; {remedy}")
    return Provenance(**content)
