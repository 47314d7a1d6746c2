"""A run says how it isolated programs: on the console, in run.json, in every step's metrics and in the report."""

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
    if kind == "process":  # this machine's interpreter may be root's alone; the record is what is tested here
        monkeypatch.setattr(sandbox, "isolation", lambda kind: WEAKER)
        overrides += ["reward.max_failures=1.0"]
    loop = make(tmp_path, "run", 'reward.functions=["code", "reward_functions:many_a"]', *overrides)
    with contextlib.closing(loop):
        loop.run()
    said = "namespaces" if kind == "namespaces" else str(WEAKER)
    assert f"programs run in sandbox: {said}" in loop.watcher.notes
    assert json.loads((tmp_path / "run" / "run.json").read_text())["sandbox"] == said
    assert [metrics["sandbox"] for metrics in lines(tmp_path / "run", "metrics")] == [said]
    page = write_report(tmp_path / "run").read_text()
    assert f"<dt>sandbox</dt><dd>{said}</dd>" in page
    assert ("Programs ran without namespaces" in page) == (kind == "process")


def test_a_run_without_programs_says_nothing(tmp_path: Path) -> None:
    loop = make(tmp_path, "run", "train.num_steps=1")
    with contextlib.closing(loop):
        loop.run()
    assert not any("sandbox" in note for note in loop.watcher.notes)
    assert "sandbox" not in json.loads((tmp_path / "run" / "run.json").read_text())
    assert "sandbox" not in lines(tmp_path / "run", "metrics")[0]
