"""What Ray is asked for, and what is refused before it is asked for anything."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cluster.ray_cluster import plan
from paceline.cluster.ray_probe import knock
from paceline.config import ClusterSection, ConfigError, load_config


@pytest.mark.parametrize(
    ("settings", "said"),
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
def test_what_does_not_go_with_ray(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, ["cluster.kind=ray", *settings])
    if "cluster." not in " ".join(settings):
        load_config(None, settings)  # in one process it does


def test_everybody_has_a_place() -> None:
    section = ClusterSection(kind="ray", num_engines=3, num_learners=2, num_reward_workers=2, cpus_per_engine=4)
    places = plan(section, 2, 1)
    shares = [places.learner, *places.followers, *places.engines, *places.rewards]
    assert [share.bundle for share in shares] == list(range(7))
    assert places.bundles == [{"CPU": 1, "GPU": 1}] * 2 + [{"CPU": 4, "GPU": 2}] * 3 + [{"CPU": 1}] * 2


def test_colocated_shares_its_place() -> None:
    section = ClusterSection(kind="ray", num_engines=3, num_learners=2, layout="colocated", cpus_per_engine=4)
    places = plan(section, 1, 1)
    assert [share.bundle for share in (places.learner, *places.followers)] == [0, 1]
    assert [share.bundle for share in places.engines] == [0, 1, 2]
    for i, bundle in enumerate(places.bundles):
        mine = [s for s in (places.learner, *places.followers, *places.engines, *places.rewards) if s.bundle == i]
        assert sum(share.cpus for share in mine) == bundle["CPU"]
        assert sum(share.gpus for share in mine) == bundle.get("GPU", 0)


def test_without_ray_it_is_said_how_to_get_it() -> None:
    """In an interpreter that does not find it."""
    program = (
        "import sys; sys.modules['ray'] = None\n"
        "from paceline.cluster.ray_cluster import RayCluster, plan\n"
        "from paceline.config import ClusterSection\n"
        "RayCluster(ClusterSection(kind='ray'), plan(ClusterSection(kind='ray'), 0, 0))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert 'Ray is not installed; pip install -e ".[ray]"' in done.stderr


def test_an_address_where_nobody_listens_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        knock(f"127.0.0.1:{port}")
    with pytest.raises(OSError):
        knock(f"127.0.0.1:{port}")
    for other in ("auto", "ray://somewhere:10001"):  # which Ray itself understands
        knock(other)
    last = tmp_path / "ray" / "ray_current_cluster"
    last.parent.mkdir()
    last.write_text(f"127.0.0.1:{port}")
    with pytest.raises(OSError, match="ray_current_cluster says"):
        knock("auto")
