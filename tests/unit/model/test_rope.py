"""Rotary tables are bit-identical to those of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.model.config import ModelConfig
from paceline.model.rope import rope_frequencies, rope_tables

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
KINDS: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 3.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    YARN,
    {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    {**YARN, "attention_factor": 1.3},
    {**YARN, "factor": 1.0},
]


def config(scaling: dict[str, Any] | None, head_dim: int = 64, theta: float = 5e5) -> ModelConfig:
    return ModelConfig("llama", 8, 4 * head_dim, 8, 1, 4, 4, head_dim, 1e-6, theta, 256, scaling)


def theirs(scaling: dict[str, Any] | None, head_dim: int = 64, theta: float = 5e5) -> tuple[torch.Tensor, torch.Tensor]:
    parameters = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    hf = LlamaConfig(
        hidden_size=4 * head_dim, num_attention_heads=4, max_position_embeddings=256, rope_parameters=parameters
    )
    cos, sin = LlamaRotaryEmbedding(hf)(torch.zeros(1), torch.arange(256)[None])
    return cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2]


@pytest.mark.parametrize("scaling", KINDS, ids=str)
@pytest.mark.parametrize("head_dim, theta", [(8, 1e4), (64, 5e5), (128, 1e6)])
def test_equals_transformers(scaling: dict[str, Any] | None, head_dim: int, theta: float) -> None:
    for ours, reference in zip(
        rope_tables(config(scaling, head_dim, theta)), theirs(scaling, head_dim, theta), strict=True
    ):
        assert ours.shape == (256, head_dim // 2)
        assert torch.equal(ours, reference)


def test_frequencies_do_not_change_with_the_version_of_transformers() -> None:
    """transformers computes the scaled ones. A change there would change the logits of a trained model."""
    recorded = [
        ([1.0, 0.10000000149011612, 0.009999999776482582, 0.0010000000474974513], 1.0),
        ([0.3333333432674408, 0.03333333507180214, 0.003333333181217313, 0.0003333333588670939], 1.0),
        ([1.0, 0.013042256236076355, 0.0012499999720603228, 0.0001250000059371814], 1.0),
        ([1.0, 0.0625, 0.0024999999441206455, 0.0002500000118743628], 1.138629436111989),
        ([1.0, 0.02500000037252903, 0.0024999999441206455, 0.0002500000118743628], 1.138629436111989),
        ([1.0, 0.0625, 0.0024999999441206455, 0.0002500000118743628], 1.0379100195867799),
    ]
    for scaling, (frequencies, magnitude) in zip(KINDS, recorded, strict=False):
        found, factor = rope_frequencies(config(scaling, 8, 1e4))
        assert found.tolist() == frequencies and factor == magnitude


def test_all_kinds_differ() -> None:
    tables = [rope_tables(config(scaling))[0] for scaling in KINDS[:-1]]
    for i, table in enumerate(tables):
        assert not any(torch.equal(table, other) for other in tables[:i])


@pytest.mark.parametrize(
    "scaling, message",
    [
        ({"rope_type": "longrope"}, "'longrope' is not supported; supported are default, linear, llama3, yarn"),
        ({"rope_type": "linear"}, "factor is missing"),
        ({"rope_type": "yarn", "factor": "4", "original_max_position_embeddings": 64}, "factor = '4'"),
        ({**YARN, "truncate": "no"}, "truncate = 'no': must be true or false"),
    ],
)
def test_unsupported_scaling_raises(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_tables(config(scaling))
