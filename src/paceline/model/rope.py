"""Rotary position tables for the RoPE kinds of the supported families: default, linear, llama3 and yarn.

The results are bit-identical to those of transformers: frequencies and angles in float32, computed on the CPU for
every device. Models are trained with this rounding; more precise float64 angles would move the logits of long contexts
away from those of other engines.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from paceline.model.config import ModelConfig

Tables = tuple[Tensor, Tensor]  # cos, sin [max_positions, E/2]


class Rope:
    """Caches the tables for one device and dtype. They are computed at the first call, and again if these change."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._tables: Tables | None = None

    def tables(self, like: Tensor) -> Tables:
        """In at least float32, on the device of `like`."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if self._tables is None or self._tables[0].device != like.device or self._tables[0].dtype != dtype:
            cos, sin = rope_tables(self.config)
            self._tables = cos.to(like.device, dtype), sin.to(like.device, dtype)
        return self._tables


def rope_tables(config: ModelConfig) -> Tables:
    """cos and sin of every position's angles, in float32."""
    frequencies, magnitude = rope_frequencies(config)
    angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position [E/2], and the factor on cos and sin (yarn's attention temperature; otherwise 1)."""
    if config.rope_scaling is None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        return 1.0 / config.rope_theta**exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # Not a config class of transformers: its validation logs warnings, and ModelConfig is validated already.
    hf = SimpleNamespace(
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        rope_parameters={**config.rope_scaling, "rope_theta": config.rope_theta},
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[config.rope_scaling["rope_type"]](hf, torch.device("cpu"))
