"""Rollouts laid out for one forward without padding. A prompt that consecutive rollouts share lies there once, before
their completions. N tokens in the forward, T tokens after the prompts (as in a TokenBatch), P of them to predict.

Only what is needed to predict the policy's own tokens is laid out: never a completion's last token, nor what an
environment said last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.types import Rollout


@dataclass(slots=True)
class Packed:
    tokens_N: Tensor  # int64
    positions_N: Tensor  # int64
    lengths: list[int]  # of the segments: prompts and completions
    prefixes: list[int | None]  # a completion's prompt, by segment
    spans: list[tuple[range, range]]  # by rollout: its prompt's rows among the N, and its completion's
    row_P: Tensor  # int64, which of the N states predicts
    target_P: Tensor  # int64, the token that is predicted
    index_P: Tensor  # int64, its place among the T

    def __len__(self) -> int:
        return len(self.tokens_N)


def filler() -> Packed:
    """One token, of which nothing is wanted, for who has nothing to compute but must compute with the others."""
    one, none = torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return Packed(one, one, [1], [None], [], row_P=one, target_P=one, index_P=none)


def pack(rollouts: Sequence[Rollout]) -> Packed:
    tokens, positions = [], []
    lengths: list[int] = []
    prefixes: list[int | None] = []
    spans: list[tuple[range, range]] = []
    rows, targets, indices = [], [], []
    num_rows = num_tokens = prompt = prompt_end = 0
    prompt_ids: tuple[int, ...] | None = None
    for rollout in rollouts:
        num_needed = _num_needed(rollout)
        if num_needed and rollout.prompt_ids != prompt_ids:
            prompt_ids, prompt = rollout.prompt_ids, len(lengths)
            tokens.append(np.array(prompt_ids))
            positions.append(np.arange(len(prompt_ids)))
            lengths.append(len(prompt_ids))
            prefixes.append(None)
            num_rows = prompt_end = num_rows + len(prompt_ids)
        chosen = np.flatnonzero(rollout.mask)
        # The state before the token predicts it: the prompt's last, or the completion's own.
        rows.append(np.where(chosen == 0, prompt_end - 1, num_rows + chosen - 1))
        targets.append(rollout.token_ids[chosen])
        indices.append(num_tokens + chosen)
        num_tokens += len(rollout.token_ids)
        if num_needed > 1:
            assert prompt_ids is not None
            tokens.append(rollout.token_ids[: num_needed - 1])
            positions.append(len(prompt_ids) + np.arange(num_needed - 1))
            lengths.append(num_needed - 1)
            prefixes.append(prompt)
            num_rows += num_needed - 1
        # Its own rows are the last that were laid out; without any token to predict it has none, nor a prompt.
        before = range(prompt_end - len(rollout.prompt_ids), prompt_end) if num_needed else range(0)
        spans.append((before, range(num_rows - max(0, num_needed - 1), num_rows)))
    return Packed(
        tokens_N=_cat(tokens),
        positions_N=_cat(positions),
        lengths=lengths,
        prefixes=prefixes,
        spans=spans,
        row_P=_cat(rows),
        target_P=_cat(targets),
        index_P=_cat(indices),
    )


def microbatches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Rollouts start … end-1, as many in order as fit into `max_tokens` when packed; one alone may exceed it."""
    start = num_tokens = 0
    prompt_ids: tuple[int, ...] | None = None
    for i, rollout in enumerate(rollouts):
        num_needed = _num_needed(rollout)
        if not num_needed:
            continue
        own, whole = num_needed - 1, num_needed - 1 + len(rollout.prompt_ids)
        cost = own if rollout.prompt_ids == prompt_ids else whole
        if num_tokens and num_tokens + cost > max_tokens:
            yield start, i
            start, num_tokens, cost = i, 0, whole
        num_tokens, prompt_ids = num_tokens + cost, rollout.prompt_ids
    if start < len(rollouts):
        yield start, len(rollouts)


def shares(rollouts: Sequence[Rollout], num: int, max_tokens: int) -> list[list[tuple[int, int]]]:
    """The microbatches of each of `num` ranks: rollouts in order, about as many tokens for each. All have as many,
    empty ones where one has none left: whatever ranks do together they do equally often."""
    if num == 1:
        return [list(microbatches(rollouts, max_tokens))]
    costs = []
    prompt_ids: tuple[int, ...] | None = None
    for rollout in rollouts:
        num_needed = _num_needed(rollout)
        costs.append(num_needed + (len(rollout.prompt_ids) if num_needed and rollout.prompt_ids != prompt_ids else 0))
        prompt_ids = rollout.prompt_ids if num_needed else prompt_ids
    middle = np.cumsum(costs) - np.array(costs) / 2
    owner = np.minimum(num - 1, (middle * num / max(1, sum(costs))).astype(np.int64))
    found = []
    for start, end in pairwise(np.searchsorted(owner, np.arange(num + 1)).tolist()):
        cuts = microbatches(rollouts[start:end], max_tokens)
        found.append([(start + first, start + last) for first, last in cuts])
    most = max(1, *map(len, found))
    return [cuts + [(0, 0)] * (most - len(cuts)) for cuts in found]


def minibatches(group_S: Tensor, num: int) -> Iterator[tuple[int, int]]:
    """Sequences start … end-1, divided evenly into `num` parts of whole groups; of whole sequences where there are
    fewer groups than that; and into fewer parts where there are fewer sequences."""
    starts = [0, *(np.flatnonzero(np.diff(group_S.numpy())) + 1).tolist()]
    if len(starts) < num:
        starts = list(range(len(group_S)))
    num = min(num, len(starts))
    cuts = [starts[len(starts) * i // num] for i in range(num)] + [len(group_S)]
    return pairwise(cuts)


def _num_needed(rollout: Rollout) -> int:
    """Tokens after the prompt up to the last that the policy chose."""
    chosen = np.flatnonzero(rollout.mask)
    return int(chosen[-1]) + 1 if len(chosen) else 0


def _cat(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays]).astype(np.int64, copy=False))
