"""Which sequences make an optimiser step: a function of their lengths, the sizes and the seed alone, so there is
nothing to save but the step's number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BUCKET = 16  # batches' worth of sequences that are sorted by length together


def batches(lengths: Sequence[int], tokens_per_batch: int) -> list[np.ndarray]:
    """Whole sequences in the order given, as many as fit when padded to the longest; one alone in any case."""
    found: list[list[int]] = []
    longest = 0
    for i, length in enumerate(lengths):
        longest = max(longest, length)
        if not found or longest * (len(found[-1]) + 1) > tokens_per_batch:
            found.append([])
            longest = length
        found[-1].append(i)
    return [np.array(batch) for batch in found]


def plan(lengths: Sequence[int], tokens_per_batch: int, num_epochs: int, seed: int) -> list[np.ndarray]:
    """Every step's sequences. Every epoch is a new shuffle, cut into buckets; in a bucket like lengths come together,
    so that little is padding, and the batches come in a shuffled order again."""
    size = np.array(lengths)
    steps: list[np.ndarray] = []
    for epoch in range(num_epochs):
        chance = np.random.default_rng((seed, epoch))
        order = chance.permutation(len(size))
        bucket = np.cumsum(size[order]) // (BUCKET * tokens_per_batch)
        order = order[np.lexsort((size[order], bucket))]
        found = batches(size[order].tolist(), tokens_per_batch)
        steps += [order[found[i]] for i in chance.permutation(len(found))]
    return steps
