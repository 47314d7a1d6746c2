"""Acceptance by depth into the completion, and its alarm."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.build.config import load_config
from paceline.rl.alarms import DEPTH, Alarms
from paceline.rl.depth import DEPTHS, DepthCounts
from paceline.types import Provenance

S, A, C, B = (int(each) for each in (Provenance.SAMPLED, Provenance.ACCEPTED, Provenance.CORRECTED, Provenance.BONUS))


def sample(provenance: list[int], sources: list[int] | None = None) -> SimpleNamespace:
    tokens = np.array(provenance, np.uint8)
    of = np.array(sources if sources is not None else [0] * len(provenance), np.uint8)
    return SimpleNamespace(provenance=tokens, sources=of, drafters=("eagle3", "suffix"))


def naive(provenance: list[int]) -> tuple[list[int], list[int]]:
    """Token by token."""
    drafts, accepted, start = [0] * len(DEPTHS), [0] * len(DEPTHS), None
    for i, each in enumerate(provenance):
        if each in (A, C) and (i == 0 or provenance[i - 1] != A):
            start = max(j for j, depth in enumerate(DEPTHS) if i >= depth)
            drafts[start] += 1
        if each == A:
            assert start is not None
            accepted[start] += 1
    return drafts, accepted


def test_a_small_case() -> None:
    """Drafts: two accepted and a bonus; none accepted; one accepted, then corrected."""
    counts = DepthCounts.of([sample([S, A, A, B, C, A, C])])
    assert counts.num_drafts.tolist() == [3, 0, 0, 0, 0] and counts.num_accepted.tolist() == [3, 0, 0, 0, 0]
    assert counts.lengths() == {"0": 2.0}


def test_equals_a_naive_count() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        provenance: list[int] = [S]
        while len(provenance) < 1200:
            num, is_whole = int(rng.integers(0, 4)), bool(rng.integers(0, 2))
            provenance += [A] * num + [S if not num else B if is_whole else C]
        found = DepthCounts.of([sample(provenance)])
        assert (found.num_drafts.tolist(), found.num_accepted.tolist()) == naive(provenance)
        assert all(found.num_drafts[:4] > 0)


def test_drafts_of_some_drafters() -> None:
    both = sample([A, A, B, A, C], [0, 0, 0, 1, 1])
    assert DepthCounts.of([both], ["eagle3"]).num_accepted.tolist()[0] == 2
    assert DepthCounts.of([both], ["suffix"]).num_drafts.tolist()[0] == 1
    assert DepthCounts.of([both], ["dspark"]).lengths() == {}


@pytest.mark.parametrize(
    ("drafts", "accepted", "is_alarm"),
    [
        ([1000, 0, 0, 1000, 0], [1500, 0, 0, 800, 0], True),
        ([1000, 0, 0, 1000, 0], [1500, 0, 0, 1200, 0], False),  # a fifth less
        ([1000, 0, 0, 20, 0], [1500, 0, 0, 5, 0], False),  # too few drafts
        ([60, 0, 0, 60, 0], [90, 0, 0, 60, 0], False),  # not significant
        ([0, 1000, 0, 1000, 0], [0, 1500, 0, 500, 0], False),  # nothing at the beginning
        ([1000, 0, 0, 1000, 0], [800, 0, 0, 1500, 0], False),
    ],
)
def test_the_alarm(drafts: list[int], accepted: list[int], is_alarm: bool) -> None:
    alarms = Alarms(load_config(None, ["speculation.method=eagle3"]))
    counts = DepthCounts(np.array(drafts), np.array(accepted))
    flags, messages = alarms.check_depth(counts)
    assert flags == {DEPTH: is_alarm} and len(messages) == is_alarm
    if is_alarm:
        assert (
            "after 1024 tokens of a completion 0.80 draft tokens" in messages[0] and "draft.max_length" in messages[0]
        )
        assert alarms.check_depth(counts) == ({DEPTH: True}, []), "once"
        again = Alarms(load_config(None, ["speculation.method=eagle3"]))
        again.load_state_dict(alarms.state_dict())
        assert again.check_depth(counts) == ({DEPTH: True}, [])
