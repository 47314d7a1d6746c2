"""A Ray that is started for a run accepts no connection without its token."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from paceline.cluster.ray_cluster import RayCluster, plan
from paceline.config import ClusterSection

pytestmark = pytest.mark.cluster

JOIN = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
print(ray.get(ray.remote(num_cpus=0)(lambda: "ran there").remote()))
"""


def test_running_code_needs_the_token() -> None:
    section = ClusterSection(kind="ray")
    cluster = RayCluster(section, plan(section, 0, 0))
    try:
        import ray

        address = ray.get_runtime_context().gcs_address
        assert len(os.environ["RAY_AUTH_TOKEN"]) >= 32

        def join(**changes: str) -> subprocess.CompletedProcess[str]:
            environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")} | changes
            command = [sys.executable, "-c", JOIN, address]
            return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

        token = os.environ["RAY_AUTH_TOKEN"]
        assert "ran there" in join(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token).stdout
        refused = join(RAY_AUTH_MODE="disabled")
        assert refused.returncode != 0 and "ran there" not in refused.stdout
        assert "nauthenticated" in refused.stderr or "oken" in refused.stderr, refused.stderr
    finally:
        with contextlib.suppress(Exception):
            cluster.close()


def test_ray_version_without_tokens_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "__version__", "2.51.2")
    section = ClusterSection(kind="ray")
    with pytest.raises(ValueError, match=r"Ray 2\.51\.2 can't be started with a token"):
        RayCluster(section, plan(section, 0, 0))
