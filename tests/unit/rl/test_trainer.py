"""The trainer's loop: sleep mode, garbage collection, versions, and interrupts."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from tiny_run import assert_each_once, lines, make, outcome

from paceline.model.weights import checksum
from paceline.rl.produce import PublishedWeights


@pytest.mark.parametrize("sleep, staleness, num_sleeps", [("true", 0, 2), ("false", 0, 0), ("true", 1, 0)])
def test_the_engine_sleeps_if_configured_and_if_it_does_not_generate(
    tmp_path: Path, sleep: str, staleness: int, num_sleeps: int
) -> None:
    trainer = make(tmp_path, "run", "train.num_steps=2", f"engine.sleep={sleep}", f"train.max_staleness={staleness}")
    calls, engine_sleep = [], trainer.engine.sleep
    trainer.engine.sleep = lambda: calls.append(engine_sleep())  # type: ignore[method-assign]
    trainer.run()
    assert len(calls) == num_sleeps and trainer.step == 2


def test_sleep_does_not_change_the_result(tmp_path: Path) -> None:
    found = []
    for sleep in ("true", "false"):
        trainer = make(tmp_path, sleep, "train.num_steps=2", f"engine.sleep={sleep}")
        trainer.run()
        found.append(checksum(trainer.learner.weights()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "num_iterations, num_minibatches, beta, num_passes",
    [(1, 1, 0, 0), (2, 1, 0, 0), (1, 2, 0, 1), (2, 2, 0, 1), (1, 1, 0.1, 2), (2, 2, 0.1, 2)],
)
def test_logprobs_are_computed_without_gradients_only_if_an_update_does_not_compute_them(
    tmp_path: Path, num_iterations: int, num_minibatches: int, beta: float, num_passes: int
) -> None:
    """The first of several passes over a batch has the old logprobs. Several minibatches need a pass of their own, and
    a penalty in the reward needs one for the old and one for the reference policy."""
    settings = [f"learner.num_iterations={num_iterations}", f"learner.num_minibatches={num_minibatches}"]
    settings += [f"algorithm.beta={beta}", "algorithm.kl_in=reward"] if beta else []
    trainer = make(tmp_path, "run", "train.num_steps=2", *settings)
    calls: list[int] = []
    logprobs = trainer.learner._logprobs

    def counted(*args: Any) -> Any:
        calls.append(trainer.step)
        return logprobs(*args)

    trainer.learner._logprobs = counted  # type: ignore[method-assign]
    trainer.run()
    assert calls == [0] * num_passes + [1] * num_passes


def test_garbage_collection_skips_what_exists_before_the_first_step(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", "train.num_steps=1")
    num_frozen, run_step = [], trainer._run_step
    trainer._run_step = lambda: num_frozen.append(gc.get_freeze_count()) or run_step()  # type: ignore[method-assign]
    trainer.run()
    assert num_frozen[0] > 10_000 and gc.get_freeze_count() == 0


@pytest.mark.parametrize("settings", [(), ("algorithm.mask_truncated_completions=true", "sampling.ignore_eos=true")])
def test_learner_step_and_published_version_are_one(tmp_path: Path, settings: tuple[str, ...]) -> None:
    """Also if no step has anything to train on."""
    trainer = make(tmp_path, "run", "train.num_steps=3", *settings)
    published: list[tuple[int, int, int]] = []
    publish = trainer.producer.publish

    def record(weights: PublishedWeights) -> None:
        published.append((weights.version, trainer.step, trainer.learner.version))
        publish(weights)

    trainer.producer.publish = record  # type: ignore[method-assign]
    trainer.run()
    assert published == [(n, n, n) for n in range(4)]
    assert [m["version"] for m in lines(tmp_path / "run", "metrics")] == [1, 2, 3]


@pytest.mark.parametrize("staleness", [0, 2])
def test_an_interrupt_before_the_update_does_not_lose_the_batch(tmp_path: Path, staleness: int) -> None:
    settings = f"train.max_staleness={staleness}", "train.num_steps=4", "train.checkpoint_every=0"
    whole = make(tmp_path, "whole", *settings)
    whole.run()
    whole.close()
    trainer = make(tmp_path, "run", *settings)
    get = trainer.producer.get

    def interrupted(step: int) -> Any:
        batch = get(step)
        if step == 2:
            raise KeyboardInterrupt
        return batch

    trainer.producer.get = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer.close()
    checkpoint = trainer.checkpoints.latest()
    assert checkpoint is not None and checkpoint.step == 2
    assert checkpoint.state["buffer"]["batches"][0]["step"] == 2, "the batch is in the checkpoint"
    resumed = make(tmp_path, "run", *settings, resume=True)
    resumed.run()
    resumed.close()
    assert_each_once(tmp_path / "run", 4)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "whole")
