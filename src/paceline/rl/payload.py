"""Rollouts and their TokenBatch as tensors and JSON: what rank 0 sends to the other ranks with a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from paceline.rl.batch import TokenBatch
from paceline.rl.records import pack_groups, unpack_groups
from paceline.types import Group, Rollout


def pack_payload(
    rollouts: Sequence[Rollout], batch: TokenBatch | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors, [metadata] = pack_groups([Group(0, "", "", list(rollouts))])
    if batch is not None:
        streams = {field.name: getattr(batch, field.name) for field in fields(batch)}
        tensors |= {f"batch.{name}": stream for name, stream in streams.items() if stream is not None}
    return tensors, metadata


def unpack_payload(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> tuple[list[Rollout], TokenBatch | None]:
    streams = {name.removeprefix("batch."): x for name, x in tensors.items() if name.startswith("batch.")}
    [group] = unpack_groups({name: x for name, x in tensors.items() if not name.startswith("batch.")}, [metadata])
    return group.rollouts, TokenBatch(**streams) if streams else None
