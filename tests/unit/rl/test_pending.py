"""Pending batches survive a checkpoint with everything that they record."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any

import numpy as np
from scripted import Bytes, ScriptedEngine, ScriptedRewarder

from paceline.rl.checkpoint import Checkpoints
from paceline.rl.collect import Collector
from paceline.rl.metrics import rollout_metrics
from paceline.rl.pending import pack_batches, unpack_batches
from paceline.rl.produce import Batch
from paceline.rl.records import rollout_record
from paceline.rl.stage_timer import StageTimer
from paceline.tasks.task import Problem
from paceline.types import SamplingParams, StepTrace

NUMBERS = {field.name: i for i, field in enumerate(fields(StepTrace))}
TRACE = StepTrace(
    **(
        NUMBERS
        | {"accepted_per_position": (2, 1), "drafted_per_position": (3, 3), "drafter": "suffix", "policy": "static"}
        | {"reason": "k = 3", "per_drafter": (("suffix", 3, 2), ("ngram", 3, 1)), "num_emitted": np.int64(5)}
        | {"draft_s": 0.1 + 0.2, "expected_s": float("inf")}
    )
)


def make_batch(step: int, num_traces: int, num_dropped: int) -> Batch:
    def reward_of(sample: Any) -> float | str:
        return "broke" if sample.columns["n"] == 2 else len(sample.completion) / 3

    engine = ScriptedEngine(lambda request: "abcdef"[: 1 + request.request_id % 5])
    collector = Collector(engine, Bytes(), ScriptedRewarder(reward_of), sampling=SamplingParams(max_tokens=8))
    problems = [(10 * step + i, Problem(f"p{i}", f"prompt {i}", {"n": i})) for i in range(4)]
    groups = collector.collect(f"step {step + 1}", problems, 3, 0).groups
    num = len(groups) - num_dropped
    timer = StageTimer({"generation": 0.1 + step, "reward": 0.7})
    traces = [replace(TRACE, step=i) for i in range(num_traces)]
    return Batch(step, groups[:num], timer, traces, groups[num:], num_stale=step, position=10 * step + 4)


def test_round_trip(tmp_path: Any) -> None:
    batches = [make_batch(3, num_traces=4, num_dropped=1), make_batch(4, 0, 0), make_batch(5, 2, 4)]
    tensors, metadata = pack_batches(batches, batches[0].traces[:1])
    checkpoints = Checkpoints(tmp_path, 1)
    checkpoints.save(1, {"buffer": tensors}, {"buffer": metadata})
    saved = checkpoints.latest()
    assert saved is not None
    found, later = unpack_batches(saved.tensors("buffer"), saved.state["buffer"])
    assert later == batches[0].traces[:1]
    for one, other in zip(batches, found, strict=True):
        assert (one.step, one.num_stale, one.position) == (other.step, other.num_stale, other.position)
        assert one.timer.seconds == other.timer.seconds
        assert [asdict(trace) for trace in one.traces] == [asdict(trace) for trace in other.traces]
        for ours, theirs in ((one.groups, other.groups), (one.dropped, other.dropped)):
            records = [[rollout_record(0, g, r) for g in side for r in g.rollouts] for side in (ours, theirs)]
            assert records[0] == records[1]
        assert rollout_metrics(one) == rollout_metrics(other)
    assert [len(batch.dropped) for batch in found] == [1, 0, 4] and [len(batch.traces) for batch in found] == [4, 0, 2]


def test_no_batch() -> None:
    assert unpack_batches(*pack_batches([])) == ([], [])
