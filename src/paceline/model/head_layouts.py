"""The config.json of draft heads, in the layouts of three libraries, and the check that a head fits a target.

The layout of `speculators`, which vLLM reads too, is read and written. Two flat layouts are only read: SpecForge's for
EAGLE-3, which SGLang reads, and DeepSpec's for DSpark, which vLLM reads. They number the target's layers differently:
SpecForge and DeepSpec store a layer's index from 0. `speculators` and Paceline store the number of layers up to and
including it, which is one more.

DSpark is supported as DeepSpec trains it: a vanilla Markov term whose embedding the confidence head reads too, full
attention, and a first position, the anchor, that predicts a token. Its layers are of the Qwen3 family in both layouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.model.config import FAMILIES, ModelConfig, value_of
from paceline.model.draft_head import HeadConfig
from paceline.model.dspark import DSparkConfig
from paceline.model.eagle3 import Eagle3Config, default_layer_ids
from paceline.model.weights import ModelError

IDS, DSPARK_IDS, DEEPSPEC_IDS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids", "target_layer_ids"
SPECFORGE, DEEPSPEC = "LlamaForCausalLMEagle3", "Qwen3DSparkModel"
DSPARK_LIMITS = {"block_size": 1000, "markov_rank": 100_000}  # as config.LIMITS
OTHER = "it was trained for another target; train one for this target: `paceline train-draft`"


# ---- writing ----


def to_speculators(config: HeadConfig, target_name: str, num_tokens: int | None, dtype: torch.dtype) -> dict[str, Any]:
    """`num_tokens` is the number of draft tokens that an engine uses by default; None: as trained, for EAGLE-3 3."""
    dtype_name = str(dtype).removeprefix("torch.")
    if isinstance(config, DSparkConfig):
        kind, own, num_tokens, architectures = "dspark", _dspark_keys(config), num_tokens or config.block_size, []
    else:
        assert isinstance(config, Eagle3Config)
        kind, own, num_tokens = "eagle3", _eagle3_keys(config), num_tokens or 3
        architectures = [next(name for name, family in FAMILIES.items() if family == config.layer.family)]
    return {
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_tokens}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name, "architectures": architectures},
        },
        "transformer_layer_config": {**config.layer.to_hf(), "dtype": dtype_name},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **own,
        "tie_word_embeddings": False,
        "dtype": dtype_name,
    }


def _eagle3_keys(config: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        IDS: list(config.layer_ids),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": False,
        "embed_requires_grad": config.own_embedding,
    }


def _dspark_keys(config: DSparkConfig) -> dict[str, Any]:
    assert config.layer.family == "qwen3"
    return {
        "architectures": ["DSparkDraftModel"],
        DSPARK_IDS: list(config.layer_ids),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": True,
        "sliding_window_non_causal": False,
        "markov_rank": config.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": config.has_confidence,
        "confidence_head_with_markov": True,
    }


# ---- reading ----


def from_json(hf: Mapping[str, Any], target: ModelConfig, own_embedding: bool) -> Eagle3Config | DSparkConfig:
    names = _architectures(hf)
    if (kind := hf.get("speculators_model_type")) is not None:
        if kind == "eagle3":
            return _eagle3(hf, *_from_speculators(hf), target, own_embedding)
        if kind == "dspark":
            return _dspark(hf, *_from_speculators_dspark(hf), own_embedding)
        raise ValueError(f"speculators_model_type = {kind!r} is not supported; supported are 'eagle3' and 'dspark'")
    if SPECFORGE in names:
        return _eagle3(hf, *_from_specforge(hf), target, own_embedding)
    if DEEPSPEC in names:
        return _dspark(hf, *_from_deepspec(hf, target), own_embedding)
    raise ValueError(
        f"architectures = {hf.get('architectures')!r} is no supported head; supported layouts are `speculators` "
        f"(speculators_model_type = 'eagle3' or 'dspark'), SpecForge (architectures = [{SPECFORGE!r}]) and DeepSpec "
        f"(architectures = [{DEEPSPEC!r}])"
    )


def architecture_of(hf: Mapping[str, Any]) -> str:
    """The name of a head's architecture in settings. One that is not supported counts as EAGLE-3: reading it fails."""
    is_dspark = hf.get("speculators_model_type") == "dspark" or DEEPSPEC in _architectures(hf)
    return "dspark" if is_dspark else "eagle3"


def _architectures(hf: Mapping[str, Any]) -> list[Any]:
    names = hf.get("architectures")
    return names if isinstance(names, list) else [names]


def ids_key(hf: Mapping[str, Any]) -> str:
    """Where this layout has the auxiliary layers."""
    if hf.get("speculators_model_type") == "dspark":
        return DSPARK_IDS
    return DEEPSPEC_IDS if DEEPSPEC in _architectures(hf) else IDS


# ---- EAGLE-3 ----


def _eagle3(
    hf: Mapping[str, Any], layer: ModelConfig, ids: tuple[int, ...], target: ModelConfig, own_embedding: bool
) -> Eagle3Config:
    return Eagle3Config(
        layer,
        draft_vocab_size=value_of(hf, "draft_vocab_size", int, layer.vocab_size),
        layer_ids=ids or default_layer_ids(target.num_layers),
        target_hidden_size=value_of(hf, "target_hidden_size", int, layer.hidden_size),
        norm_before_residual=bool(hf.get("norm_before_residual")),
        fc_norm=bool(hf.get("fc_norm")),
        own_embedding=own_embedding,
    )


def _from_speculators(hf: Mapping[str, Any]) -> tuple[ModelConfig, tuple[int, ...]]:
    for key in ("norm_before_fc", "norm_output"):
        if hf.get(key):
            raise ValueError(f"{key} = {hf[key]!r}: this variant of EAGLE-3 is not supported; use a head without it")
    if not isinstance(hf.get("norm_before_residual"), bool):
        raise ValueError(
            "norm_before_residual is missing, and its default differs between libraries; set it to true or false, as "
            "the head was trained"
        )
    value_of(hf, "draft_vocab_size", int)  # has no default
    return _layer(_inner(hf)), _ids(hf, IDS, first=1)


def _inner(hf: Mapping[str, Any]) -> dict[str, Any]:
    inner = hf.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ValueError(f"transformer_layer_config = {inner!r}: must be the configuration of the head's layers")
    return inner


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
    return _layer(hf), _ids(eagle, IDS, first=0)


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


# ---- DSpark ----


def _dspark(
    hf: Mapping[str, Any], layer: ModelConfig, ids: tuple[int, ...], has_anchor: bool | None, own_embedding: bool
) -> DSparkConfig:
    if not has_anchor:
        raise ValueError(
            "sample_from_anchor = false: a head whose first position predicts no token is not supported; use one that "
            "was trained with true"
        )
    if hf.get("markov_rank") == 0:
        raise ValueError(
            "markov_rank = 0: a head without a Markov term (DFlash) is not supported; use one with markov_rank > 0"
        )
    if (kind := hf.get("markov_head_type")) != "vanilla":
        raise ValueError(f"markov_head_type = {kind!r} is not supported; use a head with 'vanilla'")
    has_confidence = value_of(hf, "enable_confidence_head", bool)
    if has_confidence and not value_of(hf, "confidence_head_with_markov", bool):
        raise ValueError(
            "confidence_head_with_markov = false is not supported: use a head that was trained with true, or set "
            "enable_confidence_head = false and remove the tensors of confidence_head"
        )
    for key, limit in DSPARK_LIMITS.items():
        if value_of(hf, key, int) > limit:
            raise ValueError(f"{key} = {hf[key]}: must be at most {limit}")
    return DSparkConfig(
        layer,
        draft_vocab_size=value_of(hf, "draft_vocab_size", int, layer.vocab_size),
        layer_ids=ids,
        target_hidden_size=value_of(hf, "target_hidden_size", int, layer.hidden_size),
        own_embedding=own_embedding,
        mask_token_id=_mask_token(hf, layer.vocab_size),
        block_size=hf["block_size"],
        markov_rank=hf["markov_rank"],
        has_confidence=has_confidence,
    )


def _mask_token(hf: Mapping[str, Any], vocab_size: int) -> int:
    token = hf.get("mask_token_id")
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
        raise ValueError(
            f"mask_token_id = {token!r}: must be the token that the head was trained with, from 0 to {vocab_size - 1}"
        )
    return token


def _from_speculators_dspark(hf: Mapping[str, Any]) -> tuple[ModelConfig, tuple[int, ...], bool]:
    if "sample_from_anchor" not in hf:
        raise ValueError(
            "sample_from_anchor is missing, and its default differs between libraries; set it to true or false, as the "
            "head was trained"
        )
    value_of(hf, "draft_vocab_size", int)  # has no default
    return _qwen3_layers(_inner(hf)), _ids(hf, DSPARK_IDS, first=1), value_of(hf, "sample_from_anchor", bool, False)


def _from_deepspec(hf: Mapping[str, Any], target: ModelConfig) -> tuple[ModelConfig, tuple[int, ...], bool]:
    if (num := value_of(hf, "num_target_layers", int, target.num_layers)) != target.num_layers:
        raise ValueError(f"num_target_layers = {num}, but the target has {target.num_layers} layers: {OTHER}")
    ids = _ids(hf, DEEPSPEC_IDS, first=0)
    if 0 in ids:
        raise ValueError(
            f"{DEEPSPEC_IDS} = {hf[DEEPSPEC_IDS]!r}: -1, the embedding's output, is not supported; use a head that "
            "reads outputs of layers, counted from 0"
        )
    return _qwen3_layers(hf), ids, value_of(hf, "sample_from_anchor", bool, True)


def _qwen3_layers(hf: Mapping[str, Any]) -> ModelConfig:
    """`speculators` has layers of the Qwen3 family under a config of the Llama family, too."""
    if (family := hf.get("model_type")) not in ("llama", "qwen3"):
        raise ValueError(f"model_type = {family!r} is not supported; the layers of a DSpark head are of 'qwen3'")
    layer = ModelConfig.from_hf({**hf, "architectures": None, "tie_word_embeddings": False})
    return replace(layer, family="qwen3", qk_norm=True, mlp_bias=False)


# ---- both ----


def _ids(source: Mapping[str, Any], key: str, first: int) -> tuple[int, ...]:
    """The number of layers up to and including each, if layers are counted from `first`. Empty: not given, which is an
    error for DSpark."""
    ids = source.get(key)
    if ids is None and key == IDS:
        return ()
    if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{key} = {ids!r}: must be a list of target layers")
    return tuple(i + 1 - first for i in ids)


def check_fit(
    config: HeadConfig, key: str, target: ModelConfig, shapes: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Raise ModelError unless the head fits a target of this shape. `key` is where its auxiliary layers are given."""
    layer, other = config.layer, OTHER
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
            f"{path}: {key} {list(ids)}, counted from 1, must be different numbers from 1 to the target's "
            f"{target.num_layers} layers: {other}"
        )
    if (fc := shapes.get("fc.weight")) and fc[-1] != config.aux_hidden_size:
        raise ModelError(
            f"{path}: fc.weight has {fc[-1]} inputs, but {key} {list(ids)} are {len(ids)} layers of size "
            f"{config.target_hidden_size}; use the ids that the head was trained with"
        )
    if (rows := shapes.get("lm_head.weight")) and rows[0] != config.draft_vocab_size:
        raise ModelError(
            f"{path}: draft_vocab_size = {config.draft_vocab_size}, but lm_head.weight has {rows[0]} rows; config and "
            "weights are from different heads"
        )
    if isinstance(config, DSparkConfig) and "lm_head.weight" not in shapes:
        raise ModelError(
            f"{path}: lm_head.weight is missing: the head uses the LM head of the target that it was trained for; add "
            "that tensor to its safetensors"
        )
    if layer.max_positions < target.max_positions:
        raise ModelError(
            f"{path}: max_position_embeddings = {layer.max_positions}, but the target's is {target.max_positions}; "
            "train a head for the target's context, or set it to the target's number to draft beyond the context that "
            "the head was trained for"
        )
