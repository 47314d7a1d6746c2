"""Who stays while others die: places engines, reward workers and the learner, shows what happens, starts again.

Ray restarts a process; what it must then be told is told by whoever works with it: engines and reward workers by the
learner, the learner from here. A learner that was restarted goes on as `--resume` does, from its last checkpoint, with
the folder's files cut back to it: nothing is lost, and nothing there twice.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError

from paceline.cluster.ray_calls import answer, answer_at_last, patient
from paceline.cluster.ray_cluster import Plan, RayCluster
from paceline.cluster.ray_engine_actor import EngineActor
from paceline.cluster.ray_follower import Follow, FollowerActor
from paceline.cluster.ray_learner import WAIT_S, Crew, LearnerActor, MakeLoop
from paceline.cluster.ray_rewarder import RewardActor
from paceline.config import ClusterSection
from paceline.engine.interface import Engine
from paceline.tasks.rewards import Judge

if TYPE_CHECKING:
    from paceline.rl.loop import Watcher


class Supervisor:
    """What is made is made in the process that it is for."""

    def __init__(
        self,
        cluster: RayCluster,
        plan: Plan,
        section: ClusterSection,
        watcher: Watcher,
        *,
        make_engine: Callable[[], Engine],
        make_rewarder: Callable[[], Judge],
        make_loop: MakeLoop,
        follow: Follow,
    ) -> None:
        self._cluster, self._plan, self._section, self._watcher = cluster, plan, section, watcher
        self._engines = [
            cluster.actor(EngineActor, share, make_engine, number) for number, share in enumerate(plan.engines)
        ]
        self._rewards = [cluster.actor(RewardActor, share, make_rewarder) for share in plan.rewards]
        self._learner = cluster.actor(LearnerActor, plan.learner, make_loop, concurrency_groups={"beside": 2})
        self._make_follower = follow
        self._stopping = False

    def run(self, folder: Path, resume: bool) -> dict[str, Any]:
        """To the last step, or until `stop`; returns the summary."""
        num_restarts = 0
        while True:
            crew = self._muster()
            try:
                return self._follow(self._learner.run.remote(crew, str(folder), resume, num_restarts > 0))
            except RayActorError:
                num_restarts += 1
                if num_restarts > self._section.max_restarts:
                    raise ValueError(
                        f"the learner died more often than cluster.max_restarts = {self._section.max_restarts}; go on "
                        f"from its last checkpoint with --resume {folder}"
                    ) from None
                resume = (folder / "config.toml").exists()
                self._watcher.note("the learner died; it starts again, from its last checkpoint")
            finally:
                for follower in crew.followers:
                    ray.kill(follower)

    def _muster(self) -> Crew:
        """Everybody, once the learner's first rank is there; its further ones are new every time."""
        answer_at_last(patient(self._learner.news).remote(0), "the learner", self._section.max_restarts)
        followers = [
            self._cluster.actor(FollowerActor, share, self._make_follower, max_restarts=0)
            for share in self._plan.followers
        ]
        return Crew(self._engines, self._rewards, followers)

    def _follow(self, running: ray.ObjectRef) -> dict[str, Any]:
        told = False
        while True:
            done, _ = ray.wait([running], timeout=0)
            if self._stopping and not told:
                answer(self._learner.stop.remote())
                told = True
            for kind, *event in answer(self._learner.news.remote(0 if done else WAIT_S)):
                getattr(self._watcher, kind)(*event)
            if done:
                return answer(running)

    def stop(self) -> None:
        """At the next good moment, with a checkpoint. Safe from a signal handler."""
        self._stopping = True

    def close(self) -> None:
        self._cluster.close()
