"""Builds drafters that need no model, for engines and for replays. Does not import torch."""

from __future__ import annotations

from paceline.config import Config
from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.speculation.batch import Drafter

MODEL_FREE = ("none", "suffix", "ngram")  # methods that draft without a model


def build_model_free(config: Config) -> Drafter | None:
    """A drafter for one of the methods in MODEL_FREE."""
    speculation = config.speculation
    if speculation.method == "none":
        return None
    if speculation.method == "suffix":
        return build_history(config)
    assert speculation.method == "ngram"
    return NgramDrafter(speculation.prompt_lookup_min, speculation.prompt_lookup_max)


def build_history(config: Config) -> SuffixDrafter:
    s = config.speculation
    return SuffixDrafter(s.suffix_min_match, s.suffix_max_bytes, s.suffix_max_versions, s.suffix_recency)
