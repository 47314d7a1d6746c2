"""A decoder's configuration, and its conversion from and to a Hugging Face config.json.

The decoder can run every valid ModelConfig. An unsupported setting raises a ValueError that names the key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
# RoPE type -> its required parameters. "default" has no scaling.
ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
# Upper limits for the sizes in a config.json. A larger number is a mistake or an attack: it would exhaust the memory
# before a tensor is read.
MAX_POSITIONS = 1 << 24
LIMITS = {
    "vocab_size": 10_000_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "num_hidden_layers": 1000,
    "num_attention_heads": 10_000,
    "num_key_value_heads": 10_000,
    "head_dim": 10_000,
    "max_position_embeddings": MAX_POSITIONS,
}
ROPE_OPTIONS = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense decoder of the Llama, Qwen2 or Qwen3 family."""

    family: str  # "llama" | "qwen2" | "qwen3"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: dict[str, Any] | None = None  # None: default RoPE; else {"rope_type": "linear"|"llama3"|"yarn", ...}
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads = {self.num_heads} must be a multiple of "
                f"num_key_value_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even, because rotary embeddings rotate pairs")
        if self.max_positions > MAX_POSITIONS:
            raise ValueError(
                f"max_position_embeddings, multiplied by the rope scaling factor, is {self.max_positions}: must be at "
                f"most {MAX_POSITIONS}"
            )
        if self.rope_scaling is not None:
            kind = self.rope_scaling.get("rope_type")
            if not isinstance(kind, str) or kind not in ROPE_KEYS:
                raise ValueError(
                    f"rope_type = {_short(kind)} is not supported; supported are {', '.join(['default', *ROPE_KEYS])}"
                )
            for key in ROPE_KEYS[kind]:
                value_of(self.rope_scaling, key, float, of=f"the {kind} rope parameters")
            for key in ROPE_OPTIONS.get(kind, ()):
                expected = bool if key == "truncate" else float
                value_of(self.rope_scaling, key, expected, None, of=f"the {kind} rope parameters")

    @staticmethod
    def from_hf(hf: Mapping[str, Any]) -> ModelConfig:
        """From the contents of a config.json, as transformers 4 or 5 writes it."""
        check_limits(hf)
        family = _family(hf)
        _refuse_sliding_window(hf)
        if "quantization_config" in hf:
            raise ValueError(
                "config.json: quantization_config: quantised weights are not supported; use the original checkpoint"
            )
        if (act := hf.get("hidden_act", "silu")) != "silu":
            raise ValueError(f"config.json: hidden_act = {act!r} is not supported; supported is 'silu'")
        num_heads = value_of(hf, "num_attention_heads", int)
        hidden_size = value_of(hf, "hidden_size", int)
        max_positions = value_of(hf, "max_position_embeddings", int)
        theta, scaling = _rope(hf, max_positions)
        if scaling is not None and scaling["rope_type"] == "yarn":
            # Qwen's recipe adds yarn without raising max_position_embeddings, but it is meant to extend the context.
            factor = value_of(scaling, "factor", float)
            original = value_of(scaling, "original_max_position_embeddings", float)
            max_positions = max(max_positions, int(factor * original))
        attention_bias = value_of(hf, "attention_bias", bool, False)
        return ModelConfig(
            family=family,
            vocab_size=value_of(hf, "vocab_size", int),
            hidden_size=hidden_size,
            intermediate_size=value_of(hf, "intermediate_size", int),
            num_layers=value_of(hf, "num_hidden_layers", int),
            num_heads=num_heads,
            num_kv_heads=value_of(hf, "num_key_value_heads", int, num_heads),
            head_dim=value_of(hf, "head_dim", int, 128 if family == "qwen3" else hidden_size // num_heads),
            norm_eps=value_of(hf, "rms_norm_eps", float),
            rope_theta=theta,
            max_positions=max_positions,
            rope_scaling=scaling,
            tie_embeddings=value_of(hf, "tie_word_embeddings", bool, False),
            qkv_bias=attention_bias or family == "qwen2",
            o_bias=attention_bias and family != "qwen2",
            mlp_bias=value_of(hf, "mlp_bias", bool, False) and family == "llama",
            qk_norm=family == "qwen3",
            eos_token_ids=token_ids(hf, "eos_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json that transformers loads as this model."""
        attention_bias = self.qkv_bias and self.family != "qwen2"
        assert self.o_bias == attention_bias and self.qk_norm == (self.family == "qwen3")
        hf: dict[str, Any] = {
            "architectures": [next(name for name, family in FAMILIES.items() if family == self.family)],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,  # transformers 4 reads these two, transformers 5 the third
            "rope_scaling": self.rope_scaling,
            "rope_parameters": {"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_embeddings,
            "bos_token_id": None,
            "eos_token_id": list(self.eos_token_ids) or None,
            # Without it, transformers 5.17 warns that the tokenizer may be wrong.
            "transformers_version": version("transformers"),
        }
        if self.family != "qwen2":
            hf["attention_bias"] = attention_bias
        if self.family == "llama":
            hf["mlp_bias"] = self.mlp_bias
        return hf


def num_matrix_weights(model: ModelConfig, num_in: int | None = None) -> int:
    """Weights in the matrices of one layer: qkv, o, gate and up, down. `num_in`: the inputs of qkv, if not the hidden
    size."""
    d, heads = model.hidden_size, model.num_heads * model.head_dim
    qkv = (d if num_in is None else num_in) * (heads + 2 * model.num_kv_heads * model.head_dim)
    return qkv + heads * d + 3 * d * model.intermediate_size


def with_yarn(config: ModelConfig, factor: float) -> ModelConfig:
    """The same model with its context extended `factor` times (YaRN, arXiv 2309.00071)."""
    if config.rope_scaling is not None:
        raise ValueError(
            f"model.yarn_factor = {factor}: the model has {config.rope_scaling['rope_type']} rope scaling already, for "
            f"{config.max_positions} positions; remove yarn_factor"
        )
    original = config.max_positions
    scaling = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": original}
    return replace(config, rope_scaling=scaling, max_positions=int(original * factor))


def check_limits(hf: Mapping[str, Any]) -> None:
    """Raise ValueError if a size in a config.json exceeds its limit. Types are not checked here."""
    for key, limit in LIMITS.items():
        value = hf.get(key)
        if isinstance(value, int) and value > limit:
            raise ValueError(f"config.json: {key} = {_short(value)}: must be at most {limit}")


def _short(value: object) -> str:
    """A value as quoted in an error message, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def token_ids(hf: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One token id, a list of them, or null, as a tuple."""
    ids = hf.get(key)
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise ValueError(f"{key} = {hf[key]!r}: must be a token id, a list of token ids or null")
    return tuple(ids)


def _family(hf: Mapping[str, Any]) -> str:
    supported = ", ".join(FAMILIES)
    names = hf.get("architectures")
    if not names:
        if hf.get("model_type") in FAMILIES.values():
            return str(hf["model_type"])
        raise ValueError(f"config.json: architectures is missing; supported are {supported}")
    name = names[0] if isinstance(names, list) else names
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"config.json: architecture {str(name)[:60]} is not supported; supported are {supported}")
    return FAMILIES[name]


def _refuse_sliding_window(hf: Mapping[str, Any]) -> None:
    num_layers = value_of(hf, "num_hidden_layers", int)
    kinds = hf.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list):
            raise ValueError(f"config.json: layer_types = {_short(kinds)}: must be a list")
        sliding = any(kind != "full_attention" for kind in kinds)
    else:
        on = hf.get("use_sliding_window", False) and hf.get("sliding_window") is not None
        sliding = on and (hf.get("max_window_layers") == 0 or value_of(hf, "max_window_layers", int, 28) < num_layers)
    if sliding:
        raise ValueError(
            f"config.json: sliding window attention (sliding_window = {hf.get('sliding_window')!r}) is not supported; "
            "use a model with full attention in all layers"
        )


def _rope(hf: Mapping[str, Any], max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (transformers 4)."""
    given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"config.json: the rope parameters must be an object, got {given!r}")
    theta = value_of(given, "rope_theta", float, value_of(hf, "rope_theta", float, 10_000.0))
    for source in (given, hf):
        if (part := source.get("partial_rotary_factor")) not in (None, 1, 1.0):
            raise ValueError(f"config.json: partial_rotary_factor = {part!r} is not supported; supported is 1.0")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return theta, None
    if not isinstance(kind, str):
        raise ValueError(f"config.json: rope_type = {_short(kind)}: must be a string")
    keys = (*ROPE_KEYS.get(kind, ()), *ROPE_OPTIONS.get(kind, ()))
    scaling = {"rope_type": kind} | {key: given[key] for key in keys if given.get(key) is not None}
    if "original_max_position_embeddings" in keys:
        outside = hf.get("original_max_position_embeddings")  # some checkpoints have it there; it takes precedence
        scaling["original_max_position_embeddings"] = outside or given.get(
            "original_max_position_embeddings", max_positions
        )
    return theta, scaling


_MISSING: Any = object()


def value_of(source: Mapping[str, Any], key: str, kind: type, default: Any = _MISSING, of: str = "config.json") -> Any:
    """A positive int, a positive float (or int) or a bool. Null means absent."""
    value = source.get(key)
    if value is None:
        if default is _MISSING:
            raise ValueError(f"{of}: {key} is missing")
        return default
    if kind is bool:
        ok = isinstance(value, bool)
    else:
        numbers = (int, float) if kind is float else (int,)
        ok = isinstance(value, numbers) and not isinstance(value, bool) and 0 < value < float("inf")
    if not ok:
        expected = {int: "a positive integer", float: "a positive number", bool: "true or false"}[kind]
        raise ValueError(f"{of}: {key} = {_short(value)}: must be {expected}")
    return value
