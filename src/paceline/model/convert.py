"""GGUF (llama.cpp's file) to an ordinary Hugging Face directory: weights dequantised to float32, tokenizer rebuilt.

Only what `store.pull` brings: the llama architecture with a byte-level BPE tokenizer. Heavy libraries are imported
where they are used.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.model.config import ModelConfig

if TYPE_CHECKING:
    from gguf import GGUFReader

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # token_type of special tokens


def gguf_to_hf(source: Path, target: Path, tick: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Write `target`/{config.json, generation_config.json, model.safetensors, tokenizer files} from a GGUF file."""
    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(source)
    config = _config(reader)
    tensors = {}
    for i, tensor in enumerate(reader.tensors):
        name, values = _tensor(tensor, config)
        tensors[name] = values
        tick(i + 1, len(reader.tensors))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    special = {
        f"{key}_token_id": reader.fields[field].contents()
        for key, field in (
            ("bos", "tokenizer.ggml.bos_token_id"),
            ("eos", "tokenizer.ggml.eos_token_id"),
            ("pad", "tokenizer.ggml.padding_token_id"),
        )
    }
    for name, content in {
        "config.json": {**config.to_hf(), **special, "dtype": "float32"},
        "generation_config.json": special,
    }.items():
        (target / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    shutil.copymode(target / "config.json", target / "model.safetensors")  # safetensors writes for the owner alone
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
        # The file has float32s; the shortest decimal that is the same float32 is what the model's makers wrote.
        norm_eps=float(str(np.float32(get("llama.attention.layer_norm_rms_epsilon")))),
        rope_theta=float(str(np.float32(get("llama.rope.freq_base")))),
        max_positions=get("llama.context_length"),
        tie_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        eos_token_ids=(get("tokenizer.ggml.eos_token_id"),),
    )


def _tensor(tensor: Any, config: ModelConfig) -> tuple[str, np.ndarray]:
    from gguf.quants import dequantize

    *block, stem, kind = tensor.name.split(".")  # blk.3.attn_q.weight
    name = f"{'model.layers.' + block[1] + '.' if block else ''}{NAMES[stem]}.{kind}"
    values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    if stem in ("attn_q", "attn_k"):
        values = _half_split(values, config.num_heads if stem == "attn_q" else config.num_kv_heads)
    return name, np.ascontiguousarray(values)


def _half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp turns neighbouring pairs of a head's rows, Hugging Face rows i and i + E/2."""
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
    # "smollm": every digit by itself, then GPT-2's pattern.
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
    # transformers 5 writes a class name of its own, which transformers 4 doesn't know; both know this one.
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
