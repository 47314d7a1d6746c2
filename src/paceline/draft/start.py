"""The head that training begins with: a new one of the shape that `[draft]` says, or one that is there already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from paceline.config import DraftSection
from paceline.draft.lesson import Example
from paceline.draft.vocabulary import choose_draft_ids
from paceline.model.config import ModelConfig
from paceline.model.eagle3 import Eagle3Head, HeadConfig, default_layer_ids, head_config, init_head

SHAPE = ("draft_vocab_size", "layer_ids", "norm_before_residual", "fc_norm")


class Start:
    """What is known before there are sequences: a shape that fits the target, or a head (draft.init) that does.
    `section` is then the whole truth about the head's shape."""

    def __init__(self, section: DraftSection, target: ModelConfig, given: Eagle3Head | None = None) -> None:
        self.target, self.given = target, given
        self.section = section if given is None else shaped_like(section, given.config)
        self.shape = new_shape(section, target) if given is None else given.config

    def head(
        self, examples: Sequence[Example], ends: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> Eagle3Head:
        """The head itself; a new one's vocabulary is chosen by these examples."""
        if self.given is not None:
            return self.given.to(dtype=dtype, device=device)
        ids = choose_draft_ids(examples, self.shape.draft_vocab_size, self.target.vocab_size, ends)
        return init_head(self.shape, torch.from_numpy(ids), seed=self.section.seed, dtype=dtype, device=device)


def new_shape(section: DraftSection, target: ModelConfig) -> HeadConfig:
    ids = tuple(section.layer_ids or default_layer_ids(target.num_layers))
    if list(ids) != sorted(set(ids)) or not all(1 <= i <= target.num_layers for i in ids):
        given = "low, middle and high, which need 7 layers," if section.layer_ids is None else f"{list(ids)}"
        raise ValueError(
            f"draft.layer_ids = {given} of a model with {target.num_layers} layers: give ascending numbers from 1 to "
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
    """The settings with the shape that draft.init has; what was set otherwise is an error."""
    has = {key: getattr(head, key) for key in SHAPE} | {"layer_ids": list(head.layer_ids)}
    for key, value in has.items():
        asked = getattr(section, key)
        if key in section.model_fields_set and asked is not None and asked != value:
            raise ValueError(
                f"draft.{key} = {asked}: the head draft.init = {section.init!r} has {value}; say the same, or train a "
                "new head without draft.init"
            )
    return section.model_copy(update=has)
