"""The config.json of EAGLE-3 heads, in two layouts, and the check that a head fits a target.

The layout of `speculators`, which vLLM reads too, is read and written. SpecForge's flat layout, which SGLang reads, is
only read. They number the target's layers differently: SpecForge stores a layer's index from 0. `speculators`, vLLM and
Paceline store the number of layers up to and including it, which is one more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from paceline.model.config import FAMILIES, ModelConfig, value_of
from paceline.model.eagle3 import HeadConfig, default_layer_ids
from paceline.model.weights import ModelError

IDS = "eagle_aux_hidden_state_layer_ids"


def to_speculators(config: HeadConfig, target_name: str, num_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    dtype_name = str(dtype).removeprefix("torch.")
    architecture = next(name for name, family in FAMILIES.items() if family == config.layer.family)
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": [architecture]},
        },
        "transformer_layer_config": {**config.layer.to_hf(), "dtype": dtype_name},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        IDS: list(config.layer_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": False,
        "embed_requires_grad": config.own_embedding,
        "tie_word_embeddings": False,
        "dtype": dtype_name,
    }


def from_json(hf: Mapping[str, Any], target: ModelConfig, own_embedding: bool) -> HeadConfig:
    if "speculators_model_type" in hf:
        layer, ids = _from_speculators(hf)
    elif "LlamaForCausalLMEagle3" in (hf.get("architectures") or []):
        layer, ids = _from_specforge(hf)
    else:
        raise ValueError(
            f"architectures = {hf.get('architectures')!r} is no EAGLE-3 head; supported layouts are `speculators` "
            "(speculators_model_type = 'eagle3') and SpecForge (architectures = ['LlamaForCausalLMEagle3'])"
        )
    return HeadConfig(
        layer,
        draft_vocab_size=value_of(hf, "draft_vocab_size", int, layer.vocab_size),
        layer_ids=ids or default_layer_ids(target.num_layers),
        target_hidden_size=value_of(hf, "target_hidden_size", int, layer.hidden_size),
        norm_before_residual=bool(hf.get("norm_before_residual")),
        fc_norm=bool(hf.get("fc_norm")),
        own_embedding=own_embedding,
    )


def _from_speculators(hf: Mapping[str, Any]) -> tuple[ModelConfig, tuple[int, ...]]:
    if (kind := hf["speculators_model_type"]) != "eagle3":
        raise ValueError(f"speculators_model_type = {kind!r} is not supported; supported is 'eagle3'")
    inner = hf.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ValueError(f"transformer_layer_config = {inner!r}: must be the configuration of the head's layer")
    for key in ("norm_before_fc", "norm_output"):
        if hf.get(key):
            raise ValueError(f"{key} = {hf[key]!r}: this variant of EAGLE-3 is not supported; use a head without it")
    if not isinstance(hf.get("norm_before_residual"), bool):
        raise ValueError(
            "norm_before_residual is missing, and its default differs between libraries; set it to true or false, as "
            "the head was trained"
        )
    value_of(hf, "draft_vocab_size", int)  # has no default
    return _layer(inner), _ids(hf, first=1)


def _from_specforge(hf: Mapping[str, Any]) -> tuple[ModelConfig, tuple[int, ...]]:
    eagle = hf.get("eagle_config") or {}
    if not isinstance(eagle, dict):
        raise ValueError(f"eagle_config = {eagle!r}: must be an object")
    if hf.get("norm_before_fc") or eagle.get("norm_before_fc"):
        raise ValueError("norm_before_fc = true: this variant of EAGLE-3 is not supported; use a head without it")
    if eagle.get("use_aux_hidden_state") is False:
        raise ValueError(
            "eagle_config.use_aux_hidden_state = false: a head without auxiliary hidden states is not supported"
        )
    if hf.get("norm_output") is not None:
        raise ValueError(
            f"norm_output = {hf['norm_output']!r}: its meaning differs between libraries; remove it if the head "
            "applies its last norm only before the LM head. Other variants are not supported"
        )
    if IDS in hf:
        raise ValueError(
            f"{IDS} = {hf[IDS]!r}: in this layout it belongs into eagle_config, where layers are counted from 0; move "
            "it there"
        )
    return _layer(hf), _ids(eagle, first=0)


def _layer(hf: Mapping[str, Any]) -> ModelConfig:
    """A head's `model_type` is the family of its layer; its `architectures` is the head's or the target's class."""
    if (family := hf.get("model_type")) not in FAMILIES.values():
        raise ValueError(f"model_type = {family!r} is not supported; supported are {', '.join(FAMILIES.values())}")
    layer = ModelConfig.from_hf({**hf, "architectures": None, "tie_word_embeddings": False})
    if layer.num_layers != 1:
        raise ValueError(
            f"num_hidden_layers = {layer.num_layers}: a head with several layers is not supported; use one with 1"
        )
    return layer


def _ids(source: Mapping[str, Any], first: int) -> tuple[int, ...]:
    """The number of layers up to and including each, if layers are counted from `first`. Empty: not given."""
    ids = source.get(IDS)
    if ids is None:
        return ()
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{IDS} = {ids!r}: must be a list of target layers")
    return tuple(i + 1 - first for i in ids)


def check_fit(config: HeadConfig, target: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Raise ModelError unless the head fits a target of this shape."""
    layer, other = config.layer, "it was trained for another target; train one for this target: `paceline train-draft`"
    if layer.vocab_size != target.vocab_size:
        raise ModelError(f"{path}: vocab_size = {layer.vocab_size}, but the target's is {target.vocab_size}: {other}")
    if config.draft_vocab_size > target.vocab_size:
        raise ModelError(
            f"{path}: draft_vocab_size = {config.draft_vocab_size} exceeds the target's vocabulary of "
            f"{target.vocab_size}: {other}"
        )
    if config.target_hidden_size != target.hidden_size:
        raise ModelError(
            f"{path}: target_hidden_size = {config.target_hidden_size}, but the target's hidden_size is "
            f"{target.hidden_size}: {other}"
        )
    if layer.hidden_size != target.hidden_size and not config.own_embedding:
        raise ModelError(
            f"{path}: hidden_size = {layer.hidden_size}, but the target's is {target.hidden_size}: the head can't use "
            f"the target's embedding and has none of its own: {other}"
        )
    ids = config.layer_ids
    if not all(1 <= i <= target.num_layers for i in ids) or len(set(ids)) < len(ids):
        raise ModelError(
            f"{path}: {IDS} {list(ids)}, counted from 1, must be different numbers from 1 to the target's "
            f"{target.num_layers} layers: {other}"
        )
    if (fc := shapes.get("fc.weight")) and fc[-1] != config.aux_hidden_size:
        raise ModelError(
            f"{path}: fc.weight has {fc[-1]} inputs, but {IDS} {list(ids)} are {len(ids)} layers of size "
            f"{config.target_hidden_size}; use the ids that the head was trained with"
        )
    if (rows := shapes.get("lm_head.weight")) and rows[0] != config.draft_vocab_size:
        raise ModelError(
            f"{path}: draft_vocab_size = {config.draft_vocab_size}, but lm_head.weight has {rows[0]} rows; config and "
            "weights are from different heads"
        )
    if layer.max_positions < target.max_positions:
        raise ModelError(
            f"{path}: max_position_embeddings = {layer.max_positions}, but the target's is {target.max_positions}; "
            "train a head for the target's context, or set it to the target's number to draft beyond the context that "
            "the head was trained for"
        )
