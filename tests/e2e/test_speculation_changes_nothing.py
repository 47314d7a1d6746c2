"""Two runs with the same seed, speculation on and off: the same tokens, rewards and weights, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import make, outcome, policy

STEPS = "train.num_steps=12"


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def run(folder: Path, name: str, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], int]:
    trainer = make(folder, name, STEPS, "train.groups_per_step=4", *overrides)
    trainer.run()
    weights = policy(trainer)
    trainer.close()
    accepted = sum(m["num_accepted_tokens"] for m in trainer.callback.metrics)
    return rollouts(folder / name), weights, accepted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("identity")


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], int]:
    return run(folder, "plain")


def same(a: list[dict[str, Any]], b: list[dict[str, Any]], keys: tuple[str, ...]) -> bool:
    return [[record[key] for key in keys] for record in a] == [[record[key] for key in keys] for record in b]


KEYS = ("step", "problem", "sample", "token_ids", "reward", "advantage")


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_bit_for_bit(folder: Path, plain: Any, method: str) -> None:
    records, weights, accepted = run(folder, method, f"speculation.method={method}", "speculation.prompt_lookup_min=1")
    assert accepted > 0, "the test needs accepted drafts"
    assert same(records, plain[0], KEYS)
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain[1].items())


def test_with_a_correction_weights_agree_to_rounding(folder: Path) -> None:
    """With a correction the loss depends on the engine's logprobs, which differ in the last bits."""
    records, weights, _ = run(folder, "tis plain", "algorithm.correction=token_tis")
    again, others, accepted = run(folder, "tis", "algorithm.correction=token_tis", "speculation.method=suffix")
    assert accepted > 0
    assert same(records, again, ("step", "problem", "sample", "token_ids", "reward"))
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=0, atol=1e-12)


def test_another_seed_gives_another_run(folder: Path, plain: Any) -> None:
    """Otherwise the tests above would compare too little."""
    records, weights, _ = run(folder, "seed", "train.seed=1")
    assert not same(records, plain[0], KEYS)
    assert not all(torch.equal(weights[name], tensor) for name, tensor in plain[1].items())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_with_adapters(tmp_path: Path, dtype: str) -> None:
    """LoRA in float32 with the native kernels, and beside shared weights in plain torch: the adapters are identical."""
    given = "learner.lora_rank=4", "learner.learning_rate=0.02", f"model.dtype={dtype}", "train.num_steps=6"
    records, weights, _ = run(tmp_path, "off", *given)
    drafted, again, accepted = run(
        tmp_path, "on", *given, "speculation.method=suffix", "speculation.prompt_lookup_min=1"
    )
    assert accepted > 0
    assert same(records, drafted, KEYS)
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    files = [outcome(tmp_path / name)["files"]["learner/shard-00001-of-00001.safetensors"] for name in ("off", "on")]
    assert files[0] == files[1], "the checkpoint has the adapters"


@pytest.mark.slow
def test_real_weights(tmp_path: Path, smollm2: Path) -> None:
    """SmolLM2-135M, float32, native kernels: identical tokens and rewards over ten steps."""
    settings = (
        f"model.name={str(smollm2)!r}", "model.dtype=float32", "task.chat=true", "sampling.max_tokens=6",
        "algorithm.num_generations=2", "learner.learning_rate=1e-5",
    )  # fmt: skip
    records, _, _ = run(tmp_path, "off", *settings)
    drafted, _, accepted = run(tmp_path, "on", *settings, "speculation.method=suffix")
    assert accepted > 0
    assert same(records, drafted, ("step", "problem", "sample", "token_ids", "reward"))
