"""The example scripts for clusters: they parse, their settings exist, and they request enough resources."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.build.cluster import build_plan
from paceline.build.config import load_config
from paceline.config import Config
from paceline.config_io import ConfigError

ROOT = Path(__file__).parents[2]
SBATCH = (ROOT / "examples/slurm/train.sbatch").read_text()
MAP, JOB = yaml.safe_load_all((ROOT / "examples/kuberay/rayjob.yaml").read_text())
TRAIN_SH: str = MAP["data"]["train.sh"]
CONFIGS = [path for path in sorted((ROOT / "configs").glob("*.toml")) if path.stem != "draft"]


def script_settings(script: str) -> list[str]:
    """The settings in a script."""
    (body,) = re.findall(r"^\s*settings=\(\n(.*?)^\s*\)", script, re.DOTALL | re.MULTILINE)
    settings = [line.strip() for line in body.splitlines()]
    return [setting.replace('"$address"', "127.0.0.1:20000") for setting in settings if setting != '"$@"']


@pytest.mark.parametrize("script", [SBATCH, TRAIN_SH], ids=["slurm", "kuberay"])
def test_scripts_parse(script: str) -> None:
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert subprocess.run(["bash", "-n"], input=script + "\nif", text=True, stderr=subprocess.DEVNULL).returncode != 0
    assert "set -euo pipefail" in script


@pytest.mark.parametrize("script", [SBATCH, TRAIN_SH], ids=["slurm", "kuberay"])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_settings_are_valid_with_every_config(script: str, path: Path) -> None:
    settings = script_settings(script)
    config = load_config(path, settings)
    assert config.cluster.kind == "ray" and config.cluster.num_engines == 6 and len(settings) == 11
    assert config.train.max_staleness == 1 and config.algorithm.correction == "token_tis"
    with pytest.raises(ConfigError):
        load_config(path, [setting.replace("num_engines", "num_engine") for setting in settings])


def has_capacity(config: Config, nodes: int, cpus: int, gpus: int) -> bool:
    bundles = build_plan(config).bundles
    wanted = {name: sum(bundle.get(name, 0) for bundle in bundles) for name in ("CPU", "GPU")}
    return wanted["CPU"] <= nodes * cpus and wanted["GPU"] <= nodes * gpus


def option(name: str) -> int:
    (value,) = re.findall(rf"^#SBATCH --{name}=(\d+)$", SBATCH, re.MULTILINE)
    return int(value)


def test_slurm_job_requests_enough() -> None:
    assert re.search(r"^export RAY_AUTH_TOKEN RAY_AUTH_MODE=token", SBATCH, re.MULTILINE), "Ray needs a token"
    config = load_config(None, script_settings(SBATCH))
    nodes, cpus, gpus = option("nodes"), option("cpus-per-task"), option("gpus-per-node")
    assert option("ntasks-per-node") == 1  # one Ray per node
    assert has_capacity(config, nodes, cpus, gpus) and not has_capacity(config, nodes - 1, cpus, gpus)


def pods() -> dict[str, Any]:
    cluster = JOB["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    return {"head": cluster["headGroupSpec"]["template"]["spec"], "worker": workers["template"]["spec"]}


def test_kuberay_job_requests_enough() -> None:
    (workers,) = JOB["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    limits = pods()["worker"]["containers"][0]["resources"]["limits"]
    cpus, gpus, nodes = int(limits["cpu"]), int(limits["nvidia.com/gpu"]), workers["replicas"]
    config = load_config(None, script_settings(TRAIN_SH))
    assert has_capacity(config, nodes, cpus, gpus) and not has_capacity(config, nodes - 1, cpus, gpus)
    assert workers["minReplicas"] == workers["maxReplicas"] == nodes


def test_manifest_is_consistent() -> None:
    assert (MAP["kind"], JOB["kind"], JOB["apiVersion"]) == ("ConfigMap", "RayJob", "ray.io/v1")
    for name, pod in pods().items():
        (container,) = pod["containers"]
        assert container["name"] == f"ray-{name}"
        assert container["resources"]["requests"] == container["resources"]["limits"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert len(volumes) == len(mounts)
    assert mounts["/shared"] == pods()["head"]["volumes"][0]
    assert pods()["head"]["volumes"][1]["configMap"]["name"] == MAP["metadata"]["name"]
    assert JOB["spec"]["entrypoint"].split() == ["bash", "/paceline/train.sh"]
    assert JOB["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}, "Ray needs a token"
