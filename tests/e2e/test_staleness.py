"""Staleness: within its bound, groups in the order of the data, and reproducible runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from overlap import Overlap, assert_overlapped
from tiny_run import assert_each_once, lines, make, policy

from paceline.rl.trainer import Trainer

NUM_STEPS = 8


def check_staleness(run: Path, max_staleness: int) -> None:
    """Every token is within the bound, which is reached as early as possible; groups are in the order of the data."""
    expected = [min(step, max_staleness) for step in range(NUM_STEPS)]
    assert [m["staleness_max"] for m in lines(run, "metrics")] == expected
    rollouts = lines(run, "rollouts")
    groups = [record["group"] for record in rollouts]
    assert groups == sorted(groups), "groups are trained in the order of the data"
    for record in rollouts:
        assert all(record["step"] - version <= max_staleness for version, _ in record["versions"])


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_staleness_is_within_the_bound(tmp_path: Path, max_staleness: int) -> None:
    trainer = make(tmp_path, "run", f"train.max_staleness={max_staleness}", f"train.num_steps={NUM_STEPS}")
    trainer.run()
    trainer.close()
    check_staleness(tmp_path / "run", max_staleness)
    assert all(len(r["versions"]) == 1 for r in lines(tmp_path / "run", "rollouts")), "drain: one version per rollout"


def overlapped(folder: Path, max_staleness: int, inflight: str, name: str = "run") -> tuple[Trainer, Overlap]:
    settings = f"train.max_staleness={max_staleness}", f"train.inflight={inflight}", f"train.num_steps={NUM_STEPS}"
    trainer = make(folder, name, *settings)
    return trainer, Overlap(trainer)


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_running_requests_get_new_weights(tmp_path: Path, max_staleness: int, inflight: str) -> None:
    trainer, overlap = overlapped(tmp_path, max_staleness, inflight)
    trainer.run()
    trainer.close()
    assert_overlapped(tmp_path / "run", overlap, inflight, NUM_STEPS)
    metrics, rollouts = lines(tmp_path / "run", "metrics"), lines(tmp_path / "run", "rollouts")
    assert max(m["staleness_max"] for m in metrics) == max_staleness and not sum(m["num_groups_stale"] for m in metrics)
    for record in rollouts:
        assert all(record["step"] - version <= max_staleness for version, _ in record["versions"])
    assert sorted({r["group"] for r in rollouts}) == list(range(2 * NUM_STEPS)), "a group is missing"
    assert_each_once(tmp_path / "run", NUM_STEPS)
    lags = [int(lag) for m in metrics for lag in m["token_lags"]]
    assert max(lags) == max_staleness and min(m["effective_sample_size"] for m in metrics) < 1
    assert all("idle" in m["stages"] for m in metrics)


@pytest.mark.parametrize("broken", ["later", "with another inflight setting"])
def test_broken_weight_updates_are_caught(tmp_path: Path, broken: str) -> None:
    """Deliberately broken producers."""
    trainer, overlap = overlapped(tmp_path, 1, "keep")
    update_engine = trainer.producer._update_engine
    if broken == "later":

        def later(version: int, *rest: Any) -> bool:
            started = trainer.producer._started.values()
            return all(each.collection.is_generated for each in started) and update_engine(version, *rest)

        trainer.producer._update_engine = later  # type: ignore[method-assign]
    else:
        trainer.producer._update_engine = lambda version, timer, _: update_engine(version, timer, "recompute")  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="running requests did not get the new weights"):
        trainer.run()
        assert_overlapped(tmp_path / "run", overlap, "keep", NUM_STEPS)
    trainer.close()


def test_keep_and_recompute_differ(tmp_path: Path) -> None:
    """Tokens are equal until the new weights arrive; then logprobs use KV of the old weights or of the new ones."""
    found = {}
    for inflight in ("keep", "recompute"):
        trainer, _ = overlapped(tmp_path, 1, inflight, inflight)
        trainer.run()
        trainer.close()
        found[inflight] = {(r["group"], r["sample"]): r for r in lines(tmp_path / inflight, "rollouts")}
    spanning = [(r["versions"][0][0], key) for key, r in found["keep"].items() if len(r["versions"]) > 1]
    first = min(version for version, _ in spanning)  # the first update of running requests: equal weights in both runs
    differ = 0
    for key in [key for version, key in spanning if version == first]:
        kept, recomputed = found["keep"][key], found["recompute"][key]
        num_old = kept["versions"][0][1]
        assert num_old == recomputed["versions"][0][1]
        assert kept["token_ids"][:num_old] == recomputed["token_ids"][:num_old]
        assert kept["logprobs"][:num_old] == recomputed["logprobs"][:num_old]
        differ += kept["logprobs"][num_old:] != recomputed["logprobs"][num_old:]
    assert differ > 0


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_overlapped_runs_are_reproducible(tmp_path: Path, max_staleness: int) -> None:
    weights = []
    for name in ("one", "two"):
        settings = f"train.max_staleness={max_staleness}", "train.num_steps=6", "train.eval_every=2"
        trainer = make(tmp_path, name, *settings, "algorithm.correction=token_tis")
        trainer.run()
        weights.append(policy(trainer))
        trainer.close()
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    evals = []
    for name in ("one", "two"):
        metrics = lines(tmp_path / name, "metrics")
        evals.append([m.get("eval") for m in metrics])
        assert max(m["staleness_max"] for m in metrics) == max_staleness, "nothing overlapped"
    assert evals[0] == evals[1] and any(evals[0])


def test_dynamic_sampling_keeps_surplus_and_drops_stale_groups(tmp_path: Path) -> None:
    """Half of the groups have equal rewards; rounds of whole batches then give more groups than a step needs."""
    settings = "algorithm.name=dapo", 'reward.functions=["reward_functions:sometimes_alike"]', "train.num_steps=8"
    trainer = make(tmp_path, "run", *settings, "train.max_staleness=1", "train.groups_per_step=3")
    trainer.run()
    trainer.close()
    metrics = trainer.callback.metrics
    assert sum(m["num_groups_filtered"] for m in metrics) > 0
    assert all(m["num_groups"] <= 3 for m in metrics) and max(m["staleness_max"] for m in metrics) == 1
    assert sum(m["num_groups_stale"] for m in metrics) > 0, "nothing was stale"
    trained = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    keys = [(r["group"], r["sample"]) for r in trained]
    assert len(keys) == len(set(keys)), "a rollout was trained on twice"


@pytest.mark.parametrize("inflight", ["drain", "keep"])
@pytest.mark.parametrize("differs", [False, True])
def test_engine_and_learner_are_compared_at_equal_versions(tmp_path: Path, inflight: str, differs: bool) -> None:
    """Evaluations have tokens of the learner's version, the rollouts of an asynchronous step hardly any."""
    settings = "train.max_staleness=2", f"train.inflight={inflight}", "train.num_steps=6", "train.eval_every=2"
    trainer = make(tmp_path, "run", *settings)
    engine, update = trainer.engine, trainer.engine.update_weights

    def updated(*args: Any) -> Any:
        receipt = update(*args)
        if differs and receipt.version == 4:  # the receipt is right, the weights change afterwards
            with torch.no_grad():
                engine.paged.decoder.norm.mul_(1.5)
        return receipt

    engine.update_weights = updated  # type: ignore[method-assign]
    trainer.run()
    trainer.close()
    metrics = lines(tmp_path / "run", "metrics")
    found = {m["version"]: m["eval_mismatch_mean"] for m in metrics if "eval" in m}
    assert list(found) == [2, 4, 6] and found[2] < 1e-9 and found[6] < 1e-9
    assert any(m["mismatch_mean"] is None for m in metrics), "the test needs steps that compare nothing"
    assert (found[4] > 0.02) == differs
    assert [m["version"] for m in metrics if m["mismatch_alarm"]] == ([4] if differs else [])
    alarms = [note for note in trainer.callback.notes if "engine and learner differ" in note]
    assert len(alarms) == differs
