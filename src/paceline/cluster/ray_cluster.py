"""Ray itself: started on this machine or joined where it runs, and the places on it for the processes of a run.

A Ray that is started here listens on the loopback address alone, has no dashboard and reports to nobody. It asks for a
token, which only this process and those it starts know: whoever can reach its ports could run code as this user.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

from paceline.cluster.ray_probe import knock
from paceline.config import ClusterSection

PLACING_S = 60.0  # a running cluster may be busy, or may have to grow first
REWARD_CPUS = 1
TOKENS_SINCE = (2, 52)  # the first version of Ray that has them


@dataclass(frozen=True, slots=True)
class Share:
    """What a process gets, and in which bundle of the placement group."""

    bundle: int
    cpus: int
    gpus: float


@dataclass(frozen=True, slots=True)
class Plan:
    """Who is placed where. In bundle 0 is the learner's first rank."""

    bundles: list[dict[str, float]]
    learner: Share
    followers: list[Share]  # its further ranks
    engines: list[Share]
    rewards: list[Share]


def plan(section: ClusterSection, gpus_per_engine: float, gpus_per_learner: float) -> Plan:
    """Colocated, an engine lies in each learner rank's bundle and has half of its GPU, so that both see the same one;
    else everybody has a bundle."""
    bundles: list[dict[str, float]] = []

    def place(cpus: int, gpus: float) -> Share:
        bundles.append({"CPU": cpus, **({"GPU": gpus} if gpus else {})})
        return Share(len(bundles) - 1, cpus, gpus)

    ranks = [place(section.cpus_per_learner, gpus_per_learner) for _ in range(section.num_learners)]
    engines: list[Share] = []
    if section.layout == "colocated":
        for i in range(min(len(ranks), section.num_engines)):
            bundles[i]["CPU"] += section.cpus_per_engine
            ranks[i] = Share(i, section.cpus_per_learner, gpus_per_learner / 2)
            engines.append(Share(i, section.cpus_per_engine, gpus_per_learner / 2))
    while len(engines) < section.num_engines:
        engines.append(place(section.cpus_per_engine, gpus_per_engine))
    rewards = [place(REWARD_CPUS, 0) for _ in range(section.num_reward_workers)]
    return Plan(bundles, ranks[0], ranks[1:], engines, rewards)


class RayCluster:
    """Connected until it is closed; a Ray that was started for it ends with it, and so do its actors in any case."""

    def __init__(self, section: ClusterSection, plan: Plan) -> None:
        self._section = section
        ray = _ray(here=section.address is None)
        if ray.is_initialized():
            raise ValueError('cluster.kind = "ray": this process is connected to Ray already; ray.shutdown() first')
        if section.address is None:
            ray.init(
                "local",  # or it would look for one that somebody else has started
                num_cpus=int(sum(bundle["CPU"] for bundle in plan.bundles)),
                include_dashboard=False,
                object_store_memory=section.object_store_mb << 20,
                log_to_driver=False,
                logging_level="error",
            )
            if ray.util.get_node_ip_address() not in ("127.0.0.1", "::1"):
                ray.shutdown()
                raise ValueError(
                    'cluster.kind = "ray": Ray was imported before it was to be started, and listens on all addresses; '
                    "set RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 before, which keeps it on this machine"
                )
        else:
            try:
                knock(section.address)
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
        import ray
        from ray.util.placement_group import placement_group

        group = placement_group(plan.bundles, strategy="PACK")
        if group.wait(PLACING_S):
            return group
        have = {name: ray.cluster_resources().get(name, 0) for name in ("CPU", "GPU")}
        want = {name: sum(bundle.get(name, 0) for bundle in plan.bundles) for name in have}
        raise ValueError(
            f"the run needs {want['CPU']:g} CPUs and {want['GPU']:g} GPUs (cluster.num_engines, num_learners, "
            f"num_reward_workers, cpus_per_…, gpus_per_…), of which Ray has {have['CPU']:g} and {have['GPU']:g} in "
            "all; ask for less, or start Ray with more"
        )

    def actor(self, kind: type, share: Share, *args: Any, **options: Any) -> Any:
        """One more process in its place."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = ray.remote(
            num_cpus=share.cpus,
            num_gpus=share.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, share.bundle),
            **{"max_restarts": self._section.max_restarts, **options},
        )
        return placed(kind).remote(*args)

    def close(self) -> None:
        import ray
        from ray.util.placement_group import remove_placement_group

        if ray.is_initialized():
            remove_placement_group(self._group)
            ray.shutdown()


def _ray(here: bool) -> Any:
    """Ray reads these once, when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if here:
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # its only switch for "loopback alone"
        os.environ["RAY_AUTH_MODE"] = "token"
        if not (os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")):
            os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    try:
        import ray
    except ImportError:
        raise ValueError('cluster.kind = "ray", but Ray is not installed; pip install -e ".[ray]"') from None
    if here and tuple(int(part) for part in ray.__version__.split(".")[:2]) < TOKENS_SINCE:
        raise ValueError(
            f'cluster.kind = "ray": Ray {ray.__version__} can\'t be started with a token; '
            'pip install -e ".[ray]" brings a newer one'
        )
    return ray
