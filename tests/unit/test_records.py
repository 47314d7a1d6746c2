"""Groups to records and to tensors, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.rl.checkpoint import Checkpoints
from paceline.rl.records import pack_groups, rollout_record, unpack_groups
from paceline.types import Group, Rollout


def make_rollout(seed: int, num_tokens: int = 6) -> Rollout:
    rng = np.random.default_rng(seed)
    masked = seed % 2 == 1
    return Rollout(
        sample=seed,
        prompt_ids=tuple(rng.integers(0, 50_000, rng.integers(1, 5)).tolist()),
        token_ids=rng.integers(0, 50_000, num_tokens).astype(np.int32),
        mask=rng.random(num_tokens) < 0.5 if masked else np.ones(num_tokens, bool),
        logprobs=-rng.random(num_tokens) * 7,
        versions=np.sort(rng.integers(0, 4, num_tokens)).astype(np.int32),
        provenance=rng.integers(0, 4, num_tokens).astype(np.uint8),
        sources=rng.choice([0, 1, 255], num_tokens).astype(np.uint8),
        drafters=("suffix", "ngram")[: seed % 3],
        finish_reason=("stop", "length", "abort")[seed % 3],
        num_turns=1 + seed % 4,
        num_drafts=seed,
        num_draft_tokens=2 * seed,
        num_accepted_tokens=seed // 2,
        text=f"Antwort {seed} 🎲\n",
        reward=math.nan if seed % 5 == 4 else rng.random(),
        rewards={"exact": rng.random(), "format": math.nan if seed % 5 == 4 else 1.0} if seed % 2 else {},
        advantage=rng.random(),
        failure="timed out" if seed % 5 == 4 else None,
    )


def make_groups(sizes: list[int], num_tokens: int = 6) -> list[Group]:
    seeds = iter(range(10_000))
    return [
        Group(
            10 + i,
            f"chain_sum/{i}",
            f"Was ist {i}?",
            [make_rollout(next(seeds), num_tokens) for _ in range(size)],
            task=None if i % 2 else "sums",
        )
        for i, size in enumerate(sizes)
    ]


def assert_same(one: Rollout, two: Rollout, but: tuple[str, ...] = ()) -> None:
    for field in fields(Rollout):
        if field.name in but:
            continue
        ours, theirs = getattr(one, field.name), getattr(two, field.name)
        if isinstance(ours, np.ndarray):
            assert ours.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(ours, theirs, field.name)
        else:
            assert type(ours) is type(theirs), field.name
            assert repr(ours) == repr(theirs), field.name  # NaN is NaN


def test_a_record() -> None:
    (group,) = make_groups([1])
    rollout = group.rollouts[0]
    rollout.versions = np.array([3, 3, 4, 4, 4, 3], np.int32)
    rollout.reward, rollout.rewards, rollout.logprobs[0] = math.nan, {"exact": math.inf}, -1.23456789
    record = rollout_record(7, group, rollout)
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text) == record
    assert (record["step"], record["group"], record["problem"]) == (7, 10, "chain_sum/0")
    assert (record["prompt"], record["completion"]) == ("Was ist 0?", rollout.text)
    assert record["versions"] == [[3, 2], [4, 3], [3, 1]]
    assert record["reward"] is None
    assert record["rewards"] == {"exact": None}
    assert record["logprobs"][0] == -1.234568
    assert "mask" not in record and record["task"] == "sums"
    group.task = None
    assert "task" not in rollout_record(7, group, rollout), "of a run with one task"
    rollout.mask[2] = False
    assert rollout_record(7, group, rollout)["mask"] == [1, 1, 0, 1, 1, 1]


def rollout_from_record(record: Mapping[str, Any]) -> Rollout:
    """The rollout of a record: logprobs are rounded, and the draft counts are 0."""

    def number(value: float | None) -> float:
        return math.nan if value is None else value

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
        reward=number(record["reward"]),
        rewards={name: number(value) for name, value in record["rewards"].items()},
        advantage=number(record["advantage"]),
        failure=record["failure"],
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_tokens", [0, 6])
def test_a_record_can_be_read_back(seed: int, num_tokens: int) -> None:
    rollout = make_rollout(seed, num_tokens)
    record = rollout_record(1, Group(0, "p", "q", [rollout]), rollout)
    found = rollout_from_record(json.loads(json.dumps(record, allow_nan=False)))
    assert_same(rollout, found, but=("logprobs", "num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    np.testing.assert_allclose(found.logprobs, rollout.logprobs, rtol=0, atol=5.1e-7)


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 4), max_size=4), num_tokens=st.integers(0, 9))
def test_packing_is_lossless(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], num_tokens: int) -> None:
    """Through a checkpoint."""
    groups = make_groups(sizes, num_tokens)
    tensors, metadata = pack_groups(groups)
    json.dumps(metadata, allow_nan=False)
    checkpoints = Checkpoints(tmp_path_factory.getbasetemp() / "packed", 1)
    checkpoints.save(1, {"buffer": tensors}, {"buffer": metadata})
    saved = checkpoints.latest()
    assert saved is not None
    found = unpack_groups(saved.tensors("buffer"), saved.state["buffer"])
    assert len(found) == len(groups)
    for one, two in zip(groups, found, strict=True):
        assert (one.index, one.problem, one.prompt, one.task) == (two.index, two.problem, two.prompt, two.task)
        assert len(one.rollouts) == len(two.rollouts)
        for ours, theirs in zip(one.rollouts, two.rollouts, strict=True):
            assert_same(ours, theirs)


def test_unpacking_copies_and_checks_the_sizes() -> None:
    groups = make_groups([2])
    tensors, metadata = pack_groups(groups)
    found = unpack_groups(tensors, metadata)
    found[0].rollouts[0].token_ids[:] = 0
    assert_same(unpack_groups(tensors, metadata)[0].rollouts[0], groups[0].rollouts[0])
    with pytest.raises(AssertionError, match="do not belong together"):
        unpack_groups(tensors, [metadata[0] | {"rollouts": metadata[0]["rollouts"][:1]}])
