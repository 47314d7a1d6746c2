"""Rotary position tables for the RoPE kinds of the supported families: default, linear, llama3 and yarn.

The arithmetic is transformers', rounding included: frequencies and angles in float32, on the CPU whatever the
model's device. Models were trained with those roundings; "better" float64 angles would move the logits of long
contexts away from every other engine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.model.config import ModelConfig


class Rope:
    """The tables where and as precise as they are needed: made at the first call, and again if that changes."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self._tables: tuple[Tensor, Tensor] | None = None

    def tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin [max_positions, E/2], in float32 (or better) on the device of `like`."""
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if self._tables is None or self._tables[0].device != like.device or self._tables[0].dtype != dtype:
            cos, sin = rope_tables(self.config)
            self._tables = cos.to(like.device, dtype), sin.to(like.device, dtype)
        return self._tables


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, float32 [max_positions, E/2]."""
    frequencies, magnitude = rope_frequencies(config)
    angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rope_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position [E/2], and the factor on cos and sin (yarn's attention temperature; else 1)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    wavelengths = config.rope_theta**exponents
    if config.rope_scaling is None:
        return 1.0 / wavelengths, 1.0
    return _KINDS[config.rope_scaling["rope_type"]](config, config.rope_scaling, wavelengths)


def _linear(config: ModelConfig, scaling: dict[str, Any], wavelengths: Tensor) -> tuple[Tensor, float]:
    return 1.0 / wavelengths / scaling["factor"], 1.0


def _llama3(config: ModelConfig, scaling: dict[str, Any], wavelengths: Tensor) -> tuple[Tensor, float]:
    """Low frequencies are slowed by `factor`, high ones kept, those between blended (Llama 3.1)."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    plain = 1.0 / wavelengths
    period = 2 * math.pi / plain
    slowed = torch.where(period > original / low, plain / factor, plain)
    smooth = (original / period - low) / (high - low)
    blended = (1 - smooth) * slowed / factor + smooth * slowed
    between = (period >= original / high) & (period <= original / low)
    return torch.where(between, blended, slowed), 1.0


def _yarn(config: ModelConfig, scaling: dict[str, Any], wavelengths: Tensor) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): a ramp from kept to slowed frequencies, and a temperature on attention."""
    dim, theta = config.head_dim, config.rope_theta
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dim_of(num_rotations: float) -> float:
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(scaling.get("beta_fast") or 32), dim_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    frequencies = 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep
    return frequencies, _yarn_magnitude(scaling, factor)


def _yarn_magnitude(scaling: dict[str, Any], factor: float) -> float:
    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if (given := scaling.get("attention_factor")) is not None:
        return float(given)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):  # DeepSeek's variant
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1)


_KINDS: dict[str, Callable[[ModelConfig, dict[str, Any], Tensor], tuple[Tensor, float]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
