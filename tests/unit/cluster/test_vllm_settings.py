"""vLLM's options, and settings that are rejected before vLLM starts. No test here imports vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import tiny_config

from paceline.build.config import load_config
from paceline.build.engine import build_engine
from paceline.build.run import build_rollout_engine
from paceline.build.vllm import vllm_options
from paceline.config_io import ConfigError

VLLM = "engine.kind=vllm"
DRAFT = "speculation.rule=rejection"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["speculation.audit_every=2"], r"audit_every = 2: .*rule = \"coupled\", and engine.kind = \"vllm\" has none"),
        (
            ["speculation.method=ngram", "speculation.rule=coupled"],
            r"speculation.rule = \"coupled\": .*rejection sampling.*set rule = \"rejection\"",
        ),
        (["speculation.method=ngram", "speculation.rule=block"], r"speculation.rule = \"block\""),
        (["speculation.method=hybrid", DRAFT], r"method = \"hybrid\": .*one drafter at a time"),
        (["speculation.method=dspark", DRAFT], r"method = \"dspark\": not tested with engine.kind"),
        (["speculation.policy=das"], r"policy = \"das\": .*schedules by itself"),
        (["speculation.policy=auto"], r"policy = \"auto\" .*biases rule = \"rejection\"; use policy = \"static\""),
        (["speculation.policy=auto", "speculation.rule=coupled"], r"policy = \"auto\": .*schedules by itself"),
        (["speculation.method=ngram", DRAFT, "speculation.num_speculative_tokens={8 = 2}"], "takes one draft length"),
        (["speculation.method=ngram", DRAFT, "speculation.num_speculative_tokens=0"], "takes one draft length above 0"),
        (["speculation.head_dtype=float8"], 'head_dtype = "float8": .*computes a head in model.dtype'),
        (["speculation.min_confidence=0.5"], "min_confidence = 0.5: .*verifies the whole draft"),
        (["speculation.method=draft_model", "speculation.draft_model='layers:1'", DRAFT], "loads a draft model from"),
        (["speculation.method=suffix", DRAFT, "sampling.min_p=0.1"], "min_p = 0.1: .*not support min_p with drafts"),
        (["model.dtype=float64"], "does not support it"),
        (["model.yarn_factor=2.0"], "yarn_factor = 2.0: .*config.json"),
        (["engine.order=longest"], "starts requests in order of arrival"),
        (["train.inflight=keep"], "can't clear its prefix cache"),
        (["engine.vllm.speculative_config={rejection_sample_method = 'synthetic'}"], "keeps the policy's distribution"),
        (["engine.vllm.rejection_sample_method=synthetic"], "synthetic or typical acceptance does not"),
        (["engine.vllm.posterior_acceptance_threshold=0.09"], "synthetic or typical acceptance does not"),
        (["engine.vllm.quantization=fp8"], "engine.vllm.quantization: not an allowed vLLM option"),
        (["engine.vllm.trust_remote_code=true"], "engine.vllm.trust_remote_code: not an allowed vLLM option"),
    ],
)
def test_settings_that_vllm_rejects(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, [VLLM, *overrides])
    if not any(".vllm." in override for override in overrides):  # the local engine takes them
        load_config(None, [override for override in overrides if override != DRAFT])


@pytest.mark.parametrize("override", ["engine.tensor_parallel_size=2", "engine.vllm.block_size=64"])
def test_settings_that_only_vllm_takes(override: str) -> None:
    with pytest.raises(ConfigError, match=r'engine.kind = "vllm"'):
        load_config(None, [override])
    load_config(None, [VLLM, override])


def test_settings_as_vllm_options() -> None:
    model = tiny_config(head_dim=32, num_layers=3)
    given = [VLLM, "engine.kv_tokens=1000", "engine.max_num_seqs=4", "engine.graphs=false", "engine.vllm.block_size=32"]
    draft = ["speculation.method=ngram", DRAFT, "speculation.num_speculative_tokens=5"]
    options = vllm_options(load_config(None, [*given, *draft, "engine.prefix_sharing=false"]), Path("x"), model)
    assert options["speculative_config"] == {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 5,
        "rejection_sample_method": "standard",
    }
    assert options["enforce_eager"] and options["block_size"] == 32 and not options["enable_prefix_caching"]
    assert options["kv_cache_memory_bytes"] == 2 * 3 * 2 * 32 * 4 * 9 * 128  # 8 blocks of 128, and a reserved one
    assert options["max_model_len"] == options["max_num_batched_tokens"] - 256 == 256  # no chunked prefill
    suffix = vllm_options(
        load_config(None, [VLLM, DRAFT, "speculation.method=suffix", "speculation.suffix_recency=0.5"]),
        Path("x"),
        model,
    )
    assert suffix["speculative_config"]["method"] == "custom_class"
    assert suffix["additional_config"]["paceline_history"]["recency"] == 0.5
    assert vllm_options(load_config(None, [VLLM]), Path("x"), model)["speculative_config"] is None


def test_vllm_is_rejected_where_it_can_not_run() -> None:
    config = load_config(None, [VLLM, "model.name=smollm2-135m"])
    with pytest.raises(ValueError, match=r'engine.kind = "vllm": is for `paceline train`; here use "local"'):
        build_engine(config)
    with pytest.raises(ValueError, match="vLLM is not installed here; run paceline in an environment that has it"):
        build_rollout_engine(config)


def test_shipped_configuration_uses_vllm(tmp_path: Path) -> None:
    tiny = tiny_config()
    config = load_config(Path(__file__).parents[3] / "configs" / "vllm.toml")
    assert config.engine.kind == "vllm" and not config.speculation.audit_every
    assert vllm_options(config, tmp_path, tiny)["speculative_config"]["method"] == "custom_class"
