"""Building an engine raises ValueError for settings that do not fit the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.build.config import load_config
from paceline.build.engine import build_engine
from paceline.build.learner import load_policy
from paceline.types import Request, SamplingParams


def build(target: Path, draft: str | Path):
    overrides = [
        f"model.name={target}",
        "speculation.method=draft_model",
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


def test_training_in_float16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.build.learner.check_device", lambda config: None)  # a CPU has its own error
    with pytest.raises(ValueError, match='"float16": small gradients'):
        load_policy(load_config(None, ["model.device=cuda", "model.dtype=float16"]), Path(), "cpu")
