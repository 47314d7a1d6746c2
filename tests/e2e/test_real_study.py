"""The study in benchmarks/real with a tiny model: every part runs, continues after a kill or a time limit without
repeating anything, and comes out in the tables; an audit notices other tokens and other weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import write_model

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "benchmarks" / "real"
MODULES = ("study", "settings", "results", "runs", "heads", "audits", "figures", "topics")
NUM_STEPS = 6
SETTINGS = (
    "model.device=cpu",
    "model.dtype=float64",
    "engine.max_num_seqs=8",
    "speculation.cost_table=vllm-h200-qwen3-8b",
    "sampling.max_tokens=8",
    "task.chat=false",
    "task.template='{prompt}'",
    "task.held_out=2",
    'reward.functions=["reward_functions:many_a"]',
    "reward.workers=1",
    "algorithm.num_generations=2",
    "learner.learning_rate=0.01",
    "draft.layer_ids=[1, 2]",
    "draft.draft_vocab_size=64",
    "draft.num_sequences=12",
    "draft.max_length=64",
    "draft.held_out=4",
    "draft.num_epochs=1",
    "draft.tokens_per_batch=64",
    "draft.unroll=2",
    "train.groups_per_step=2",
    "train.checkpoint_every=2",
)
# With few drafters, sizes and rounds.
SMALL = {
    "audit": ("--steps=1,4", "--batch=4", "--drafters=plain,suffix,eagle3-in-domain,hybrid", "--lengths=auto,1"),
    "long": ("--batch=2", "--drafters=plain,suffix", "--lengths=auto,das"),
    "step": ("--batch=4",),
}

Call = Callable[..., int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    write_model(folder / "model", max_positions=1024)
    rows = [{"question": f"say {chr(97 + i)}", "answer": f"because #### {i}"} for i in range(12)]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def arguments(folder: Path, part: str, *given: str) -> list[str]:
    sizes = ("--num-steps", str(NUM_STEPS), "--problems=4", "--steps=1,4", "--short-steps=5", "--rounds=1")
    paths = ("--model", str(folder / "model"), "--data", str(folder / "task.jsonl"), "--out", str(folder / "out"))
    return [part, *paths, *sizes, "--requests=4", *SMALL.get(part, ()), *given, *SETTINGS]


@pytest.fixture(scope="module")
def study(folder: Path) -> Iterator[Call]:
    """Runs a part in this process; the first one, `record`, is killed once before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(STUDY))
        import study as script

        kill(arguments(folder, "record"), folder / "out" / "record.jsonl", num_steps=3)
        yield lambda part, *given: script.main(arguments(folder, part, *given))
        for name in MODULES:
            patch.delitem(sys.modules, name)


def kill(argv: list[str], results: Path, num_steps: int) -> None:
    """SIGKILL after so many steps, and a row of the results that is half written."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, str(STUDY / "study.py"), *argv], env=environment)
    while not results.exists() or results.read_text().count('"kind": "step"') < num_steps:
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with results.open("a") as file:
        file.write('{"kind": "step", "run": "pla')


def rows(folder: Path, part: str, kind: str) -> list[dict[str, Any]]:
    return rows_in(folder / "out" / f"{part}.jsonl", kind)


def rows_in(path: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in jsonl(path) if row["kind"] == kind]


@pytest.fixture(scope="module")
def recorded(folder: Path, study: Call) -> Path:
    before = rows_before_the_end(folder)
    assert study("record") == 0
    steps = rows(folder, "record", "step")
    assert {row["step"] for row in steps} == set(range(NUM_STEPS))
    assert steps[: len(before)] == before and len(steps) > len(before) >= 3, "what the killed process measured is kept"
    assert len(steps) < len(before) + NUM_STEPS, "it starts again at step 0, not at the checkpoint"
    return folder


def rows_before_the_end(folder: Path) -> list[dict[str, Any]]:
    """Without the incomplete row."""
    lines = (folder / "out" / "record.jsonl").read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in found if row["kind"] == "step"]


@pytest.fixture(scope="module")
def trained(recorded: Path, study: Call) -> Path:
    assert study("heads") == 0
    return recorded


def test_a_killed_run_continues(recorded: Path, study: Call) -> None:
    work, size = recorded / "out" / "work", (recorded / "out" / "record.jsonl").stat().st_size
    assert [path.name for path in (work / "weights").iterdir()] == ["version-3.safetensors"]
    assert not (work / "runs-record" / "plain" / "checkpoints").exists(), "checkpoints take too much space"
    assert study("record") == 0
    more = (recorded / "out" / "record.jsonl").read_bytes()[size:]
    assert more.count(b"\n") == 1 and b'"kind": "machine"' in more, "a finished run is not repeated"


def test_a_run_with_other_weights_fails_again(
    recorded: Path, study: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first attempt recorded and kept is not replaced."""
    import runs

    from paceline.rl.publisher import Publisher

    measured = rows(recorded, "record", "step")
    (tmp_path / "record.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured))
    kept = tmp_path / "work" / "weights" / "version-3.safetensors"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"of the first attempt")
    publish = Publisher.publish

    def publish_other(publisher: Publisher) -> str:
        return publish(publisher) + ("x" if publisher.learner.version == 3 else "")

    monkeypatch.setattr(Publisher, "publish", publish_other)
    for attempt in (1, 2):
        with pytest.raises(runs.OtherWeights, match="plain, step 3: other weights"):
            study("record", "--out", str(tmp_path))
        more = [row["step"] for row in rows_in(tmp_path / "record.jsonl", "step")[len(measured) :]]
        assert more == [0, 1] * attempt, "the wrong step is recorded, or the run continues after it"
    assert kept.read_bytes() == b"of the first attempt"


def test_heads(trained: Path, study: Call) -> None:
    assert study("heads") == 0, "heads that exist are not trained again"
    heads = rows(trained, "heads", "head")
    assert [head["name"] for head in heads] == ["general", "in-domain"]
    assert all(head["tokens_per_s"] > 0 and head["num_generated_tokens"] > 0 for head in heads)
    used = {r["problem"] for r in jsonl(trained / "out" / "work" / "runs-record" / "plain" / "rollouts.jsonl")}
    prompts = jsonl(trained / "out" / "work" / "prompts" / "in-domain.jsonl")
    names = {f"task/{ord(row['question'][4]) - 97}" for row in prompts}
    assert len(prompts) == 12 - 4 - 2 and not names & used, "trained on other problems than the run"


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_audits(trained: Path, study: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from settings import LimitReached, Study

    checks = iter(range(100))

    def check_time(self: Study, needed_s: float) -> None:
        if next(checks) == 5:
            raise LimitReached

    with monkeypatch.context() as patch:
        patch.setattr(Study, "check_time", check_time)
        assert study("audit") == 3
    before = rows(trained, "audit", "audit")
    assert study("audit") == 0
    found = rows(trained, "audit", "audit")
    cells = [(row["step"], row["drafter"], row["length"]) for row in found]
    lengths = {"plain": ["0"], "suffix": ["auto", "1"], "eagle3-in-domain": ["auto", "1"], "hybrid": ["auto", "1"]}
    wanted = {(step, drafter, length) for step in (1, 4) for drafter in lengths for length in lengths[drafter]}
    assert 0 < len(before) < len(found) == len(cells) == len(wanted) and set(cells) == wanted
    assert found[: len(before)] == before
    assert all(row["identical"] and row["num_tokens"] > 0 and row["speedup"] > 0 for row in found)
    static = [row for row in found if row["length"] == "1"]
    assert sum(row["num_accepted_tokens"] for row in static) > 0
    assert all(0 <= part["drafted"] <= 1 <= part["emitted"] for row in static for part in row["by_rows"].values())
    size = (trained / "out" / "audit.jsonl").stat().st_size
    assert study("audit") == 0
    assert (trained / "out" / "audit.jsonl").read_bytes()[size:].count(b"\n") == 1, "nothing is measured twice"


def test_history_has_the_earlier_steps(trained: Path, study: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """At step 4, problems have been sampled before; without these samples less is accepted."""
    import audits

    def num_drafted(name: str) -> int:
        assert study("audit", *copied(trained, name), "--drafters=suffix", "--lengths=3", "--steps=4") == 0
        (row,) = [row for row in jsonl(trained / name / "audit.jsonl") if row["kind"] == "audit"]
        return row["num_draft_tokens"]

    with_history, real = num_drafted("with"), audits.history_of
    monkeypatch.setattr(audits, "history_of", lambda bench, samples: real(bench, []))
    assert num_drafted("without") < with_history


def copied(folder: Path, name: str) -> tuple[str, ...]:
    """Other results, with the same recorded run."""
    (folder / name).mkdir()
    (folder / name / "record.jsonl").write_bytes((folder / "out" / "record.jsonl").read_bytes())
    return "--out", str(folder / name), "--work", str(folder / "out" / "work")


def test_other_tokens_and_other_weights_are_noticed(
    trained: Path, study: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    import audits

    given, out = (*copied(trained, "other"), "--drafters=suffix", "--lengths=1", "--steps=4"), trained / "other"
    read = audits.read_samples

    def read_wrong(*args: Any) -> Any:
        samples = read(*args)
        samples[4][0].tokens = np.append(samples[4][0].tokens, np.int32(7))
        return samples

    monkeypatch.setattr(audits.Bench, "must_be_identical", True)
    monkeypatch.setattr(audits, "read_samples", read_wrong)
    with pytest.raises(ValueError, match="suffix 1: other tokens than expected"):
        study("audit", *given)
    monkeypatch.setattr(audits, "read_samples", read)
    assert study("audit", *given) == 0
    found = rows_in(out / "audit.jsonl", "audit")
    assert [(row["identical"], row["failed"]) for row in found] == [(False, True), (True, False)], "not measured again"
    steps = [json.dumps(row | {"weights_checksum": "other"}) + "\n" for row in jsonl(out / "record.jsonl")]
    (out / "record.jsonl").write_text("".join(steps))
    (out / "audit.jsonl").unlink()
    with pytest.raises(ValueError, match="the kept weights of version 3 are not those of the recorded run"):
        study("audit", *given)


def test_sizes_that_can_not_be_measured(recorded: Path, study: Call) -> None:
    with pytest.raises(ValueError, match="--batch 5, 8: step 1 was recorded with 4 samples; give sizes from 1 to 4"):
        study("audit", "--batch=4,5,8")
    with pytest.raises(ValueError, match="--batch 2,4: the part `long` measures one size"):
        study("long", "--batch=2,4")


def test_all_parts_and_the_tables(trained: Path, study: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert study("table") == 0
    assert "Missing: " in capsys.readouterr().out
    for part in ("audit", "online", "long", "step", "stale", "curves"):
        assert study(part) == 0
    capsys.readouterr()
    assert study("table") == 0
    text = (trained / "out" / "tables.md").read_text()
    assert capsys.readouterr().out == text + "\n" and "Missing: nothing" in text and "nan" not in text
    for run in ("curves: eagle3", "online: general", "online: in-domain"):
        assert f"{run} and plain: identical in {NUM_STEPS} steps" in text
    assert "eagle3-4-0 against plain-4-0: generation and whole step" in text
    # With staleness, algorithm.correction reads the engine's logprobs, which on a CPU drafts change in rounding.
    differing = [line for line in text.splitlines() if "differ in" in line]
    assert all(line.startswith("- eagle3-1 against plain-1") for line in differing)
    assert "eagle3-1 against plain-1" in text and "| suffix das |" in text and "reach the limit" in text
    assert (trained / "out" / "study.svg").read_bytes().startswith(b"<?xml")
    trained_online = rows(trained, "online", "step")
    assert {row["drafter_version"] for row in trained_online if row["run"] == "general"} > {0}, "not trained online"


# ---- figures ----


def audit_rows(auto: list[float], noise: list[float]) -> list[dict[str, Any]]:
    cell = {"step": 1, "batch_size": 8}
    return [
        *(cell | {"drafter": "ngram", "length": "auto", "speedup": x} for x in auto),
        *(cell | {"drafter": "plain", "length": "0", "speedup": x} for x in noise),
    ]


@pytest.mark.parametrize(
    ("auto", "expected"),
    [
        ([0.98, 0.98, 1.0, 1.1, 0.96], "holds in 1 of 1 cells"),
        ([0.97, 0.97, 0.97, 1.1, 1.1], "MISSED: 0.97 (0.97–1.10)"),  # the median
        ([1.1, 1.1, 1.1, 1.1, 0.94], "MISSED: 1.10 (0.94–1.10)"),  # one audit
        ([1.1, 1.1], "2 audits and 5 of plain against plain; 5 of each are needed"),
    ],
)
def test_what_auto_must_reach(study: Call, auto: list[float], expected: str) -> None:
    import figures

    assert expected in figures.auto_check(audit_rows(auto, [0.97, 1.0, 1.0, 1.02, 1.01]), num_rounds=5)


def test_with_fewer_rounds(study: Call, tmp_path: Path) -> None:
    """The chosen rounds suffice, and the tables say that they are few. Failed audits are in no table."""
    import figures
    from results import Results

    results = Results(tmp_path)
    results.append("audit", "machine", {"options": {"rounds": "3"}})
    rows = audit_rows([1.1, 1.1, 1.1], [1.0, 1.0, 1.0])
    for row in [*rows, rows[0] | {"failed": True}]:
        results.append("audit", "audit", row)
    assert figures.chosen_rounds(results) == 3
    assert "holds in 1 of 1 cells" in figures.auto_check(rows, figures.chosen_rounds(results))
    few, failed = figures.about_rounds(results, "audit")
    assert few.startswith("2 of 2 cells were measured in fewer than 5 rounds") and failed.startswith("1 audits emitted")
    results.append("audit", "machine", {"options": {"rounds": "None"}})
    assert figures.chosen_rounds(results) == 5


def test_interval_of_a_share(study: Call) -> None:
    import figures

    low, high = figures.wilson(0.5, 1024)
    assert 0.469 < low < 0.470 and 0.530 < high < 0.531
    assert figures.wilson(0.0, 10)[0] == pytest.approx(0, abs=1e-12) and figures.wilson(0.0, 10)[1] > 0.2


def test_runs_that_differ(study: Call) -> None:
    import runs

    step = {"step": 0, "reward_mean": 0.5, "weights_checksum": "a"}
    assert runs.difference([step], [step]) is None
    assert runs.difference([step], [step | {"weights_checksum": "b"}]) == "step 1: weights_checksum"
