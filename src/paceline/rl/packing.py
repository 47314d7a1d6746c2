"""Sequence packing: rollouts in one forward pass without padding. Consecutive rollouts of one prompt share it: the
prompt is packed once, before their completions.

Shapes: N tokens in the forward pass, T tokens after the prompts (as in a TokenBatch), P of them to predict. Tokens that
predict none of the policy's tokens are left out: a completion's last token, and the environment's last turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from paceline.types import Rollout

KEYS_PER_TOKEN = 8  # limit of a microbatch; a prompt is packed once, but attention copies its keys for each completion


@dataclass(slots=True)
class Packed:
    tokens_N: Tensor  # int64
    positions_N: Tensor  # int64
    lengths: list[int]  # by segment; a segment is a prompt or a completion
    prefixes: list[int | None]  # by segment: the segment of a completion's prompt
    spans: list[tuple[range, range]]  # by rollout: the rows of its prompt and of its completion, among the N
    row_P: Tensor  # int64, index of the hidden state that predicts, among the N
    target_P: Tensor  # int64, the predicted token
    index_P: Tensor  # int64, index of the predicted token, among the T

    def __len__(self) -> int:
        return len(self.tokens_N)


def dummy_packed() -> Packed:
    """One token that predicts nothing, for a rank without rollouts: every rank must run the forward pass."""
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
        # The state before a token predicts it: the prompt's last state for the first token.
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
        # The completion's rows are the last ones so far. A rollout without a token to predict has no rows.
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


def padded_microbatches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Spans start … end-1 of rollouts, in order, for a model that pads sequences to one length and does not share
    prompts: each of at most `max_tokens` tokens, with padding. A single rollout may have more."""
    start = num_sequences = longest = 0
    for i, rollout in enumerate(rollouts):
        num_needed = _num_needed(rollout)
        if not num_needed:
            continue
        length = len(rollout.prompt_ids) + num_needed - 1
        if num_sequences and (num_sequences + 1) * max(longest, length) > max_tokens:
            yield start, i
            start, num_sequences, longest = i, 0, 0
        num_sequences, longest = num_sequences + 1, max(longest, length)
    if start < len(rollouts):
        yield start, len(rollouts)


def microbatches(rollouts: Sequence[Rollout], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Spans start … end-1 of rollouts, in order, each of at most `max_tokens` packed tokens and KEYS_PER_TOKEN times as
    many keys. A single rollout may have more."""
    start = num_tokens = num_keys = 0
    prompt_ids: tuple[int, ...] | None = None
    for i, rollout in enumerate(rollouts):
        num_needed = _num_needed(rollout)
        if not num_needed:
            continue
        own, prompt = num_needed - 1, len(rollout.prompt_ids)
        keys = prompt + own if own else 0
        added = 0 if rollout.prompt_ids == prompt_ids else prompt  # before the completion
        too_many_keys = num_keys + added + keys > KEYS_PER_TOKEN * max_tokens
        if num_tokens and (num_tokens + added + own > max_tokens or too_many_keys):
            yield start, i
            start, num_tokens, num_keys, added = i, 0, 0, prompt
        num_tokens, num_keys, prompt_ids = num_tokens + added + own, num_keys + added + keys, rollout.prompt_ids
    if start < len(rollouts):
        yield start, len(rollouts)


def microbatches_per_rank(
    rollouts: Sequence[Rollout], num: int, max_tokens: int, padded: bool = False
) -> list[list[tuple[int, int]]]:
    """The microbatches of each of `num` ranks: rollouts in order, about the same number of tokens per rank. All ranks
    get the same number of microbatches, some of them empty: collectives must match."""
    cut = padded_microbatches if padded else microbatches
    if num == 1:
        return [list(cut(rollouts, max_tokens))]
    costs = []
    prompt_ids: tuple[int, ...] | None = None
    for rollout in rollouts:
        num_needed = _num_needed(rollout)
        has_prompt = num_needed and (padded or rollout.prompt_ids != prompt_ids)
        costs.append(num_needed + (len(rollout.prompt_ids) if has_prompt else 0))
        prompt_ids = rollout.prompt_ids if num_needed else prompt_ids
    middle = np.cumsum(costs) - np.array(costs) / 2
    owner = np.minimum(num - 1, (middle * num / max(1, sum(costs))).astype(np.int64))
    by_rank = []
    for start, end in pairwise(np.searchsorted(owner, np.arange(num + 1)).tolist()):
        spans = cut(rollouts[start:end], max_tokens)
        by_rank.append([(start + first, start + last) for first, last in spans])
    num_spans = max(1, *map(len, by_rank))
    return [spans + [(0, 0)] * (num_spans - len(spans)) for spans in by_rank]


def minibatches(group_S: Tensor, num: int, sample_S: Tensor | None = None) -> Iterator[tuple[int, int]]:
    """Spans start … end-1 of sequences: `num` even parts of whole groups. With fewer than `num` groups: parts of whole
    samples. With fewer than `num` samples: fewer parts. `sample_S`: as in TokenBatch."""
    starts = [0, *(np.flatnonzero(np.diff(group_S.numpy())) + 1).tolist()]
    if len(starts) < num:
        samples = sample_S.numpy() if sample_S is not None else np.arange(len(group_S))
        starts = [0, *(np.flatnonzero(np.diff(samples)) + 1).tolist()]
    num = min(num, len(starts))
    edges = [starts[len(starts) * i // num] for i in range(num)] + [len(group_S)]
    return pairwise(edges)


def _num_needed(rollout: Rollout) -> int:
    """Number of tokens after the prompt, up to the policy's last one."""
    chosen = np.flatnonzero(rollout.mask)
    return int(chosen[-1]) + 1 if len(chosen) else 0


def _cat(arrays: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.empty(0, np.int64), *arrays]).astype(np.int64, copy=False))
