"""A decoder's parameters under their Hugging Face names: from and to directories, in and out of memory, hashed.

Our parameters are fused (qkv, gate_up) and on a CPU engine packed into panels; everybody outside knows them by the
names and shapes of transformers. A `Home` is where the two meet, and `decoder_homes` lists a decoder's; `head_files.py`
lists an EAGLE-3 head's. What doesn't fit is refused whole: no call here leaves a module half old, half new.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline import files, native
from paceline.model.config import ModelConfig, token_ids, with_yarn
from paceline.model.decoder import Decoder
from paceline.model.layer import Layer, Linear
from paceline.model.sharding import whole

Fetch = Callable[[str], Tensor]
GB = 10**9
EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONVERT = "AutoModelForCausalLM.from_pretrained(path).save_pretrained(path) of transformers writes safetensors"


class ModelError(ValueError):
    """A model that can't be found, read or used; the message names the file and the remedy."""


# ---- names ----


class Home(NamedTuple):
    """Where some tensors of Hugging Face live: one below the other in one of ours, or in a Linear's matrix."""

    holder: Tensor | Linear
    parts: tuple[tuple[str, int], ...]  # (Hugging Face name, number of rows)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        tail = (self.holder.num_in,) if isinstance(self.holder, Linear) else tuple(self.holder.shape[1:])
        return ((name, (rows, *tail)) for name, rows in self.parts)


def linear_homes(module: Linear, *parts: tuple[str, int]) -> Iterator[Home]:
    yield Home(module, tuple((f"{name}.weight", rows) for name, rows in parts))
    if module.bias is not None:
        yield Home(module.bias, tuple((f"{name}.bias", rows) for name, rows in parts))


def norm_homes(parameter: Tensor | None, name: str) -> Iterator[Home]:
    if parameter is not None:
        yield Home(parameter, ((f"{name}.weight", len(parameter)),))


def layer_homes(layer: Layer, c: ModelConfig, at: str) -> Iterator[Home]:
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    yield from norm_homes(layer.input_norm, f"{at}.input_layernorm")
    qkv = zip("qkv", (q, kv, kv), strict=True)
    yield from linear_homes(layer.qkv, *((f"{at}.self_attn.{which}_proj", rows) for which, rows in qkv))
    yield from norm_homes(layer.q_norm, f"{at}.self_attn.q_norm")
    yield from norm_homes(layer.k_norm, f"{at}.self_attn.k_norm")
    yield from linear_homes(layer.o, (f"{at}.self_attn.o_proj", c.hidden_size))
    yield from norm_homes(layer.post_norm, f"{at}.post_attention_layernorm")
    both = ((f"{at}.mlp.{which}_proj", c.intermediate_size) for which in ("gate", "up"))
    yield from linear_homes(layer.gate_up, *both)
    yield from linear_homes(layer.down, (f"{at}.mlp.down_proj", c.hidden_size))


def decoder_homes(decoder: Decoder) -> Iterator[Home]:
    c = decoder.config
    yield from linear_homes(decoder.embed, ("model.embed_tokens", c.vocab_size))
    for i, layer in enumerate(decoder.layers):
        yield from layer_homes(layer, c, f"model.layers.{i}")
    yield from norm_homes(decoder.norm, "model.norm")
    if decoder.lm_head is not None:
        yield from linear_homes(decoder.lm_head, ("lm_head", c.vocab_size))


# ---- memory ----


def hf_state(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name: a view where the decoder holds it plainly, unpacked where it holds
    panels, merged where it has an adapter. Each is made when its turn comes, so who lets go of one before asking for
    the next needs no memory for them all. A tied lm_head appears once, as the embedding."""
    return read_homes(decoder_homes(decoder))


def read_homes(homes: Iterable[Home]) -> Iterator[tuple[str, Tensor]]:
    for home in homes:
        names, sizes = zip(*home.parts, strict=True)
        yield from zip(names, _read(home.holder).split(sizes), strict=True)


def assign(decoder: Decoder, pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite every parameter, in place, from Hugging Face-named tensors of any dtype and device."""
    _fill(decoder, *collect(pairs), "weights")


def collect(pairs: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, tuple[int, ...]], Fetch]:
    """The shapes of all that is given, and the tensor of a name."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in pairs:
        if name in tensors:
            raise ModelError(f"weights: {name} is given twice")
        tensors[name] = tensor
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}, tensors.__getitem__


def _fill(decoder: Decoder, shapes: Mapping[str, tuple[int, ...]], fetch: Fetch, source: object) -> None:
    if decoder.lm_head is None and LM_HEAD in shapes and EMBED in shapes:
        # Some checkpoints spell a tied head out. Fine, as long as it is the embedding.
        if not torch.equal(fetch(LM_HEAD), fetch(EMBED)):
            raise ModelError(
                f"{source}: {LM_HEAD} differs from {EMBED} although the config ties them (tie_word_embeddings)"
            )
        shapes = {name: shape for name, shape in shapes.items() if name != LM_HEAD}
    fill_homes(decoder_homes(decoder), shapes, fetch, source)


def fill_homes(homes: Iterable[Home], shapes: Mapping[str, tuple[int, ...]], fetch: Fetch, source: object) -> None:
    """Check all that is offered, then copy it tensor by tensor."""
    homes = list(homes)
    check_homes(homes, shapes, source)
    with torch.no_grad():
        for home in homes:
            _write(home, fetch)


def check_homes(homes: Iterable[Home], shapes: Mapping[str, tuple[int, ...]], source: object) -> None:
    """Whether what is offered is what is needed, tensor by tensor."""
    needed = dict(shape for home in homes for shape in home.shapes())
    if missing := [name for name in needed if name not in shapes]:
        raise ModelError(f"{source}: missing tensors the config asks for: {_listing(missing)}")
    if wrong := [name for name in needed if shapes[name] != needed[name]]:
        each = [f"{name} is {list(shapes[name])}, the config says {list(needed[name])}" for name in wrong]
        raise ModelError(f"{source}: wrong shapes: {_listing(each)}")
    spare = {name for name in shapes.keys() - needed.keys() if not name.endswith("rotary_emb.inv_freq")}
    if spare:
        raise ModelError(f"{source}: tensors that the config has no place for: {_listing(sorted(spare))}")


def _listing(items: list[str], most: int = 4) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return "; ".join(items[:most]) + more


def _read(holder: Tensor | Linear) -> Tensor:
    if not isinstance(holder, Linear):
        return whole(holder.detach())
    if holder.weight is not None:
        weight = whole(holder.weight.detach())
        return weight if holder.lora is None else holder.lora.merged(weight)
    from paceline.model import kernels

    assert holder.panels is not None
    return kernels.unpack(holder.panels, holder.num_out)


def _write(home: Home, fetch: Fetch) -> None:
    holder = home.holder
    if isinstance(holder, Linear) and holder.weight is None:
        from paceline.model import kernels

        assert holder.panels is not None
        first = 0
        for name, rows in home.parts:
            kernels.pack_rows(fetch(name).to(holder.panels), holder.panels, first)
            first += rows
        return
    assert not isinstance(holder, Linear) or holder.lora is None, "weights are assigned before adapters are attached"
    plain = _read(holder)
    for (name, _), view in zip(home.parts, plain.split([rows for _, rows in home.parts]), strict=True):
        view.copy_(fetch(name))
    if isinstance(holder, Linear) and holder.rounded is not None:
        holder.rounded.follow(plain)


def init(
    config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """Random weights, the same on every device: normal with deviation 0.02, norms at one."""
    decoder = _empty(config, dtype, device)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in hf_state(decoder):
            if name.endswith("norm.weight"):
                tensor.fill_(1)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=noise) * 0.02)
    return decoder


def _empty(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    with torch.device("meta"):
        decoder = Decoder(config)
    return decoder.to(dtype).to_empty(device=device)


# ---- directories ----


def read_config(directory: Path | str) -> ModelConfig:
    """config.json, with the end tokens of generation_config.json, which generation goes by, where it has them."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory")
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(f"{directory}: config.json is missing; a model directory holds config.json and {SINGLE}")
    generation = directory / "generation_config.json"
    try:
        config = ModelConfig.from_hf(read_json(path))
        if generation.exists() and (ids := token_ids(read_json(generation), "eos_token_id")):
            config = replace(config, eos_token_ids=ids)
    except ModelError:
        raise
    except ValueError as error:
        raise ModelError(f"{directory}: {error}") from None
    return config


def load(
    directory: Path | str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    yarn_factor: float | None = None,
) -> Decoder:
    """The decoder of a Hugging Face directory, its context stretched by `yarn_factor` if one is given. Tensors are
    mapped from disk and copied one by one."""
    directory = Path(directory)
    config = read_config(directory)
    if yarn_factor is not None:
        config = with_yarn(config, yarn_factor)
    with tensors_in(directory) as (shapes, fetch):
        _check_stored(config, shapes, directory)
        decoder = _empty(config, dtype, device)
        _fill(decoder, shapes, fetch, directory)
    return decoder


def _check_stored(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: object) -> None:
    """Before any memory is taken: are the tensors there that the config asks for, and as large? A config that asks for
    more than the files hold would otherwise take memory for what does not exist. One layer more than is stored is
    enough to find the first that is missing."""
    stored = {found[1] for name in shapes if (found := re.match(r"model\.layers\.(\d+)\.", name))}
    with torch.device("meta"):
        decoder = Decoder(replace(config, num_layers=min(config.num_layers, len(stored) + 1)))
    needed = dict(shape for home in decoder_homes(decoder) for shape in home.shapes())
    if missing := [name for name in needed if name not in shapes]:
        raise ModelError(f"{source}: missing tensors the config asks for: {_listing(missing)}")
    check_homes(decoder_homes(decoder), {name: shapes[name] for name in needed}, source)


@contextmanager
def tensors_in(directory: Path, convert: str = CONVERT) -> Iterator[tuple[dict[str, tuple[int, ...]], Fetch]]:
    """The shapes of a directory's tensors by name, and what maps one from disk. `convert` is the advice where there
    are pickles only."""
    with ExitStack() as stack:
        home: dict[str, Any] = {}  # tensor name -> the open file that has it
        for path in _safetensors(directory, convert):
            try:
                opened = stack.enter_context(safe_open(path, "pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path}: truncated or corrupt ({error}); download it again") from None
            home |= dict.fromkeys(opened.keys(), opened)
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name, opened in home.items()}
        yield shapes, lambda name: home[name].get_tensor(name)


def save(decoder: Decoder, directory: Path | str, max_shard_bytes: int = 5 * GB) -> None:
    """Write config.json and safetensors, sharded where they exceed `max_shard_bytes`. The config comes last: a
    directory without one was never finished."""
    config = {**decoder.config.to_hf(), "dtype": str(decoder.dtype).removeprefix("torch.")}
    shapes = (shape for home in decoder_homes(decoder) for shape in home.shapes())
    sizes = {name: int(np.prod(shape)) * decoder.dtype.itemsize for name, shape in shapes}
    write_directory(Path(directory), hf_state(decoder), sizes, {"config.json": config}, max_shard_bytes)


def write_directory(
    directory: Path,
    state: Iterator[tuple[str, Tensor]],
    sizes: Mapping[str, int],
    documents: Mapping[str, dict[str, Any]],
    max_shard_bytes: int,
) -> None:
    """Tensors, then JSON `documents` in their order, the last of which a finished directory is known by. `sizes` are
    the tensors' bytes, in the state's order."""
    directory.mkdir(parents=True, exist_ok=True)
    *_, last = documents
    (directory / last).unlink(missing_ok=True)
    for stale in (*directory.glob("model*.safetensors"), directory / INDEX):
        stale.unlink(missing_ok=True)
    shards = _shards(sizes, max_shard_bytes)
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    if len(shards) == 1:
        files = [SINGLE]
    for file, names in zip(files, shards, strict=True):
        part = dict(pair for _, pair in zip(names, state, strict=False))
        save_file({name: tensor.contiguous() for name, tensor in part.items()}, directory / file, {"format": "pt"})
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(directory / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where})
    for name, content in documents.items():
        _write_json(directory / name, content)
    for file in files:
        shutil.copymode(directory / last, directory / file)  # safetensors writes for the owner alone


def _shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """The tensors' names, in order, cut where a file would grow beyond `max_bytes`."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


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
                    f"{index}: weight_map names {file!r}, which is not a file of this directory; nothing outside of it "
                    "is read: get the model from its source again"
                )
        paths = [directory / file for file in sorted(set(where.values()))]
        for path in paths:
            if not path.exists():
                raise ModelError(f"{path}: missing, though {INDEX} names it; download the model again")
        return paths
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise ModelError(
            f"{directory}: only {pickles[0]}, a pickle, which may run any code when it is read; convert it where you "
            f"trust it: {convert}"
        )
    raise ModelError(f"{directory}: no weights; expected {SINGLE} or {INDEX}")


def read_json(path: Path) -> dict[str, Any]:
    try:
        return files.read_json(path)
    except ValueError as error:
        raise ModelError(f"{error}; download it again") from None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


# ---- checksum ----

_SPAN = 1 << 16  # words per partial sum
_BLOCK = {"cpu": 2, "cuda": 128}  # partial sums torch computes at once: 1 MB of scratch, to stay in cache; or 64 MB


def checksum(pairs: Iterable[tuple[str, Tensor]]) -> str:
    """A hash of names, dtypes, shapes and bits, the same for every layout, order and device.

    Each span of words is summed with odd multipliers, modulo 2^64, on the tensor's own device; SHA-256 then takes
    the sums. One changed element always changes its sum, since odd numbers have inverses; and two swapped elements
    do, since the multipliers' low halves differ by less than 2^17."""
    labels, sums = [], []
    for name, tensor in pairs:
        labels.append(f"{name} {tensor.dtype} {list(tensor.shape)}")
        sums.append(_sums(_words(tensor)))
    own = (hashlib.sha256(each.astype("<u8").tobytes()) for each in _on_host(sums))
    lines = [f"{label} {digest.hexdigest()}" for label, digest in zip(labels, own, strict=True)]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def checkpoint_checksum(directory: Path | str) -> str:
    """Of a directory's tensors as they are stored, so that it doesn't depend on the dtype they are loaded with."""
    with tensors_in(Path(directory)) as (shapes, fetch):
        return checksum((name, fetch(name)) for name in shapes)


def _words(tensor: Tensor) -> Tensor:
    """The tensor's bits as int8, int16 or int32. float64 as two words: within one int64 a difference in the top bit
    would be lost to an even factor."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view({1: torch.int8, 2: torch.int16}.get(flat.dtype.itemsize, torch.int32))


def _sums(words: Tensor) -> Tensor:
    """The sum of every whole span and of the rest, uint64 in int64's clothes: in C on a CPU that has a compiler, in
    torch elsewhere."""
    if words.device.type == "cpu" and (in_c := _native_sums()):
        return torch.from_numpy(in_c(words, _high_halves()).view(np.int64))
    return _torch_sums(words)


def _on_host(sums: Sequence[Tensor]) -> Iterator[np.ndarray]:
    """All in one copy: for each the host would wait until the device has come to it."""
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
    whole = len(words) // _SPAN * _SPAN
    blocks = words[:whole].view(-1, _SPAN).split(_BLOCK.get(words.device.type, 2))
    rest = words[whole:]
    return torch.cat(
        [*((block * multipliers).sum(1) for block in blocks), (rest * multipliers[: len(rest)]).sum(0, True)]
    )


@cache
def _multipliers(device: torch.device) -> Tensor:
    """Random high halves; the low halves are 1, 3, 5, ..."""
    low = 2 * np.arange(_SPAN, dtype=np.uint64) + np.uint64(1)
    return torch.from_numpy((_high_halves().astype(np.uint64) << np.uint64(32) | low).view(np.int64)).to(device)


@cache
def _high_halves() -> np.ndarray:
    return np.random.PCG64(0).random_raw(_SPAN).astype(np.uint32)
