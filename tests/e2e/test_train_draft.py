"""`paceline train-draft` from a shell: its output, its exit code, and that a killed run loses nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_run import SETTINGS, lines, settings
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.cli import app

TESTS = Path(__file__).parents[1]
SMALL = (
    "sampling.max_tokens=10",
    "draft.layer_ids=[1, 2]",
    "draft.draft_vocab_size=64",
    "draft.num_sequences=12",
    "draft.held_out=4",
    "draft.num_epochs=2",
    "draft.tokens_per_batch=64",
    "draft.unroll=2",
    "draft.eval_every=2",
    "draft.checkpoint_every=2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    settings(folder)
    return folder


def argv(folder: Path, name: str, *overrides: str) -> list[str]:
    model, task = (repr(str(folder / part)) for part in ("model", "task.jsonl"))
    given = [f"model.name={model}", f"task.name={task}", *SETTINGS, *SMALL, *overrides]
    return ["train-draft", "--run", str(folder / name), *given]


def call(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(arg) for arg in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    return call(*argv(folder, "trained"), "--json", folder / "out.json")


def test_output(folder: Path, trained: Any) -> None:
    head = folder / "trained" / "head"
    assert "acceptance on held-out sequences, k = 2, temperature 1" in trained.stdout
    for row in ("coupled", "greedy", "sampled (rejection rule)"):
        assert trained.stdout.count(row) == 2, "before and after"
    assert f'speculation.method = "eagle3"\nspeculation.head = "{head}"\n' in trained.stdout
    assert "held-out tokens in it" in trained.stdout and "tokens trained on" in trained.stdout
    assert "before  acceptance length  coupled 1." in trained.stderr and "step 2  acceptance length" in trained.stderr
    data = json.loads((folder / "out.json").read_text())
    assert data["head"] == str(head) and data["finished"] and data["config"]["draft"]["unroll"] == 2
    assert data["acceptance_after"]["coupled"]["mean_acceptance_length"] >= 1
    assert 0 < data["coverage"] <= 1 and data["seconds"] > 0


def test_two_architectures_are_compared(folder: Path) -> None:
    result = call(*argv(folder, "both", "draft.markov_rank=4"), "--compare", "--json", folder / "both.json")
    data = json.loads((folder / "both.json").read_text())
    runs = folder / "both" / "eagle3", folder / "both" / "dspark"
    rollouts, others = ((run / "rollouts.jsonl").read_bytes() for run in runs)
    assert rollouts == others != b""
    assert data["eagle3"]["num_tokens"] == data["dspark"]["num_tokens"] > 0
    assert "acceptance length on held-out sequences, on the same data" in result.stdout
    assert all((run / "head" / "config.json").exists() for run in runs)


def test_the_printed_settings_use_the_head(folder: Path, trained: Any) -> None:
    """A run with these settings speculates with the head."""
    use = trained.stdout.split("to draft with it:\n")[1].splitlines()[:2]
    given = [f"model.name={str(folder / 'model')!r}", "model.dtype=float64", "speculation.num_speculative_tokens=2"]
    config = load_config(None, [*given, *(line.replace(" = ", "=") for line in use)])
    overrides = [*given, *(line.replace(" = ", "=") for line in use)]
    assert config.speculation.method == "eagle3"
    sets = [part for arg in overrides for part in ("--set", arg)]
    arguments = ("--raw", "--max-tokens", "12", *sets, "--json", folder / "generated.json")
    call("generate", "say a", *arguments, "--compare")
    generated = json.loads((folder / "generated.json").read_text())
    assert generated["metrics"]["num_drafts"] > 0
    assert generated["comparison"]["identical"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere.toml"], "config file nowhere.toml does not exist"),
        (["draft.unrol=3"], "unknown key draft.unrol: did you mean draft.unroll?"),
        (["draft.unroll=0"], "draft.unroll = 0: expected an integer >= 1"),
        (["--resume", "nowhere"], "--resume nowhere: not a run"),
        (["--resume", "nowhere", "draft.seed=1"], "--resume uses the run's own settings; give no others"),
        (["--json", "/nowhere/out.json"], "can't write into the folder"),
        (["--compare", "draft.init=smollm2-135m"], "--compare: draft.init = 'smollm2-135m' is a head of one architec"),
    ],
)
def test_errors_are_one_line(given: list[str], message: str) -> None:
    output = call("train-draft", *given, code=2).stderr
    assert message in output and output.startswith("error: ")


def test_a_run_of_another_command(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "run.json").write_text('{"format": 3, "name": "grpo on chain_sum"}')
    assert "paceline train --resume" in call("train-draft", "--resume", tmp_path, code=2).stderr


# ---- killed ----


def start(*arguments: str) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "paceline.cli", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_for(process: subprocess.Popen[bytes], path: Path, num_lines: int) -> None:
    while not path.exists() or len(path.read_bytes().splitlines()) < num_lines:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def outcome(run: Path) -> Any:
    last = sorted((run / "checkpoints").glob("step-*"))[-1]
    files = json.loads((last / "state.json").read_text())["files"]
    metrics = [{key: value for key, value in m.items() if key != "seconds"} for m in lines(run, "metrics")]
    return files, metrics, (run / "head" / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_killed_and_resumed(folder: Path, number: signal.Signals) -> None:
    """The head is bit-identical to that of an uninterrupted run, and no rollout is generated twice."""
    longer = ("draft.num_epochs=30", "draft.eval_every=0", "draft.checkpoint_every=10")
    process = start(*argv(folder, number.name, *longer))
    wait_for(process, folder / number.name / "metrics.jsonl", 15)
    process.send_signal(number)
    output = process.communicate(timeout=120)[1].decode()
    rollouts = (folder / number.name / "rollouts.jsonl").read_bytes()
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130, output
        assert f"paceline train-draft --resume {folder / number.name}" in output
    result = call("train-draft", "--resume", folder / number.name)
    assert "to draft with it" in result.stdout
    assert (folder / number.name / "rollouts.jsonl").read_bytes() == rollouts
    if not (folder / "through").exists():
        call(*argv(folder, "through", *longer))
    assert outcome(folder / number.name) == outcome(folder / "through")
