"""Times learner and engine in the same way in every run, and records how the engine gets new weights."""

from __future__ import annotations

import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from tiny_run import lines

from paceline.rl.continuous_producer import ContinuousProducer
from paceline.rl.trainer import Trainer


class Overlap:
    """The engine waits for rewards after every step. A batch is taken after the step that makes it possible; then the
    engine waits until the learner has published the next version, while requests run. `in_flight` has the versions that
    the engine got while requests ran, each with its `inflight` setting."""

    def __init__(self, trainer: Trainer) -> None:
        self.in_flight: list[tuple[int, str]] = []
        producer, engine = trainer.producer, trainer.engine
        assert isinstance(producer, ContinuousProducer), "nothing overlaps"
        update_to_newest, update = producer._update_to_newest, engine.update_weights

        def patched_update_to_newest(timer: Any) -> None:
            wait([future for started in producer._started.values() for future in started.collection.futures])
            producer._finish_groups()
            until = time.monotonic() + 300  # a GPU that other processes use compiles and trains slowly
            with producer._changed:
                if producer._next_step < producer.config.train.num_steps and producer._take(producer._next_step):
                    while max(producer._published) < producer._next_step and not producer.stopping:
                        producer._changed.wait(0.01)
                        assert time.monotonic() < until, f"version {producer._next_step} was never published"
            update_to_newest(timer)

        def patched_update(weights: Any, version: int, inflight: str = "recompute") -> Any:
            if any(not started.collection.is_generated for started in producer._started.values()):
                self.in_flight.append((version, inflight))
            return update(weights, version, inflight)

        get = producer.get

        def patched_get(step: int) -> Any:  # the thread takes the batches
            while step not in producer._pending and producer._error is None and not producer.stopping:
                time.sleep(0.002)
            return get(step)

        producer._update_to_newest = patched_update_to_newest  # type: ignore[method-assign]
        producer.get = patched_get  # type: ignore[method-assign]
        engine.update_weights = patched_update  # type: ignore[method-assign]


def assert_overlapped(run: Path, overlap: Overlap, inflight: str, num_steps: int) -> None:
    """Requests that ran got the new weights, and there are completions of two versions."""
    assert len(overlap.in_flight) >= num_steps // 4 and {each[1] for each in overlap.in_flight} == {inflight}, (
        f"running requests did not get the new weights: {overlap.in_flight}"
    )
    assert any(len(r["versions"]) > 1 for r in lines(run, "rollouts")), "no completion has tokens of two versions"
