"""Convert a GGUF file (llama.cpp) to a Hugging Face directory: weights dequantised to float32, tokenizer rebuilt.

Supports only what `store.pull` downloads: the llama architecture with a byte-level BPE tokenizer. Heavy libraries are
imported inside the functions that use them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.weights import MAX_SHARD_BYTES, decoder_views, write_directory

if TYPE_CHECKING:
    from gguf import GGUFReader

CONTROL = 3  # token_type of special tokens


def gguf_to_hf(source: Path, target: Path, track: Callable[[list[Any]], Iterable[Any]] = iter) -> None:
    """Write `target`/{config.json, generation_config.json, model.safetensors, tokenizer files} from a GGUF file.
    `track` iterates over the tensors and shows the progress."""
    from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map

    reader = GGUFReader(source)
    config = _config(reader)
    with torch.device("meta"):
        views = decoder_views(Decoder(config))
    to_gguf = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_layers)
    hf_names = {to_gguf.get_name(name, (".weight",)): name for view in views for name, _ in view.parts}
    special = {
        f"{key}_token_id": reader.fields[field].contents()
        for key, field in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
    }
    write_directory(
        target,
        ((hf_names[tensor.name], _values(tensor, config)) for tensor in track(reader.tensors)),
        {hf_names[tensor.name]: 4 * int(tensor.n_elements) for tensor in reader.tensors},
        {"generation_config.json": special, "config.json": {**config.to_hf(), **special, "dtype": "float32"}},
        MAX_SHARD_BYTES,
    )
    _write_tokenizer(reader, target, config.max_positions)


def _config(reader: GGUFReader) -> ModelConfig:
    def get(key: str) -> Any:
        return reader.fields[key].contents()

    if (architecture := get("general.architecture")) != "llama":
        raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported is 'llama'")
    hidden_size, num_heads = get("llama.embedding_length"), get("llama.attention.head_count")
    return ModelConfig(
        family="llama",
        vocab_size=len(get("tokenizer.ggml.tokens")),
        hidden_size=hidden_size,
        intermediate_size=get("llama.feed_forward_length"),
        num_layers=get("llama.block_count"),
        num_heads=num_heads,
        num_kv_heads=get("llama.attention.head_count_kv"),
        head_dim=hidden_size // num_heads,
        # The file stores float32. The shortest decimal with the same float32 value is the original number.
        norm_eps=float(str(np.float32(get("llama.attention.layer_norm_rms_epsilon")))),
        rope_theta=float(str(np.float32(get("llama.rope.freq_base")))),
        max_positions=get("llama.context_length"),
        tie_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        eos_token_ids=(get("tokenizer.ggml.eos_token_id"),),
    )


def _values(tensor: Any, config: ModelConfig) -> Tensor:
    from gguf.quants import dequantize

    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    for stem, num_heads in ((".attn_q.", config.num_heads), (".attn_k.", config.num_kv_heads)):
        if stem in tensor.name:
            values = _half_split(values, num_heads)
    return torch.from_numpy(np.array(values))  # a copy: the file is mapped read-only


def _half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp rotates adjacent pairs of a head's rows, Hugging Face rows i and i + E/2."""
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(reader: GGUFReader, target: Path, max_positions: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    def get(key: str) -> Any:
        return reader.fields[f"tokenizer.{key}"].contents()

    scheme = get("ggml.model"), get("ggml.pre")
    if scheme != ("gpt2", "smollm"):
        raise ValueError(f"GGUF tokenizer {'/'.join(scheme)} is not supported; supported is gpt2/smollm")
    tokens, kinds = get("ggml.tokens"), get("ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in get("ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    # "smollm": split digits individually, then GPT-2's pattern.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[get("ggml.bos_token_id")],
        eos_token=tokens[get("ggml.eos_token_id")],
        unk_token=tokens[get("ggml.unknown_token_id")],
        pad_token=tokens[get("ggml.padding_token_id")],
        chat_template=get("chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )
    wrapped.save_pretrained(target)
    # transformers 5 writes a class name that transformers 4 does not have. Both have this one.
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
