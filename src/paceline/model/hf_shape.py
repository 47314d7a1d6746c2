"""How large a model is, of whatever architecture: what must be known of one that others compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.model.config import LIMITS, check_limits, token_ids
from paceline.model.weights import ModelError, read_json


@dataclass(frozen=True, slots=True)
class Shape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


def check_sizes(config: Any) -> None:
    """Whether the sizes that transformers read in a config.json are those of a model."""
    text = config.get_text_config()
    check_limits({key: getattr(text, key, None) for key in LIMITS})


def read_shape(directory: Path) -> Shape:
    """From a Hugging Face directory; code that comes with a model is never run."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
        text = config.get_text_config()
        check_sizes(config)
        heads = text.num_attention_heads
        generation = directory / "generation_config.json"
        told = read_json(generation) if generation.exists() else {}
        return Shape(
            num_layers=text.num_hidden_layers,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            max_positions=text.max_position_embeddings,
            eos_token_ids=token_ids(told, "eos_token_id")
            or token_ids(read_json(directory / "config.json"), "eos_token_id"),
        )
    except Exception as error:  # transformers and its validators raise all sorts
        raise ModelError(f"{directory}: its config.json can't be used: {error}") from None
