"""Which of the target's tokens a head can say: those that the target itself says most often.

What always holds: ids ascend; the tokens that end a sequence are among them; equal counts go by id, so the same
sequences give the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.draft.lesson import Example


def choose_draft_ids(examples: Iterable[Example], size: int, vocab_size: int, ends: Sequence[int]) -> np.ndarray:
    """int64 [size]. Where the sequences use fewer tokens than that, those of the prompts follow, then the lowest ids,
    which are the commonest in most tokenizers."""
    ends = sorted(set(ends))
    if not len(ends) <= size <= vocab_size:
        raise ValueError(
            f"draft.draft_vocab_size = {size}: the model has {vocab_size} tokens, of which {len(ends)} end a sequence; "
            "choose a number between"
        )
    said, read = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for example in examples:
        np.add.at(said, example.tokens[example.chosen], 1)
        np.add.at(read, example.tokens[~example.chosen], 1)
    said[ends] = np.iinfo(np.int64).max
    return np.sort(np.lexsort((np.arange(vocab_size), -read, -said))[:size])


def coverage(draft_ids: np.ndarray, examples: Iterable[Example]) -> float:
    """The share of chosen tokens that a head with these ids can say at all."""
    num_known = num_tokens = 0
    for example in examples:
        chosen = example.tokens[example.chosen]
        num_known += int(np.isin(chosen, draft_ids).sum())
        num_tokens += len(chosen)
    return num_known / num_tokens if num_tokens else 0.0
