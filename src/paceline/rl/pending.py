"""Pending batches in a checkpoint: finished, not yet trained on.

Everything that a batch adds to the run's records is saved: groups, dropped groups, engine traces, counts and times.
Only `rounds` are not, which audits read: a batch that was pending when the run stopped is not audited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.rl.produce import Batch
from paceline.rl.records import pack_groups, unpack_groups
from paceline.rl.stage_timer import StageTimer
from paceline.types import StepTrace


def pack_batches(
    batches: Sequence[Batch], later_traces: Sequence[StepTrace] = ()
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and the remaining fields as JSON. `later_traces`: those that are in no batch yet."""
    tensors, groups = pack_groups([group for batch in batches for group in [*batch.groups, *batch.dropped]])
    # JSON as bytes: a large batch has tens of thousands of traces, too many for the checkpoint's state.json.
    parts = [*(batch.traces for batch in batches), later_traces]
    traces = json.dumps([[asdict(trace) for trace in part] for part in parts], default=np.generic.item)
    tensors["traces"] = torch.frombuffer(bytearray(traces.encode()), dtype=torch.uint8)
    return tensors, {
        "groups": groups,
        "batches": [
            {
                "step": batch.step,
                "num_groups": len(batch.groups),
                "num_dropped": len(batch.dropped),
                "num_stale": batch.num_stale,
                "position": batch.position,
                "seconds": dict(batch.timer.seconds),
            }
            for batch in batches
        ],
    }


def unpack_batches(tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> tuple[list[Batch], list[StepTrace]]:
    packed = {name: tensor for name, tensor in tensors.items() if name != "traces"}
    groups = iter(unpack_groups(packed, metadata["groups"]))
    *parts, later = json.loads(tensors["traces"].numpy().tobytes())
    batches = [
        Batch(
            batch["step"],
            list(islice(groups, batch["num_groups"])),
            StageTimer(batch["seconds"]),
            traces=list(map(_trace, traces)),
            dropped=list(islice(groups, batch["num_dropped"])),
            num_stale=batch["num_stale"],
            position=batch["position"],
        )
        for batch, traces in zip(metadata["batches"], parts, strict=True)
    ]
    return batches, list(map(_trace, later))


def _trace(fields: dict[str, Any]) -> StepTrace:
    """Turns JSON's lists back into tuples."""
    for name in ("accepted_per_position", "drafted_per_position"):
        fields[name] = tuple(fields[name])
    fields["per_drafter"] = tuple(map(tuple, fields["per_drafter"]))
    return StepTrace(**fields)
