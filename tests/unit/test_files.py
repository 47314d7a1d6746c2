"""Reading jsonl files of a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from replayed_run import write_run

from paceline import files
from paceline.build.replay_costs import audited_s
from paceline.files import number, read_metrics, read_run_lines
from paceline.sim.recorded_run import RecordedRun
from paceline.sim.run_simulation import RunSimulation


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE", 32)
    path = tmp_path / "metrics.jsonl"
    # The end of the long line would be an object by itself.
    long = b'"' + b"x" * 31 + b'{"step": 9}\n'
    lines = [b'{"step": 1}\n', b"[2]\n", b" \n", long, b"{\n", b'{"a": "\xff"}\n', b'{"step": 3}\n', b'{"step": 4']
    path.write_bytes(b"".join(lines))
    damaged: list[int] = []
    found = list(read_run_lines(path, damaged))
    assert [record for _, record in found] == [{"step": 1}, {"a": "\ufffd"}, {"step": 3}]
    assert [path.read_bytes()[start:].split(b"\n")[0] + b"\n" for start, _ in found] == [lines[0], *lines[5:7]]
    assert damaged == [2, 4, 5, 8]
    damaged.clear()
    assert len(list(read_run_lines(path, damaged, growing=True))) == 3 and damaged == [2, 4, 5]
    path.write_bytes(b'{"step": 1}\n{"step": 2}')
    assert len(list(read_run_lines(path))) == 2, "complete without a line end"


def test_steps_ascend_and_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    records = [
        {"step": 1},
        {"step": 0, "x": 1},
        {"step": True},
        {"step": "2"},
        {"step": 2**60},
        {},
        {"step": 0, "x": 2},
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert read_metrics(path) == [{"step": 0, "x": 2}, {"step": 1}]
    with pytest.raises(FileNotFoundError):
        read_metrics(tmp_path / "none.jsonl")


def test_numbers() -> None:
    record = json.loads('{"a": {"b": 2}, "n": NaN, "i": Infinity, "t": true, "s": "3", "large": 1' + "0" * 400 + "}")
    assert number(record, "a", "b") == 2.0
    assert [
        number(record, *path) for path in (["a"], ["a", "b", "c"], ["n"], ["i"], ["t"], ["s"], ["large"], ["x"])
    ] == [None] * 8


def test_a_line_that_is_cut_off_hides_no_other_step(tmp_path: Path) -> None:
    """And a step that was written twice counts once."""
    write_run(tmp_path)
    run = RecordedRun.open(tmp_path)
    assert run is not None
    audits, means = audited_s(run), RunSimulation(run).means
    assert len(audits) == 1 and means.stages["training"] == pytest.approx(20.0)
    path = tmp_path / "metrics.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    interrupted = json.loads(first) | {"audit": {"plain_s": 9.0, "speculative_s": 1.0}}
    interrupted["stages"] = {"training": 500.0}
    path.write_text(json.dumps(interrupted) + "\n" + "".join([first, *rest]) + '{"step": 3, "aud')
    assert audited_s(run) == audits
    assert RunSimulation(run).means == means
    path.write_text("")
    with pytest.raises(ValueError, match="has no RL step yet"):
        RunSimulation(run)
