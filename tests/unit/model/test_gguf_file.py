"""Read GGUF files, damaged ones too."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf_files import TOKENS, quantised, write_gguf

from paceline.model.gguf_file import GgufFile
from paceline.model.weights import ModelError

MATRIX = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Path:
    model = checkpoint("llama", hidden_size=64, intermediate_size=96, vocab_size=len(TOKENS))
    return write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", model, tensors={"m": (MATRIX, Kind.Q8_0)})


def test_metadata_and_tensors(path: Path) -> None:
    file = GgufFile(path)
    assert file.shape("m") == (5, 64) and file.bits("m") == 8.5
    assert np.array_equal(file.values("m"), quantised(MATRIX, Kind.Q8_0))
    assert np.array_equal(file.values("m", np.array([3, 1])), quantised(MATRIX, Kind.Q8_0)[[3, 1]])
    assert file.get("tokenizer.ggml.tokens") == TOKENS and file.get("no.such.key", 7) == 7
    assert file.get_float("llama.attention.layer_norm_rms_epsilon") == 1e-5  # stored as float32
    with pytest.raises(ModelError, match=r"x\.gguf: general\.architecture = llama: must be a number"):
        file.get_float("general.architecture")
    with pytest.raises(ModelError, match=r"x\.gguf: no\.such\.key is missing"):
        file.get("no.such.key")


@pytest.mark.parametrize("share", [0, 0.0001, 0.01, 0.05, 0.2, 0.5, 0.999])
def test_a_truncated_file(path: Path, tmp_path: Path, share: float) -> None:
    content = path.read_bytes()
    (tmp_path / "short.gguf").write_bytes(content[: int(share * len(content))])
    with pytest.raises(ModelError, match=r"short\.gguf: truncated or not a GGUF file .*download it again"):
        GgufFile(tmp_path / "short.gguf")


@pytest.mark.parametrize("kind", [gguf.GGUFValueType.UINT8, gguf.GGUFValueType.STRING])
def test_an_array_longer_than_the_file(tmp_path: Path, kind: gguf.GGUFValueType) -> None:
    """It must not allocate memory for the length that the file states."""
    key = b"tokenizer.ggml.tokens"
    counts = struct.pack("<IIQQ", gguf.GGUF_MAGIC, 3, 0, 1)
    array = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, 1 << 60)
    (tmp_path / "long.gguf").write_bytes(counts + struct.pack("<Q", len(key)) + key + array + bytes(1000))
    with pytest.raises(ModelError, match=r"long\.gguf: truncated or not a GGUF file \(the file ends early\)"):
        GgufFile(tmp_path / "long.gguf")


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("These are not the bytes of a model." * 100)
    with pytest.raises(ModelError, match="not a GGUF file"):
        GgufFile(tmp_path / "text.gguf")
    with pytest.raises(ModelError, match=r"nowhere\.gguf: no such file"):
        GgufFile(tmp_path / "nowhere.gguf")


def test_an_unsupported_quantisation(path: Path) -> None:
    file = GgufFile(path)
    file.tensors["x"] = file.tensors["token_embd.weight"]._replace(tensor_type=Kind.Q8_1)
    with pytest.raises(ModelError, match="tensor x: type Q8_1 is not supported"):
        file.values("x")
