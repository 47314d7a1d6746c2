"""Weights under Hugging Face names: assign, load, save, checksum."""

from __future__ import annotations

import hashlib
import json
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import native
from paceline.model import kernels, lora, weights
from paceline.model.config import ModelConfig
from paceline.model.decoder import Decoder
from paceline.model.hf_directory import INDEX
from paceline.model.layer import Linear
from paceline.model.paged import PagedDecoder
from paceline.model.weights import ModelError, assign, checksum, hf_state, init, load, save
from paceline.native import NativeUnavailable

Checkpoint = Callable[..., Path]
CONFIG = ModelConfig("qwen3", 50, 24, 40, 2, 4, 2, 8, 1e-6, 1e4, 64, qk_norm=True, qkv_bias=True, o_bias=True)


def state(decoder: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in hf_state(decoder)}


# ---- memory ----


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_state_equals_what_transformers_saved(checkpoint: Checkpoint, family: str, tie: bool) -> None:
    path = checkpoint(family, tie=tie)
    theirs, ours = load_file(path / "model.safetensors"), state(load(path))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_state_is_views() -> None:
    decoder = init(CONFIG)
    dict(hf_state(decoder))["model.layers.1.self_attn.k_proj.weight"].fill_(7)
    assert (decoder.layers[1].qkv.weight == 7).sum() == 16 * 24
    assert (decoder.layers[1].qkv.weight[32:48] == 7).all()


def test_assign_is_in_place_and_takes_streams() -> None:
    old, new = init(CONFIG, seed=0), init(CONFIG, seed=1, dtype=torch.float64)
    places = [parameter.data_ptr() for parameter in old.parameters()]
    assign(old, hf_state(new))
    assert places == [parameter.data_ptr() for parameter in old.parameters()]
    assert all(torch.equal(tensor, state(new)[name].float()) for name, tensor in hf_state(old))


def _broken(good: dict[str, Tensor], how: str) -> Iterator[tuple[str, Tensor]]:
    for i, (name, tensor) in enumerate(good.items()):
        if how == "missing" and name == "model.norm.weight":
            continue
        if how == "shape" and name == "lm_head.weight":
            tensor = tensor[:-1]
        if how == "raises" and i == 12:
            raise RuntimeError("the stream broke")
        yield name, tensor
        if how == "twice" and i == 3:
            yield name, tensor
    if how == "unexpected":
        yield "model.layers.2.mlp.up_proj.weight", good["model.layers.1.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    "how, error, message",
    [
        ("missing", ModelError, "missing tensors .*: model.norm.weight"),
        ("unexpected", ModelError, "unexpected tensors.*: model.layers.2.mlp.up_proj.weight"),
        ("shape", ModelError, r"lm_head.weight is \[49, 24\], the config requires \[50, 24\]"),
        ("twice", ModelError, "given twice"),
        ("raises", RuntimeError, "the stream broke"),
    ],
)
def test_a_failed_assign_changes_nothing(how: str, error: type[Exception], message: str) -> None:
    decoder = init(CONFIG, seed=0)
    before = checksum(hf_state(decoder))
    with pytest.raises(error, match=message):
        assign(decoder, _broken(state(init(CONFIG, seed=1)), how))
    assert checksum(hf_state(decoder)) == before


def test_a_tied_lm_head_may_be_stored_if_it_equals_the_embedding(checkpoint: Checkpoint) -> None:
    decoder = load(checkpoint("llama", tie=True))
    new = state(decoder)
    new["lm_head.weight"] = new["model.embed_tokens.weight"].clone()
    assign(decoder, new.items())
    new["lm_head.weight"][3, 1] += 1
    with pytest.raises(ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        assign(decoder, new.items())


def _packed(decoder: Decoder) -> Decoder:
    try:
        kernels.pack_for_inference(decoder)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    assert all(module.weight is None for module in decoder.modules() if isinstance(module, Linear))
    return decoder


def test_panels_give_the_same_state(tmp_path: Path) -> None:
    plain, new = init(CONFIG, seed=0), init(CONFIG, seed=1, dtype=torch.float64)
    panels = _packed(init(CONFIG, seed=0))
    assert checksum(hf_state(panels)) == checksum(hf_state(plain))

    places = [module.panels.data_ptr() for module in panels.modules() if isinstance(module, Linear)]
    for decoder in (plain, panels):
        assign(decoder, hf_state(new))
    assert checksum(hf_state(panels)) == checksum(hf_state(plain))
    assert places == [module.panels.data_ptr() for module in panels.modules() if isinstance(module, Linear)]

    with pytest.raises(ModelError, match=r"missing tensors .*: model.norm.weight"):
        assign(panels, _broken(state(init(CONFIG, seed=2)), "missing"))
    save(panels, tmp_path, max_shard_bytes=8_000)
    assert checksum(hf_state(load(tmp_path))) == checksum(hf_state(plain))


def test_init_is_reproducible() -> None:
    first, again, other = (checksum(hf_state(init(CONFIG, seed=seed))) for seed in (3, 3, 4))
    assert first == again != other


# ---- checksum ----

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_checksum_changes_with_every_element(dtype: torch.dtype) -> None:
    size = 2 * weights._SPAN + 77  # more than one partial sum, and a remainder
    tensor = torch.randint(-100, 100, (size,), generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[:2] = torch.tensor([1, -1]).to(dtype)
    seen = {checksum([("a", tensor)])}

    def new(changed: Tensor, name: str = "a") -> bool:
        number = len(seen)
        seen.add(checksum([(name, changed)]))
        return len(seen) == number + 1

    for position in (0, 1, size // 2, weights._SPAN - 1, weights._SPAN, size - 1):
        changed = tensor.clone()
        changed[position] += 1
        assert new(changed)
    for i, j in ((0, 1), (1, 1 << 15), (0, size - 1), (5, weights._SPAN + 5)):
        changed = tensor.clone()
        changed[i], changed[j] = 64, -64  # in floating point only the sign bit differs, the hardest swap to detect
        assert new(changed)
        changed[i], changed[j] = -64, 64
        assert new(changed)
    assert new(tensor, name="b")
    assert new(tensor[:-1])
    assert new(tensor.view(-1, 1))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [0, 1, 77, weights._SPAN - 1, weights._SPAN, 2 * weights._SPAN + 13])
def test_checksum_in_c_equals_checksum_in_torch(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if weights._native_sums() is None:
        pytest.skip("no compiler")
    noise = torch.Generator().manual_seed(size)
    bits = torch.randint(-(2**63), 2**63 - 1, (size,), generator=noise).view(torch.uint8)  # NaNs and infinities too
    tensor = bits[: size * dtype.itemsize].clone().view(dtype) if dtype != torch.bool else bits[:size] > 99
    words = weights._words(tensor)
    in_c = weights._sums(words).numpy().view(np.uint64)
    assert in_c.tolist() == slow_sums(words)
    in_torch = weights._torch_sums(words).numpy().view(np.uint64)
    assert in_c.dtype == in_torch.dtype and np.array_equal(in_c, in_torch)
    with_c = checksum([("a", tensor)])
    monkeypatch.setattr(weights, "_native_sums", lambda: None)
    assert checksum([("a", tensor)]) == with_c


def slow_sums(words: Tensor) -> list[int]:
    """The definition, with Python's integers."""
    multipliers = [int(m) % 2**64 for m in weights._multipliers(torch.device("cpu"))]
    assert all(m % 2**32 == 2 * i + 1 for i, m in enumerate(multipliers))
    values, span = words.tolist(), weights._SPAN
    spans = [values[at : at + span] for at in range(0, len(values) // span * span + 1, span)]
    return [sum(w * m for w, m in zip(part, multipliers, strict=False)) % 2**64 for part in spans]


def test_the_checksum_is_stable() -> None:
    """Receipts are compared between machines, and are recorded in runs."""
    tensors = [("a", torch.arange(70_000) * 2654435761 % 1000 / 7), ("b", torch.tensor(-1.5, dtype=torch.bfloat16))]
    assert checksum(tensors) == "88b52ca6f6d093189269aede8aa872a88f2d3329397f88c96f7960674942b21f"


def test_the_number_of_sums_computed_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU computes more at once than a CPU, with the same result."""
    words = torch.arange(5 * weights._SPAN + 7, dtype=torch.int32)
    few = weights._torch_sums(words)
    for num in (1, 4, 128):
        monkeypatch.setitem(weights._BLOCK, "cpu", num)
        assert torch.equal(weights._torch_sums(words), few)


def test_the_checksum_of_nothing() -> None:
    assert checksum([]) == hashlib.sha256(b"").hexdigest() != checksum([("a", torch.empty(0))])


def test_without_a_compiler_torch_computes_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(native, "load", unavailable)
    assert weights._native_sums.__wrapped__() is None


def test_a_receipt_needs_memory_for_one_matrix_only(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedDecoder(_packed(init(CONFIG, seed=0)), 4)
    new = list(state(init(CONFIG, seed=1)).items())
    num_alive: list[int] = []

    def watched(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
        seen: list[weakref.ref] = []
        for name, tensor in hf_state(decoder):
            seen.append(weakref.ref(tensor))
            num_alive.append(sum(ref() is not None for ref in seen))
            yield name, tensor

    assert len(list(watched(paged.decoder))) == max(num_alive)  # a caller that keeps them all is detected
    num_alive.clear()
    monkeypatch.setattr(lora, "hf_state", watched)
    receipt = paged.update(new, 3)
    assert len(num_alive) == len(new) and max(num_alive) <= 4  # one matrix, and the last part of the previous one
    assert (receipt.version, receipt.checksum) == (3, checksum(new))
    assert receipt.num_tensors == len(new) and receipt.num_bytes == sum(tensor.nbytes for _, tensor in new)


def test_a_receipt_is_of_the_receivers_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = PagedDecoder(_packed(init(CONFIG, seed=0)), 4)
    new = list(state(init(CONFIG, seed=1)).items())
    pack_rows = kernels.pack_rows

    def skips_the_second_part(rows: Tensor, panels: Tensor, first: int) -> None:
        if first == 0:
            pack_rows(rows, panels, first)

    monkeypatch.setattr(kernels, "pack_rows", skips_the_second_part)
    assert paged.update(new, 3).checksum != checksum(new)


def test_checksum_ignores_layout_and_order() -> None:
    a, b = torch.randn(30, 7), torch.randn(5)
    assert checksum([("a", a), ("b", b)]) == checksum([("b", b), ("a", a.t().contiguous().t())])


def test_checksum_distinguishes_zero_from_minus_zero_and_dtypes() -> None:
    zero = torch.zeros(4)
    assert len({checksum([("a", x)]) for x in (zero, -zero, zero.int(), zero.half())}) == 4


# ---- directories ----


def test_load_in_other_dtypes(checkpoint: Checkpoint) -> None:
    path = checkpoint("qwen2")
    double, half = load(path, torch.float64), load(path, torch.bfloat16)
    assert double.dtype == torch.float64 and half.dtype == torch.bfloat16
    assert all(torch.equal(state(double)[name].bfloat16(), tensor) for name, tensor in hf_state(half))


def test_eos_token_ids_of_generation_config(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert load(path).config.eos_token_ids == (1, 2)
    (path / "generation_config.json").write_text('{"max_length": 9}')
    assert load(path).config.eos_token_ids == (258,)


def test_saving_again_leaves_no_old_shards(tmp_path: Path) -> None:
    save(init(CONFIG, seed=0), tmp_path, max_shard_bytes=5_000)
    assert (tmp_path / INDEX).exists()
    decoder = init(CONFIG, seed=1)
    save(decoder, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert checksum(hf_state(load(tmp_path))) == checksum(hf_state(decoder))


def test_shards_have_at_most_max_shard_bytes(tmp_path: Path) -> None:
    decoder = init(CONFIG)
    save(decoder, tmp_path, max_shard_bytes=8_000)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for _, t in hf_state(decoder))
    assert index["weight_map"].keys() == dict(hf_state(decoder)).keys()
    sizes = [sum(t.numel() * 4 for t in load_file(p).values()) for p in tmp_path.glob("*.safetensors")]
    assert len(sizes) > 3 and max(sizes) <= 8_000


def _edit_config(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _drop(path: Path, *names: str) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if name not in names}, path / "model.safetensors")


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _shard(path: Path) -> Path:
    save(load(path), path, max_shard_bytes=20_000)
    return sorted(path.glob("model-*.safetensors"))[1]


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no directory": (shutil.rmtree, "model: no such directory"),
    "no config": (lambda p: (p / "config.json").unlink(), "config.json is missing"),
    "invalid JSON": (lambda p: _truncate(p / "config.json"), "config.json: not valid JSON .* download it again"),
    "JSON list": (lambda p: (p / "config.json").write_text("[1]"), "config.json: expected a JSON object"),
    "architecture": (lambda p: _edit_config(p, architectures=["PhiForCausalLM"]), "PhiForCausalLM is not supported"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "no weights; expected model.safetensors"),
    "pickle": (
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        "only pytorch_model.bin, a pickle.* convert it",
    ),
    "truncated": (lambda p: _truncate(p / "model.safetensors"), "model.safetensors: truncated or corrupt.*again"),
    "empty": (lambda p: (p / "model.safetensors").write_bytes(b""), "model.safetensors: truncated or corrupt.*again"),
    "not safetensors": (
        lambda p: (p / "model.safetensors").write_text("<html>404 Not Found</html>" * 9),
        "model.safetensors: truncated or corrupt.*again",
    ),
    "shard missing": (lambda p: _shard(p).unlink(), "model-00002-of-.*: missing, though .*index.json names it"),
    "shard truncated": (lambda p: _truncate(_shard(p)), "model-00002-of-.*: truncated or corrupt"),
    "index broken": (lambda p: (_shard(p), _truncate(p / INDEX)), "index.json: not valid JSON"),
    "index empty": (lambda p: (_shard(p), (p / INDEX).write_text("{}")), "weight_map is missing"),
    "tensor missing": (
        lambda p: _drop(p, "model.norm.weight", "model.layers.0.mlp.up_proj.weight"),
        "missing tensors that the config requires: model.layers.0.mlp.up_proj.weight; model.norm.weight",
    ),
    "fewer layers": (
        lambda p: _edit_config(p, num_hidden_layers=2),
        "unexpected tensors.*: model.layers.2.input_layernorm.weight; .* and 5 more",
    ),
    "other width": (
        lambda p: _edit_config(p, intermediate_size=64),
        r"model.layers.0.mlp.gate_proj.weight is \[56, 32\], the config requires \[64, 32\]",
    ),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_directories_raise(
    checkpoint: Checkpoint, tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    load(path)  # it was fine before
    damage(path)
    with pytest.raises(ModelError, match=message) as error:
        load(path)
    assert str(path) in str(error.value)
