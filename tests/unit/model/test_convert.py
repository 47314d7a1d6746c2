"""Convert GGUF files of every architecture, and compare with the checkpoints they were written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import TOKENS, kind_of, quantised, write_gguf

from paceline.model import convert, weights
from paceline.model.attention import PackedAttention
from paceline.model.gguf_file import GgufFile
from paceline.model.weights import EMBED, LM_HEAD, ModelError

Checkpoint = Callable[..., Path]
FAMILIES = ["llama", "qwen2", "qwen3"]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def tiny(checkpoint: Checkpoint) -> Callable[..., Path]:
    """A tiny checkpoint whose rows are whole blocks of every quantisation."""

    def make(family: str, **changes: Any) -> Path:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": len(TOKENS)}
        if family == "qwen3":
            sizes["head_dim"] = 32  # differs from hidden_size / num_attention_heads
        return checkpoint(family, **(sizes | changes))

    return make


def converted(file: Path, target: Path, **options: Any) -> Path:
    convert.gguf_to_hf(GgufFile(file), target, **options)
    return target


def float32(name: str, tensor: Any) -> Kind:
    return Kind.F32


def state(directory: Path) -> dict[str, torch.Tensor]:
    return dict(weights.hf_state(weights.load(directory)))


def logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    decoder = weights.load(directory)
    with torch.no_grad():
        return decoder.logits(decoder(ids, torch.arange(len(ids)), PackedAttention([len(ids)])).hidden)


def transformers_logits(directory: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(ids[None]).logits[0]


# ---- weights ----


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("broken", [False, True])
def test_every_tensor_is_the_original_quantised_and_dequantised(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, broken: bool
) -> None:
    if broken:  # the rows of q and k in the order of another family
        half_split, values_of = convert._half_split, GgufFile.values
        monkeypatch.setattr(convert, "_half_split", lambda weight, num_heads: weight)
        if family != "llama":
            monkeypatch.setattr(
                GgufFile,
                "values",
                lambda file, name, *rows: (
                    half_split(values_of(file, name), 4 if ".attn_q." in name else 2)
                    if ".attn_q.w" in name or ".attn_k.w" in name
                    else values_of(file, name, *rows)
                ),
            )
    made = state(converted(write_gguf(tmp_path / "x.gguf", tiny(family)), tmp_path / "made"))
    original = state(tiny(family))
    assert made.keys() == original.keys()
    different = {
        name
        for name, tensor in original.items()
        if not np.array_equal(made[name].numpy(), quantised(tensor.numpy(), kind_of(name, tensor)))
    }
    assert different == {f"model.layers.{i}.self_attn.{x}_proj.weight" for i in range(3) for x in "qk" if broken}
    assert ("model.layers.0.self_attn.q_proj.bias" in made) == (family == "qwen2")
    assert ("model.layers.0.self_attn.q_norm.weight" in made) == (family == "qwen3")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_the_same_logits(tiny: Callable[..., Path], tmp_path: Path, family: str) -> None:
    made = converted(write_gguf(tmp_path / "x.gguf", tiny(family), kind=float32), tmp_path / "made")
    ids = torch.arange(40)
    expected = transformers_logits(tiny(family), ids)
    torch.testing.assert_close(logits(made, ids), expected)
    torch.testing.assert_close(transformers_logits(made, ids), expected)
    config = json.loads((made / "config.json").read_text())
    assert config["model_type"] == family
    assert config["transformers_version"] == version("transformers")  # else it warns that the tokenizer may be wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_reading_the_gguf(tiny: Callable[..., Path], tmp_path: Path, family: str) -> None:
    pytest.importorskip("accelerate", reason="transformers needs it to read GGUF")
    from transformers import AutoModelForCausalLM

    model = tiny(family, head_dim=128) if family == "qwen3" else tiny(family)  # transformers reads no other head_dim
    made = converted(write_gguf(tmp_path / "x.gguf", model), tmp_path / "made")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="x.gguf", dtype=torch.float32).state_dict()
    for name, tensor in state(made).items():
        assert torch.equal(tensor, theirs[name]), name


def test_bfloat16(tiny: Callable[..., Path], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", tiny("qwen2"))
    full, half = converted(file, tmp_path / "a"), converted(file, tmp_path / "b", dtype=torch.bfloat16)
    assert json.loads((half / "config.json").read_text())["dtype"] == "bfloat16"
    with weights.tensors_in(full) as (names, expected), weights.tensors_in(half) as (_, found):
        for name in names:
            assert torch.equal(found(name), expected(name).to(torch.bfloat16))
    assert (half / "model.safetensors").stat().st_size < 0.6 * (full / "model.safetensors").stat().st_size
    assert convert.num_bytes(GgufFile(file), torch.bfloat16) > 0.9 * (half / "model.safetensors").stat().st_size


# ---- embedding and LM head ----


@pytest.mark.parametrize("embed, lm_head", [(Kind.Q4_1, Kind.Q8_0), (Kind.Q8_0, Kind.Q5_0), (Kind.Q8_0, Kind.Q8_0)])
def test_two_copies_of_a_tied_matrix_become_the_more_precise_one(
    tiny: Callable[..., Path], tmp_path: Path, embed: Kind, lm_head: Kind
) -> None:
    matrix = state(tiny("qwen2"))[EMBED].numpy()
    copies = {"token_embd.weight": (matrix, embed), "output.weight": (matrix, lm_head)}
    made = converted(write_gguf(tmp_path / "x.gguf", tiny("qwen2"), tensors=copies), tmp_path / "made")
    assert weights.read_config(made).tie_embeddings
    with weights.tensors_in(made) as (names, fetch):
        assert LM_HEAD not in names
        assert np.array_equal(fetch(EMBED).numpy(), quantised(matrix, Kind.Q8_0))


def test_a_tied_matrix_in_float32_and_bfloat16(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """bfloat16 has 8 significant bits of its 16."""
    matrix = state(tiny("qwen2"))[EMBED].numpy()
    copies = {"token_embd.weight": (matrix, Kind.BF16), "output.weight": (matrix, Kind.F32)}
    made = converted(write_gguf(tmp_path / "x.gguf", tiny("qwen2"), tensors=copies), tmp_path / "made")
    assert weights.read_config(made).tie_embeddings and np.array_equal(state(made)[EMBED].numpy(), matrix)


@pytest.mark.parametrize("difference", [1.0, 0.1])
def test_an_lm_head_of_its_own_stays(tiny: Callable[..., Path], tmp_path: Path, difference: float) -> None:
    model = tiny("qwen3")
    matrix = state(model)[EMBED].numpy()
    noise = np.random.default_rng(0).normal(0, matrix.std(), matrix.shape).astype(np.float32)
    own = {"output.weight": (matrix * (1 - difference) + noise * difference, Kind.Q8_0)}
    made = converted(write_gguf(tmp_path / "x.gguf", model, tensors=own), tmp_path / "made")
    assert not weights.read_config(made).tie_embeddings
    assert np.array_equal(state(made)[EMBED].numpy(), quantised(matrix, Kind.Q8_0))
    assert np.array_equal(state(made)[LM_HEAD].numpy(), quantised(own["output.weight"][0], Kind.Q8_0))


# ---- config ----


def test_converted_config(tiny: Callable[..., Path], tmp_path: Path) -> None:
    made = converted(write_gguf(tmp_path / "x.gguf", tiny("llama")), tmp_path / "made")
    config = weights.read_config(made)
    assert (config.norm_eps, config.rope_theta, config.max_positions) == (1e-5, 10_000.0, 128)
    assert config.tie_embeddings and config.eos_token_ids == (2,)
    saved = json.loads((made / "config.json").read_text())
    assert (saved["bos_token_id"], saved["eos_token_id"], saved["pad_token_id"]) == (1, 2, 2)


def test_the_embedding_may_have_more_rows_than_there_are_tokens(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("qwen2", vocab_size=len(TOKENS) + 10)
    made = converted(write_gguf(tmp_path / "x.gguf", model), tmp_path / "made")
    assert weights.read_config(made).vocab_size == len(state(made)[EMBED]) == len(TOKENS) + 10


@pytest.mark.parametrize("scaling", ["linear", "yarn"])
def test_rope_scaling(tiny: Callable[..., Path], tmp_path: Path, scaling: str) -> None:
    model = tiny("qwen2", rope=scaling)
    expected = weights.read_config(model).rope_scaling
    assert expected is not None
    fields: dict[str, Any] = {"qwen2.rope.scaling.type": scaling, "qwen2.rope.scaling.factor": expected["factor"]}
    if scaling == "yarn":
        fields["qwen2.rope.scaling.original_context_length"] = 32
    made = converted(write_gguf(tmp_path / "x.gguf", model, fields, float32), tmp_path / "made")
    assert weights.read_config(made).rope_scaling == expected
    ids = torch.arange(100)
    torch.testing.assert_close(logits(made, ids), transformers_logits(model, ids))


@pytest.mark.parametrize("key", ["rope.scale_linear", "rope.scaling.factor"])
@pytest.mark.parametrize("factor", [1.0, 0.0, 2.0])
def test_linear_rope_scaling_without_a_type(tiny: Callable[..., Path], tmp_path: Path, key: str, factor: float) -> None:
    """Older files have only a factor; 1 and 0 mean none."""
    made = converted(write_gguf(tmp_path / "x.gguf", tiny("qwen2"), {f"qwen2.{key}": factor}), tmp_path / "made")
    expected = {"rope_type": "linear", "factor": 2.0} if factor == 2 else None
    assert weights.read_config(made).rope_scaling == expected


def llama3_divisors(theta: float, head_dim: int) -> np.ndarray:
    """rope_freqs.weight as llama.cpp's converter writes it."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (8192 / wavelengths - 1) / (4 - 1)
    divisors = 1 / ((1 - smooth) / 8 + smooth)
    return np.where(smooth > 1, 1, np.where(smooth < 0, 8, divisors)).astype(np.float32)


def test_llama3_rope_scaling_from_its_divisors(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny("llama", rope_parameters={**LLAMA3, "rope_theta": 500_000.0}, max_position_embeddings=4096)
    divisors = llama3_divisors(500_000.0, 16)
    assert len(set(divisors)) > 2  # one is in the smooth band
    added = {"rope_freqs.weight": (divisors, Kind.F32)}
    made = converted(write_gguf(tmp_path / "x.gguf", model, kind=float32, tensors=added), tmp_path / "made")
    assert weights.read_config(made).rope_scaling == LLAMA3
    ids = torch.arange(3000) % len(TOKENS)
    torch.testing.assert_close(logits(made, ids), transformers_logits(model, ids))

    added["rope_freqs.weight"] = (np.where(divisors == 1, 1, divisors * 1.1).astype(np.float32), Kind.F32)
    with pytest.raises(ModelError, match=r"rope_freqs\.weight: not the rope scaling of Llama 3"):
        converted(write_gguf(tmp_path / "y.gguf", model, tensors=added), tmp_path / "other")


# ---- errors ----


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"general.architecture": "mamba"}, "general.architecture = 'mamba' is not supported; supported are llama"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model = 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "whatif"}, "tokenizer.ggml.pre = 'whatif' is not supported; supported are smollm"),
        ({"tokenizer.ggml.eos_token_id": None}, "tokenizer.ggml.eos_token_id is missing"),
        ({"tokenizer.ggml.padding_token_id": 999}, "tokenizer.ggml.padding_token_id = 999: must be below"),
        ({"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True}, "bos_token_id is missing"),
        ({"tokenizer.ggml.merges": ["no merge"]}, "tokenizer.ggml.merges do not fit"),
        ({"tokenizer.ggml.token_type": [1]}, "but 1 tokenizer.ggml.token_type"),
        ({"qwen2.block_count": None}, "qwen2.block_count is missing"),
        ({"qwen2.block_count": 4}, "missing tensors that the config requires: model.layers.3.input_layernorm"),
        ({"qwen2.block_count": 2}, "unexpected tensors, not part of the config: blk.2.attn_k.bias"),
        ({"qwen2.feed_forward_length": 95}, r"wrong shapes: model.layers.0.mlp.gate_proj.weight is \[96, 64\]"),
        ({"qwen2.attention.head_count": 0}, "qwen2.attention.head_count = 0: must be a positive integer"),
        ({"qwen2.attention.head_count_kv": [2, 2, 1]}, r"head_count_kv = \[2, 2, 1\]: must be a positive integer"),
        ({"qwen2.attention.value_length": 8}, "qwen2.attention.value_length = 8 is not supported"),
        ({"qwen2.rope.dimension_count": 8}, "qwen2.rope.dimension_count = 8 is not supported"),
        ({"qwen2.rope.scaling.type": "longrope"}, "qwen2.rope.scaling.type = 'longrope' is not supported"),
        ({"qwen2.rope.scaling.attn_factor": 2.0}, "qwen2.rope.scaling.attn_factor = 2.0 is not supported"),
        ({"qwen2.attention.sliding_window": 64}, "qwen2.attention.sliding_window = 64 is not supported"),
        ({"split.count": 2}, r"one of 2 parts \(split.count\)"),
    ],
    ids=str,
)
def test_unsupported_metadata(tiny: Callable[..., Path], tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    file = write_gguf(tmp_path / "x.gguf", tiny("qwen2"), fields)
    with pytest.raises(ModelError, match=rf"x\.gguf: .*{message}"):
        converted(file, tmp_path / "made")
    assert not (tmp_path / "made" / "config.json").exists()


def test_unused_metadata_is_no_error(tiny: Callable[..., Path], tmp_path: Path) -> None:
    unused = {"qwen2.expert_count": 0, "qwen2.vocab_size": len(TOKENS), "qwen2.rope.scaling.type": "none"}
    converted(write_gguf(tmp_path / "x.gguf", tiny("qwen2"), unused), tmp_path / "made")


def test_more_tokens_than_rows(tiny: Callable[..., Path], tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "x.gguf", tiny("qwen2", vocab_size=len(TOKENS) - 1))
    with pytest.raises(ModelError, match=f"{len(TOKENS)} tokenizer.ggml.tokens, but token_embd.weight has only"):
        converted(file, tmp_path / "made")
