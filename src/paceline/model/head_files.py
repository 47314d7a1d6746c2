"""EAGLE-3 heads in directories and in memory, under the names that everybody outside knows them by: those of the
`speculators` layout, which is also the one written. `head_layouts.py` knows what else is read.

`d2t` holds offsets: draft token i is target token i + d2t[i]; `t2d` says which target tokens are draft tokens. A head
that was loaded fits its target: what doesn't is refused, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from paceline import native
from paceline.model.config import ModelConfig
from paceline.model.eagle3 import Eagle3Head, HeadConfig
from paceline.model.head_layouts import check_fit, from_json, to_speculators
from paceline.model.provenance import FILE, Provenance, read_provenance
from paceline.model.weights import (
    Fetch,
    Home,
    ModelError,
    check_homes,
    checksum,
    collect,
    fill_homes,
    layer_homes,
    linear_homes,
    norm_homes,
    read_homes,
    read_json,
    tensors_in,
    write_directory,
)

Shapes = dict[str, tuple[int, ...]]
CONVERT = "safetensors.torch.save_file(torch.load(path, weights_only=True), 'model.safetensors')"


# ---- memory ----


def _homes(head: Eagle3Head) -> Iterator[Home]:
    c = head.config
    yield from linear_homes(head.fc, ("fc", c.layer.hidden_size))
    if head.fc_norm is not None:
        for i, row in enumerate(head.fc_norm.detach()):
            yield from norm_homes(row, f"fc_norm.{i}")
    yield from norm_homes(head.hidden_norm, "layers.0.hidden_norm")
    yield from layer_homes(head.layer, c.layer, "layers.0")
    yield from norm_homes(head.norm, "norm")
    yield from linear_homes(head.lm_head, ("lm_head", c.draft_vocab_size))
    if head.embed is not None:
        yield from linear_homes(head.embed, ("embed_tokens", c.layer.vocab_size))


def head_state(head: Eagle3Head) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its name in the `speculators` layout, as `weights.hf_state` does it for a decoder. A head of
    the full vocabulary has no `d2t` and `t2d`."""
    yield from read_homes(_homes(head))
    num_draft, num_target = head.config.draft_vocab_size, head.config.layer.vocab_size
    if num_draft < num_target:
        yield "d2t", head.draft_ids - torch.arange(num_draft, device=head.device)
        known = torch.zeros(num_target, dtype=torch.bool, device=head.device)
        yield "t2d", known.index_fill_(0, head.draft_ids, True)


def assign_head(head: Eagle3Head, pairs: Iterable[tuple[str, Tensor]]) -> None:
    """Overwrite every tensor, in place, with those of `head_state` of any dtype and device."""
    _fill(head, *collect(pairs), "head weights")


def head_checksum(head: Eagle3Head) -> str:
    return checksum(head_state(head))


def _fill(head: Eagle3Head, shapes: Shapes, fetch: Fetch, source: object) -> None:
    ids = _draft_ids(head.config, shapes, fetch, source)
    order = ids.argsort()

    def sorted_fetch(name: str) -> Tensor:
        """Ours ascend; a head whose tokens come otherwise is the same with the rows of its LM head sorted."""
        tensor = fetch(name)
        return tensor[order.to(tensor.device)] if name == "lm_head.weight" else tensor

    fill_homes(_homes(head), _without_ids(shapes), sorted_fetch, source)
    head.draft_ids.copy_(ids[order])


def _without_ids(shapes: Shapes) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d")}


def _draft_ids(config: HeadConfig, shapes: Shapes, fetch: Fetch, source: object) -> Tensor:
    """The target's token of each draft token, on the CPU: [N], distinct and within the target's vocabulary."""
    num_draft, num_target = config.draft_vocab_size, config.layer.vocab_size
    if "d2t" in shapes:
        if shapes["d2t"] != (num_draft,):
            raise ModelError(f"{source}: d2t is {list(shapes['d2t'])}, draft_vocab_size says [{num_draft}]")
        ids = torch.arange(num_draft) + fetch("d2t").cpu().long()
        if ids.min() < 0 or ids.max() >= num_target:
            bad = ids[(ids < 0) | (ids >= num_target)]
            raise ModelError(
                f"{source}: d2t leads to token {int(bad[0])}, outside the target's vocabulary of {num_target}; it "
                "must hold offsets: draft token i is target token i + d2t[i]"
            )
        if len(ids.unique()) < num_draft:
            raise ModelError(
                f"{source}: d2t leads to some target token twice; it must hold offsets: draft token i is target token "
                "i + d2t[i]"
            )
    elif num_draft == num_target:
        ids = torch.arange(num_draft)
    else:
        raise ModelError(
            f"{source}: d2t is missing, so nobody knows which of {num_target} tokens the {num_draft} draft tokens are; "
            "take it from where the head was trained"
        )
    if "t2d" in shapes:
        known = torch.zeros(num_target, dtype=torch.bool)
        known[ids] = True
        if shapes["t2d"] != (num_target,) or not torch.equal(fetch("t2d").cpu().bool(), known):
            raise ModelError(
                f"{source}: t2d must be true for the tokens that d2t leads to and false for all others of the target's "
                f"{num_target}; the two come from different vocabularies: take both from where the head was trained"
            )
    return ids


# ---- writing ----


def save_head(
    head: Eagle3Head,
    directory: Path | str,
    provenance: Provenance,
    *,
    target_name: str | None = None,
    num_speculative_tokens: int = 3,
    dtype: torch.dtype | None = torch.bfloat16,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write config.json, safetensors and provenance.json. `target_name` is what others will load as the target where
    it isn't what we call it, a hub id for instance; `dtype` None keeps the head's own. The config comes last: a
    directory without one was never finished."""
    dtype = dtype or head.dtype
    state = [(name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in head_state(head)]
    config = to_speculators(head.config, target_name or provenance.target, num_speculative_tokens, dtype)
    documents = {FILE: provenance.to_json(), "config.json": config}
    write_directory(Path(directory), iter(state), {name: x.nbytes for name, x in state}, documents, max_shard_bytes)


# ---- reading ----


def load_head(
    directory: Path | str,
    target: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    target_checksum: str | None = None,
    any_target: bool = False,
) -> Eagle3Head:
    """The head of a directory in either layout. `target_checksum`, `weights.checkpoint_checksum` of the target, is held
    against the one in the head's provenance, where there is one; `any_target` lets another target pass."""
    directory = Path(directory)
    if not directory.is_dir():
        raise ModelError(f"{directory}: no such directory; an EAGLE-3 head is a directory with config.json and weights")
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(f"{directory}: config.json is missing; a head's directory holds config.json and safetensors")
    hf = read_json(path)
    with tensors_in(directory, CONVERT) as (shapes, fetch):
        shapes, fetch = _renamed(shapes, fetch)
        try:
            config = from_json(hf, target, own_embedding="embed_tokens.weight" in shapes)
        except ValueError as error:
            raise ModelError(f"{path}: {error}") from None
        check_fit(config, target, shapes, path)
        if not any_target:
            _check_target(directory, target_checksum)
        with torch.device("meta"):
            head = Eagle3Head(config)
        check_homes(_homes(head), _without_ids(shapes), directory)  # before any memory is taken
        head = head.to(dtype).to_empty(device=device)
        _fill(head, shapes, fetch, directory)
    for name, parameter in head.named_parameters():
        if not parameter.isfinite().all():
            raise ModelError(f"{directory}: {name} holds values that are not finite; train the head again")
    return head


def _renamed(shapes: Shapes, fetch: Fetch) -> tuple[Shapes, Fetch]:
    """SpecForge's `midlayer` is `layers.0` elsewhere."""
    stored = {
        name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name: name for name in shapes
    }
    return {name: shapes[old] for name, old in stored.items()}, lambda name: fetch(stored[name])


def _check_target(directory: Path, target_checksum: str | None) -> None:
    """Whether it was made for this very checkpoint. A damaged provenance is an error even where nobody asks."""
    provenance = read_provenance(directory)
    if provenance is None or target_checksum is None or provenance.target_checksum is None:
        return
    if provenance.target_checksum != target_checksum:
        raise ModelError(
            f"{directory / FILE}: target_checksum = {provenance.target_checksum[:12]}…, of {provenance.target}, the "
            f"loaded target's is {target_checksum[:12]}…; train a head for this one with `paceline train-draft`, or "
            "draft with it all the same: speculation.any_target = true"
        )


# ---- names ----


def resolve_head(name: str | None, model_name: str) -> Path:
    """The directory of a head given by path, or the one that ships with Paceline for a model of this name. A model that
    was pulled may be given by its directory too."""
    shipped = Path(str(resources.files("paceline"))) / "heads"
    known = sorted(path.parent.name for path in shipped.glob("*/config.json"))
    if name is not None:
        path = Path(name).expanduser()
        if name in known and not path.exists():
            return shipped / name
        if not name or not path.is_dir():
            raise ModelError(
                f"speculation.head = {name!r}: no such directory; train a head with `paceline train-draft`, or name "
                f"one that ships with Paceline ({', '.join(known) or 'none does'})"
            )
        if not (path / "config.json").exists() and (path / "head" / "config.json").exists():
            raise ModelError(f"speculation.head = {name!r} is a run; its head is {str(path / 'head')!r}")
        return path
    pulled = Path(model_name).expanduser()
    model = pulled.name if pulled.parent == native.cache_dir() / "models" else model_name
    if model in known:
        return shipped / model
    raise ModelError(
        f"no EAGLE-3 head ships with Paceline for model {model_name!r} (for: {', '.join(known) or 'none'}); train one "
        "with `paceline train-draft` and set speculation.head to its directory, or draft without one: "
        'speculation.method = "suffix". For a policy that was trained from one of these models: speculation.head = its '
        "name, speculation.any_target = true"
    )
