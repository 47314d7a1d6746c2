"""The Ray cluster of a run: start Ray on this machine or connect to a running one, and place the run's processes.

A Ray that is started here listens on the loopback address only, has no dashboard and sends no usage reports. It
requires a token that only this process and its children know: a process that can reach Ray's ports could otherwise run
code as this user.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

from paceline.cluster.ray_probe import check_reachable
from paceline.config import ClusterSection

PLACEMENT_TIMEOUT_S = 60.0  # a running cluster may be busy, or may scale up first
REWARD_CPUS = 1
MIN_TOKEN_VERSION = (2, 52)  # the first Ray version with token authentication


@dataclass(frozen=True, slots=True)
class Placement:
    """The resources of one process, and its bundle in the placement group."""

    bundle: int
    cpus: int
    gpus: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The placement of all processes. The learner's rank 0 is in bundle 0."""

    bundles: list[dict[str, float]]
    learner: Placement  # rank 0
    other_ranks: list[Placement]  # of the learner, from rank 1
    engines: list[Placement]
    reward_workers: list[Placement]


def plan(section: ClusterSection, gpus_per_engine: float, gpus_per_learner: float) -> Plan:
    """Layout "colocated" puts an engine into each learner rank's bundle with half of its GPU, so that both see the same
    GPU. Otherwise every process has a bundle of its own."""
    bundles: list[dict[str, float]] = []

    def add_bundle(cpus: int, gpus: float) -> Placement:
        bundles.append({"CPU": cpus, **({"GPU": gpus} if gpus else {})})
        return Placement(len(bundles) - 1, cpus, gpus)

    ranks = [add_bundle(section.cpus_per_learner, gpus_per_learner) for _ in range(section.num_learners)]
    engines: list[Placement] = []
    if section.layout == "colocated":
        for i in range(min(len(ranks), section.num_engines)):
            bundles[i]["CPU"] += section.cpus_per_engine
            ranks[i] = Placement(i, section.cpus_per_learner, gpus_per_learner / 2)
            engines.append(Placement(i, section.cpus_per_engine, gpus_per_learner / 2))
    while len(engines) < section.num_engines:
        engines.append(add_bundle(section.cpus_per_engine, gpus_per_engine))
    reward_workers = [add_bundle(REWARD_CPUS, 0) for _ in range(section.num_reward_workers)]
    return Plan(bundles, ranks[0], ranks[1:], engines, reward_workers)


class RayCluster:
    """A connection to Ray. `close` ends the run's actors, and Ray itself if it was started here."""

    def __init__(self, section: ClusterSection, plan: Plan) -> None:
        self._section = section
        self._ray = ray = _import_ray(is_local=section.address is None)
        if ray.is_initialized():
            raise ValueError('cluster.kind = "ray": this process is connected to Ray already; ray.shutdown() first')
        if section.address is None:
            ray.init(
                "local",  # never connect to a Ray that is already running
                num_cpus=int(sum(bundle["CPU"] for bundle in plan.bundles)),
                include_dashboard=False,
                object_store_memory=section.object_store_mb << 20,
                log_to_driver=False,
                logging_level="error",
            )
            if ray.util.get_node_ip_address() not in ("127.0.0.1", "::1"):
                ray.shutdown()
                raise ValueError(
                    'cluster.kind = "ray": Ray was imported too early and listens on all addresses; set '
                    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before importing it, so that it listens on this machine only"
                )
        else:
            try:
                check_reachable(section.address)
                ray.init(section.address, log_to_driver=False, logging_level="error")
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"cluster.address = {section.address!r}: no Ray there ({error}); give HOST:PORT of a running one, "
                    '"auto", or none to start one here'
                ) from None
        try:
            self._group = self._reserve(plan)
        except BaseException:
            ray.shutdown()
            raise

    def _reserve(self, plan: Plan) -> Any:
        group = self._ray.util.placement_group(plan.bundles, strategy="PACK")
        if group.wait(PLACEMENT_TIMEOUT_S):
            return group
        have = {name: self._ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        want = {name: sum(bundle.get(name, 0) for bundle in plan.bundles) for name in have}
        raise ValueError(
            f"the run needs {want['CPU']:g} CPUs and {want['GPU']:g} GPUs (cluster.num_engines, num_learners, "
            f"num_reward_workers, cpus_per_…, gpus_per_…), but Ray has {have['CPU']:g} and {have['GPU']:g} in all; "
            "lower them, or start Ray with more"
        )

    def actor(self, actor_class: type, placement: Placement, *args: Any, **options: Any) -> Any:
        """Start an actor in its bundle."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        remote = self._ray.remote(
            num_cpus=placement.cpus,
            num_gpus=placement.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement.bundle),
            **{"max_restarts": self._section.max_restarts, **options},
        )
        return remote(actor_class).remote(*args)

    def close(self) -> None:
        if self._ray.is_initialized():
            self._ray.util.remove_placement_group(self._group)
            self._ray.shutdown()


def _import_ray(is_local: bool) -> Any:
    """Ray reads these environment variables once, when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_local:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # the only switch that makes Ray listen on loopback only
        os.environ["RAY_AUTH_MODE"] = "token"
        if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        import ray
    except ImportError:
        raise ValueError('cluster.kind = "ray", but Ray is not installed; pip install -e ".[ray]"') from None
    if is_local and tuple(int(part) for part in ray.__version__.split(".")[:2]) < MIN_TOKEN_VERSION:
        raise ValueError(
            f'cluster.kind = "ray": Ray {ray.__version__} can\'t be started with a token; '
            'pip install -e ".[ray]" installs a newer one'
        )
    return ray
