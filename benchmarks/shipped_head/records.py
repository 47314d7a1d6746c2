"""Token sequences on disk, prompts or rollouts that begin with them: one npz file with concatenated uint16 ids."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class Record:
    group: str  # "gsm8k", "gym", "sums" or "general"
    tokens: np.ndarray  # uint16, the prompt first
    num_prompt: int
    temperature: float = 1.0


def write(path: Path, records: list[Record]) -> None:
    groups = sorted({r.group for r in records})
    np.savez_compressed(
        path,
        groups=np.array(groups),
        group=np.array([groups.index(r.group) for r in records], np.uint8),
        tokens=np.concatenate([r.tokens for r in records]).astype(np.uint16),
        length=np.array([len(r.tokens) for r in records], np.uint16),
        num_prompt=np.array([r.num_prompt for r in records], np.uint16),
        temperature=np.array([r.temperature for r in records], np.float32),
    )


def read(path: Path) -> list[Record]:
    with np.load(path) as z:
        ends = np.cumsum(z["length"].astype(np.int64))
        parts = np.split(z["tokens"], ends[:-1])
        columns = zip(z["group"], parts, z["num_prompt"], z["temperature"], strict=True)
        names = [str(name) for name in z["groups"]]
        return [Record(names[g], tokens, int(n), round(float(t), 4)) for g, tokens, n, t in columns]
