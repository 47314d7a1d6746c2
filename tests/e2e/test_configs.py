"""Every shipped config is valid and trains, on a model so small that it takes seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import RecordingCallback, lines, write_head, write_model

from paceline.build.config import load_config
from paceline.build.run import build_trainer
from paceline.config import HEAD_METHODS, Config
from paceline.config_io import dump_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
HERE = [path for path in CONFIGS if load_config(path).engine.kind == "local"]  # tests/vllm trains the others
WANTED = {"quickstart", "gsm8k", "gpu-gsm8k", "code", "dapo", "async", "two-tasks"}
SMALL = (
    "model.device=cpu",
    "model.dtype=float64",
    "engine.max_num_seqs=8",
    "sampling.max_tokens=8",
    "algorithm.num_generations=4",
    "train.num_steps=2",
    "train.groups_per_step=2",
    "train.eval_every=2",
    "train.eval_samples=1",
    "train.checkpoint_every=1",
    "train.tensorboard=false",
)
# A random model never solves the task, and dynamic sampling would drop all groups. So it gets its own reward.
OWN_REWARD = '["reward_functions:many_a"]'


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


def test_documented_configs_exist() -> None:
    assert {path.stem for path in CONFIGS} >= WANTED


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert config != Config()
    (tmp_path / "config.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "config.toml") == config


def small(path: Path, model: Path, folder: Path, *overrides: str) -> Config:
    gsm8k(folder / "gsm8k-train.jsonl")
    written = load_config(path)
    given = [f"model.name={str(model)!r}", *SMALL, *overrides]
    for task in written.tasks:
        given += [f"{task.key}.held_out=2", f"{task.max_tokens_key}=8"]
        if task.section.kind == "dataset":  # tests/e2e/test_hub_dataset.py loads it from a hub
            data = str(folder / "gsm8k-train.jsonl")
            given += [f"{task.key}.kind=jsonl", f"{task.key}.name={data!r}", f"{task.key}.params={{}}"]
        if task.section.size is not None:
            given.append(f"{task.key}.size=16")
    if written.algorithm.overlong_buffer:
        given.append("algorithm.overlong_buffer=2")
    if written.speculation.method in HEAD_METHODS:
        given.append(write_head(folder, model=model)[1])
    if written.speculation.audit_every:
        given.append("speculation.audit_every=1")
    return load_config(path, given)


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_trains(path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # paths in the configs are relative to it
    config = small(path, model, tmp_path)
    callback = RecordingCallback()
    trainer = build_trainer(config, callback, run=tmp_path / "run")
    try:
        summary: dict[str, Any] = trainer.run()
    finally:
        trainer.close()
    assert summary["finished"] and summary["num_steps"] == 2
    assert summary["reward_before"] is not None and summary["reward_after"] is not None
    metrics, rollouts = lines(tmp_path / "run", "metrics"), lines(tmp_path / "run", "rollouts")
    assert len(metrics) == 2 and len(rollouts) >= 16
    assert [r["failure"] for r in rollouts if r["failure"]] == [], "every sample was scored"
    assert all(
        m["staleness_max"] <= config.train.max_staleness and not m["mismatch_alarm"] for m in metrics if m["num_groups"]
    )
    if config.speculation.audit_every:
        assert summary["identical"] is True and summary["generation_speedup"] > 0
        assert set(summary["tail_speedup"]) == {"1", "2", "4"}


@pytest.mark.parametrize("path", HERE, ids=lambda path: path.stem)
def test_the_policy_changes(path: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a reward that a random model can get, the algorithm of every config changes the policy."""
    monkeypatch.chdir(ROOT)
    keys = [task.reward_key for task in load_config(path).tasks]
    rewards = [setting for key in keys for setting in (f"{key}.functions={OWN_REWARD}", f"{key}.weights=[1.0]")]
    config = small(path, model, tmp_path, *rewards, "learner.warmup_steps=0")
    trainer = build_trainer(config, RecordingCallback(), run=tmp_path / "run")
    before = {name: tensor.clone() for name, tensor in trainer.learner.weights()}
    try:
        trainer.run()
        moved = [name for name, tensor in trainer.learner.weights() if not before[name].equal(tensor)]
    finally:
        trainer.close()
    assert moved
    assert any(m["grad_norm"] > 0 for m in lines(tmp_path / "run", "metrics"))
