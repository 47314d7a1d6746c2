"""Builds a training run on a Ray cluster: the placement of processes, and the objects of each process."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.build.config import with_absolute_paths
from paceline.build.learner import run_worker
from paceline.build.run import build_rollout_engine, build_trainer
from paceline.build.task import build_rewarder
from paceline.cluster.ray_cluster import Plan, RayCluster, plan
from paceline.config import Config
from paceline.config_io import dump_config
from paceline.model.store import load_tokenizer, resolve
from paceline.rl.callback import ProgressCallback
from paceline.rl.folder import fresh_folder
from paceline.rl.trainer import Trainer
from paceline.rl.worker_group import WorkerGroup

if TYPE_CHECKING:  # these import Ray
    from paceline.cluster.ray_learner import Workers
    from paceline.cluster.ray_supervisor import Supervisor


class ClusterRun:
    """A run of `paceline train` with cluster.kind = "ray". Close it, also after an error."""

    def __init__(self, config: Config, callback: ProgressCallback, *, run: Path | None, resume: Path | None) -> None:
        config = with_absolute_paths(config)
        self._supervisor = build_supervisor(config, callback)
        self._resume = resume is not None
        self._is_fresh = run is None and resume is None
        # Absolute, and chosen once: processes run on other nodes, and a restarted learner opens the same folder.
        self.folder = (resume or run or fresh_folder(dump_config(config))).resolve()

    def run(self) -> dict[str, Any]:
        """Run to the last step, or until `stop`, and return the summary."""
        return self._supervisor.run(self.folder, self._resume)

    def stop(self) -> None:
        self._supervisor.stop()

    def close(self) -> None:
        self._supervisor.close()
        if self._is_fresh:
            with contextlib.suppress(OSError):  # a run that never began leaves an empty folder
                self.folder.rmdir()


def build_plan(config: Config) -> Plan:
    """The CPUs and GPUs of each process of a run."""
    section, on_gpu = config.cluster, config.model.device == "cuda"
    gpus_per_engine, gpus_per_learner = section.gpus_per_engine, section.gpus_per_learner
    if gpus_per_engine is None:
        gpus_per_engine = config.engine.tensor_parallel_size if on_gpu else 0
    if gpus_per_learner is None:
        gpus_per_learner = 1 if on_gpu else 0
    return plan(section, gpus_per_engine, gpus_per_learner)


def _calls_per_rewarder(config: Config) -> int:
    return sum(settings.reward.workers for settings in config.tasks)


def build_supervisor(config: Config, callback: ProgressCallback) -> Supervisor:
    section, placement = config.cluster, build_plan(config)
    cluster = RayCluster(section, placement)  # before other imports of Ray, which reads its environment when imported
    from paceline.cluster.ray_supervisor import Supervisor

    try:
        return Supervisor(
            cluster,
            placement,
            section,
            callback,
            make_engine=partial(build_rollout_engine, config),
            make_rewarder=partial(build_rewarder, config),
            calls_per_rewarder=_calls_per_rewarder(config),
            make_trainer=partial(build_ray_trainer, config),
            run_rank=partial(run_rank_on_ray, config),
        )
    except BaseException:
        cluster.close()
        raise


def build_ray_trainer(
    config: Config, workers: Workers, callback: ProgressCallback, folder: Path, resume: bool, restarted: bool
) -> Trainer:
    """Runs in the learner's process, rank 0."""
    from paceline.cluster.ray_engine import RayEngine
    from paceline.cluster.ray_learner import RestartCounter, start_ranks
    from paceline.cluster.ray_rewarder import RayRewarder

    section = config.cluster
    # NCCL allows one process per GPU; with layout "colocated" there are two.
    backend = "nccl" if config.model.device == "cuda" and section.layout == "disaggregated" else "gloo"
    rewarder = RayRewarder(workers.reward_workers, _calls_per_rewarder(config), section, callback.note)
    tokenizer = load_tokenizer(resolve(config.model.name), config.model.chat_template)
    engine = RayEngine(workers.engines, tokenizer, section, backend, callback.note)
    worker_group = join(config, 0, 1 + len(workers.other_ranks), start_ranks(workers.other_ranks))
    return build_trainer(
        config,
        callback,
        run=None if resume else folder,
        resume=folder if resume else None,
        engine=engine,
        rewarder=rewarder,
        worker_group=worker_group,
        restarts=RestartCounter(engine, rewarder, restarted),
    )


def run_rank_on_ray(config: Config, rank: int, size: int, address: str) -> None:
    """Runs in the process of a rank above 0."""
    run_worker(config, join(config, rank, size, address))


def join(config: Config, rank: int, size: int, address: str) -> WorkerGroup:
    """Join the ranks of the learner. Each rank sees only the GPU that Ray gave it."""
    return WorkerGroup.join(rank, size, address, "cuda:0" if config.model.device == "cuda" else "cpu")
