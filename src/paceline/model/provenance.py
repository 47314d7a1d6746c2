"""provenance.json, a file in a head's directory: its target, its training data and its measured acceptance.

`target_checksum` is `weights.checkpoint_checksum` of the target's directory. It does not depend on the dtype that the
target is loaded with. None: the head is for any target of its shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import paceline
from paceline.model.weights import ModelError, read_json
from paceline.types import acceptance_probability

FILE = "provenance.json"
TYPES: dict[str, Any] = {"str": str, "str or null": str | None, "int": int, "dict": dict}


@dataclass(frozen=True, slots=True)
class Provenance:
    target: str  # the name that the user gave
    target_checksum: str | None
    data: str  # a description: the prompts, the model that answered them, the temperature
    seed: int
    num_steps: int
    num_tokens: int
    # Measurements by data set. An entry with `temperature` and `k` has the mean acceptance lengths for these by kind of
    # draft: "coupled", "greedy", "sampled".
    acceptance: dict[str, Any] = field(default_factory=dict)
    created: str = field(default_factory=lambda: datetime.now(UTC).date().isoformat())
    versions: dict[str, str] = field(
        default_factory=lambda: {"paceline": paceline.__version__, "torch": torch.__version__}
    )

    def first_position_rate(self, temperature: float, kind: str) -> float | None:
        """The acceptance rate of the first draft token, on the data set where it is lowest, interpolated between
        recorded temperatures. None if there is no comparable measurement.

        The first position is used because its rate does not depend on the draft length or the speculation policy. The
        record has mean acceptance lengths: the rate is the one that gives this length if it is the same at all k
        positions."""
        by_temperature: dict[float, float] = {}
        for entry in self.acceptance.values():
            if isinstance(entry, Mapping) and {"temperature", "k", kind} <= entry.keys():
                rate = acceptance_probability(float(entry[kind]), int(entry["k"]))
                at = float(entry["temperature"])
                by_temperature[at] = min(rate, by_temperature.get(at, 1.0))
        recorded = sorted(by_temperature)
        if not recorded or not recorded[0] <= temperature <= recorded[-1]:
            return None
        return float(np.interp(temperature, recorded, [by_temperature[at] for at in recorded]))


def read_provenance(directory: Path | str) -> Provenance | None:
    """None if there is no such file: heads that were trained with other tools have none."""
    path = Path(directory) / FILE
    if not path.exists():
        return None
    content = read_json(path)
    remedy = "restore the file, or delete it to use the head without provenance"
    for entry in fields(Provenance):
        key, expected = entry.name, str(entry.type).partition("[")[0].replace(" | None", " or null")
        if key not in content:
            raise ModelError(f"{path}: {key} is missing; {remedy}")
        if not isinstance(content[key], TYPES[expected]) or isinstance(content[key], bool):
            raise ModelError(f"{path}: {key} = {content[key]!r}: must be {expected}; {remedy}")
    if unknown := sorted(content.keys() - {entry.name for entry in fields(Provenance)}):
        raise ModelError(f"{path}: {unknown[0]} is unknown; {remedy}")
    return Provenance(**content)
