"""Settings that are rejected before vLLM starts: vLLM would reject them late, unclearly, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from real_vllm import SHAPE

pytest.importorskip("vllm.v1", reason="needs vLLM", exc_type=ImportError)

from paceline.build.config import load_config
from paceline.build.vllm import MAX_DRAFT, TEMPERATURES, vllm_options
from paceline.cluster import vllm_shared
from paceline.cluster.vllm_python import in_this_process
from paceline.model.hf_shape import read_shape

pytestmark = pytest.mark.vllm
DRAFT = "speculation.rule=rejection"


def options(model: Path, *overrides: str) -> dict[str, Any]:
    config = load_config(None, [f"model.name={str(model)!r}", "engine.kind=vllm", *overrides])
    return vllm_options(config, model, read_shape(model))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sampling.temperature=0.001"], r"sampling.temperature = 0.001: .*it must be 0, or from 0.01 to 2"),
        (["train.eval_temperature=2.5"], r"train.eval_temperature = 2.5: .*it must be 0, or from 0.01 to 2"),
        (
            ["speculation.method=ngram", DRAFT, "speculation.num_speculative_tokens=129"],
            "num_speculative_tokens = 129: vLLM verifies at most 128",
        ),
        (["engine.vllm.pipeline_parallel_size=2"], r"pipeline_parallel_size = 2: .*engine.tensor_parallel_size"),
        (
            ["engine.tensor_parallel_size=3"],
            "tensor_parallel_size = 3: does not divide the model's num_attention_heads",
        ),
        (["engine.vllm.max_model_len=1000"], "engine.vllm.max_model_len = 1000: .* allow 128; lower it"),
        (["engine.kv_tokens=64", "engine.vllm.max_model_len=128"], "engine.vllm.max_model_len = 128: .* allow 64"),
        (
            ["speculation.method=draft_model", DRAFT, "speculation.draft_model=nowhere"],
            "speculation.draft_model: model",
        ),
    ],
)
def test_rejected_settings(checkpoint: Callable[..., Path], overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(checkpoint("llama", **SHAPE), *overrides)


def test_limits_match_vllm() -> None:
    from vllm import SamplingParams
    from vllm.v1.sample.rejection_sampler import MAX_SPEC_LEN

    low, high = TEMPERATURES
    assert MAX_SPEC_LEN == MAX_DRAFT
    assert SamplingParams(temperature=low / 2).temperature == SamplingParams(temperature=low).temperature == low
    assert SamplingParams(temperature=high).temperature == high
    with pytest.raises(Exception, match="temperature must be in"):
        SamplingParams(temperature=high + 0.01)


def test_draft_model_vocabulary_and_memory(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("llama", **SHAPE)
    method = ["speculation.method=draft_model", DRAFT, "engine.kv_tokens=128"]
    large = tmp_path / "large"
    shutil.copytree(checkpoint("llama", **{**SHAPE, "head_dim": 64, "num_key_value_heads": 4}), large)
    given = ([], [*method, f"speculation.draft_model={str(large)!r}"])
    target_bytes, total_bytes = (
        options(model, "engine.kv_tokens=128", *each)["kv_cache_memory_bytes"] for each in given
    )
    target, draft = (s.num_layers * s.num_kv_heads * s.head_dim for s in map(read_shape, (model, large)))
    assert total_bytes / target_bytes == (target + draft) / target and draft > target
    other = checkpoint("llama", vocab_size=300, **SHAPE)
    with pytest.raises(ValueError, match="has 300 tokens, the target 259: a draft model must share"):
        options(model, *method, f"speculation.draft_model={str(other)!r}")
    file = large / "tokenizer.json"
    file.write_text(file.read_text().replace('"a"', '"aa"'))
    with pytest.raises(ValueError, match="its tokenizer gives other ids"):
        options(model, *method, f"speculation.draft_model={str(large)!r}")


def test_environment_does_not_override_kv_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "2")
    with in_this_process():
        assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_files_of_a_killed_run_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a running process are not."""
    monkeypatch.setattr(vllm_shared, "FOLDERS", (str(tmp_path),))
    weights = [("a", torch.ones(3)), ("b", torch.ones(5))]
    stale = tmp_path / f"{vllm_shared.PREFIX}stale"
    stale.touch()
    other = tmp_path / "unrelated"
    other.touch()
    first, second = vllm_shared.write_buckets(weights, 1), vllm_shared.write_buckets(weights, 1)
    first_path = Path(next(first)["path"])
    assert not stale.exists() and first_path.exists()
    second_path = Path(next(second)["path"])
    assert first_path.exists() and second_path.exists() and other.exists()
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == [other]
