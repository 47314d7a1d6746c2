"""Shapes of well-known models by name, for measuring without their weights."""

from __future__ import annotations

from paceline.model.config import ModelConfig

SHAPES = {
    "qwen3-8b": ModelConfig(
        "qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 1e-6, 1e6, 40960, qk_norm=True, eos_token_ids=(151645,)
    ),
    "qwen3-1.7b": ModelConfig(
        "qwen3", 151936, 2048, 6144, 28, 16, 8, 128, 1e-6, 1e6, 40960, qk_norm=True, tie_embeddings=True,
        eos_token_ids=(151645,),
    ),
    "qwen3-0.6b": ModelConfig(
        "qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 1e-6, 1e6, 40960, qk_norm=True, tie_embeddings=True,
        eos_token_ids=(151645,),
    ),
    "qwen2.5-1.5b": ModelConfig(
        "qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 1e-6, 1e6, 131072, tie_embeddings=True, qkv_bias=True,
        eos_token_ids=(151643,),
    ),
    "smollm2-135m": ModelConfig(
        "llama", 49152, 576, 1536, 30, 9, 3, 64, 1e-5, 1e5, 8192, tie_embeddings=True, eos_token_ids=(2,)
    ),
}  # fmt: skip
