"""`paceline doctor CONFIG`: checks what the settings of a run require. A problem is one row with a remedy."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from tiny_run import settings, write_head
from typer.testing import CliRunner

from paceline import doctor
from paceline.build.cluster import build_plan
from paceline.build.config import load_config
from paceline.cli import app
from paceline.cluster import channel_probe, probe, ray_probe, vllm_probe, vllm_shared
from paceline.config import Config
from paceline.doctor import run
from paceline.doctor.finding import Finding

VLLM = ("engine.kind=vllm", "model.dtype=float32")


def row(findings: Any, name: str) -> Finding:
    return {finding.name: finding for finding in findings}[f"run: {name}"]


def on_ray(*overrides: str) -> Config:
    return load_config(None, ["cluster.kind=ray", *overrides])


@pytest.fixture
def without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """without(library): child processes can't import it."""

    def hide(name: str) -> None:
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return hide


def test_existing_model_and_head(tmp_path: Path) -> None:
    config = settings(tmp_path)
    (found,) = run._model(config)
    assert found.status == doctor.OK and str(tmp_path / "model") in found.detail
    config = settings(tmp_path, *write_head(tmp_path))
    assert [finding.status for finding in run._model(config)] == [doctor.OK, doctor.OK]
    assert row(run._model(config), "head").detail == "reads layers [1, 2] of model"


def test_an_imported_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings(tmp_path / "cache" / "models")  # writes a model there
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    (found,) = run._model(load_config(None, ["model.name=model"]))
    assert found.status == doctor.OK and str(tmp_path / "cache" / "models" / "model") in found.detail


def test_missing_models_and_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("smollm2-135m", "nowhere/nothing"):
        (found,) = run._model(load_config(None, [f"model.name={name}"]))
        assert found.status == doctor.MISSING and found.required and found.remedy == f"paceline pull {name}"
    config = settings(tmp_path, "speculation.method=eagle3", "speculation.head='nowhere'")
    assert "nowhere" in row(run._model(config), "head").detail and not doctor.is_ok(list(run._model(config)))
    config = settings(tmp_path, "speculation.method=draft_model", "speculation.draft_model='nowhere'")
    assert row(run._model(config), "drafter").remedy == "paceline pull nowhere"
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (found,) = run._model(settings(tmp_path))
    assert "truncated" in found.detail and found.remedy == "download it again"


def test_head_with_other_layers_is_not_for_vllm(tmp_path: Path) -> None:
    """vLLM gives a head three layers; this head reads two."""
    settings(tmp_path)
    head = write_head(tmp_path)
    config = settings(tmp_path, *head, *VLLM, "speculation.rule=rejection")
    assert [f.status for f in run._model(config) if f.name == "run: head"] == [doctor.OK, doctor.MISSING]


def test_vllm_installed_or_not(without: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    without("vllm")
    config = load_config(None, VLLM)
    (found,) = run._vllm(config)
    assert found.status == doctor.MISSING and "not here" in found.detail and ".venv-vllm" in found.remedy
    facts: dict[str, Any] = {"version": "1", "weight_transfer": True}
    monkeypatch.setattr(vllm_probe, "vllm_facts", lambda: facts)
    assert [f.status for f in run._vllm(config)] == [doctor.OK]
    facts["weight_transfer"] = False
    assert [f.status for f in run._vllm(config)] == [doctor.DEGRADED]
    online = ("speculation.method=eagle3", "speculation.rule=rejection", "draft.online=every")
    (found,) = run._vllm(load_config(None, [*VLLM, *online]))
    assert found.status == doctor.MISSING and found.required


def test_shared_memory_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tmp_path)
    monkeypatch.setattr(vllm_shared, "FOLDERS", (str(tmp_path),))
    (found,) = run._shared_memory(config)
    assert found.status == doctor.OK and list(tmp_path.glob("paceline-weights-*")) == []
    monkeypatch.setattr(vllm_shared, "FOLDERS", ("/nowhere", str(tmp_path)))
    (found,) = run._shared_memory(config)
    assert found.status == doctor.DEGRADED and "/nowhere" in found.remedy
    monkeypatch.setattr(vllm_shared, "FOLDERS", ("/nowhere",))
    (found,) = run._shared_memory(config)
    assert found.status == doctor.MISSING and "TMPDIR" in found.remedy


def test_two_processes_exchange_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = run._weight_transfer("127.0.0.1", required=True)
    assert found.status == doctor.OK and "307 kB" in found.detail
    monkeypatch.setattr(channel_probe, "checksum", lambda weights: "another")
    found = run._weight_transfer("127.0.0.1", required=True)
    assert found.status == doctor.MISSING and "not what was sent" in found.detail
    found = run._weight_transfer("192.0.2.77", required=False)  # reserved for documentation
    assert found.status == doctor.MISSING and not found.required


def test_without_ray_other_checks_still_run(without: Any, tmp_path: Path) -> None:
    without("ray")
    findings = doctor.check_run(settings(tmp_path, "cluster.kind=ray"))
    assert row(findings, "Ray").remedy == 'pip install -e ".[ray]"' and "not here" in row(findings, "Ray").detail
    assert {row(findings, name).status for name in ("device", "model", "gloo")} == {doctor.OK}


def test_address_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_probe, "ray_version", lambda: "2.60")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rows, host = run._ray(on_ray(f"cluster.address=127.0.0.1:{port}"))
    assert [found.status for found in rows] == [doctor.MISSING] and host == "127.0.0.1"
    assert "no process listens at 127.0.0.1" in rows[0].detail and "docs/how-to/ray.md" in rows[0].remedy


def node(cpus: float = 8, gpus: float = 4, host: str = "one", **changes: Any) -> dict[str, Any]:
    versions = {"python": "3.11", "paceline": "0.1.0", "torch": "2.13", "vllm": None}
    facts = {"versions": versions, "absent": []}
    return {"host": host, "resources": {"CPU": cpus, "GPU": gpus}, **(facts | changes)}


def resources_finding(nodes: list[dict[str, Any]], *overrides: str, free: dict[str, float] | None = None) -> Finding:
    total = {name: sum(n["resources"][name] for n in nodes) for name in ("CPU", "GPU")}
    plan = build_plan(on_ray("model.device=cuda", "model.dtype=bfloat16", *overrides))
    return run._cluster_resources(plan, {"nodes": nodes, "free": free or total})


def test_cluster_resources() -> None:
    assert resources_finding([node(), node()], "cluster.num_engines=6", "cluster.num_learners=2").status == doctor.OK
    found = resources_finding([node(), node()], "cluster.num_engines=7", "cluster.num_learners=2")
    assert (
        found.status == doctor.MISSING and "10 CPUs and 9 GPUs required, 16 CPUs and 8 GPUs available" in found.detail
    )
    found = resources_finding([node(gpus=3), node(gpus=3)], "cluster.num_engines=1", "cluster.gpus_per_engine=4")
    assert found.status == doctor.MISSING and "no node has 1 CPUs and 4 GPUs for one process" in found.detail
    found = resources_finding([node()], free={"CPU": 8, "GPU": 1})
    assert found.status == doctor.DEGRADED and "1 GPUs free" in found.detail
    colocated = ("cluster.layout=colocated", "cluster.num_engines=4", "cluster.num_learners=4")
    assert resources_finding([node(cpus=9)], *colocated).status == doctor.OK
    assert resources_finding([node(cpus=8)], *colocated).status == doctor.MISSING


def test_local_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(4), raising=False)
    assert run._local_resources(build_plan(on_ray("cluster.num_engines=2"))).status == doctor.OK
    assert run._local_resources(build_plan(on_ray("cluster.num_engines=3"))).status == doctor.DEGRADED
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    on_gpu = ("model.device=cuda", "model.dtype=bfloat16")
    assert run._local_resources(build_plan(on_ray(*on_gpu))).status == doctor.OK
    assert run._local_resources(build_plan(on_ray(*on_gpu, "cluster.num_engines=2"))).status == doctor.MISSING


def test_different_nodes() -> None:
    config, old = on_ray(), {"python": "3.11", "paceline": "0.1.0", "torch": "2.12", "vllm": None}
    assert run._nodes(config, [node(), node(host="two")]).status == doctor.OK
    found = run._nodes(config, [node(), node(host="two", versions=old)])
    assert found.status == doctor.DEGRADED and "torch 2.13 and 2.12" in found.detail
    found = run._nodes(config, [node(), node(host="two", versions=old | {"paceline": None})])
    assert found.status == doctor.MISSING and found.detail == "two has no paceline"
    found = run._nodes(on_ray("engine.kind=vllm"), [node()])
    assert found.status == doctor.MISSING and found.detail == "one has no vllm"
    found = run._nodes(config, [node(absent=["/shared/model"])])
    assert found.status == doctor.MISSING and "/shared/model" in found.detail
    found = run._nodes(config, [node(absent=[str(Path.cwd())])])
    assert found.status == doctor.DEGRADED and "--run" in found.remedy


def test_local_files_are_those_in_the_settings(tmp_path: Path) -> None:
    config = settings(tmp_path)
    assert run._local_files(config) == [str(tmp_path / "model"), str(tmp_path / "task.jsonl")]


def test_probe_that_hangs_dies_or_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    with pytest.raises(ValueError, match=r"no answer within 0\.5 s"):
        probe.run_module("slow", timeout_s=0.5)
    (tmp_path / "deadly.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ValueError, match="ended with -9"):
        probe.run_module("deadly")
    (tmp_path / "verbose.py").write_text("import sys; print('hello'); print('{\"count\":', len(sys.argv[1:]), '}')")
    assert probe.run_module("verbose", "one", "two") == {"count": 2}


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "check_machine", lambda progress: [])
    settings(tmp_path)
    arguments = [f"model.name={str(tmp_path / 'model')!r}", "model.dtype=float64"]
    result = CliRunner().invoke(app, ["doctor", *arguments, "--json", str(tmp_path / "good.json")])
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "good.json").read_text())["rows"]
    assert [r["name"] for r in rows] == ["run: device", "run: model", "run: gloo"]
    result = CliRunner().invoke(app, ["doctor", "model.name='nowhere'", "--json", str(tmp_path / "bad.json")])
    assert result.exit_code == 1 and json.loads((tmp_path / "bad.json").read_text())["ok"] is False
    result = CliRunner().invoke(app, ["doctor", "cluster.knid=ray"])
    assert result.exit_code == 2 and "cluster.kind" in result.output
