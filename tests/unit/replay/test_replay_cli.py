"""`paceline replay` and `paceline advise` from the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import write_tokenizer
from typer.testing import CliRunner

from paceline.build import replay as build
from paceline.cli import app
from paceline.replay.run import Cell
from paceline.speculation.cost import CostTable, Point

# Writes rollouts of 8 problems with similar samples, until argv[1] MB are written.
FEED = """
import random, sys
rng = random.Random(0)
base = [[rng.randrange(5000) for _ in range(400)] for _ in range(8)]
text = "".join(rng.choice("abcdefgh ") for _ in range(40000))
written = step = 0
while written < int(sys.argv[1]) * 10**6:
    for p in range(8):
        for sample in range(4):
            ids = [t if rng.random() < 0.8 else rng.randrange(5000) for t in base[p]]
            written += sys.stdout.write(
                '{"step": %d, "problem": "p%d", "prompt_ids": [1, 2, 3], "token_ids": %s, "completion": "%s"}\\n'
                % (step, p, ids, text)
            )
    step += 1
"""


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "rollouts.jsonl"
    rng = np.random.default_rng(0)
    base = rng.integers(0, 500, (3, 40))
    with path.open("w") as file:
        for step in range(3):
            for p in range(3):
                for _ in range(3):
                    num = int(rng.integers(20, 40))
                    ids = np.where(rng.random(num) < 0.85, base[p, :num], rng.integers(0, 500, num)).tolist()
                    digits = "".join(map(str, rng.integers(0, 5, num)))
                    line = {"step": step, "problem": f"p{p}", "prompt_ids": [p, 1, 2], "token_ids": ids,
                            "finish_reason": "stop", "head_accepted": digits}  # fmt: skip
                    file.write(json.dumps(line) + "\n")
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Draft tokens are cheap with one row; with 16 rows each costs as much as a step."""
    points = [Point(1, 1, 50, 0.01), Point(1, 8, 57, 0.0101), Point(16, 16, 800, 0.01), Point(16, 32, 816, 0.17)]
    path = tmp_path_factory.mktemp("cost") / "table.json"
    CostTable("mine", points, {"eagle3": [(1, 1, 0.001)]}, source="made up").save(path)
    return str(path)


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return done.exit_code, done.output


def test_replay_output_and_json(rollouts: Path, table: str, tmp_path: Path) -> None:
    code, output = run("replay", rollouts, "--cost", table, "--drafter", "suffix,ngram,eagle3,hybrid", "--policy",
                       "static:3,auto", "--batch", "1,4", "--json", tmp_path / "out.json")  # fmt: skip
    assert code == 0, output
    assert "suffix static:3" in output and "hybrid auto" in output and "cold" in output and "warm" in output
    assert "has no draft times of ngram, suffix" in output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert len(rows) == 2 * 4 * 2 * (3 + 1)  # batches, drafters, policies, epochs and all
    totals = {(r["drafter"], r["policy"], r["batch"]): r for r in rows if r["epoch"] == "all"}
    assert len({row["num_tokens"] for row in totals.values()}) == 1  # all settings emit the same tokens
    best = totals["suffix", "static:3", 1]
    assert best["speedup"] == pytest.approx(best["plain_makespan_s"] / best["makespan_s"]) and best["speedup"] > 1.2
    epochs = [r for r in rows if (r["drafter"], r["policy"], r["batch"]) == ("suffix", "static:3", 1)]
    assert [r["epoch"] for r in epochs] == ["1", "2", "3", "all"]
    assert sum(r["makespan_s"] for r in epochs[:3]) == pytest.approx(best["makespan_s"])
    assert epochs[2]["draft_acceptance_rate"] > epochs[0]["draft_acceptance_rate"]  # history


def test_a_pipe_gives_what_the_file_gives(rollouts: Path, table: str, tmp_path: Path) -> None:
    options = ["--cost", table, "--drafter", "suffix,ngram", "--policy", "static:2", "--batch", "1,4"]
    assert run("replay", rollouts, *options, "--json", tmp_path / "file.json")[0] == 0
    command = [sys.executable, "-m", "paceline.cli", "replay", "-", *options, "--json", str(tmp_path / "pipe.json")]
    with rollouts.open("rb") as file:
        subprocess.run(command, stdin=file, check=True, capture_output=True)
    file_rows, pipe_rows = (json.loads((tmp_path / f"{n}.json").read_text())["rows"] for n in ("file", "pipe"))
    assert file_rows == pipe_rows


def test_advice(rollouts: Path, table: str, tmp_path: Path) -> None:
    code, output = run("advise", rollouts, "--cost", table, "--batch", "1,16", "--json", tmp_path / "out.json")
    assert code == 0, output
    assert "batch 1: " in output and "Generation " in output and "whole step" in output
    assert "batch 16: do not speculate" in output
    assert "speculation.method=" in output and "--generation-share" in output
    advised = json.loads((tmp_path / "out.json").read_text())
    assert [row["speculate"] for row in advised["batches"]] == [True, False]
    assert {row["drafter"] for row in advised["rows"]} == {"suffix", "ngram", "eagle3", "hybrid"}


def test_advice_reads_the_runs_own_metrics(rollouts: Path, table: str, tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").write_bytes(rollouts.read_bytes())
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "stages": {"generation": 9.0, "total": 10.0}}) + "\n"
    )
    code, output = run("advise", tmp_path, "--cost", table, "--batch", "1", "--json", tmp_path / "out.json")
    assert code == 0 and json.loads((tmp_path / "out.json").read_text())["generation_share"] == 0.9, output
    assert "assumed to take 65%" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "draft_model"], "--drafter 'draft_model': replay has no model; use one of suffix, ngram"),
        (["--drafter", "dspark"], "--drafter 'dspark': replay has no model; use one of suffix, ngram, eagle3, hybrid"),
        (["--policy", "static"], "--policy 'static': use static:K"),
        (["--policy", "auto:x"], "--policy 'auto:x'"),
        (["--policy", "static:999"], "speculation.num_speculative_tokens"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--batch", "a"], "--batch 'a': give numbers separated by commas"),
        (["--order", "shortest"], "--order 'shortest'"),
        (["--hardware", "abacus"], "--hardware 'abacus': the shipped tables are"),
        (["--cost", "missing.json"], "--cost missing.json: no such file"),
        (["--cost", "a.json", "--hardware", "b"], "give one of the two"),
        (["--set", "speculation.nonsense=1"], "unknown key speculation.nonsense"),
        (["--set", "engine.kv_tokens=64"], "--set engine.kv_tokens: not a setting of a replay, which has engine"),
        (["--set", "speculation={method='ngram'}"], "--set speculation.method: not a setting of a replay"),
        (["--max-tokens", "2147483648"], "--max-tokens"),
        (["--max-num-batched-tokens", "9" * 30], "--max-num-batched-tokens"),
    ],
)
def test_invalid_options(rollouts: Path, arguments: list[str], message: str) -> None:
    code, output = run("replay", rollouts, *arguments)
    assert code == 2 and message in " ".join(output.split()), output


def test_broken_lines_are_errors_or_skipped(rollouts: Path, table: str, tmp_path: Path) -> None:
    lines = rollouts.read_text().splitlines()
    (tmp_path / "r.jsonl").write_text("\n".join([*lines[:10], "{", *lines[10:]]) + "\n")
    options = ["--cost", table, "--batch", "4", "--policy", "static:1"]
    code, output = run("replay", tmp_path / "r.jsonl", *options)
    assert code == 2 and "line 11: not valid JSON" in " ".join(output.split())
    code, output = run("replay", tmp_path / "r.jsonl", *options, "--skip-broken")
    assert code == 0 and "1 broken lines were skipped" in " ".join(output.split())


def test_advise_refuses_config_keys_that_it_does_not_use(rollouts: Path) -> None:
    code, output = run("advise", rollouts, "--set", "model.name=x")
    assert code == 2 and "--set model.name: not a setting of a replay" in " ".join(output.split())


class RecordingConfig:
    """A config that records which keys are read."""

    def __init__(self, settings: object, read: set[str], section: str = "") -> None:
        self._settings, self._read, self._section = settings, read, section

    def __getattr__(self, name: str) -> object:
        value = getattr(self._settings, name)
        if not self._section:
            return RecordingConfig(value, self._read, name)
        self._read.add(f"{self._section}.{name}")
        return value


def test_allowed_config_keys_are_those_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: set[str] = set()
    original = build.replay_config
    monkeypatch.setattr(
        build, "replay_config", lambda cell, overrides: RecordingConfig(original(cell, overrides), read)
    )
    for drafter in (*build.MODEL_FREE, *build.WITH_HEAD):
        for policy in ("static:3", "das", "auto"):
            build.build_replay(Cell(drafter, policy, 4), build.frozen_costs(None, None))
    by_option = {f"speculation.{name}" for name in ("method", "policy", "num_speculative_tokens")}
    assert read == by_option | set(build.SUPPORTED_SETTINGS)


@pytest.mark.parametrize("command", ["replay", "advise"])
def test_a_tokenizer_that_cannot_be_loaded_is_one_error(command: str, tmp_path: Path) -> None:
    """Not a broken line, so --skip-broken does not apply."""
    (tmp_path / "r.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    code, output = run(command, tmp_path / "r.jsonl", "--tokenizer", tmp_path, "--skip-broken", "--batch", "1")
    text = " ".join(output.split())
    assert code == 2 and "error: --tokenizer" in text and "smollm2-135m" in text and "broken lines" not in text, output


@pytest.mark.parametrize("name", ["smollm2-135m", "imported-q8_0"])
def test_the_tokenizer_of_a_model_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_tokenizer(tmp_path / "models" / name)
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    (tmp_path / "r.jsonl").write_text('{"prompt": "a", "completion": "bcd"}\n')
    options = ["--tokenizer", name, "--batch", "1", "--policy", "static:1", "--json", tmp_path / "out.json"]
    code, output = run("replay", tmp_path / "r.jsonl", *options)
    assert code == 0, output
    assert json.loads((tmp_path / "out.json").read_text())["rows"][-1]["num_tokens"] == 3


@pytest.mark.parametrize("command", ["replay", "advise"])
def test_rollouts_without_completions_are_an_error(command: str, tmp_path: Path) -> None:
    lines = '{"prompt_ids": [1], "token_ids": []}', '{"prompt_ids": [1], "token_ids": [5], "mask": [0]}'
    (tmp_path / "r.jsonl").write_text("\n".join(lines))
    code, output = run(command, tmp_path / "r.jsonl", "--batch", "1")
    assert code == 2 and "nothing to replay, because no rollout has a completion" in " ".join(output.split()), output


def test_advise_warns_about_a_small_sample(rollouts: Path, table: str, tmp_path: Path) -> None:
    code, output = run("advise", rollouts, "--cost", table, "--batch", "1", "--json", tmp_path / "out.json")
    assert code == 0 and "Based on 27 completions; record more for a reliable result." in output
    assert json.loads((tmp_path / "out.json").read_text())["text"][-1].startswith("Based on 27")


def test_brackets_are_not_markup(rollouts: Path, tmp_path: Path) -> None:
    CostTable("mine", [Point(1, 1, 50, 0.01)], source="[/b] of [mine]").save(tmp_path / "t.json")
    (tmp_path / "r.jsonl").write_text(rollouts.read_text() + '{"[/b]": 1}\n')
    options = ["--cost", tmp_path / "t.json", "--batch", "1", "--policy", "static:1", "--skip-broken"]
    code, output = run("replay", tmp_path / "r.jsonl", *options)
    assert code == 0 and "Costs: [/b] of [mine]" in output and "its keys are [/b]" in " ".join(output.split())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_pipe_of_500_mb_takes_less_than_200_mb_of_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline.cli", "replay", "-", "--batch", "32", "--policy", "static:3", "--set",
               "speculation.suffix_max_versions=2", "--json", str(tmp_path / "out.json")]  # fmt: skip
    feed = subprocess.Popen([sys.executable, "-c", FEED, "500"], stdout=subprocess.PIPE)
    replay = subprocess.Popen(command, stdin=feed.stdout, stdout=subprocess.DEVNULL)
    assert feed.stdout is not None
    feed.stdout.close()
    peaks = [0]  # kB. Not ru_maxrss, which includes the memory of this process when it forked
    while replay.poll() is None:
        peaks += [int(kb) for kb in re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{replay.pid}/status").read_text())]
        time.sleep(0.05)
    assert feed.wait() == 0 and replay.returncode == 0
    (*_, total) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert total["num_tokens"] > 4_000_000 and total["num_accepted_tokens"] > 1_000_000
    assert 10_000 < max(peaks) < 200_000, peaks[-1]


def test_a_head_that_was_not_recorded_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text('{"step": 0, "problem": "p", "prompt_ids": [1], "token_ids": [2, 3, 4]}\n')
    for drafter in ("eagle3", "hybrid"):
        found = CliRunner().invoke(app, ["replay", str(path), "--drafter", drafter, "--batch", "2"])
        assert found.exit_code == 2 and "have no `head_accepted`" in " ".join(found.output.split())


@pytest.mark.parametrize("key", ["--policy", "--drafter"])
def test_an_empty_list_is_an_error(rollouts: Path, key: str) -> None:
    found = CliRunner().invoke(app, ["replay", str(rollouts), key, "", "--batch", "2"])
    assert found.exit_code == 2 and f"{key}: give at least one" in found.output


def test_named_pipes_and_odd_names(rollouts: Path, tmp_path: Path) -> None:
    odd = tmp_path / "[" / "x].jsonl"  # a closing tag, to rich
    odd.parent.mkdir()
    odd.write_bytes(rollouts.read_bytes())
    paceline = f"{sys.executable} -m paceline.cli"
    for given in (f"<(cat {rollouts})", f"'{odd}'"):
        done = subprocess.run(
            ["bash", "-c", f"{paceline} replay {given} --batch 2 --policy static:1"], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "suffix static:1" in done.stdout
    closed = subprocess.run(["bash", "-c", f"{paceline} replay - --batch 2 <&-"], capture_output=True, text=True)
    assert closed.returncode == 2 and "standard input is closed" in closed.stderr
