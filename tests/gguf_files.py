"""GGUF files of tiny checkpoints, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers.pre_tokenizers import ByteLevel

from paceline.model import weights

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h e", "Ġ he"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def kind_of(name: str, tensor: Any) -> Kind:
    """The quantisation of SmolLM2's GGUF file."""
    return Kind.F32 if tensor.ndim == 1 else Kind.Q8_0 if "embed" in name else Kind.Q4_1


def quantised(values: np.ndarray, kind: Kind) -> np.ndarray:
    """Quantised and dequantised."""
    return gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind)


def metadata(model: Path) -> dict[str, Any]:
    """The metadata of a checkpoint, with a tokenizer as SmolLM2 has it."""
    config = weights.read_config(model)
    at = config.family
    return {
        f"{at}.block_count": config.num_layers,
        f"{at}.context_length": config.max_positions,
        f"{at}.embedding_length": config.hidden_size,
        f"{at}.feed_forward_length": config.intermediate_size,
        f"{at}.attention.head_count": config.num_heads,
        f"{at}.attention.head_count_kv": config.num_kv_heads,
        f"{at}.attention.layer_norm_rms_epsilon": config.norm_eps,
        f"{at}.rope.freq_base": config.rope_theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    } | ({f"{at}.attention.key_length": config.head_dim} if at == "qwen3" else {})


def write_gguf(
    path: Path,
    model: Path,
    fields: Mapping[str, Any] | None = None,
    kind: Callable[[str, Any], Kind] = kind_of,
    tensors: Mapping[str, tuple[np.ndarray, Kind]] | None = None,
) -> Path:
    """The checkpoint `model` as a GGUF file. `fields` changes metadata (None removes a key), `tensors` adds tensors or
    replaces them."""
    config = weights.read_config(model)
    writer = gguf.GGUFWriter(path, config.family)
    for key, value in (metadata(model) | dict(fields or {})).items():
        _add(writer, key, value)
    to_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.family.upper()], config.num_layers)  # llama.cpp's table
    stored: dict[str, tuple[np.ndarray, Kind]] = {}
    for name, tensor in weights.hf_state(weights.load(model)):
        values = tensor.numpy()
        if config.family == "llama" and ("q_proj" in name or "k_proj" in name):
            values = _pairs(values, config.num_heads if "q_proj" in name else config.num_kv_heads)
        stored[to_gguf.get_name(name, try_suffixes=(".weight", ".bias"))] = values, kind(name, tensor)
    for name, (values, its_kind) in (stored | dict(tensors or {})).items():
        writer.add_tensor(name, gguf.quants.quantize(values, its_kind), raw_dtype=its_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if key == "general.architecture":
        writer.kv_data[0][key].value = value
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif value is not None:
        add[type(value)](key, value)


def _pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The reordering of q and k of Llama in llama.cpp's converter."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
