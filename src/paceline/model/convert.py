"""Convert a GGUF file (llama.cpp) to a Hugging Face directory: weights dequantised, tokenizer rebuilt.

Supports the architectures llama, qwen2 and qwen3. Metadata of the architecture that this module does not know raises an
error, because it may change what the model computes. Heavy libraries are imported inside the functions that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.model.config import FAMILIES, ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.gguf_file import GgufFile
from paceline.model.gguf_tokenizer import build_tokenizer, save_tokenizer, special_ids
from paceline.model.hf_directory import write_directory
from paceline.model.rope import rope_frequencies
from paceline.model.tensor_file import TensorSpec
from paceline.model.weights import EMBED, check_views, decoder_views

GGUF_EMBED, GGUF_LM_HEAD, ROPE_FACTORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
KNOWN_KEYS = {  # after "<architecture>."
    *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "tensor_data_layout"),
    *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    *("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
    *(f"rope.scaling.{key}" for key in ("type", "factor", "original_context_length", "finetuned")),
    *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
}
NUM_SAMPLED_ROWS = 256


def gguf_to_hf(
    file: GgufFile,
    target: Path,
    track: Callable[[list[Any]], Iterable[Any]] = iter,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Write `target`/{config.json, generation_config.json, model.safetensors, tokenizer files} from a GGUF file.
    `track` iterates over the tensors and shows the progress."""
    family = _family(file)
    stored = _stored(file)
    config = _config(file, family, tied=GGUF_EMBED not in stored or GGUF_LM_HEAD not in stored)
    hf_names = _hf_names(file, config, stored)
    special = special_ids(file)
    save_tokenizer(build_tokenizer(file, config.max_positions), target)
    dtype_name = str(dtype).removeprefix("torch.")
    write_directory(
        target,
        ((hf_names[name], _values(file, name, config).to(dtype)) for name in track(stored)),
        {hf_names[name]: TensorSpec(dtype, file.shape(name)) for name in stored},
        {"generation_config.json": special, "config.json": {**config.to_hf(), **special, "dtype": dtype_name}},
    )


def num_bytes(file: GgufFile, dtype: torch.dtype) -> int:
    """Disk space for the weights, at most."""
    return dtype.itemsize * sum(int(tensor.n_elements) for tensor in file.tensors.values())


def _stored(file: GgufFile) -> list[str]:
    """The tensors to write. Of a tied model only one of embedding and LM head is among them.

    llama.cpp quantises the embedding and the LM head of a tied model separately, so the file may have two different
    copies of one matrix. A tied model needs one: the copy with more bits is closer to the original."""
    names = [name for name in file.tensors if name != ROPE_FACTORS]
    if GGUF_EMBED not in names or GGUF_LM_HEAD not in names or not _are_copies(file, GGUF_EMBED, GGUF_LM_HEAD):
        return names
    worse = GGUF_EMBED if file.bits(GGUF_EMBED) < file.bits(GGUF_LM_HEAD) else GGUF_LM_HEAD
    return [name for name in names if name != worse]


def _are_copies(file: GgufFile, first: str, second: str) -> bool:
    """Whether two matrices differ by no more than quantisation does, on a sample of rows.

    With b bits per weight, quantisation changes normally distributed weights by about 2 * 2^-b of their size. Twice
    that is allowed. Matrices that were trained separately differ by about their own size."""
    if file.shape(first) != file.shape(second):
        return False
    rows = np.unique(np.linspace(0, file.shape(first)[0] - 1, NUM_SAMPLED_ROWS).astype(np.int64))
    a, b = file.values(first, rows), file.values(second, rows)
    allowed = min(0.5, 4 * (2 ** -file.bits(first) + 2 ** -file.bits(second)))
    return bool(np.linalg.norm(a - b) <= allowed * np.linalg.norm(b))


def _family(file: GgufFile) -> str:
    """The architecture. Raises ModelError if it, or a key of its metadata, is not supported."""
    family = file.get("general.architecture")
    if family not in FAMILIES.values():
        raise file.error(
            f"general.architecture = {family!r} is not supported; supported are {', '.join(FAMILIES.values())}"
        )
    for key in file.keys:
        unknown = key.startswith(f"{family}.") and key.removeprefix(f"{family}.") not in KNOWN_KEYS
        if unknown and (value := file.get(key)) not in (0, "none"):  # 0 and false: not used
            raise file.error(f"{key} = {value!r} is not supported; use a model without it")
    return str(family)


def _config(file: GgufFile, family: str, tied: bool) -> ModelConfig:
    def size(key: str, *default: int) -> int:
        return file.get_size(f"{family}.{key}", *default)

    num_heads, hidden_size = size("attention.head_count"), size("embedding_length")
    head_dim = size("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := size(key, head_dim)) != head_dim:
            raise file.error(f"{family}.{key} = {other} is not supported; supported is the head dimension, {head_dim}")
    hf = {
        "model_type": family,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": file.get_float(f"{family}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": size("context_length"),
        "rope_theta": file.get_float(f"{family}.rope.freq_base", 10_000.0),
        "rope_scaling": _rope_scaling(file, family),
        "tie_word_embeddings": tied,
        "eos_token_id": special_ids(file)["eos_token_id"],
    }
    try:
        config = ModelConfig.from_hf(hf)
    except ValueError as error:
        raise file.error(str(error)) from None
    if ROPE_FACTORS in file.tensors:
        _check_rope_factors(file, config)
    return config


def _vocab_size(file: GgufFile) -> int:
    """The rows of the embedding. Some pad it, so it may have more rows than there are tokens."""
    if GGUF_EMBED not in file.tensors:
        raise file.error(f"tensor {GGUF_EMBED} is missing; use a complete GGUF file")
    num_rows, num_tokens = file.shape(GGUF_EMBED)[0], len(file.get("tokenizer.ggml.tokens"))
    if num_tokens > num_rows:
        raise file.error(f"{num_tokens} tokenizer.ggml.tokens, but {GGUF_EMBED} has only {num_rows} rows")
    return num_rows


def _rope_scaling(file: GgufFile, family: str) -> dict[str, Any] | None:
    at = f"{family}.rope.scaling"
    factor, old_factor = f"{at}.factor", f"{family}.rope.scale_linear"
    if factor not in file.keys and old_factor in file.keys:
        factor = old_factor
    kind = file.get(f"{at}.type", "linear" if factor in file.keys else "none")
    if ROPE_FACTORS in file.tensors:
        # llama.cpp stores llama3 scaling as a divisor of each frequency. The largest is the factor; the others are the
        # same in all Llama 3 models. `_check_rope_factors` compares the result with the tensor.
        frequencies = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        return {"rope_type": "llama3", "factor": float(file.values(ROPE_FACTORS).max()), **frequencies}
    if kind == "none":
        return None
    if kind == "linear":
        scale = file.get_float(factor)
        return None if scale in (0, 1) else {"rope_type": "linear", "factor": scale}  # llama.cpp reads 0 as 1
    if kind != "yarn":
        raise file.error(f"{at}.type = {kind!r} is not supported; supported are none, linear and yarn")
    original = file.get(f"{at}.original_context_length")
    yarn = {"rope_type": "yarn", "factor": file.get_float(factor), "original_max_position_embeddings": original}
    betas = {key: f"{at}.yarn_{key}" for key in ("beta_fast", "beta_slow")}
    return yarn | {key: file.get_float(field) for key, field in betas.items() if field in file.keys}


def _check_rope_factors(file: GgufFile, config: ModelConfig) -> None:
    scaled, plain = rope_frequencies(config)[0], rope_frequencies(replace(config, rope_scaling=None))[0]
    factors = torch.from_numpy(np.array(file.values(ROPE_FACTORS)))
    if factors.shape != plain.shape or not torch.allclose(plain / scaled, factors, rtol=1e-4):
        raise file.error(f"tensor {ROPE_FACTORS}: not the rope scaling of Llama 3, which is the only one supported")


def _hf_names(file: GgufFile, config: ModelConfig, stored: list[str]) -> dict[str, str]:
    """The Hugging Face name of every stored tensor. Raises ModelError if one is missing, unknown or has a wrong
    shape."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    with torch.device("meta"):
        views = list(decoder_views(Decoder(config)))
    to_gguf = get_tensor_name_map(MODEL_ARCH[config.family.upper()], config.num_layers)
    names = {to_gguf.get_name(name, (".weight", ".bias")): name for view in views for name, _ in view.parts}
    if config.tie_embeddings:
        names[GGUF_LM_HEAD] = EMBED  # `_stored` keeps one of the two
    hf_names = {name: names.get(name, name) for name in stored}
    check_views(views, {hf_names[name]: file.shape(name) for name in stored}, file.path)
    return hf_names


def _values(file: GgufFile, name: str, config: ModelConfig) -> Tensor:
    values = file.values(name)
    if config.family == "llama":
        for stem, num_heads in ((".attn_q.", config.num_heads), (".attn_k.", config.num_kv_heads)):
            if stem in name:
                values = _half_split(values, num_heads)
    return torch.from_numpy(np.array(values))  # a copy: the file is mapped read-only


def _half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """For Llama, llama.cpp rotates adjacent pairs of a head's rows, Hugging Face rows i and i + E/2. For Qwen2 and
    Qwen3, both rotate rows i and i + E/2."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
