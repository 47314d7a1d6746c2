"""The head that training starts with: a new head with the shape of `[draft]`, or an existing one (draft.init)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.config import DraftSection
from paceline.draft.head_batch import Example
from paceline.draft.vocabulary import choose_draft_ids
from paceline.model.config import ModelConfig
from paceline.model.eagle3 import Eagle3Head, HeadConfig, default_layer_ids, head_config, init_head

SHAPE = ("draft_vocab_size", "layer_ids", "norm_before_residual", "fc_norm")


class HeadInit:
    """The shape of a new head, or an existing head, checked before sequences are generated. `section` is the config
    with the head's actual shape."""

    def __init__(self, section: DraftSection, target: ModelConfig, given: Eagle3Head | None = None) -> None:
        self.target, self.given = target, given
        self.section = section if given is None else shaped_like(section, given.config)
        self.shape = new_shape(section, target) if given is None else given.config

    def head(
        self, examples: Sequence[Example], eos_ids: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Eagle3Head:
        """The existing head, or a new one with a draft vocabulary that is chosen by these examples."""
        if self.given is not None:
            return self.given.to(dtype=dtype, device=device)
        ids = choose_draft_ids(examples, self.shape.draft_vocab_size, self.target.vocab_size, eos_ids)
        return init_head(self.shape, torch.from_numpy(ids), seed=self.section.seed, dtype=dtype, device=device)


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
    return replace(
        head_config(target, section.draft_vocab_size, ids),
        norm_before_residual=section.norm_before_residual,
        fc_norm=section.fc_norm,
    )


def shaped_like(section: DraftSection, head: HeadConfig) -> DraftSection:
    """The config with the shape of draft.init. A key that was set to another value is an error."""
    shape = {key: getattr(head, key) for key in SHAPE} | {"layer_ids": list(head.layer_ids)}
    for key, value in shape.items():
        given = getattr(section, key)
        if key in section.model_fields_set and given is not None and given != value:
            raise ValueError(
                f"draft.{key} = {given}: the head draft.init = {section.init!r} has {value}; use that value, or train "
                "a new head without draft.init"
            )
    return section.model_copy(update=shape)
