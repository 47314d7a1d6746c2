"""The process that starts engines, reward workers and the learner, reports progress, and restarts the learner.

Ray restarts a process that died. Its state is restored by the process that uses it: the learner restores engines and
reward workers, the supervisor restores the learner. A restarted learner does what `--resume` does: it starts from its
last checkpoint and truncates the run's files to it, so that no step is lost or recorded twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from paceline.cluster.ray_calls import get_result, get_when_started, with_retries
from paceline.cluster.ray_cluster import Plan, RayCluster
from paceline.cluster.ray_engine_actor import EngineActor
from paceline.cluster.ray_learner import POLL_WAIT_S, LearnerActor, LearnerRankActor, MakeTrainer, RunRank, Workers
from paceline.cluster.ray_rewarder import RewardActor
from paceline.config import ClusterSection
from paceline.engine.interface import Engine
from paceline.tasks.rewards import Rewarder

if TYPE_CHECKING:
    from paceline.rl.callback import ProgressCallback


class Supervisor:
    """The `make_*` functions and `run_rank` are called in the actors' processes."""

    def __init__(
        self,
        cluster: RayCluster,
        plan: Plan,
        section: ClusterSection,
        callback: ProgressCallback,
        *,
        make_engine: Callable[[], Engine],
        make_rewarder: Callable[[], Rewarder],
        calls_per_rewarder: int,
        make_trainer: MakeTrainer,
        run_rank: RunRank,
    ) -> None:
        self._cluster, self._plan, self._section, self._callback = cluster, plan, section, callback
        self._engines = [
            cluster.actor(EngineActor, placement, make_engine, i) for i, placement in enumerate(plan.engines)
        ]
        self._reward_workers = [
            cluster.actor(RewardActor, placement, make_rewarder, max_concurrency=calls_per_rewarder)
            for placement in plan.reward_workers
        ]
        self._learner = cluster.actor(LearnerActor, plan.learner, make_trainer, concurrency_groups={"control": 2})
        self._run_rank = run_rank
        self._stopping = False

    def run(self, folder: Path, resume: bool) -> dict[str, Any]:
        """Run to the last step, or until `stop`; return the summary."""
        num_restarts = 0
        while True:
            workers = self._start_workers()
            try:
                return self._watch(self._learner.run.remote(workers, str(folder), resume, num_restarts > 0))
            except RayActorError:
                num_restarts += 1
                if num_restarts > self._section.max_restarts:
                    raise ValueError(
                        f"the learner died more often than cluster.max_restarts = {self._section.max_restarts}; "
                        f"continue from its last checkpoint with --resume {folder}"
                    ) from None
                resume = (folder / "config.toml").exists()
                self._callback.note("the learner died; restarting it from its last checkpoint")
            finally:
                for actor in workers.other_ranks:
                    ray.kill(actor)

    def _start_workers(self) -> Workers:
        """Wait for the learner's rank 0, then start its other ranks, which are new in every attempt."""
        get_when_started(with_retries(self._learner.poll_events).remote(0), "the learner", self._section.max_restarts)
        other_ranks = [
            self._cluster.actor(LearnerRankActor, placement, self._run_rank, max_restarts=0)
            for placement in self._plan.other_ranks
        ]
        return Workers(self._engines, self._reward_workers, other_ranks)

    def _watch(self, running: ray.ObjectRef) -> dict[str, Any]:
        """Report the learner's events until its `run` returns."""
        has_sent_stop = False
        while True:
            done, _ = ray.wait([running], timeout=0)
            if self._stopping and not has_sent_stop:
                get_result(self._learner.stop.remote())
                has_sent_stop = True
            for kind, *event in get_result(self._learner.poll_events.remote(0 if done else POLL_WAIT_S)):
                getattr(self._callback, kind)(*event)
            if done:
                return get_result(running)

    def stop(self) -> None:
        """Stop the run at the next opportunity, with a checkpoint. Safe to call in a signal handler."""
        self._stopping = True

    def close(self) -> None:
        self._cluster.close()
