"""A decoder's parameters under their Hugging Face names: load, save, read, assign and hash them.

Our parameters are fused (qkv, gate_up), and packed into panels on a CPU engine. All other code uses the names and
shapes of transformers. A `ParameterView` maps one of our parameters to Hugging Face tensors; `decoder_views` lists
those of a decoder, `head_files.py` those of a draft head. All names and shapes are checked before a tensor is
copied: a failed call leaves the module unchanged.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline import files, native
from paceline.model.config import ModelConfig, with_yarn
from paceline.model.decoder import Decoder
from paceline.model.hf_directory import INDEX, MAX_SHARD_BYTES, SINGLE, write_directory
from paceline.model.layer import Layer, Linear, init_random
from paceline.model.sharding import full_tensor
from paceline.model.tensor_file import TensorFile, TensorSpec

Fetch = Callable[[str], Tensor]
Shapes = Mapping[str, tuple[int, ...]]
EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONVERT = "AutoModelForCausalLM.from_pretrained(path).save_pretrained(path) of transformers writes safetensors"


class ModelError(ValueError):
    """A model can't be found, read or used. The message names the file and the remedy."""


# ---- names ----


class ParameterView(NamedTuple):
    """One of our parameters, or a Linear's matrix, seen as Hugging Face tensors: each is a slice of its rows."""

    parameter: Tensor | Linear
    parts: tuple[tuple[str, int], ...]  # (Hugging Face name, number of rows)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        parameter = self.parameter
        tail = (parameter.num_in,) if isinstance(parameter, Linear) else tuple(parameter.shape[1:])
        return ((name, (rows, *tail)) for name, rows in self.parts)


def linear_views(module: Linear, *parts: tuple[str, int]) -> Iterator[ParameterView]:
    yield ParameterView(module, tuple((f"{name}.weight", rows) for name, rows in parts))
    if module.bias is not None:
        yield ParameterView(module.bias, tuple((f"{name}.bias", rows) for name, rows in parts))


def norm_views(parameter: Tensor | None, name: str) -> Iterator[ParameterView]:
    if parameter is not None:
        yield ParameterView(parameter, ((f"{name}.weight", len(parameter)),))


def layer_views(layer: Layer, c: ModelConfig, at: str) -> Iterator[ParameterView]:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield from norm_views(layer.input_norm, f"{at}.input_layernorm")
    qkv = zip("qkv", (q, kv, kv), strict=True)
    yield from linear_views(layer.qkv, *((f"{at}.self_attn.{which}_proj", rows) for which, rows in qkv))
    yield from norm_views(layer.q_norm, f"{at}.self_attn.q_norm")
    yield from norm_views(layer.k_norm, f"{at}.self_attn.k_norm")
    yield from linear_views(layer.o, (f"{at}.self_attn.o_proj", c.hidden_size))
    yield from norm_views(layer.post_norm, f"{at}.post_attention_layernorm")
    both = ((f"{at}.mlp.{which}_proj", c.intermediate_size) for which in ("gate", "up"))
    yield from linear_views(layer.gate_up, *both)
    yield from linear_views(layer.down, (f"{at}.mlp.down_proj", c.hidden_size))


def decoder_views(decoder: Decoder) -> Iterator[ParameterView]:
    c = decoder.config
    yield from linear_views(decoder.embed, ("model.embed_tokens", c.vocab_size))
    for i, layer in enumerate(decoder.layers):
        yield from layer_views(layer, c, f"model.layers.{i}")
    yield from norm_views(decoder.norm, "model.norm")
    if decoder.lm_head is not None:
        yield from linear_views(decoder.lm_head, ("lm_head", c.vocab_size))


# ---- memory ----


def hf_state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name: a view of the parameter if possible, unpacked from panels, or merged
    with its LoRA adapters. Each tensor is created when the iterator reaches it: a caller that frees each one before the
    next needs memory for one only. A tied lm_head appears once, as the embedding."""
    return read_views(decoder_views(decoder))


def read_views(views: Iterable[ParameterView], dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """In `dtype`, or that of the parameters."""
    for view in views:
        names, sizes = zip(*view.parts, strict=True)
        yield from zip(names, _read(view.parameter, dtype).split(sizes), strict=True)


def assign(decoder: Decoder, pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite every parameter in place from tensors of any dtype and device, under their Hugging Face names."""
    _fill(decoder, *collect(pairs), "weights")


def collect(pairs: Iterable[tuple[str, Tensor]]) -> tuple[Shapes, Fetch]:
    """The shapes of all tensors, and a function that returns a tensor by name."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if name in tensors:
            raise ModelError(f"weights: {name} is given twice")
        tensors[name] = tensor
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__


def _fill(decoder: Decoder, shapes: Shapes, fetch: Fetch, source: object) -> None:
    if decoder.lm_head is None and LM_HEAD in shapes and EMBED in shapes:
        # Some checkpoints store a tied LM head. It must equal the embedding.
        if not torch.equal(fetch(LM_HEAD), fetch(EMBED)):
            raise ModelError(
                f"{source}: {LM_HEAD} differs from {EMBED} although the config ties them (tie_word_embeddings)"
            )
        shapes = {name: shape for name, shape in shapes.items() if name != LM_HEAD}
    fill_views(decoder_views(decoder), shapes, fetch, source)


def fill_views(views: Iterable[ParameterView], shapes: Shapes, fetch: Fetch, source: object) -> None:
    """Check the names and shapes of all tensors, then copy them one by one."""
    views = list(views)
    check_views(views, shapes, source)
    with torch.no_grad():
        for view in views:
            _write(view, fetch)


def check_views(views: Iterable[ParameterView], shapes: Shapes, source: object) -> None:
    """Raise ModelError unless the tensors have exactly the names and shapes that the views need."""
    needed = dict(shape for view in views for shape in view.shapes())
    if missing := [name for name in needed if name not in shapes]:
        raise ModelError(f"{source}: missing tensors that the config requires: {_listing(missing)}")
    if wrong := [name for name in needed if shapes[name] != needed[name]]:
        each = [f"{name} is {list(shapes[name])}, the config requires {list(needed[name])}" for name in wrong]
        raise ModelError(f"{source}: wrong shapes: {_listing(each)}")
    unexpected = {name for name in shapes.keys() - needed.keys() if not name.endswith("rotary_emb.inv_freq")}
    if unexpected:
        raise ModelError(f"{source}: unexpected tensors, not part of the config: {_listing(sorted(unexpected))}")


def _listing(items: list[str], limit: int = 4) -> str:
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


def _read(parameter: Tensor | Linear, dtype: torch.dtype | None = None) -> Tensor:
    if not isinstance(parameter, Linear):
        return full_tensor(parameter.detach().to(dtype or parameter.dtype))
    if parameter.weight is not None:
        weight = _read(parameter.weight, dtype)
    else:
        from paceline.model import kernels

        assert parameter.panels is not None
        weight = kernels.unpack(parameter.panels, parameter.num_out)
    return weight if parameter.lora is None else parameter.lora.merged(weight)


def _write(view: ParameterView, fetch: Fetch) -> None:
    parameter = view.parameter
    assert not isinstance(parameter, Linear) or parameter.lora is None, "assign weights before attaching adapters"
    if isinstance(parameter, Linear) and parameter.weight is None:
        from paceline.model import kernels

        assert parameter.panels is not None
        first = 0
        for name, rows in view.parts:
            kernels.pack_rows(fetch(name).to(parameter.panels), parameter.panels, first)
            first += rows
        return
    tensor = _read(parameter)
    for (name, _), part in zip(view.parts, tensor.split([rows for _, rows in view.parts]), strict=True):
        part.copy_(fetch(name))
    if isinstance(parameter, Linear) and parameter.float8 is not None:
        parameter.float8.update(tensor)


def init(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    decoder = _empty(config, dtype, device)
    init_random(hf_state(decoder), seed)
    return decoder


def _empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    return decoder.to(dtype).to_empty(device=device)


# ---- directories ----


def read_config(directory: Path | str, yarn_factor: float | None = None) -> ModelConfig:
    """The config of a Hugging Face directory, with its context extended by `yarn_factor` if given."""
    hf = read_config_json(Path(directory))
    try:
        config = ModelConfig.from_hf(hf)
    except ValueError as error:
        raise ModelError(f"{directory}: {error}") from None
    return config if yarn_factor is None else with_yarn(config, yarn_factor)


def read_config_json(directory: Path) -> dict[str, Any]:
    """config.json of a model or a head. If generation_config.json has eos_token_id, that takes precedence."""
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    if not (directory / "config.json").exists():
        raise ModelError(f"{directory}: config.json is missing; expected a directory with config.json and {SINGLE}")
    hf, generation = read_json(directory / "config.json"), directory / "generation_config.json"
    if generation.exists() and (ids := read_json(generation).get("eos_token_id")) not in (None, []):
        hf["eos_token_id"] = ids
    return hf


def load(
    directory: Path | str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    yarn_factor: float | None = None,
) -> Decoder:
    """The decoder of a Hugging Face directory. Tensors are mapped from disk and copied one by one."""
    directory = Path(directory)
    config = read_config(directory, yarn_factor)
    with tensors_in(directory) as (shapes, fetch):
        _check_stored(config, shapes, directory)
        decoder = _empty(config, dtype, device)
        _fill(decoder, shapes, fetch, directory)
    return decoder


def _check_stored(config: ModelConfig, shapes: Shapes, source: object) -> None:
    """Check before allocating memory that the files have the tensors that the config requires. Otherwise a config with
    too large sizes would allocate memory for tensors that do not exist. One layer more than is stored is enough to
    find the first missing one."""
    stored = {found[1] for name in shapes if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    with torch.device("meta"):
        decoder = Decoder(replace(config, num_layers=min(config.num_layers, len(stored) + 1)))
    tied = {LM_HEAD} if config.tie_embeddings else set()
    check_views(decoder_views(decoder), {name: shapes[name] for name in shapes.keys() - tied}, source)


@contextmanager
def tensors_in(directory: Path, convert: str = CONVERT, mapped: bool = True) -> Iterator[tuple[Shapes, Fetch]]:
    """The shapes of a directory's tensors by name, and a function that maps one from disk or, if not `mapped`, reads
    it. `convert` is the advice in the error message if there are only pickles."""
    with ExitStack() as stack:
        file_of: dict[str, Any] = {}  # tensor name -> the open file that has it
        for path in _safetensors(directory, convert):
            try:
                opened: Any = stack.enter_context(safe_open(path, "pt") if mapped else TensorFile(path))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: truncated or corrupt ({error}); download it again") from None
            file_of |= dict.fromkeys(opened.keys(), opened)
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name, opened in file_of.items()}
        yield shapes, lambda name: file_of[name].get_tensor(name)


def save(decoder: Decoder, directory: Path | str, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write config.json and safetensors, in files of at most `max_shard_bytes`. The config is written last: a directory
    without it is incomplete."""
    documents = {"config.json": hf_config(decoder.config, decoder.dtype)}
    specs = specs_of(decoder_views(decoder), decoder.dtype)
    write_directory(Path(directory), hf_state(decoder), specs, documents, max_shard_bytes)


def hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json for weights of this dtype."""
    return {**config.to_hf(), "dtype": str(dtype).removeprefix("torch.")}


def specs_of(views: Iterable[ParameterView], dtype: torch.dtype) -> dict[str, TensorSpec]:
    """Of the Hugging Face tensors, if they are written in this dtype."""
    return {name: TensorSpec(dtype, shape) for view in views for name, shape in view.shapes()}


def _safetensors(directory: Path, convert: str) -> list[Path]:
    if (single := directory / SINGLE).exists():
        return [single]
    index = directory / INDEX
    if index.exists():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict) or not where:
            raise ModelError(f"{index}: weight_map is missing; download it again")
        for file in where.values():
            if not files.is_plain_name(file):
                raise ModelError(
                    f"{index}: weight_map has {file!r}, which is not a file name in this directory; files outside of "
                    "it are not read: download the model again"
                )
        paths = [directory / file for file in sorted(set(where.values()))]
        for path in paths:
            if not path.exists():
                raise ModelError(f"{path}: missing, though {INDEX} names it; download the model again")
        return paths
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise ModelError(
            f"{directory}: only {pickles[0]}, a pickle, which can run arbitrary code when it is loaded; if you trust "
            f"it, convert it: {convert}"
        )
    raise ModelError(f"{directory}: no weights; expected {SINGLE} or {INDEX}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except ValueError as error:
        raise ModelError(f"{error}; download it again") from None


# ---- checksum ----

_SPAN = 1 << 16  # words per partial sum
_BLOCK = {"cpu": 2, "cuda": 128}  # partial sums that torch computes at once: 1 MB of scratch (fits the cache), or 64 MB


def checksum(pairs: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, dtypes, shapes and bits. It does not depend on layout, order and device.

    Each span of words is summed with odd multipliers, modulo 2^64, on the tensor's device. SHA-256 hashes the sums. One
    changed element always changes its sum, because odd numbers have inverses. So do two swapped elements, because the
    low halves of the multipliers differ by less than 2^17."""
    labels, sums = [], []
    for name, tensor in pairs:
        labels.append(f"{name} {tensor.dtype} {list(tensor.shape)}")
        sums.append(_sums(_words(tensor)))
    own = (hashlib.sha256(each.astype("<u8").tobytes()) for each in _on_host(sums))
    lines = [f"{label} {digest.hexdigest()}" for label, digest in zip(labels, own, strict=True)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def checkpoint_checksum(directory: Path | str) -> str:
    """The checksum of a directory's tensors as stored. It does not depend on the dtype they are loaded with."""
    with tensors_in(Path(directory)) as (shapes, fetch):
        return checksum((name, fetch(name)) for name in shapes)


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits as int8, int16 or int32. A float64 becomes two words: as int64, swapping two elements that
    differ only in the top bit would not change the sum, because multipliers differ by an even number."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view({1: torch.int8, 2: torch.int16}.get(flat.dtype.itemsize, torch.int32))


def _sums(words: Tensor) -> Tensor:
    """The sum of every full span and of the remainder, uint64 stored as int64. Computed in C for CPU tensors if there
    is a compiler, otherwise in torch."""
    if words.device.type == "cpu" and (in_c := _native_sums()):
        return torch.from_numpy(in_c(words, _high_halves()).view(np.int64))
    return _torch_sums(words)


def _on_host(sums: Sequence[Tensor]) -> Iterator[np.ndarray]:
    """One copy for all, because each copy from the device synchronises."""
    if sums:
        device = sums[-1].device
        together = torch.cat([each.to(device) for each in sums]).cpu()
        yield from (each.numpy().view(np.uint64) for each in together.split([len(each) for each in sums]))


@cache
def _native_sums() -> Callable[[Tensor, np.ndarray], np.ndarray] | None:
    from paceline.model import kernels

    try:
        native.load("weights")
    except native.NativeUnavailable:
        return None
    return kernels.sums


def _torch_sums(words: Tensor) -> Tensor:
    multipliers = _multipliers(words.device)
    end = len(words) // _SPAN * _SPAN
    blocks = words[:end].view(-1, _SPAN).split(_BLOCK.get(words.device.type, 2))
    remainder = words[end:]
    last = (remainder * multipliers[: len(remainder)]).sum(0, True)
    return torch.cat([*((block * multipliers).sum(1) for block in blocks), last])


@cache
def _multipliers(device: torch.device) -> Tensor:
    """Odd 64-bit numbers: random high halves, low halves 1, 3, 5, …"""
    low = 2 * np.arange(_SPAN, dtype=np.uint64) + np.uint64(1)
    return torch.from_numpy((_high_halves().astype(np.uint64) << np.uint64(32) | low).view(np.int64)).to(device)


@cache
def _high_halves() -> np.ndarray:
    return np.random.PCG64(0).random_raw(_SPAN).astype(np.uint32)
