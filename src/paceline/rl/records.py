"""Groups of rollouts outside of memory: a line of rollouts.jsonl for people and reports, tensors for a checkpoint.

A record is rounded and leaves out what can be told from the rest; packing is lossless, NaN rewards included.
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
    """One sample of one group, as JSON has it. What has no number (NaN, infinite) is null."""
    record = {
        "step": step,
        "group": group.index,
        "problem": group.problem,
        "sample": rollout.sample,
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
    if not rollout.mask.all():
        record["mask"] = rollout.mask.astype(int).tolist()
    return record


def rollout_of(record: Mapping[str, Any]) -> Rollout:
    """The rollout that a record tells of, its logprobs rounded; how it was drafted is told by its tokens alone."""
    token_ids = np.array(record["token_ids"], np.int32)
    runs = record["versions"]
    return Rollout(
        sample=record["sample"],
        prompt_ids=tuple(record["prompt_ids"]),
        token_ids=token_ids,
        mask=np.array(record.get("mask", [True] * len(token_ids)), bool),
        logprobs=np.array(record["logprobs"], np.float64),  # null becomes NaN
        versions=np.repeat(np.array([v for v, _ in runs], np.int32), [num for _, num in runs]),
        provenance=np.array(record["provenance"], np.uint8),
        sources=np.array(record["sources"], np.uint8),
        drafters=tuple(record["drafters"]),
        finish_reason=record["finish_reason"],
        num_turns=record["num_turns"],
        text=record["completion"],
        reward=_float(record["reward"]),
        rewards={name: _float(value) for name, value in record["rewards"].items()},
        advantage=_float(record["advantage"]),
        failure=record["failure"],
    )


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _float(value: float | None) -> float:
    return math.nan if value is None else value


# ---- tensors ----

PER_TOKEN: dict[str, type] = {
    "token_ids": np.int32, "mask": np.bool_, "logprobs": np.float64, "versions": np.int32, "provenance": np.uint8,
    "sources": np.uint8,
}  # fmt: skip
PLAIN = (
    "sample", "finish_reason", "num_turns", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "text", "failure",
)  # fmt: skip


def pack_groups(groups: Sequence[Group]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Tensors, all rollouts' end to end, and what is left, which JSON can hold."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tensors = {
        name: _flat([getattr(rollout, name) for rollout in rollouts], dtype) for name, dtype in PER_TOKEN.items()
    }
    tensors["prompt_ids"] = _flat([rollout.prompt_ids for rollout in rollouts], np.int64)
    # Per rollout: its reward, its advantage, then each of its rewards. Not in JSON, which has no NaN.
    tensors["scores"] = _flat([[r.reward, r.advantage, *r.rewards.values()] for r in rollouts], np.float64)
    return tensors, [
        {
            "index": group.index,
            "problem": group.problem,
            "prompt": group.prompt,
            "rollouts": [
                {name: getattr(rollout, name) for name in PLAIN}
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


def unpack_groups(tensors: Mapping[str, Tensor], rest: Sequence[Mapping[str, Any]]) -> list[Group]:
    arrays = {name: _Reader(tensor.numpy()) for name, tensor in tensors.items()}

    def rollout(of: Mapping[str, Any]) -> Rollout:
        per_token: dict[str, Any] = {name: arrays[name].take(of["num_tokens"]) for name in PER_TOKEN}
        reward, advantage, *rewards = arrays["scores"].take(2 + len(of["rewards"])).tolist()
        return Rollout(
            prompt_ids=tuple(arrays["prompt_ids"].take(of["num_prompt"]).tolist()),
            drafters=tuple(of["drafters"]),
            reward=reward,
            advantage=advantage,
            rewards=dict(zip(of["rewards"], rewards, strict=True)),
            **per_token,
            **{name: of[name] for name in PLAIN},
        )

    groups = [Group(of["index"], of["problem"], of["prompt"], list(map(rollout, of["rollouts"]))) for of in rest]
    assert all(reader.at == len(reader.array) for reader in arrays.values()), "tensors and rest are not of one packing"
    return groups


def _flat(parts: Sequence[Any], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *(np.asarray(part, dtype) for part in parts)]))


class _Reader:
    def __init__(self, array: np.ndarray) -> None:
        self.array, self.at = array, 0

    def take(self, num: int) -> np.ndarray:
        self.at += num
        return self.array[self.at - num : self.at].copy()
