"""Inspect Ray: whether it can be imported, and the nodes of a running cluster."""

from __future__ import annotations

import json
import os
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from paceline.cluster.probe import run_module

PACKAGES = ("paceline", "torch", "transformers", "ray", "vllm")
CONNECT_TIMEOUT_S = 10.0
NODE_TIMEOUT_S = 60.0  # a node may have to start Python first


def ray_version() -> str:
    """Raise ValueError with the reason if Ray can't be imported."""
    return str(run_module(__name__)["version"])


def cluster_facts(address: str, paths: list[str]) -> dict[str, Any]:
    """`nodes`: each node's host, resources, package versions, and the `paths` that are absent there; `free`: resources
    not in use; `host`: this machine's address in the cluster. Raise ValueError with the reason if no Ray runs at this
    address."""
    try:
        check_reachable(address)
    except OSError as error:
        raise ValueError(str(error)) from None
    return run_module(__name__, address, *paths)


def check_reachable(address: str) -> None:
    """Raise OSError if no process listens at HOST:PORT. It takes seconds; Ray itself would retry for minutes. `auto`
    means RAY_ADDRESS, or the Ray that was started last on this machine, which may have ended."""
    source = ""
    if address == "auto":
        folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        last = Path(folder, "ray", "ray_current_cluster")
        address = os.environ.get("RAY_ADDRESS") or (last.read_text().strip() if last.is_file() else address)
        source = f" (the address in {'RAY_ADDRESS' if 'RAY_ADDRESS' in os.environ else last})"
    host, colon, port = address.rpartition(":")
    if colon and host and "/" not in address and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise OSError(f"no process listens at {address}{source}: {error}") from None


def _inspect_cluster(address: str, paths: list[str]) -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(address, log_to_driver=False, logging_level="error")
    alive = [node for node in ray.nodes() if node["Alive"]]
    inspect_node = ray.remote(num_cpus=0, max_retries=0)(_inspect_node)
    references = []
    for node in alive:
        strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        references.append(inspect_node.options(scheduling_strategy=strategy).remote(PACKAGES, paths))
    nodes = [
        {
            "host": node["NodeManagerAddress"],
            "resources": {name: node["Resources"].get(name, 0) for name in ("CPU", "GPU")},
            **ray.get(reference, timeout=NODE_TIMEOUT_S),
        }
        for node, reference in zip(alive, references, strict=True)
    ]
    free = {name: ray.available_resources().get(name, 0) for name in ("CPU", "GPU")}
    host = ray.util.get_node_ip_address()
    ray.shutdown()
    return {"nodes": nodes, "free": free, "host": host}


def _inspect_node(packages: tuple[str, ...], paths: list[str]) -> dict[str, Any]:
    """Runs on a node. Ray pickles this function by value, so the node need not have Paceline installed."""
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

    facts = _inspect_cluster(sys.argv[1], sys.argv[2:]) if sys.argv[1:] else {}
    print(json.dumps({"version": ray.__version__, **facts}))
