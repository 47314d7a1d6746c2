"""Load, save, read and assign draft heads under the tensor names of the `speculators` layout, which is also the one
that is written. `head_layouts.py` reads the config files of all supported layouts.

`d2t` holds offsets: draft token i is target token i + d2t[i]. `t2d` marks the target tokens that are draft tokens. A
loaded head fits its target; otherwise loading raises a ModelError that names the mismatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline import native
from paceline.model.config import ModelConfig
from paceline.model.draft_head import DraftHead, HeadConfig
from paceline.model.dspark import DSparkConfig, DSparkHead
from paceline.model.eagle3 import Eagle3Config, Eagle3Head
from paceline.model.head_layouts import check_fit, from_json, ids_key, to_speculators
from paceline.model.hf_directory import MAX_SHARD_BYTES, write_directory
from paceline.model.provenance import FILE, Provenance, read_provenance
from paceline.model.tensor_file import TensorSpec
from paceline.model.weights import (
    Fetch,
    ModelError,
    ParameterView,
    Shapes,
    check_views,
    collect,
    fill_views,
    layer_views,
    linear_views,
    norm_views,
    read_config_json,
    read_views,
    tensors_in,
)

LM_HEAD, MARKOV_OUT = "lm_head.weight", "markov_head.markov_w2.weight"  # one row per draft token
CONVERT = "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"


# ---- memory ----


def _head_views(head: DraftHead) -> Iterator[ParameterView]:
    c = head.config
    yield from linear_views(head.fc, ("fc", c.layer.hidden_size))
    if isinstance(head, DSparkHead):
        yield from _dspark_views(head)
    else:
        assert isinstance(head, Eagle3Head)
        yield from _eagle3_views(head)
    yield from norm_views(head.norm, "norm")
    yield from linear_views(head.lm_head, ("lm_head", c.draft_vocab_size))
    if head.embed is not None:
        yield from linear_views(head.embed, ("embed_tokens", c.layer.vocab_size))


def _eagle3_views(head: Eagle3Head) -> Iterator[ParameterView]:
    if head.fc_norm is not None:
        for i, row in enumerate(head.fc_norm.detach()):
            yield from norm_views(row, f"fc_norm.{i}")
    yield from norm_views(head.hidden_norm, "layers.0.hidden_norm")
    yield from layer_views(head.layer, head.config.layer, "layers.0")


def _dspark_views(head: DSparkHead) -> Iterator[ParameterView]:
    c = head.config
    yield from norm_views(head.hidden_norm, "hidden_norm")
    for i, layer in enumerate(head.layers):
        yield from layer_views(layer, c.layer, f"layers.{i}")
    yield from linear_views(head.markov_in, ("markov_head.markov_w1", c.layer.vocab_size))
    yield from linear_views(head.markov_out, (MARKOV_OUT.removesuffix(".weight"), c.draft_vocab_size))
    if head.confidence is not None:
        yield from linear_views(head.confidence, ("confidence_head.proj", 1))


def head_state(head: DraftHead) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name in the `speculators` layout; the counterpart of `weights.hf_state`. A head with the
    full vocabulary has no `d2t` and `t2d`."""
    yield from read_views(_head_views(head))
    num_draft, num_target = head.config.draft_vocab_size, head.config.layer.vocab_size
    if num_draft < num_target:
        yield "d2t", head.draft_ids - torch.arange(num_draft, device=head.device)
        has_draft_token = torch.zeros(num_target, dtype=torch.bool, device=head.device)
        yield "t2d", has_draft_token.index_fill_(0, head.draft_ids, True)


def assign_head(head: DraftHead, pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite every tensor in place with those of a `head_state`, of any dtype and device."""
    _fill(head, *collect(pairs), "head weights")


def _fill(head: DraftHead, shapes: Shapes, fetch: Fetch, source: object) -> None:
    ids = _draft_ids(head.config, shapes, fetch, source)
    order = ids.argsort()

    def sorted_fetch(name: str) -> Tensor:
        """Our draft ids are sorted, so matrices with one row per draft token are sorted in the same way."""
        tensor = fetch(name)
        return tensor[order.to(tensor.device)] if name in (LM_HEAD, MARKOV_OUT) else tensor

    fill_views(_head_views(head), _without_ids(shapes), sorted_fetch, source)
    head.draft_ids.copy_(ids[order])


def _without_ids(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d")}


def _draft_ids(config: HeadConfig, shapes: Shapes, fetch: Fetch, source: object) -> Tensor:
    """The target token of each draft token, on the CPU: [N], distinct and within the target's vocabulary."""
    num_draft, num_target = config.draft_vocab_size, config.layer.vocab_size
    if "d2t" in shapes:
        if shapes["d2t"] != (num_draft,):
            raise ModelError(f"{source}: d2t has shape {list(shapes['d2t'])}, but draft_vocab_size = {num_draft}")
        ids = torch.arange(num_draft) + fetch("d2t").cpu().long()
        if ids.min() < 0 or ids.max() >= num_target:
            bad = ids[(ids < 0) | (ids >= num_target)]
            raise ModelError(
                f"{source}: d2t maps to token {int(bad[0])}, outside the target's vocabulary of {num_target}; it must "
                "hold offsets: draft token i is target token i + d2t[i]"
            )
        if len(ids.unique()) < num_draft:
            raise ModelError(
                f"{source}: d2t maps two draft tokens to one target token; it must hold offsets: draft token i is "
                "target token i + d2t[i]"
            )
    elif num_draft == num_target:
        ids = torch.arange(num_draft)
    else:
        raise ModelError(
            f"{source}: d2t is missing, which maps the {num_draft} draft tokens to the target's {num_target} tokens; "
            "take it from the head's training run"
        )
    if "t2d" in shapes:
        has_draft_token = torch.zeros(num_target, dtype=torch.bool)
        has_draft_token[ids] = True
        if shapes["t2d"] != (num_target,) or not torch.equal(fetch("t2d").cpu().bool(), has_draft_token):
            raise ModelError(
                f"{source}: t2d must be true for the tokens that d2t maps to and false for all others of the target's "
                f"{num_target}; they are from different vocabularies: take both from the head's training run"
            )
    return ids


# ---- writing ----


def save_head(
    head: DraftHead,
    directory: Path | str,
    provenance: Provenance,
    *,
    target_name: str | None = None,
    num_speculative_tokens: int | None = None,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write config.json, safetensors and provenance.json. `target_name` is the target's name for other engines, for
    example a hub id; by default it is the provenance's. `num_speculative_tokens` is for other engines too; by default
    3, or a DSpark head's block size. `dtype` None keeps the head's. The config is written last: a directory without it
    is incomplete."""
    dtype = dtype or head.dtype
    state = [(name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in head_state(head)]
    config = to_speculators(head.config, target_name or provenance.target, num_speculative_tokens, dtype)
    documents = {FILE: asdict(provenance), "config.json": config}
    specs = {name: TensorSpec(tensor.dtype, tuple(tensor.shape)) for name, tensor in state}
    write_directory(Path(directory), iter(state), specs, documents, max_shard_bytes)


# ---- reading ----


def load_head(
    directory: Path | str,
    target: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    target_checksum: str | None = None,
    any_target: bool = False,
) -> DraftHead:
    """The head of a directory in any supported layout. `target_checksum` is `weights.checkpoint_checksum` of the
    target. Unless `any_target`, it must equal the one in the head's provenance, if there is one."""
    directory = Path(directory)
    hf = read_config_json(directory)
    with tensors_in(directory, CONVERT) as (shapes, fetch):
        shapes, fetch = _renamed(shapes, fetch)
        config = _config(hf, directory / "config.json", target, shapes)
        if not any_target:
            _check_target(directory, target_checksum)
        with torch.device("meta"):
            head = _new(config)
        check_views(_head_views(head), _without_ids(shapes), directory)  # before allocating memory
        head = head.to(dtype).to_empty(device=device)
        _fill(head, shapes, fetch, directory)
    for name, parameter in head.named_parameters():
        if not parameter.isfinite().all():
            raise ModelError(f"{directory}: {name} holds values that are not finite; train the head again")
    return head


def _new(config: Eagle3Config | DSparkConfig) -> DraftHead:
    return DSparkHead(config) if isinstance(config, DSparkConfig) else Eagle3Head(config)


def read_head_config(directory: Path, target: ModelConfig) -> HeadConfig:
    """The shape of a directory's head. Reads no weights."""
    hf = read_config_json(directory)
    with tensors_in(directory, CONVERT) as (shapes, fetch):
        return _config(hf, directory / "config.json", target, _renamed(shapes, fetch)[0])


def _config(hf: dict[str, Any], path: Path, target: ModelConfig, shapes: Shapes) -> Eagle3Config | DSparkConfig:
    try:
        config = from_json(hf, target, own_embedding="embed_tokens.weight" in shapes)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from None
    check_fit(config, ids_key(hf), target, shapes, path)
    return config


def _renamed(shapes: Shapes, fetch: Fetch) -> tuple[Shapes, Fetch]:
    """SpecForge's `midlayer` as `layers.0`."""
    stored = {
        name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name: name for name in shapes
    }
    return {name: shapes[old] for name, old in stored.items()}, lambda name: fetch(stored[name])


def _check_target(directory: Path, target_checksum: str | None) -> None:
    """Raise ModelError if the head was trained for another checkpoint, or if provenance.json is damaged."""
    provenance = read_provenance(directory)
    if provenance is None or target_checksum is None or provenance.target_checksum is None:
        return
    if provenance.target_checksum != target_checksum:
        raise ModelError(
            f"{directory / FILE}: target_checksum = {provenance.target_checksum[:12]}… (of {provenance.target}), but "
            f"the loaded target has {target_checksum[:12]}…; train a head for this target with `paceline train-draft`, "
            "or set speculation.any_target = true to use this one"
        )


# ---- names ----


def ships_head(model_name: str) -> bool:
    """Whether an EAGLE-3 head for this model ships with Paceline."""
    return _known_name(model_name) in _shipped_heads()


def _known_name(model_name: str) -> str:
    """The name of a model that is given by name or by the directory of a pulled model."""
    pulled = Path(model_name).expanduser()
    return pulled.name if pulled.parent == native.cache_dir() / "models" else model_name


def _shipped_heads() -> dict[str, Path]:
    """Directories by model."""
    heads = Path(str(resources.files("paceline"))) / "heads"
    return {path.parent.name: path.parent for path in heads.glob("*/config.json")}


def resolve_head(name: str | None, model_name: str) -> Path:
    """The directory of a head given by path or name or, if `name` is None, of the one that ships with Paceline for this
    model. `model_name` may be the directory of a pulled model."""
    heads = _shipped_heads()
    shipped = ", ".join(sorted(heads)) or "none"
    if name is not None:
        path = Path(name).expanduser()
        if name in heads and not path.exists():
            return heads[name]
        if not name or not path.is_dir():
            raise ModelError(
                f"speculation.head = {name!r}: no such directory; train a head with `paceline train-draft`, or use "
                f"one that ships with Paceline ({shipped})"
            )
        if not (path / "config.json").exists() and (path / "head" / "config.json").exists():
            raise ModelError(f"speculation.head = {name!r} is a run's folder; use its head, {str(path / 'head')!r}")
        return path
    if ships_head(model_name):
        return heads[_known_name(model_name)]
    raise ModelError(
        f"no EAGLE-3 head ships with Paceline for model {model_name!r} (for: {shipped}); train one with `paceline "
        "train-draft` and set speculation.head to its directory, or draft without a head: "
        'speculation.method = "suffix". For a policy that was trained from one of these models, set speculation.head '
        "to the model's name and speculation.any_target = true"
    )
