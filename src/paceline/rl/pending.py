"""Finished batches that wait for the learner, in a checkpoint.

All that a batch puts into the run's records travels with it: groups, dropped groups, engine traces, counts and times.
Only `rounds` are left out: audits read them, and runs with pending batches have no audits.
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
from paceline.rl.stopwatch import Stopwatch
from paceline.types import StepTrace


def pack_batches(batches: Sequence[Batch]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors, and the rest, which JSON can hold."""
    tensors, groups = pack_groups([group for batch in batches for group in [*batch.groups, *batch.dropped]])
    # JSON as bytes: a long batch has tens of thousands of traces, too many for the checkpoint's state.json.
    traces = json.dumps([[asdict(trace) for trace in batch.traces] for batch in batches], default=np.generic.item)
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
                "seconds": dict(batch.watch.seconds),
            }
            for batch in batches
        ],
    }


def unpack_batches(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> list[Batch]:
    packed = {name: tensor for name, tensor in tensors.items() if name != "traces"}
    groups = iter(unpack_groups(packed, rest["groups"]))
    traces = json.loads(tensors["traces"].numpy().tobytes())
    return [
        Batch(
            of["step"],
            list(islice(groups, of["num_groups"])),
            Stopwatch(of["seconds"]),
            traces=[_trace(fields) for fields in of_batch],
            dropped=list(islice(groups, of["num_dropped"])),
            num_stale=of["num_stale"],
            position=of["position"],
        )
        for of, of_batch in zip(rest["batches"], traces, strict=True)
    ]


def _trace(fields: dict[str, Any]) -> StepTrace:
    """JSON has lists for tuples."""
    for name in ("accepted_per_position", "drafted_per_position"):
        fields[name] = tuple(fields[name])
    fields["sources"] = tuple(tuple(source) for source in fields["sources"])
    return StepTrace(**fields)
