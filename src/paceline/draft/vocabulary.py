"""A head's draft vocabulary: the tokens that are most frequent in the target's completions.

Invariants: ids are ascending; end-of-sequence tokens are included; ties are broken by id, so the same sequences give
the same vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.draft.head_batch import Example


def choose_draft_ids(examples: Iterable[Example], size: int, vocab_size: int, eos_ids: Sequence[int]) -> np.ndarray:
    """int64 [size]. If the completions have fewer distinct tokens, the most frequent ones of the prompts follow, then
    the lowest ids, which are the most common ones in most tokenizers."""
    eos_ids = sorted(set(eos_ids))
    if not len(eos_ids) <= size <= vocab_size:
        raise ValueError(
            f"draft.draft_vocab_size = {size}: the model has {vocab_size} tokens, of which {len(eos_ids)} end a "
            f"sequence; choose a number from {len(eos_ids)} to {vocab_size}"
        )
    in_completions, in_prompts = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for example in examples:
        np.add.at(in_completions, example.tokens[example.loss_mask], 1)
        np.add.at(in_prompts, example.tokens[~example.loss_mask], 1)
    in_completions[eos_ids] = np.iinfo(np.int64).max
    return np.sort(np.lexsort((np.arange(vocab_size), -in_prompts, -in_completions))[:size])


def coverage(draft_ids: np.ndarray, examples: Iterable[Example]) -> float:
    """The share of tokens in the loss masks that are in this draft vocabulary."""
    num_covered = num_tokens = 0
    for example in examples:
        tokens = example.tokens[example.loss_mask]
        num_covered += int(np.isin(tokens, draft_ids).sum())
        num_tokens += len(tokens)
    return num_covered / num_tokens if num_tokens else 0.0
