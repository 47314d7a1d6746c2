"""One loop, synchronous or not: lag stays within its bound, order goes by index, runs repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from overlap import Overlap, assert_overlapped
from tiny_run import lines, make, policy

from paceline.rl.loop import Loop

NUM_STEPS = 8


def check_lags(run: Path, max_staleness: int) -> None:
    """The bound holds for every token, and is reached as soon as it can be; groups come in the order of the data."""
    assert [m["lag_max"] for m in lines(run, "metrics")] == [min(step, max_staleness) for step in range(NUM_STEPS)]
    rollouts = lines(run, "rollouts")
    groups = [record["group"] for record in rollouts]
    assert groups == sorted(groups), "groups are trained in the order of the data"
    for record in rollouts:
        assert all(record["step"] - version <= max_staleness for version, _ in record["versions"])


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
def test_lag_never_exceeds_the_bound(tmp_path: Path, max_staleness: int) -> None:
    loop = make(tmp_path, "run", f"train.max_staleness={max_staleness}", f"train.num_steps={NUM_STEPS}")
    loop.run()
    loop.close()
    check_lags(tmp_path / "run", max_staleness)
    assert all(len(r["versions"]) == 1 for r in lines(tmp_path / "run", "rollouts")), "drain: no version in between"


def overlapped(folder: Path, max_staleness: int, inflight: str, name: str = "run") -> tuple[Loop, Overlap]:
    settings = f"train.max_staleness={max_staleness}", f"train.inflight={inflight}", f"train.num_steps={NUM_STEPS}"
    loop = make(folder, name, *settings)
    return loop, Overlap(loop)


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
@pytest.mark.parametrize("max_staleness", [1, 2])
def test_new_weights_arrive_in_running_requests(tmp_path: Path, max_staleness: int, inflight: str) -> None:
    loop, overlap = overlapped(tmp_path, max_staleness, inflight)
    loop.run()
    loop.close()
    assert_overlapped(tmp_path / "run", overlap, max_staleness, inflight, NUM_STEPS)
    check_lags(tmp_path / "run", max_staleness)


@pytest.mark.parametrize("broken", ["never taken", "taken by all in the same way", "taken between batches"])
def test_weights_that_do_not_arrive_in_running_requests_are_noticed(tmp_path: Path, broken: str) -> None:
    """Deliberately broken producers: the check above must fail for each."""
    loop, overlap = overlapped(tmp_path, 1, "keep")
    take = loop.producer._take
    if broken == "taken between batches":
        loop.producer.inflight = "drain"
    elif broken == "never taken":
        loop.producer._take = lambda version, *rest: version == 0 and take(version, *rest)  # type: ignore[method-assign]
    else:
        loop.producer._take = lambda version, watch, _: take(version, watch, "recompute")  # type: ignore[method-assign]
    loop.run()
    loop.close()
    with pytest.raises(AssertionError, match="weights did not arrive in running requests"):
        assert_overlapped(tmp_path / "run", overlap, 1, "keep", NUM_STEPS)


def test_keep_and_recompute_differ(tmp_path: Path) -> None:
    """The same tokens until new weights arrive; after that, logprobs under a cache of the old weights or the new."""
    found = {}
    for inflight in ("keep", "recompute"):
        loop, _ = overlapped(tmp_path, 1, inflight, inflight)
        loop.run()
        loop.close()
        found[inflight] = [r for r in lines(tmp_path / inflight, "rollouts") if r["step"] == 1]
    differ = 0
    for kept, recomputed in zip(found["keep"], found["recompute"], strict=True):
        num_old = kept["versions"][0][1] if kept["versions"][0][0] == 0 else 0
        assert kept["token_ids"][:num_old] == recomputed["token_ids"][:num_old]
        assert kept["logprobs"][:num_old] == recomputed["logprobs"][:num_old]
        differ += kept["logprobs"][num_old:] != recomputed["logprobs"][num_old:]
    assert differ > 0


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_overlapped_runs_repeat(tmp_path: Path, max_staleness: int) -> None:
    weights = []
    for name in ("one", "two"):
        settings = f"train.max_staleness={max_staleness}", "train.num_steps=6", "train.eval_every=2"
        loop = make(tmp_path, name, *settings, "algorithm.correction=token_tis")
        loop.run()
        weights.append(policy(loop))
        loop.close()
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    evals = []
    for name in ("one", "two"):
        metrics = lines(tmp_path / name, "metrics")
        evals.append([m.get("eval") for m in metrics])
        assert max(m["lag_max"] for m in metrics) == max_staleness, "nothing overlapped"
    assert evals[0] == evals[1] and any(evals[0])


def test_dynamic_sampling_carries_surplus_and_drops_what_is_stale(tmp_path: Path) -> None:
    """Half of the groups are all alike; rounds of whole batches then leave more than a step needs."""
    settings = "algorithm.name=dapo", 'reward.functions=["reward_functions:sometimes_alike"]', "train.num_steps=8"
    loop = make(tmp_path, "run", *settings, "train.max_staleness=1", "train.groups_per_step=3")
    loop.run()
    loop.close()
    metrics = loop.watcher.metrics
    assert sum(m["groups_filtered"] for m in metrics) > 0
    assert all(m["num_groups"] <= 3 for m in metrics) and max(m["lag_max"] for m in metrics) == 1
    assert sum(m["groups_stale"] for m in metrics) > 0, "nothing was stale"
    trained = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    keys = [(r["group"], r["sample"]) for r in trained]
    assert len(keys) == len(set(keys)), "a rollout was trained on twice"
