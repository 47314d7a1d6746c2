"""Makes the engine get new weights while requests run, at the same point in every run, and checks it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_run import lines

from paceline.rl.produce import Batch, PublishedWeights
from paceline.rl.trainer import Trainer

NUM_ENGINE_STEPS = 3  # after these, all prompts are computed and no completion is finished


class Overlap:
    """With max_staleness = s, batch n begins with version n - s and waits, while requests run, for version n - s + 1.
    The learner publishes that version only then. `in_flight` has the versions that the engine got while requests ran,
    each with its `inflight` setting."""

    def __init__(self, trainer: Trainer) -> None:
        self.in_flight: list[tuple[int, str]] = []
        producer, engine, staleness = trainer.producer, trainer.engine, trainer.config.train.max_staleness
        assert staleness > 0, "without staleness nothing overlaps"
        before_engine_step, publish, update = producer._before_engine_step, producer.publish, engine.update_weights
        changed, waiting, calls = threading.Condition(), set[int](), dict[int, int]()
        generating = [False]

        def wait(predicate: Callable[[], bool], what: str) -> None:
            until = time.monotonic() + 300  # a GPU that other processes use compiles and trains slowly
            while not changed.wait_for(lambda: predicate() or producer.stopping, 0.01):
                assert time.monotonic() < until, f"{what} was never reached"

        def patched_before_engine_step(batch: Batch, done: int, total: int) -> None:
            calls[batch.step] = calls.get(batch.step, 0) + 1
            version = batch.step - staleness + 1
            if calls[batch.step] == NUM_ENGINE_STEPS and version >= 1:
                assert done < total, "all requests are finished before the new weights arrive"
                with changed:
                    waiting.add(batch.step)
                    changed.notify_all()
                    wait(lambda: max(producer._published) >= version, f"version {version}")
            generating[0] = done < total
            try:
                before_engine_step(batch, done, total)
            finally:
                generating[0] = False

        def patched_publish(published: PublishedWeights) -> None:
            step = published.version + staleness - 1  # the batch that gets this version while it runs
            with changed:
                if step >= producer.config.train.num_steps:  # no batch uses it
                    wait(lambda: producer._next_step == producer.config.train.num_steps, "the end of the last batch")
                elif published.version >= 1:
                    wait(lambda: step in waiting, f"batch {step}")
                publish(published)
                changed.notify_all()

        def patched_update(weights: Any, version: int, inflight: str = "recompute") -> Any:
            if generating[0]:
                self.in_flight.append((version, inflight))
            return update(weights, version, inflight)

        producer._before_engine_step = patched_before_engine_step  # type: ignore[method-assign]
        producer.publish = patched_publish  # type: ignore[method-assign]
        engine.update_weights = patched_update  # type: ignore[method-assign]


def assert_overlapped(run: Path, overlap: Overlap, max_staleness: int, inflight: str, num_steps: int) -> None:
    """Every batch from `max_staleness` on got new weights while it ran, and has completions of two versions."""
    versions = range(1, num_steps - max_staleness + 1)
    expected = [(version, inflight) for version in versions]
    assert overlap.in_flight == expected, f"running requests did not get the new weights: {overlap.in_flight}"
    for step in range(max_staleness, num_steps):
        found = [[version for version, _ in r["versions"]] for r in lines(run, "rollouts") if r["step"] == step]
        assert [step - max_staleness, step - max_staleness + 1] in found, f"step {step}: no completion has two versions"
