"""Placement of processes, and settings that are rejected before Ray starts."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.build.config import load_config
from paceline.cluster.ray_cluster import plan
from paceline.cluster.ray_probe import check_reachable
from paceline.config import ClusterSection
from paceline.config_io import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["speculation.audit_every=2"], r"speculation.audit_every = 2: .* cluster.kind = \"ray\" has none there"),
        (["model.device=cuda:1"], r'model.device = "cuda:1": .* use "cuda"'),
        (["cluster.gpus_per_engine=1"], r'cluster.gpus_per_engine = 1: does not go with model.device = "cpu"'),
        (["model.device=cuda", "cluster.gpus_per_learner=0"], r"cluster.gpus_per_learner = 0: does not go with"),
        (
            ["model.device=cuda", "cluster.layout=colocated", "cluster.gpus_per_engine=2"],
            r'"colocated" shares one GPU, but cluster.gpus_per_engine = 2',
        ),
        (["cluster.num_engines=0"], r"cluster.num_engines = 0: expected an integer >= 1"),
        (["cluster.layout=together"], r"cluster.layout = 'together': expected one of"),
        (["cluster.engines=2"], r"did you mean cluster.num_engines"),
    ],
)
def test_settings_that_ray_rejects(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["cluster.kind=ray", *settings])
    if "cluster." not in " ".join(settings):
        load_config(None, settings)  # valid in one process


def test_every_process_has_a_bundle() -> None:
    section = ClusterSection(kind="ray", num_engines=3, num_learners=2, num_reward_workers=2, cpus_per_engine=4)
    found = plan(section, 2, 1)
    placements = [found.learner, *found.other_ranks, *found.engines, *found.reward_workers]
    assert [placement.bundle for placement in placements] == list(range(7))
    assert found.bundles == [{"CPU": 1, "GPU": 1}] * 2 + [{"CPU": 4, "GPU": 2}] * 3 + [{"CPU": 1}] * 2


def test_colocated_engines_share_the_learner_bundles() -> None:
    section = ClusterSection(kind="ray", num_engines=3, num_learners=2, layout="colocated", cpus_per_engine=4)
    found = plan(section, 1, 1)
    placements = [found.learner, *found.other_ranks, *found.engines, *found.reward_workers]
    assert [placement.bundle for placement in placements] == [0, 1, 0, 1, 2, 3]
    for i, bundle in enumerate(found.bundles):
        in_bundle = [placement for placement in placements if placement.bundle == i]
        assert sum(placement.cpus for placement in in_bundle) == bundle["CPU"]
        assert sum(placement.gpus for placement in in_bundle) == bundle.get("GPU", 0)


def test_missing_ray_is_reported_with_the_install_command() -> None:
    """In an interpreter that can't import it."""
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from paceline.cluster.ray_cluster import RayCluster, plan\n"
        "from paceline.config import ClusterSection\n"
        "RayCluster(ClusterSection(kind='ray'), plan(ClusterSection(kind='ray'), 0, 0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert 'Ray is not installed; pip install -e ".[ray]"' in done.stderr


def test_unreachable_address_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_reachable(f"127.0.0.1:{port}")
    with pytest.raises(OSError):
        check_reachable(f"127.0.0.1:{port}")
    for other in ("auto", "ray://somewhere:10001"):  # Ray resolves these itself
        check_reachable(other)
    last = tmp_path / "ray" / "ray_current_cluster"
    last.parent.mkdir()
    last.write_text(f"127.0.0.1:{port}")
    with pytest.raises(OSError, match=r"the address in .*ray_current_cluster"):
        check_reachable("auto")
