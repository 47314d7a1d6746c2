"""The sizes of a model of any architecture, for models that another engine computes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.model.config import LIMITS, check_limits, token_ids
from paceline.model.weights import ModelError, read_config_json


@dataclass(frozen=True, slots=True)
class Shape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    eos_token_ids: tuple[int, ...]


def load_hf_config(directory: Path) -> tuple[Any, Any]:
    """transformers' config of a directory, and the part of it that describes the language model. Raises ValueError if a
    size exceeds its limit. Code in the directory is never run."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    text = config.get_text_config()
    check_limits({key: getattr(text, key, None) for key in LIMITS})
    return config, text


def read_shape(directory: Path) -> Shape:
    """From a Hugging Face directory."""
    hf = read_config_json(directory)  # first: its errors are better than those of transformers
    try:
        _, text = load_hf_config(directory)
        heads = text.num_attention_heads
        return Shape(
            num_layers=text.num_hidden_layers,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            max_positions=text.max_position_embeddings,
            eos_token_ids=token_ids(hf, "eos_token_id"),
        )
    except Exception as error:  # transformers and its validators raise many types
        raise ModelError(f"{directory}: its config.json can't be used: {error}") from None
