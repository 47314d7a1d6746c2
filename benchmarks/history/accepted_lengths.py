"""The accepted length of a head's draft at each token of recorded completions."""

from __future__ import annotations

import numpy as np

from paceline.draft.acceptance import completion_spans, correct_drafts
from paceline.draft.head_batch import HeadBatch
from paceline.model.eagle3 import Eagle3Head
from paceline.model.layer import Linear


def accepted_lengths(
    head: Eagle3Head, embed: Linear, head_batch: HeadBatch, k: int, temperature: float, seed: int = 0
) -> list[np.ndarray]:
    """For each sequence and each completion token: the accepted length of a coupled draft with k tokens that starts
    with this token. 0 for the first token, which is sampled without a draft. The last token counts, though the engine
    does not draft it at the length limit."""
    correct = correct_drafts(head, embed, head_batch, k, temperature, seed, ("coupled",))["coupled"]
    lengths = np.logical_and.accumulate(correct, 1).sum(1)  # by base: [S, L]
    found = []
    for row, (first, end) in enumerate(completion_spans(head_batch)):
        by_token = np.zeros(max(0, end - first), np.int64)
        drafted = np.arange(max(first + 1, 2), end)
        by_token[drafted - first] = lengths[row, drafted - 2]
        found.append(by_token)
    return found
