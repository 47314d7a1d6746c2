"""The history that a device reads: what is kept, what is dropped first, what a checkpoint holds."""

from __future__ import annotations

import numpy as np
import pytest
from history_reference import commits_of

from paceline.speculation.history_store import TAIL, HistoryStore
from paceline.types import Request, SamplingParams


def request(number: int, problem: str | None = "a", prompt: int = 3) -> Request:
    return Request(number, tuple(range(prompt)), SamplingParams(max_tokens=50), problem=problem)


def add(store: HistoryStore, number: int, problem: str | None, version: int, *tokens: int) -> None:
    """A request that emits these tokens and ends."""
    store.begin(request(number, problem), version)
    store.observe(commits_of({number: list(tokens)}))
    store.end(number)


def tokens_of(store: HistoryStore, problem: str) -> list[list[int]]:
    return [entry.emitted.tolist() for entry in store.entries(problem)]


def test_emitted_tokens_are_seen_by_the_requests_of_the_same_problem() -> None:
    store = HistoryStore()
    store.begin(request(0), 0)
    store.begin(request(1, prompt=40), 0)
    store.observe(commits_of({0: [7, 8], 1: [9]}))
    store.observe(commits_of({0: list(range(200))}))
    assert tokens_of(store, "a") == [[*range(40 - TAIL, 40), 9], [0, 1, 2, 7, 8, *range(200)]]
    assert store.live[0].capacity == 53 and store.num_bytes == 4 * (TAIL + 1 + 5 + 200)
    assert not store.entries("b")


def test_a_problem_keeps_its_last_versions_and_live_requests() -> None:
    store = HistoryStore(max_versions=2)
    store.begin(request(9), 1)
    for version in (1, 4, 6):
        add(store, version, "a", version, version)
    add(store, 0, "b", 0, 5)
    assert tokens_of(store, "a") == [[0, 1, 2, 6], [0, 1, 2, 4], [0, 1, 2]]
    assert tokens_of(store, "b") == [[0, 1, 2, 5]]
    store.end(9)
    assert tokens_of(store, "a") == [[0, 1, 2, 6], [0, 1, 2, 4]]


def test_above_max_bytes_the_oldest_is_dropped() -> None:
    store = HistoryStore(max_bytes=4 * 12)
    for i, problem in enumerate("abcd"):
        add(store, i, problem, 0, 5)
    assert list(store.problems) == ["b", "c", "d"] and store.num_bytes == 48
    store.begin(request(7, "b"), 0)
    store.observe(commits_of({7: [1] * 30}))
    store.end(7)
    assert list(store.problems) == [] and store.num_bytes == 0


def test_without_a_problem_nothing_is_kept() -> None:
    store = HistoryStore()
    add(store, 0, None, 0, 5)
    assert not store.problems and not store.num_bytes and not store.live


def test_state_round_trip() -> None:
    store = HistoryStore()
    for i, problem in enumerate("abca"):
        add(store, i, problem, i // 2, *range(i))
    other = HistoryStore()
    add(other, 0, "x", 0, 1)
    other.load_state_dict(store.state_dict())
    assert {name: tokens_of(other, name) for name in other.problems} == {name: tokens_of(store, name) for name in "abc"}
    assert other.num_bytes == store.num_bytes and [entry.version for entry in other.entries("a")] == [1, 0]
    empty = HistoryStore()
    empty.load_state_dict(HistoryStore().state_dict())
    assert not empty.problems
    with pytest.raises(ValueError, match="was speculation"):
        empty.load_state_dict({"logs": np.zeros(1)})
