"""Shared fixtures: tiny random Hugging Face checkpoints of every family, and a real model if it can be downloaded."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.model import store
from paceline.model.weights import ModelError

FAMILIES = ("llama", "qwen2", "qwen3")
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL)


def hf_config(family: str, rope: str = "default", tie: bool = True, **changes: Any) -> Any:
    """A tiny transformers config. No matrix is square, so that a transposed one raises an error."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**ROPES[rope], "rope_theta": 10_000.0},
        "tie_word_embeddings": tie,
        "eos_token_id": VOCAB_SIZE - 1,
        "bos_token_id": None,
    }
    if family == "qwen3":
        values["head_dim"] = 16  # differs from hidden_size / num_attention_heads, as in real models
    return classes[family](**(values | changes))


def write_tokenizer(directory: Path) -> None:
    """A tokenizer with one token per byte and three special tokens: every text is a valid prompt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "pad_token": SPECIAL[2]}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **names).save_pretrained(directory)


def pytest_configure() -> None:
    """Set the default SIGINT handler. Shells start background jobs with SIGINT ignored, and child processes inherit it;
    tests of Ctrl-C would hang."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoint(family, rope="default", tie=True, seed=0, **config changes) -> a float32 checkpoint saved by
    transformers, with a byte tokenizer. Do not write to it: the same arguments give the same directory."""
    from transformers import AutoModelForCausalLM

    made: dict[str, Path] = {}

    def make(family: str, rope: str = "default", tie: bool = True, seed: int = 0, **changes: Any) -> Path:
        key = json.dumps([family, rope, tie, seed, changes])
        if key not in made:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(hf_config(family, rope, tie, **changes))
            for name, parameter in model.named_parameters():
                # Larger than transformers' initialisation, which gives logits near zero and norm weights of one.
                torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.2)
            made[key] = tmp_path_factory.mktemp(f"{family}-{rope}")
            model.save_pretrained(made[key])
            write_tokenizer(made[key])
        return made[key]

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, downloaded if it is not cached."""
    try:
        return store.resolve("smollm2-135m")
    except ModelError as error:
        pytest.skip(str(error))
