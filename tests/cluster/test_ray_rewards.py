"""Reward workers of a run over Ray that score several samples at once."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from ray_processes import processes
from ray_runs import BASE, CLUSTER, ActingCallback, assert_each_once, outcome
from tiny_run import lines, make, settings

from paceline.build.cluster import build_supervisor

pytestmark = pytest.mark.cluster


def test_reward_workers_score_several_samples_at_once(folder: Path) -> None:
    """Each of two workers scores two samples at once. They die once during the run."""
    reward = ('reward.functions=["reward_functions:num_letters"]', "reward.call_per=sample")
    trainer = make(folder, "by sample", *BASE, *reward)
    with contextlib.closing(trainer):
        assert trainer.run()["finished"]
    callback = ActingCallback()
    several = ("cluster.num_reward_workers=2", "reward.workers=2")
    supervisor = build_supervisor(settings(folder, *BASE, *CLUSTER, *reward, *several), callback)
    callback.actions = {2: lambda: [os.kill(process, signal.SIGKILL) for process in processes("RewardActor")]}
    path = folder / "ray by sample"
    with contextlib.closing(supervisor):
        assert supervisor.run(path, resume=False)["finished"]
    assert_each_once(path, 6)
    assert outcome(path) == outcome(folder / "by sample")
    assert sum(m["cluster"]["reward_restarts"] for m in lines(path, "metrics")) == len(callback.notes) == 2
