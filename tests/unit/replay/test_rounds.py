"""Splitting into rounds, length limits, and the prefix cache."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.replay import rounds as rounds_module
from paceline.replay.prefixes import Prefixes
from paceline.replay.rounds import Record, Round, RoundSplitter


def record(problem: str, num: int = 3, **changes: object) -> Record:
    prompt = np.array([ord(letter) for letter in problem], np.int32)
    return Record(problem, prompt, np.arange(num, dtype=np.int32), **changes)  # type: ignore[arg-type]


def split(records: list[Record], **options: int) -> list[Round]:
    return list(RoundSplitter(**options).split(records))


def test_a_step_is_a_round() -> None:
    found = split(
        [record("a", step=4), record("b", step=4), record("a", step=5), record("a", step=5), record("c", step=9)]
    )
    assert [(r.version, r.problems) for r in found] == [(4, ["a", "b"]), (5, ["a", "a"]), (9, ["c"])]
    assert [r.epochs.tolist() for r in found] == [[0, 0], [1, 1], [0]]


def test_without_steps_a_round_ends_when_a_problem_appears_again() -> None:
    found = split([record(problem) for problem in "aabbaacbb"])
    assert [r.problems for r in found] == [list("aabb"), list("aacbb")]
    assert [r.version for r in found] == list(range(len(found)))
    assert found[1].epochs.tolist() == [1, 1, 0, 1, 1]


def test_a_large_round_is_split_but_stays_one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "MAX_TOKENS", 20)
    found = split([record("a", 9, step=1, version=7)] * 6 + [record("a", step=2)])
    assert len(found) > 2 and [r.version for r in found] == [7] * (len(found) - 1) + [2]
    assert [set(r.epochs.tolist()) for r in found] == [{0}] * (len(found) - 1) + [{1}]
    assert sum(map(len, found)) == 7


@pytest.mark.parametrize(
    ("changes", "options", "limit"),
    [
        ({}, {}, 9),  # the longest completion
        ({"is_cut": True}, {}, 5),  # it was cut at its limit
        ({}, {"max_tokens": 40}, 40),
        ({"max_tokens": 30}, {"max_tokens": 40}, 30),  # the file takes precedence
        ({"is_cut": True}, {"max_tokens": 40}, 5),  # the model's context length may have been the limit
    ],
)
def test_length_limit(changes: dict, options: dict, limit: int) -> None:
    (found,) = split([record("a", 5, **changes), record("b", 9)], **options)
    assert found.limit[0] - found.num_prompt[0] == limit


def test_the_longest_cut_completion_is_the_length_limit() -> None:
    (found,) = split([record("a", 5), record("b", 8, is_cut=True), record("c", 9, max_tokens=9)])
    assert (found.limit - found.num_prompt).tolist() == [8, 8, 9]


def test_turns_share_their_tokens() -> None:
    mask = np.array([1, 1, 0, 1, 0, 0, 1, 1, 1, 0], bool)
    head_accepted = np.arange(10, dtype=np.uint8) % 10
    episode = record("ab", 10, mask=mask, head_accepted=head_accepted)
    (found,) = split([record("z"), episode, record("y")], max_tokens=20)
    assert found.num_prompt.tolist() == [1, 2, 5, 8, 1]
    assert found.num_total.tolist() == [4, 4, 6, 11, 4]
    assert found.previous_turn.tolist() == [-1, -1, 1, 2, -1]
    assert (found.limit - found.num_prompt).tolist() == [20, 20, 18, 17, 20]  # what the previous turns left
    assert found.start.tolist() == [0, 4, 4, 4, 16]
    assert found.head_accepted is not None and found.head_accepted[6:16].tolist() == head_accepted.tolist()
    part = found.select_problems({"ab", "y"})
    assert part is not None and part.previous_turn.tolist() == [-1, 0, 1, -1] and part.start.tolist() == [4, 4, 4, 16]
    assert found.select_problems({"other"}) is None


def test_empty_completions_are_left_out() -> None:
    (found,) = split([record("a", 0), record("b")])
    assert found.problems == ["b"] and found.start.tolist() == [1]


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=70), max_size=6), st.lists(st.integers(0, 1), max_size=70)
)
def test_the_longest_cached_prefix_is_found(known: list[list[int]], wanted: list[int]) -> None:
    prefixes = Prefixes()
    for tokens in known:
        prefixes.add(np.array(tokens, np.int32))

    def common(tokens: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), min(len(tokens), len(wanted))
        )

    assert prefixes.match(np.array(wanted, np.int32)) == max(map(common, known), default=0)
