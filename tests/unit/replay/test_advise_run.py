"""`paceline advise` and `paceline replay` on a run's folder: its own step times, not those of a shipped table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from replayed_run import write_run
from typer.testing import CliRunner

from paceline.cli import app


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    folder = tmp_path_factory.mktemp("run") / "mine"
    return folder, write_run(folder)


def test_advice_is_close_to_what_the_run_measured(recorded: tuple[Path, float], tmp_path: Path) -> None:
    folder, measured = recorded
    code, output = run("advise", folder, "--json", tmp_path / "own.json")
    assert code == 0, output
    first, second = output.splitlines()[:2]
    assert first == "Costs: measured in this run (Abacus 3000, 2 threads; smollm2-135m, float32)."
    assert second.startswith(
        f'This run\'s audits measured {measured:.2f}x (suffix, policy "static", batch 8; 1 audit).'
    )
    own = json.loads((tmp_path / "own.json").read_text())
    assert own["measured"]["speedup"] == pytest.approx(measured)
    assert own["measured"]["replayed"] == pytest.approx(measured, rel=0.06)
    assert [row["batch"] for row in own["batches"]] == [1, 8]
    best = own["batches"][-1]["generation_speedup"]
    assert "Do not speculate: batch 8 does not become faster." in output and own["settings"] == {
        "speculation.method": "none"
    }
    # The shipped table, of a GPU on which draft tokens cost little, promises much more.
    code, output = run(
        "advise", folder, "--hardware", "vllm-h200-qwen3-8b", "--batch", 8, "--json", tmp_path / "h.json"
    )
    assert code == 0 and output.startswith("Costs: vLLM 0.25.1 measured on one H200, Qwen3-8B shape"), output
    assert "Your hardware and model will differ." in output.splitlines()[0]
    assert json.loads((tmp_path / "h.json").read_text())["batches"][0]["generation_speedup"] > 1.15 * max(
        best, measured
    )


def test_a_run_without_usable_steps_says_why(recorded: tuple[Path, float], tmp_path: Path) -> None:
    folder, _ = recorded
    for name in ("rollouts.jsonl", "run.json", "config.toml"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "trace.jsonl").write_text((folder / "trace.jsonl").read_text()[:5000])
    code, output = run("advise", tmp_path, "--batch", 8)
    first = output.splitlines()[0]
    assert code == 0 and "Qwen3-8B" in first and "usable engine steps, but 32 or more are needed" in first, output
    code, output = run("advise", folder / "rollouts.jsonl", "--batch", 8)
    assert code == 0 and output.startswith("Costs: measured in this run"), output


@pytest.mark.parametrize(("method", "other"), [("suffix", "ngram"), ("ngram", "suffix")])
def test_only_the_drafter_that_the_run_timed_is_recommended(tmp_path: Path, method: str, other: str) -> None:
    """Another one would be replayed as if drafting took no time."""
    write_run(tmp_path / "mine", method=method)
    code, output = run("advise", tmp_path / "mine", "--json", tmp_path / "out.json")
    assert code == 0, output
    advised = json.loads((tmp_path / "out.json").read_text())
    assert {row["drafter"] for row in advised["batches"]} == {method}
    assert advised["settings"]["speculation.method"] in (method, "none")
    assert {row["drafter"] for row in advised["rows"]} == {"suffix", "ngram"}
    assert f"{other} is not recommended: its draft time is unknown" in output


def test_a_file_that_cannot_be_read_is_the_only_message(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text("not json\n")
    for path in (tmp_path / "broken.jsonl", tmp_path / "no-such.jsonl"):
        code, output = run("advise", path)
        assert code == 2 and output.startswith("error: ") and "Costs:" not in output, output


def test_a_warning_for_batch_sizes_that_the_run_did_not_have(recorded: tuple[Path, float]) -> None:
    code, output = run("advise", recorded[0], "--batch", "8,16")
    assert "Best setting for this run's batch size, 8:" in output or "Do not speculate: batch 8" in output
    assert code == 0 and "batch 16: the run's steps have at most 8 sequences" in " ".join(output.split()), output


def test_replay_uses_the_runs_costs_and_explains_its_columns(recorded: tuple[Path, float]) -> None:
    code, output = run("replay", recorded[0], "--batch", 8, "--policy", "static:3")
    assert code == 0 and output.startswith("Costs: measured in this run"), output
    shown = output.splitlines()
    for line in ("epoch: cold is", "length: acceptance length", "per row: tokens per", "speed-up: plain s / s"):
        assert any(each.startswith(line) for each in shown), line
    assert not any(line.startswith("drafting:") for line in shown)  # a narrow terminal has no such column
