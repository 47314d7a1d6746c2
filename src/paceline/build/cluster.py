"""A training run over a cluster: who is placed where, and what each process builds."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.build.learner import build_learner, follow
from paceline.build.run import build_loop, build_rewarder, build_rollout_engine, with_absolute_paths
from paceline.config import Config, dump_config

if TYPE_CHECKING:
    from paceline.cluster.ray_cluster import Plan
    from paceline.cluster.ray_learner import Crew
    from paceline.cluster.ray_supervisor import Supervisor
    from paceline.rl.loop import Loop, Watcher
    from paceline.rl.world import World


class ClusterRun:
    """What `paceline train` runs with cluster.kind = "ray"; close it, whatever became of it."""

    def __init__(self, config: Config, watcher: Watcher, *, run: Path | None, resume: Path | None) -> None:
        from paceline.rl.folder import fresh_folder

        config = with_absolute_paths(config)
        self._supervisor = build_supervisor(config, watcher)
        self._resume = resume is not None
        self._is_fresh = run is None and resume is None
        # The processes may be elsewhere, and one of them may need the folder's name a second time.
        self.folder = (resume or run or fresh_folder(dump_config(config))).resolve()

    def run(self) -> dict[str, Any]:
        """To the last step, or until `stop`; returns the summary."""
        return self._supervisor.run(self.folder, self._resume)

    def stop(self) -> None:
        self._supervisor.stop()

    def close(self) -> None:
        self._supervisor.close()
        if self._is_fresh:
            with contextlib.suppress(OSError):  # a run that never began leaves an empty folder
                self.folder.rmdir()


def build_plan(config: Config) -> Plan:
    """What each of a run's processes needs of Ray."""
    from paceline.cluster.ray_cluster import plan

    section, on_gpu = config.cluster, config.model.device == "cuda"
    gpus_per_engine, gpus_per_learner = section.gpus_per_engine, section.gpus_per_learner
    if gpus_per_engine is None:
        gpus_per_engine = config.engine.tensor_parallel_size if on_gpu else 0
    if gpus_per_learner is None:
        gpus_per_learner = 1 if on_gpu else 0
    return plan(section, gpus_per_engine, gpus_per_learner)


def build_supervisor(config: Config, watcher: Watcher) -> Supervisor:
    from paceline.cluster.ray_cluster import RayCluster

    section, places = config.cluster, build_plan(config)
    cluster = RayCluster(section, places)  # before all else that imports Ray, which reads its environment then
    from paceline.cluster.ray_supervisor import Supervisor

    try:
        return Supervisor(
            cluster,
            places,
            section,
            watcher,
            make_engine=partial(build_rollout_engine, config),
            make_rewarder=partial(build_rewarder, config),
            make_loop=partial(build_ray_loop, config),
            follow=partial(follow_on_ray, config),
        )
    except BaseException:
        cluster.close()
        raise


def build_ray_loop(config: Config, crew: Crew, watcher: Watcher, folder: Path, resume: bool, restarted: bool) -> Loop:
    """In the learner's process."""
    from paceline.cluster.ray_engine import RayEngine
    from paceline.cluster.ray_follower import call
    from paceline.cluster.ray_restarts import Restarts
    from paceline.cluster.ray_rewarder import RayRewarder
    from paceline.model.store import load_tokenizer, resolve

    section = config.cluster
    # NCCL has one member per GPU, and where the learner shares one there would be two.
    backend = "nccl" if config.model.device == "cuda" and section.layout == "disaggregated" else "gloo"
    rewarder = RayRewarder(crew.rewards, section, watcher.note)
    engine = RayEngine(crew.engines, load_tokenizer(resolve(config.model.name)), section, backend, watcher.note)
    world = join(config, 0, 1 + len(crew.followers), call(crew.followers))
    return build_loop(
        config,
        watcher,
        run=None if resume else folder,
        resume=folder if resume else None,
        engine=engine,
        rewarder=rewarder,
        make_learner=partial(build_learner, world=world),
        restarts=Restarts(engine, rewarder, restarted),
    )


def follow_on_ray(config: Config, rank: int, size: int, address: str) -> None:
    """In the process of a further rank."""
    follow(config, join(config, rank, size, address))


def join(config: Config, rank: int, size: int, address: str) -> World:
    """The ranks of the learner, met. Each sees the GPU that Ray gave it, and no other."""
    from paceline.rl.world import World

    return World.join(rank, size, address, "cuda:0" if config.model.device == "cuda" else "cpu")
