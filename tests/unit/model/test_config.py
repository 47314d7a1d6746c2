"""ModelConfig from and to config.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from paceline.model.config import ModelConfig

# As on the hub, written by transformers 4.
LLAMA_32 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN_25 = {
    "architectures": ["Qwen2ForCausalLM"],
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_llama_of_transformers_4() -> None:
    config = ModelConfig.from_hf(LLAMA_32)
    assert (config.family, config.num_layers, config.head_dim, config.num_kv_heads) == ("llama", 16, 64, 8)
    assert config.rope_theta == 500_000 and config.rope_scaling == LLAMA_32["rope_scaling"]
    assert config.eos_token_ids == (128001, 128008, 128009)
    assert config.tie_embeddings and not config.qkv_bias and not config.qk_norm


def test_qwen2_of_transformers_4() -> None:
    config = ModelConfig.from_hf(QWEN_25)
    assert (config.family, config.head_dim, config.rope_scaling, config.eos_token_ids) == ("qwen2", 64, None, (151645,))
    assert config.qkv_bias and not config.o_bias


def test_qwen_with_yarn_has_a_longer_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = ModelConfig.from_hf(QWEN_25 | {"rope_scaling": scaling})
    assert config.rope_scaling == {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config.max_positions == 131072
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_round_trip_through_transformers(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str, rope: str
) -> None:
    config = ModelConfig.from_hf(json.loads((checkpoint(family, rope) / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert ModelConfig.from_hf(json.loads((tmp_path / "again" / "config.json").read_text())) == config


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"architectures": ["GptOssForCausalLM"]},
            "GptOssForCausalLM is not supported; supported are LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM",
        ),
        ({"architectures": None, "model_type": "mamba"}, "architectures is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "896"}, "hidden_size = '896': must be a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be a positive integer"),
        ({"rms_norm_eps": True}, "rms_norm_eps = True: must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes': must be true or false"),
        ({"num_key_value_heads": 5}, "num_attention_heads = 14 must be a multiple of num_key_value_heads = 5"),
        ({"head_dim": 63}, "head_dim = 63 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type = 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": [4]}, "must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"use_sliding_window": True}, "sliding window attention .* is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window attention .* is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights are not supported"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:40],
)
def test_unsupported_configs_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(QWEN_25 | changes)


def test_a_sliding_window_that_no_layer_uses_is_accepted() -> None:
    assert ModelConfig.from_hf(QWEN_25 | {"use_sliding_window": True, "max_window_layers": 24}).num_layers == 24
