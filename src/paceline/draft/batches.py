"""Assignment of sequences to optimizer steps. It depends only on the lengths, the batch size and the seed, so a
checkpoint needs only the step number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

BUCKET = 16  # batches per bucket; sequences are sorted by length within a bucket


def batches(lengths: Sequence[int], tokens_per_batch: int) -> list[np.ndarray]:
    """Split sequences, in the given order, into batches of at most tokens_per_batch tokens when padded to the longest.
    A sequence that is longer gets a batch of its own."""
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
    """The sequences of every step. Each epoch shuffles the sequences, splits them into buckets, sorts each bucket by
    length to reduce padding, and shuffles the batches."""
    size = np.array(lengths)
    steps: list[np.ndarray] = []
    for epoch in range(num_epochs):
        rng = np.random.default_rng((seed, epoch))
        order = rng.permutation(len(size))
        bucket = np.cumsum(size[order]) // (BUCKET * tokens_per_batch)
        order = order[np.lexsort((size[order], bucket))]
        found = batches(size[order].tolist(), tokens_per_batch)
        steps += [order[found[i]] for i in rng.permutation(len(found))]
    return steps
