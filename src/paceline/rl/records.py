"""Serialized groups of rollouts: a line of rollouts.jsonl for people and reports, tensors for a checkpoint.

A record has rounded logprobs and omits derived values. Packing to tensors is lossless, including NaN rewards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.types import Group, Rollout

# ---- records ----


def rollout_record(step: int, group: Group, rollout: Rollout) -> dict[str, Any]:
    """One rollout as a JSON object. NaN and infinity become null."""
    record = {
        "step": step,
        "group": group.index,
        "problem": group.problem,
        "sample": rollout.sample,
        **({"branch": rollout.branch} if rollout.branch else {}),
        "prompt": group.prompt,
        "prompt_ids": list(rollout.prompt_ids),
        "completion": rollout.text,
        "token_ids": rollout.token_ids.tolist(),
        "logprobs": [_number(round(x, 6)) for x in rollout.logprobs.tolist()],
        "reward": _number(rollout.reward),
        "rewards": {name: _number(value) for name, value in rollout.rewards.items()},
        "advantage": _number(rollout.advantage),
        "versions": [[version, len(list(run))] for version, run in groupby(rollout.versions.tolist())],
        "provenance": rollout.provenance.tolist(),
        "sources": rollout.sources.tolist(),
        "drafters": list(rollout.drafters),
        "finish_reason": rollout.finish_reason,
        "num_turns": rollout.num_turns,
        "failure": rollout.failure,
    }
    if group.task is not None:
        record["task"] = group.task
    if rollout.turn_rewards:
        record["turn_lengths"], record["turn_rewards"] = list(rollout.turn_lengths), list(rollout.turn_rewards)
    if rollout.metrics:
        record["metrics"] = rollout.metrics
    if not rollout.mask.all():
        record["mask"] = rollout.mask.astype(int).tolist()
    return record


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


# ---- tensors ----

PER_TOKEN: dict[str, type] = {
    "token_ids": np.int32, "mask": np.bool_, "logprobs": np.float64, "versions": np.int32, "provenance": np.uint8,
    "sources": np.uint8,
}  # fmt: skip
TUPLES = ("turn_lengths", "turn_rewards")
SCALARS = (
    "sample", "branch", "finish_reason", "num_turns", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "text",
    "failure", "metrics",
)  # fmt: skip


def pack_groups(groups: Sequence[Group]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Concatenated tensors of all rollouts, and the remaining fields as JSON."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tensors = {
        name: _flat([getattr(rollout, name) for rollout in rollouts], dtype) for name, dtype in PER_TOKEN.items()
    }
    tensors["prompt_ids"] = _flat([rollout.prompt_ids for rollout in rollouts], np.int64)
    # Per rollout: reward, advantage, then each of `rewards`. Tensors, because JSON has no NaN.
    tensors["scores"] = _flat([[r.reward, r.advantage, *r.rewards.values()] for r in rollouts], np.float64)
    return tensors, [
        {
            "index": group.index,
            "problem": group.problem,
            "prompt": group.prompt,
            "task": group.task,
            "rollouts": [
                {name: getattr(rollout, name) for name in SCALARS}
                | {name: list(getattr(rollout, name)) for name in TUPLES}
                | {
                    "num_prompt": len(rollout.prompt_ids),
                    "num_tokens": len(rollout.token_ids),
                    "drafters": list(rollout.drafters),
                    "rewards": list(rollout.rewards),
                }
                for rollout in group.rollouts
            ],
        }
        for group in groups
    ]


def unpack_groups(tensors: Mapping[str, Tensor], metadata: Sequence[Mapping[str, Any]]) -> list[Group]:
    arrays = {name: _Reader(tensor.numpy()) for name, tensor in tensors.items()}

    def rollout(fields: Mapping[str, Any]) -> Rollout:
        per_token: dict[str, Any] = {name: arrays[name].take(fields["num_tokens"]) for name in PER_TOKEN}
        per_turn: dict[str, Any] = {name: tuple(fields[name]) for name in TUPLES}
        reward, advantage, *rewards = arrays["scores"].take(2 + len(fields["rewards"])).tolist()
        return Rollout(
            prompt_ids=tuple(arrays["prompt_ids"].take(fields["num_prompt"]).tolist()),
            drafters=tuple(fields["drafters"]),
            reward=reward,
            advantage=advantage,
            rewards=dict(zip(fields["rewards"], rewards, strict=True)),
            **per_token,
            **per_turn,
            **{name: fields[name] for name in SCALARS},
        )

    groups = [
        Group(group["index"], group["problem"], group["prompt"], list(map(rollout, group["rollouts"])), group["task"])
        for group in metadata
    ]
    complete = all(reader.position == len(reader.array) for reader in arrays.values())
    assert complete, "the tensors and the metadata do not belong together"
    return groups


def _flat(parts: Sequence[Any], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)]))


class _Reader:
    """Reads an array from the beginning to the end."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.position = array, 0

    def take(self, num: int) -> np.ndarray:
        self.position += num
        return self.array[self.position - num : self.position].copy()
