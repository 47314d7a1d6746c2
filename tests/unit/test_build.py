"""Building an engine or a run raises ValueError for settings that do not fit; models get their device."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny_decoder
from tiny_run import RecordingCallback, make, settings

from paceline.build.config import load_config
from paceline.build.engine import build_engine
from paceline.build.learner import load_policy, run_worker
from paceline.build.model import (
    build_decoder,
    check_device,
    invariant_obstacle,
    load_decoder,
    prepare_device,
    uses_invariant_kernels,
)
from paceline.build.run import build_trainer
from paceline.cli.train import show_plan
from paceline.doctor import finding
from paceline.doctor import run as doctor_run
from paceline.model.decoder import Decoder
from paceline.model.device import ALLOCATOR_VARIABLES
from paceline.rl.worker_group import WorkerGroup
from paceline.types import Request, SamplingParams


def build(target: Path, draft: str | Path):
    overrides = [
        f"model.name={target}",
        "speculation.method=draft_model",
        "speculation.policy=static",
        f"speculation.draft_model={draft}",
        "engine.kv_tokens=1024",
    ]
    return build_engine(load_config(None, overrides))


def test_draft_model_with_another_vocabulary_raises(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="300 tokens, the target 259"):
        build(checkpoint("llama"), checkpoint("llama", vocab_size=300))


@pytest.mark.parametrize("draft", ["layers:0", "layers:9", "layers:x"])
def test_invalid_number_of_layers_raises(checkpoint: Callable[..., Path], draft: str) -> None:
    with pytest.raises(ValueError, match="N from 1 to 3"):
        build(checkpoint("llama"), draft)


@pytest.mark.parametrize("other", [False, True])
def test_draft_model_drafts(checkpoint: Callable[..., Path], other: bool) -> None:
    engine = build(checkpoint("llama"), checkpoint("llama", seed=3) if other else "layers:2")
    engine.generate([Request(0, (1, 2, 3), SamplingParams(max_tokens=8, ignore_eos=True))])
    assert sum(trace.num_draft_tokens for trace in engine.drain_trace()) > 0


def test_min_confidence_reaches_the_policy(checkpoint: Callable[..., Path]) -> None:
    settings = [f"model.name={checkpoint('llama')}", "engine.kv_tokens=1024", "speculation.min_confidence=0.3"]
    assert build_engine(load_config(None, settings)).policy.min_confidence == 0.3
    with pytest.raises(ValueError, match=r"speculation\.min_confidence = 0"):
        build_engine(load_config(None, [*settings, "speculation.rule=rejection"]))


def test_a_note_says_that_a_run_is_resumed_with_other_kernels(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", "train.num_steps=1")
    trainer.run()
    trainer.close()
    trainer = make(tmp_path, "run", "train.num_steps=2", resume=True)
    trainer.close()
    assert not any("other kernels" in note for note in trainer.callback.notes)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["kernels"]["batch_invariant"] = "other"
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    trainer = make(tmp_path, "run", "train.num_steps=2", resume=True)
    trainer.close()
    assert any("other kernels than the run started with (batch_invariant;" in note for note in trainer.callback.notes)


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has its own error for 16 bits."""
    for module in ("model", "learner", "memory"):
        monkeypatch.setattr(f"paceline.build.{module}.check_device", lambda config: None)


def test_training_in_float16_is_refused_before_anything_is_loaded(
    any_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("paceline.build.run.build_rollout_engine", load)
    monkeypatch.setattr("paceline.build.learner.load_policy", load)
    config = settings(tmp_path, "model.dtype=float16")
    for start in (
        lambda: build_trainer(config, RecordingCallback(), run=tmp_path / "run"),
        lambda: run_worker(config, WorkerGroup()),
        lambda: show_plan(config),
    ):
        with pytest.raises(ValueError, match='"float16": small gradients'):
            start()
    assert not (tmp_path / "run").exists()
    assert [found.status for found in doctor_run._device(config)] == [finding.MISSING]


def test_a_run_in_float16_can_be_exported(any_device: None, checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("llama")
    config = load_config(None, [f"model.name={model}", "model.dtype=float16"])
    assert load_policy(config, model, "cpu").dtype == torch.float16


def test_the_models_device_becomes_the_current_one(any_device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches kernels on it."""
    current: list[torch.device] = []
    loaded: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda settings: None)

    def load(directory: Path, dtype: torch.dtype, device: str, *rest: Any) -> Decoder:
        assert not device.endswith(":1") or current == [torch.device("cuda:1")]
        loaded.append(device)
        return tiny_decoder()

    monkeypatch.setattr("paceline.build.model.load", load)
    for device in ("cpu", "cuda", "cuda:1"):
        load_decoder(load_config(None, [f"model.device={device}"]), Path())
    assert loaded == ["cpu", "cuda", "cuda:1"] and current == [torch.device("cuda:1")]


@pytest.mark.parametrize(
    ("device", "kind", "environment", "expected"),
    [
        ("cuda", "local", {}, ["expandable_segments:True"]),
        ("cpu", "local", {}, []),
        ("cuda", "vllm", {}, []),
        ("cuda", "local", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, []),
        ("cuda", "local", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, []),
    ],
)
def test_segments_of_gpu_memory_are_expandable(
    any_device: None, monkeypatch: pytest.MonkeyPatch, device: str, kind: str, environment: dict[str, str],
    expected: list[str],
) -> None:  # fmt: skip
    chosen: list[str] = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", chosen.append)
    prepare_device(load_config(None, [f"engine.kind={kind}"]), device)
    assert chosen == expected


def test_generation_in_a_thread_uses_the_learners_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(
        "paceline.rl.trainer.use_device", lambda device: used.append((threading.current_thread().name, device))
    )
    trainer = make(tmp_path, "run", "train.num_steps=1", "train.max_staleness=1")
    trainer.run()
    trainer.close()
    assert used == [("rollouts", torch.device("cpu"))]


INVARIANT = ["model.device=cuda", "model.dtype=bfloat16", "engine.native=true", "engine.kind=local"]


@pytest.mark.parametrize(
    ("settings", "capability", "expected"),
    [
        ([], (9, 0), None),
        ([], (8, 0), "the kernels are for Hopper GPUs (H100, H200), not for an A100"),
        (["model.device=cpu"], (9, 0), 'model.device = "cpu"'),
        (["model.dtype=float16"], (9, 0), 'model.dtype = "float16", but the kernels need "bfloat16"'),
        (["engine.native=false"], (9, 0), "engine.native = false, but the kernels need true"),
        (["engine.kind=vllm"], (9, 0), 'engine.kind = "vllm", but the kernels need "local"'),
    ],
)
def test_where_kernels_are_batch_invariant(
    monkeypatch: pytest.MonkeyPatch, settings: list[str], capability: tuple[int, int], expected: str | None
) -> None:
    """Not set: where they are supported, with a warning on a GPU in bfloat16 without them. Set: an error instead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    config = load_config(None, [*INVARIANT, *settings])
    if expected is None:
        assert invariant_obstacle(config) is None and uses_invariant_kernels(config)
    else:
        assert expected in str(invariant_obstacle(config))
        with pytest.warns(UserWarning) if config.model.dtype == "bfloat16" else nullcontext():
            assert not uses_invariant_kernels(config)
    assert not uses_invariant_kernels(config.changed(engine={"invariant": False}))
    config = config.changed(engine={"invariant": True})
    if config.model.device == "cpu":
        config = config.changed(model={"dtype": "float32"})
    with nullcontext() if expected is None else pytest.raises(ValueError, match=r"engine\.invariant = true: "):
        check_device(config)


def test_invariant_kernels_are_required_if_set(
    any_device: None, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain torch does not silently replace kernels that do not support a model."""
    model = checkpoint("llama")
    config = load_config(None, [f"model.name={model}", "engine.native=false", "engine.invariant=true"])
    with pytest.raises(ValueError, match="the kernels do not support this model"):
        build_decoder(config, model)
