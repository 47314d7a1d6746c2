"""Rebuild the tokenizers of GGUF files, and compare with those of transformers."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf_files import MERGES, SPECIAL, TEMPLATE, write_gguf
from tokenizers import AddedToken, Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from paceline.model import convert, gguf_tokenizer, store
from paceline.model.gguf_file import GgufFile
from paceline.model.weights import ModelError

Checkpoint = Callable[..., Path]
# Words of the merges cross the borders of words that the schemes set differently.
QWEN_MERGES = [*MERGES, "1 2", "12 3", "' S", "s x", "! Ċ", "Ċ Ċ", "Ġ Ċ", "Ã ©", "Ì ģ"]
BASE = [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in QWEN_MERGES)]
ADDED = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<tool_call>": 4}
PADDING = [f"[PAD{i}]" for i in range(len(BASE) + len(ADDED), 300)]
QWEN_TOKENS = [*BASE, *ADDED, *PADDING]
END_OF_TEXT, IM_START, IM_END, TOOL_CALL = range(len(BASE), len(BASE) + 4)
QWEN = {
    "tokenizer.ggml.pre": "qwen2",
    "tokenizer.ggml.tokens": QWEN_TOKENS,
    "tokenizer.ggml.token_type": [1] * len(BASE) + list(ADDED.values()) + [5] * len(PADDING),
    "tokenizer.ggml.merges": QWEN_MERGES,
    "tokenizer.ggml.bos_token_id": END_OF_TEXT,
    "tokenizer.ggml.eos_token_id": IM_END,
    "tokenizer.ggml.unknown_token_id": None,
    "tokenizer.ggml.padding_token_id": END_OF_TEXT,
}
TEXTS = [
    "",
    "the  hen",
    "x = 12345\n\tif y:\r\n        z += 3.14",
    "éß日本🙂 e\u0301",
    "<|im_start|>user\nhe<|im_end|>\n<|endoftext|>",
    "<tool_call>he</tool_call>",
    "I'm HE'S 'tis they'LL 'Sx",
    "a  12\n\n \n!\n\n",
]


def texts() -> list[str]:
    draw = random.Random(0)
    pieces = [*"he 123'sSx!\n\t\r", "é", "e\u0301", "日", "½", "٣", "  ", "'ll", "\u00a0", "<|im_end|>"]
    return [*TEXTS, *("".join(draw.choices(pieces, k=draw.randint(1, 40))) for _ in range(500))]


def make(folder: Path, checkpoint: Checkpoint, family: str = "qwen2", **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    model = checkpoint(family, hidden_size=64, intermediate_size=96, vocab_size=len(QWEN_TOKENS))
    changes = QWEN | {f"tokenizer.{key.replace('__', '.')}": value for key, value in fields.items()}
    convert.gguf_to_hf(GgufFile(write_gguf(folder / "x.gguf", model, changes)), folder / "made")
    return folder / "made"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("change", [{}, {"nfc": False}, {"digits": r"\p{N}{1,3}"}, {"digits": None}], ids=str)
def test_qwen2_encodes_as_the_tokenizer_of_transformers(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str, change: dict[str, Any]
) -> None:
    from transformers import Qwen2Tokenizer

    scheme = replace(gguf_tokenizer.SCHEMES["qwen2"], **change)  # with a change, it must not be equal
    monkeypatch.setitem(gguf_tokenizer.SCHEMES, "qwen2", scheme)
    made = make(tmp_path, checkpoint, family)
    theirs = Qwen2Tokenizer({token: i for i, token in enumerate(BASE)}, [tuple(m.split(" ")) for m in QWEN_MERGES])
    theirs.add_tokens([AddedToken(name, special=kind == 3, normalized=False) for name, kind in ADDED.items()])
    assert theirs.convert_tokens_to_ids("<tool_call>") == TOOL_CALL
    ours = Tokenizer.from_file(str(made / "tokenizer.json"))  # transformers may replace parts of it
    ids = [ours.encode(text).ids for text in texts()]
    assert (ids == [theirs.encode(text) for text in texts()]) == (not change)
    if not change:
        loaded = store.load_tokenizer(made)
        assert ids == [loaded.encode(text) for text in texts()]
        assert [loaded.decode(i) for i in ids] == [theirs.decode(i) for i in ids]


def test_added_tokens_and_padding(tmp_path: Path, checkpoint: Checkpoint) -> None:
    tokenizer = store.load_tokenizer(make(tmp_path, checkpoint))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|endoftext|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert tokenizer.decode([IM_START, TOOL_CALL, IM_END], skip_special_tokens=True) == "<tool_call>"
    assert len(tokenizer) == len(BASE) + len(ADDED)  # without the tokens that pad the vocabulary
    assert tokenizer.decode([len(QWEN_TOKENS) - 1]) == ""
    assert tokenizer.decode(tokenizer.encode(PADDING[0])) == PADDING[0]  # as text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_base_model_without_template_and_padding(tmp_path: Path, checkpoint: Checkpoint) -> None:
    made = make(tmp_path, checkpoint, chat_template=None, ggml__padding_token_id=None, ggml__bos_token_id=None)
    tokenizer = store.load_tokenizer(made)
    assert tokenizer.chat_template is None and tokenizer.bos_token is None


@pytest.mark.parametrize("eos", [IM_END, END_OF_TEXT])
def test_all_tokens_that_end_a_text(tmp_path: Path, checkpoint: Checkpoint, eos: int) -> None:
    from transformers import GenerationConfig

    from paceline.model.weights import read_config

    made = make(tmp_path, checkpoint, ggml__eos_token_id=eos)
    other = {IM_END: END_OF_TEXT, END_OF_TEXT: IM_END}[eos]
    assert read_config(made).eos_token_ids == (eos, other)
    generation = GenerationConfig.from_pretrained(made)
    assert generation.eos_token_id == [eos, other] and generation.pad_token_id == END_OF_TEXT
    assert store.load_tokenizer(made).eos_token_id == eos


@pytest.mark.parametrize("eos", [IM_END, END_OF_TEXT])
def test_tokens_that_the_file_says_end_a_turn(tmp_path: Path, checkpoint: Checkpoint, eos: int) -> None:
    from paceline.model.weights import read_config

    made = make(tmp_path, checkpoint, ggml__pre="smollm", ggml__eos_token_id=eos, ggml__eot_token_id=IM_END,
                ggml__eom_token_id=IM_START)  # fmt: skip
    assert read_config(made).eos_token_ids == tuple(dict.fromkeys([eos, IM_END, IM_START]))
    with pytest.raises(ModelError, match=r"tokenizer.ggml.eot_token_id = 999: must be below"):
        make(tmp_path / "other", checkpoint, ggml__eot_token_id=999)


def test_deepseek_r1_qwen(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """The words of Qwen2, with other special tokens and a bos token."""
    qwen = store.load_tokenizer(make(tmp_path / "qwen", checkpoint))
    special = {"<｜end▁of▁sentence｜>": 3, "<｜User｜>": 4, "<｜begin▁of▁sentence｜>": 3}
    tokens = [*BASE, *special]
    fields = {
        "ggml__pre": "deepseek-r1-qwen",
        "ggml__tokens": tokens,
        "ggml__token_type": [1] * len(BASE) + list(special.values()),
        "ggml__bos_token_id": len(BASE) + 2,
        "ggml__eos_token_id": len(BASE),
        "ggml__padding_token_id": len(BASE),
        "ggml__add_bos_token": True,
    }
    from paceline.model.weights import read_config

    made = make(tmp_path / "deepseek", checkpoint, **fields)
    assert read_config(made).eos_token_ids == (len(BASE),)
    tokenizer = store.load_tokenizer(made)
    for text in (text for text in texts() if "<|" not in text and "<tool" not in text):
        assert tokenizer.encode(text) == [len(BASE) + 2, *qwen.encode(text)]


def test_llama_bpe(tmp_path: Path, checkpoint: Checkpoint) -> None:
    # "hen" is in the vocabulary, but no merge makes it. "12345" is split after three digits.
    tokens = [*BASE, "hen", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    bos = len(tokens) - 3
    fields = {
        "ggml__pre": "llama-bpe",
        "ggml__tokens": tokens,
        "ggml__token_type": [1] * bos + [3] * 3,
        "ggml__bos_token_id": bos,
        "ggml__eos_token_id": bos + 2,
        "ggml__padding_token_id": None,
        "ggml__add_bos_token": None,
    }
    made = make(tmp_path, checkpoint, "llama", **fields)
    tokenizer = store.load_tokenizer(made)
    pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("hen12345 e\u0301<|eot_id|>"))
    assert pieces == ["<|begin_of_text|>", "hen", "123", "4", "5", "Ġ", "e", "Ìģ", "<|eot_id|>"]
    assert tokenizer.encode("12312") == [bos, *(tokens.index(token) for token in ("123", "12"))]
    assert tokenizer.encode("he", add_special_tokens=False) == [tokens.index("he")]
    from paceline.model.weights import read_config

    assert read_config(made).eos_token_ids == (bos + 2, bos + 1)


@pytest.mark.parametrize("digits", [None, r"\p{N}"])
def test_smollm_encodes_as_the_tokenizer_of_transformers(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, digits: str | None
) -> None:
    """It is GPT-2's, after the text is split at every digit."""
    from transformers import GPT2Tokenizer

    scheme = replace(gguf_tokenizer.SCHEMES["smollm"], digits=digits)  # with other words, it must not be equal
    monkeypatch.setitem(gguf_tokenizer.SCHEMES, "smollm", scheme)
    made = make(tmp_path, checkpoint, ggml__pre="smollm")
    ours = Tokenizer.from_file(str(made / "tokenizer.json"))
    theirs = GPT2Tokenizer({token: i for i, token in enumerate(BASE)}, [tuple(m.split(" ")) for m in QWEN_MERGES])
    theirs.add_tokens([AddedToken(name, special=kind == 3, normalized=False) for name, kind in ADDED.items()])
    assert theirs.convert_tokens_to_ids("<tool_call>") == TOOL_CALL

    def encode(text: str) -> list[int]:
        words = "".join(f"\0{c}\0" if unicodedata.category(c).startswith("N") else c for c in text).split("\0")
        return [i for word in words if word for i in theirs.encode(word)]

    assert ([ours.encode(text).ids for text in texts()] == [encode(text) for text in texts()]) == (digits is None)


def test_smollm(tmp_path: Path, checkpoint: Checkpoint) -> None:
    model = checkpoint("llama", hidden_size=64, intermediate_size=96, vocab_size=len(QWEN_TOKENS))
    convert.gguf_to_hf(GgufFile(write_gguf(tmp_path / "x.gguf", model)), tmp_path / "made")
    tokenizer = store.load_tokenizer(tmp_path / "made")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    # Digits are split first, so the two spaces before them are one token. The GGUF reader of transformers differs.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.chat_template == TEMPLATE
