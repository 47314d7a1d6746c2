"""Makes new weights arrive while requests run, at the same place in every run, and checks that they did."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_run import lines

from paceline.rl.loop import Loop
from paceline.rl.produce import Batch, Published

ENOUGH_STEPS = 3  # of the engine, after which every prompt is computed and no completion is done


class Overlap:
    """With max_staleness = s, batch n begins under version n - s and waits, with requests in flight, for version
    n - s + 1; and the learner publishes that version only then. `in_flight` has the versions that arrived while
    requests ran, each with how running requests were told to go on."""

    def __init__(self, loop: Loop) -> None:
        self.in_flight: list[tuple[int, str]] = []
        producer, engine, staleness = loop.producer, loop.engine, loop.config.train.max_staleness
        assert staleness > 0, "without staleness nothing overlaps"
        between, publish, update = producer._between, producer.publish, engine.update_weights
        changed, begun, calls = threading.Condition(), set[int](), dict[int, int]()
        generating = [False]

        def wait(happened: Callable[[], bool], what: str) -> None:
            until = time.monotonic() + 60
            while not changed.wait_for(lambda: happened() or producer.stopping, 0.01):
                assert time.monotonic() < until, f"{what} never came"

        def watched_between(batch: Batch, done: int, total: int) -> None:
            calls[batch.step] = calls.get(batch.step, 0) + 1
            version = batch.step - staleness + 1
            if calls[batch.step] == ENOUGH_STEPS and version >= 1:
                assert done < total, "all requests were done before the new weights could come"
                with changed:
                    begun.add(batch.step)
                    changed.notify_all()
                    wait(lambda: max(producer._published) >= version, f"version {version}")
            generating[0] = done < total
            try:
                between(batch, done, total)
            finally:
                generating[0] = False

        def watched_publish(published: Published) -> None:
            step = published.version + staleness - 1  # the batch that is to see this version arrive
            with changed:
                if step >= producer.num_steps:  # too new for any batch
                    wait(lambda: producer._next_step == producer.num_steps, "the end of the last batch")
                elif published.version >= 1:
                    wait(lambda: step in begun, f"batch {step}")
                publish(published)
                changed.notify_all()

        def watched_update(weights: Any, version: int, inflight: str = "recompute") -> Any:
            if generating[0]:
                self.in_flight.append((version, inflight))
            return update(weights, version, inflight)

        producer._between, producer.publish = watched_between, watched_publish  # type: ignore[method-assign]
        engine.update_weights = watched_update  # type: ignore[method-assign]


def assert_overlapped(run: Path, overlap: Overlap, max_staleness: int, inflight: str, num_steps: int) -> None:
    """Every batch that could saw new weights arrive, and has completions that began under one version and ended under
    the next."""
    versions = range(1, num_steps - max_staleness + 1)
    expected = [(version, inflight) for version in versions]
    assert overlap.in_flight == expected, f"weights did not arrive in running requests: {overlap.in_flight}"
    for step in range(max_staleness, num_steps):
        found = [[version for version, _ in r["versions"]] for r in lines(run, "rollouts") if r["step"] == step]
        assert [step - max_staleness, step - max_staleness + 1] in found, f"step {step}: no completion has two versions"
