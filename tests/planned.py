"""Memory plans of runs with Qwen3-1.7B and Qwen3-8B on GPUs that are not here."""

from __future__ import annotations

from typing import Any

from paceline.build.config import load_config
from paceline.build.memory_plan import MemoryPlan, RunShape, plan_memory
from paceline.build.memory_text import refusal
from paceline.config import Config
from paceline.model.config import ModelConfig
from paceline.model.shapes import SHAPES

SMALL, LARGE = SHAPES["qwen3-1.7b"], SHAPES["qwen3-8b"]


def on_gpu(*overrides: str) -> Config:
    """Without drafts: 256 sequences of 480 tokens, and 128 for each one's share of the prompt."""
    base = ["model.device=cuda", "model.dtype=bfloat16", "engine.max_num_seqs=256", "sampling.max_tokens=480"]
    return load_config(None, [*base, "speculation.method=none", *overrides])


def plan(model: ModelConfig, total: float, *overrides: str, **rest: Any) -> MemoryPlan:
    """ValueError if the run does not fit."""
    config, shape = on_gpu(*overrides), RunShape(model, int(total), **rest)
    found = plan_memory(config, shape)
    if not found.fits:
        raise ValueError(refusal(config, shape, found))
    return found
