"""Every shipped config is right in every key, and trains: on a model so small that it takes seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Quiet, lines, write_head, write_model

from paceline.build import build_loop
from paceline.config import ADAPTABLE, Config, dump_config, load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
HERE = [path for path in CONFIGS if load_config(path).engine.kind == "local"]  # tests/vllm trains the other
WANTED = {"quickstart", "gsm8k", "code", "dapo", "async"}
SMALL = (
    "model.dtype=float64",
    "engine.max_num_seqs=8",
    "sampling.max_tokens=8",
    "task.held_out=2",
    "algorithm.num_generations=4",
    "train.num_steps=2",
    "train.groups_per_step=2",
    "train.eval_every=2",
    "train.eval_samples=1",
    "train.checkpoint_every=1",
    "train.tensorboard=false",
)
# A model of noise is never right: what the task gives it then is of no use to dynamic sampling, so a reward of its own.
OWN_REWARD = 'reward.functions=["reward_functions:many_a"]'


def gsm8k(path: Path) -> None:
    rows = [
        {"question": f"What is {n} + {n}?", "answer": f"{n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}\n#### {2 * n}"}
        for n in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    config = json.loads((directory / "config.json").read_text()) | {"max_position_embeddings": 2048}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def test_all_that_were_promised_are_there() -> None:
    assert {path.stem for path in CONFIGS} >= WANTED


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_parses_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert config != Config()
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config


def small(path: Path, model: Path, folder: Path, *overrides: str) -> Config:
    gsm8k(folder / "gsm8k-train.jsonl")
    written = load_config(path)
    given = [f"model.name={str(model)!r}", *SMALL, *overrides]
    if path.stem == "gsm8k":
        given.append(f"task.name={str(folder / 'gsm8k-train.jsonl')!r}")
    if written.task.size is not None:
        given.append("task.size=16")
    if written.algorithm.overlong_buffer:
        given.append("algorithm.overlong_buffer=2")
    if written.speculation.method in ADAPTABLE:
        given.append(write_head(folder, model=model)[1])
    if written.speculation.audit_every:
        given.append("speculation.audit_every=1")
    return load_config(path, given)


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_trains(path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # as the README says; paths in configs are from here
    config = small(path, model, tmp_path)
    watcher = Quiet()
    loop = build_loop(config, watcher, run=tmp_path / "run")
    try:
        summary: dict[str, Any] = loop.run()
    finally:
        loop.close()
    assert summary["finished"] and summary["steps"] == 2
    assert summary["reward_before"] is not None and summary["reward_after"] is not None
    metrics, rollouts = lines(tmp_path / "run", "metrics"), lines(tmp_path / "run", "rollouts")
    assert len(metrics) == 2 and len(rollouts) >= 16
    assert [r["failure"] for r in rollouts if r["failure"]] == [], "every sample was scored"
    assert all(
        m["lag_max"] <= config.train.max_staleness and not m["mismatch_alarm"] for m in metrics if m["num_groups"]
    )
    if config.speculation.audit_every:
        assert summary["identical"] is True and summary["generation_speedup"] > 0
        assert set(summary["tail_speedup"]) == {"1", "2", "4"}


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_learns_something(path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reward that noise can earn, every config's algorithm moves the policy."""
    monkeypatch.chdir(ROOT)
    config = small(path, model, tmp_path, OWN_REWARD, "reward.weights=[1.0]", "learner.warmup_steps=0")
    loop = build_loop(config, Quiet(), run=tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in loop.learner.weights()}
    try:
        loop.run()
        moved = [name for name, tensor in loop.learner.weights() if not before[name].equal(tensor)]
    finally:
        loop.close()
    assert moved
    assert any(m["grad_norm"] > 0 for m in lines(tmp_path / "run", "metrics"))
