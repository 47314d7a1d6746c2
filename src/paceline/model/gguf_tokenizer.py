"""The tokenizer of a GGUF file as a tokenizer of transformers. Supports byte-level BPE as in SCHEMES."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.model.gguf_file import GgufFile

# Special tokens by name, with their names in a file: those of transformers, and all that end a text, turn or message.
NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
ENDS = {"eos": "eos", "eot": "eot", "eom": "eom"}
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5  # token types: special; added, but not special; padding of the vocabulary


@dataclass(frozen=True, slots=True)
class Scheme:
    """What `tokenizer.ggml.pre` implies."""

    digits: str | None  # digits that form one word; None: GPT-2's words, and before that every digit is one
    nfc: bool = False  # Unicode normalisation
    ignore_merges: bool = False  # a word in the vocabulary is one token, even if no merges lead to it
    add_bos: bool = False  # unless the file says otherwise
    # Tokens that end a text or a turn. A file names one or more (ENDS), but a model may generate the others too: those
    # in its own generation_config.json.
    ends: tuple[str, ...] = ()


SCHEMES = {
    "smollm": Scheme(digits=None),
    "llama-bpe": Scheme(
        digits=r"\p{N}{1,3}", ignore_merges=True, add_bos=True, ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
    ),
    "qwen2": Scheme(digits=r"\p{N}", nfc=True, ends=("<|im_end|>", "<|endoftext|>")),
    "deepseek-r1-qwen": Scheme(digits=r"\p{N}", nfc=True),
}


def special_ids(file: GgufFile) -> dict[str, Any]:
    """bos_token_id, eos_token_id and pad_token_id as in a generation_config.json. eos_token_id is a list if several
    tokens end a text."""
    tokens, kinds = _tokens(file)
    named = _ids(file, len(tokens), NAMED)
    if (eos := named.get("eos")) is None:
        raise file.error("tokenizer.ggml.eos_token_id is missing; use a file that has it")
    of_file = _ids(file, len(tokens), ENDS).values()
    of_scheme = [tokens.index(end) for end in _scheme(file).ends if end in tokens]
    all_ends = list(dict.fromkeys([*of_file, *(i for i in of_scheme if kinds[i] == CONTROL)]))
    special: dict[str, Any] = {**named, "eos": eos if len(all_ends) == 1 else all_ends}
    return {f"{name}_token_id": special[name] for name in ("bos", "eos", "pad") if name in special}


def build_tokenizer(file: GgufFile, max_positions: int) -> Any:
    """Vocabulary, merges, added tokens and chat template of the file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    scheme = _scheme(file)
    tokens, kinds = _tokens(file)
    # The real tokenizer does not have the tokens that pad the vocabulary to the size of the embedding.
    vocabulary = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind != UNUSED}
    merges = [tuple(merge.split(" ")) for merge in file.get("tokenizer.ggml.merges")]
    try:
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=scheme.ignore_merges))
    except Exception as error:  # tokenizers raises plain exceptions
        raise file.error(
            f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({error}); download it again"
        ) from None
    if scheme.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(scheme)
    tokenizer.decoder = decoders.ByteLevel()
    for added in (CONTROL, USER_DEFINED):
        names = (token for token, kind in zip(tokens, kinds, strict=True) if kind == added)
        tokenizer.add_tokens([AddedToken(name, normalized=False, special=added == CONTROL) for name in names])
    named = {f"{name}_token": tokens[i] for name, i in _ids(file, len(tokens), NAMED).items()}
    if file.get("tokenizer.ggml.add_bos_token", scheme.add_bos):
        tokenizer.post_processor = _prepend(file, named.get("bos_token"), vocabulary)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **named,
        chat_template=file.get("tokenizer.chat_template", None),
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )


def save_tokenizer(tokenizer: Any, target: Path) -> None:
    tokenizer.save_pretrained(target)
    # transformers 5 writes a class name that transformers 4 does not have. Both have this one.
    path = target / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8")) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _scheme(file: GgufFile) -> Scheme:
    kind, name = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.pre", None)
    if kind != "gpt2":
        raise file.error(f"tokenizer.ggml.model = {kind!r} is not supported; supported is 'gpt2' (byte-level BPE)")
    if name not in SCHEMES:
        raise file.error(f"tokenizer.ggml.pre = {name!r} is not supported; supported are {', '.join(SCHEMES)}")
    return SCHEMES[name]


def _tokens(file: GgufFile) -> tuple[list[str], list[int]]:
    """All tokens and their types."""
    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
    if len(tokens) != len(kinds):
        raise file.error(f"{len(tokens)} tokenizer.ggml.tokens, but {len(kinds)} tokenizer.ggml.token_type")
    return tokens, kinds


def _ids(file: GgufFile, num_tokens: int, keys: Mapping[str, str]) -> dict[str, int]:
    """The ids of these tokens by name, of those that the file has."""
    ids = {}
    for name, key in keys.items():
        key = f"tokenizer.ggml.{key}_token_id"
        if (i := file.get(key, None)) is not None:
            if not 0 <= i < num_tokens:
                raise file.error(f"{key} = {i}: must be below the number of tokens, {num_tokens}")
            ids[name] = i
    return ids


def _pre_tokenizer(scheme: Scheme) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if scheme.digits is None:
        first = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        scheme.digits,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    split = pre_tokenizers.Split(Regex("|".join(words)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _prepend(file: GgufFile, bos: str | None, vocabulary: dict[str, int]) -> Any:
    """Every text starts with the bos token."""
    from tokenizers import processors

    if bos is None:
        raise file.error(
            "tokenizer.ggml.bos_token_id is missing, but every text starts with it; use a file that has it"
        )
    return processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos}:1 $B:1", [(bos, vocabulary[bos])])
