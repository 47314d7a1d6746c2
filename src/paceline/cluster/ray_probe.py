"""What there is of Ray: whether it can be imported, and of one that runs, its nodes and what each of them sees."""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.cluster.probe import ask

PACKAGES = ("paceline", "torch", "transformers", "ray", "vllm")
CONNECT_S = 10.0
ANSWER_S = 60.0  # a node may have to start Python first


def ray_version() -> str:
    """ValueError with the reason where it can't be imported."""
    return str(ask(__name__)["version"])


def cluster_facts(address: str, paths: list[str]) -> dict[str, Any]:
    """`nodes`: host, resources, versions, and which of `paths` it does not see; `free`: what is not in use now; `host`:
    by which the others reach this one. ValueError with the reason where there is no Ray at this address."""
    try:
        knock(address)
    except OSError as error:
        raise ValueError(str(error)) from None
    return ask(__name__, address, *paths)


def knock(address: str) -> None:
    """OSError if nobody listens at HOST:PORT, within seconds; Ray itself would try for minutes. `auto` is what
    RAY_ADDRESS says, or the Ray that was started last on this machine, which may be gone."""
    said = ""
    if address == "auto":
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        last = Path(folder, "ray", "ray_current_cluster")
        address = os.environ.get("RAY_ADDRESS") or (last.read_text().strip() if last.is_file() else address)
        said = f", as {'RAY_ADDRESS' if 'RAY_ADDRESS' in os.environ else last} says"
    host, colon, port = address.rpartition(":")
    if colon and host and "/" not in address and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError as error:
            raise OSError(f"nobody listens at {address}{said}: {error}") from None


def _join(address: str, paths: list[str]) -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address, log_to_driver=False, logging_level="error")
    alive = [node for node in ray.nodes() if node["Alive"]]
    look = ray.remote(num_cpus=0, max_retries=0)(_look)
    seen = []
    for node in alive:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        seen.append(look.options(scheduling_strategy=there).remote(PACKAGES, paths))
    nodes = [
        {
            "host": node["NodeManagerAddress"],
            "resources": {name: node["Resources"].get(name, 0) for name in ("CPU", "GPU")},
            **ray.get(reference, timeout=ANSWER_S),
        }
        for node, reference in zip(alive, seen, strict=True)
    ]
    free = {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
    host = ray.util.get_node_ip_address()
    ray.shutdown()
    return {"nodes": nodes, "free": free, "host": host}


def _look(packages: tuple[str, ...], paths: list[str]) -> dict[str, Any]:
    """On a node. It travels there by value, so that one without Paceline can say so."""
    versions: dict[str, str | None] = {"python": ".".join(map(str, sys.version_info[:2]))}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {"versions": versions, "absent": [path for path in paths if not Path(path).exists()]}


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    facts = _join(sys.argv[1], sys.argv[2:]) if sys.argv[1:] else {}
    print(json.dumps({"version": ray.__version__, **facts}))
