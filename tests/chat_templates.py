"""Tokenizers with the chat templates of real models, and a real transcript of sampled ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "data" / "templates"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Merges that a text uses whenever it can. A policy may sample the parts, too.
MERGES = [
    ("a", "d"),
    ("ad", "d"),
    ("i", "s"),
    ("t", "h"),
    ("th", "e"),
    ("{", '"'),
    ("n", "a"),
    ("m", "e"),
    ("na", "me"),
]


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def tokenizer_of(name: str) -> Any:
    """A byte-level tokenizer with a few merges, and the chat template of a real model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*letters, *("".join(pair) for pair in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template(name), bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def sampled(tokenizer: Any, text: str, ends: bool = True) -> list[int]:
    """Ids of a text as a policy may sample them: letter by letter, without merges."""
    ids = [id for letter in text for id in tokenizer.encode(letter, add_special_tokens=False)]
    return [*ids, tokenizer.eos_token_id] if ends else ids


# Sampled from SmolLM2-135M-Instruct at temperature 1. Tokenizing its text again gives other ids.
SMOLLM2_SAMPLED = [
    2068, 803, 253, 725, 4047, 288, 1372, 4047, 30502, 2104, 80, 270, 2179, 48859, 80, 643, 346, 416, 722, 253, 1489,
    4488, 17227, 2179, 80, 288, 3812, 260, 1844, 288, 260, 3124, 284, 15323, 601, 288, 260, 3007, 30, 378, 2179, 27, 80,
    3573, 8029, 260, 3616, 282,
]  # fmt: skip
