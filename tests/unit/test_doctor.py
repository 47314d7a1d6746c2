from __future__ import annotations

import json

from typer.testing import CliRunner

from paceline import doctor, native
from paceline.cli import app
from paceline.cluster import vllm_python
from paceline.doctor import machine


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_doctor_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_python, "version", lambda python: "0")  # importing it takes seconds
    path = tmp_path / "doctor.json"
    result = CliRunner().invoke(app, ["doctor", "--json", str(path)])
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert report["ok"] is True
    rows = {row["name"]: row for row in report["rows"]}
    for name in ("Python", "libraries", "torch", "CPU", "cache"):
        assert rows[name]["status"] in ("ok", "degraded")
    for row in rows.values():
        assert row["status"] in ("ok", "degraded", "missing")
        assert row["status"] == "ok" or row["remedy"], row


def test_no_compiler_is_degraded_with_a_remedy(monkeypatch):
    monkeypatch.setattr(native, "compiler", lambda: None)
    (finding,) = machine._native()
    assert finding.status == "degraded"
    assert "install a C compiler" in finding.remedy


def test_wrong_kernels_are_degraded(monkeypatch):
    monkeypatch.setattr(machine, "native_difference", lambda: 0.5)
    finding = machine._check_kernels()
    assert finding.status == "degraded"
    assert "5.0e-01" in finding.detail

    def broken():
        raise RuntimeError("boom")

    monkeypatch.setattr(machine, "native_difference", broken)
    assert "boom" in machine._check_kernels().detail


def test_missing_requirement_gives_exit_code_1(monkeypatch, tmp_path):
    findings = [doctor.Finding("torch", doctor.MISSING, "gone", "pip install torch", required=True)]
    monkeypatch.setattr(doctor, "check_machine", lambda progress: findings)
    path = tmp_path / "doctor.json"
    result = CliRunner().invoke(app, ["doctor", "--json", str(path)])
    assert result.exit_code == 1
    assert json.loads(path.read_text())["ok"] is False
    assert "torch  missing  gone" in result.stdout


def test_an_absent_optional_part_is_not_shown_as_missing(monkeypatch):
    findings = [doctor.Finding("extra: wandb", doctor.MISSING, "not installed", "only for train.wandb")]
    monkeypatch.setattr(doctor, "check_machine", lambda progress: findings)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "extra: wandb  optional  not installed" in result.stdout and "missing" not in result.stdout


def test_models_and_vllm_are_optional(monkeypatch, tmp_path):
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    monkeypatch.setenv("PACELINE_VLLM_PYTHON", str(tmp_path / "nothing"))
    findings = [*machine._cache(), *machine._vllm()]
    assert by_name(findings)["model: smollm2-135m"].remedy == "paceline pull smollm2-135m"
    assert "no such file" in by_name(findings)["vLLM"].detail
    assert doctor.is_ok(findings)


LONG = "a long explanation with many words of what was found, and /some/path/without/spaces/" + "X" * 90


def test_it_fits_80_columns_and_shows_what_it_checks(monkeypatch):
    statuses = (doctor.OK, doctor.DEGRADED, doctor.MISSING)

    def check_machine(progress):
        progress("kernels")
        return [doctor.Finding("extra: reasoning_gym", status, LONG, LONG) for status in statuses]

    monkeypatch.setattr(doctor, "check_machine", check_machine)
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.count("X") == 6 * 90, "nothing is cut off"
    assert "checking kernels" in result.stderr


def test_every_check_of_the_machine_is_announced(monkeypatch):
    from paceline.doctor import machine

    for name in ("_python", "_libraries", "_torch", "_native", "_machine", "_cache", "_cuda", "_vllm", "_sandbox"):
        monkeypatch.setattr(machine, name, list)
    monkeypatch.setattr(machine, "_extras", lambda: [doctor.Finding("extra", doctor.OK, "")])
    announced = []
    assert len(doctor.check_machine(announced.append)) == 1
    assert len(announced) == 10 and "kernels (compiles them at first)" in announced
