"""The head that training starts with: a new head with the shape of `[draft]`, or an existing one (draft.init)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.config import DraftSection
from paceline.draft.head_batch import Example
from paceline.draft.vocabulary import choose_draft_ids
from paceline.model.config import ModelConfig
from paceline.model.draft_head import DraftHead, HeadConfig
from paceline.model.dspark import DSparkConfig, dspark_config, init_dspark
from paceline.model.eagle3 import Eagle3Config, default_layer_ids, head_config, init_head

MAX_BLOCK = 16  # draft.unroll
SHAPES = {  # keys of `[draft]` by architecture
    "eagle3": ("draft_vocab_size", "layer_ids", "norm_before_residual", "fc_norm"),
    "dspark": ("draft_vocab_size", "layer_ids", "num_layers", "markov_rank"),
}


class HeadInit:
    """The shape of a new head, or an existing head, checked before sequences are generated. `section` is the config
    with the head's actual shape."""

    def __init__(self, section: DraftSection, target: ModelConfig, given: DraftHead | None = None) -> None:
        self.target, self.given = target, given
        self.section = section if given is None else shaped_like(section, given)
        self.shape = new_shape(section, target) if given is None else given.config

    def head(
        self, examples: Sequence[Example], eos_ids: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> DraftHead:
        """The existing head, or a new one with a draft vocabulary that is chosen by these examples."""
        if self.given is not None:
            return self.given.to(dtype=dtype, device=device)
        ids = choose_draft_ids(examples, self.shape.draft_vocab_size, self.target.vocab_size, eos_ids)
        return new_head(self.shape, torch.from_numpy(ids), self.section.seed, dtype, device)


def new_shape(section: DraftSection, target: ModelConfig) -> HeadConfig:
    ids = tuple(section.layer_ids or default_layer_ids(target.num_layers))
    if list(ids) != sorted(set(ids)) or not all(1 <= i <= target.num_layers for i in ids):
        is_default = section.layer_ids is None
        value = "is not set, and its default needs 7 layers" if is_default else f"= {list(ids)}"
        raise ValueError(
            f"draft.layer_ids {value}: the model has {target.num_layers} layers; give ascending numbers from 1 to "
            f"{target.num_layers}, such as [1, {target.num_layers}]"
        )
    if section.draft_vocab_size > target.vocab_size:
        raise ValueError(
            f"draft.draft_vocab_size = {section.draft_vocab_size}: the model has {target.vocab_size} tokens; lower it"
        )
    check_architecture(section)
    if section.architecture == "dspark":
        return dspark_config(
            target,
            section.draft_vocab_size,
            ids,
            num_layers=section.num_layers,
            block_size=section.unroll,
            markov_rank=section.markov_rank,
        )
    return replace(
        head_config(target, section.draft_vocab_size, ids),
        norm_before_residual=section.norm_before_residual,
        fc_norm=section.fc_norm,
    )


def new_head(
    config: HeadConfig, draft_ids: Tensor, seed: int, dtype: torch.dtype, device: torch.device | str
) -> DraftHead:
    """A head with random weights."""
    options: Any = {"seed": seed, "dtype": dtype, "device": device}
    if isinstance(config, DSparkConfig):
        return init_dspark(config, draft_ids, **options)
    assert isinstance(config, Eagle3Config)
    return init_head(config, draft_ids, **options)


def check_architecture(section: DraftSection) -> None:
    """Raise ValueError for a key of another architecture, which would be ignored."""
    known = SHAPES[section.architecture]
    for key in {key for keys in SHAPES.values() for key in keys}.difference(known) & section.model_fields_set:
        (other,) = (name for name, keys in SHAPES.items() if key in keys)
        if getattr(section, key) != DraftSection.model_fields[key].default:
            raise ValueError(
                f'draft.{key} = {getattr(section, key)}: is for draft.architecture = "{other}", but it is '
                f'"{section.architecture}"; remove the key, or change draft.architecture'
            )


def without_other_keys(section: DraftSection) -> DraftSection:
    """The keys of other architectures have their defaults."""
    others = {key for keys in SHAPES.values() for key in keys} - set(SHAPES[section.architecture])
    return section.model_copy(update={key: DraftSection.model_fields[key].default for key in others})


def shaped_like(section: DraftSection, head: DraftHead) -> DraftSection:
    """The config with the shape of draft.init. A key that was set to another value is an error, and so is one of
    another architecture."""
    config = head.config
    check_architecture(section.model_copy(update={"architecture": head.architecture}))
    if isinstance(config, DSparkConfig) and config.block_size > MAX_BLOCK:
        raise ValueError(
            f"draft.init = {section.init!r}: its block_size = {config.block_size}, and blocks of at most {MAX_BLOCK} "
            "tokens can be trained; use another head"
        )
    shape: dict[str, object] = {"architecture": head.architecture, "layer_ids": list(config.layer_ids)}
    for key in SHAPES[head.architecture]:
        if key == "num_layers":
            shape[key] = config.layer.num_layers
        elif key != "layer_ids":
            shape[key] = getattr(config, key)
    if isinstance(config, DSparkConfig):
        shape["unroll"] = config.block_size
    for key, value in shape.items():
        given = getattr(section, key)
        if key in section.model_fields_set and given is not None and given != value:
            raise ValueError(
                f"draft.{key} = {given}: the head draft.init = {section.init!r} has {value}; use that value, or train "
                "a new head without draft.init"
            )
    return section.model_copy(update=shape)
