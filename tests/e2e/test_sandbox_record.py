"""A run reports how programs are isolated: on the console, in run.json, in every step's metrics and in the report."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from tiny_run import lines, make

from paceline.report.html import write_report
from paceline.tasks import sandbox
from paceline.tasks.sandbox import Isolation

WEAKER = Isolation("process", ("disk space",))


@pytest.mark.parametrize("kind", ["namespaces", "process"])
def test_the_isolation_is_recorded(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tmp_path / "programs.jsonl"
    task.write_text("".join(json.dumps({"prompt": f"say {i}", "tests": ["assert 1"]}) + "\n" for i in range(6)))
    overrides = [f"task.name={str(task)!r}", f"reward.sandbox={kind}", "train.num_steps=1"]
    if kind == "process":  # replaced, as only root may be able to read this machine's interpreter
        monkeypatch.setattr(sandbox, "isolation", lambda kind: WEAKER)
        overrides += ["reward.max_failures=1.0"]
    trainer = make(tmp_path, "run", 'reward.functions=["code", "reward_functions:many_a"]', *overrides)
    with contextlib.closing(trainer):
        trainer.run()
    expected = "namespaces" if kind == "namespaces" else str(WEAKER)
    assert f"programs run in sandbox: {expected}" in trainer.callback.notes
    assert json.loads((tmp_path / "run" / "run.json").read_text())["sandbox"] == expected
    assert [metrics["sandbox"] for metrics in lines(tmp_path / "run", "metrics")] == [expected]
    page = write_report(tmp_path / "run").read_text()
    assert f"<dt>sandbox</dt><dd>{expected}</dd>" in page
    assert ("Programs ran without namespaces" in page) == (kind == "process")


def test_a_run_without_programs_reports_no_sandbox(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", "train.num_steps=1")
    with contextlib.closing(trainer):
        trainer.run()
    assert not any("sandbox" in note for note in trainer.callback.notes)
    assert "sandbox" not in json.loads((tmp_path / "run" / "run.json").read_text())
    assert "sandbox" not in lines(tmp_path / "run", "metrics")[0]
