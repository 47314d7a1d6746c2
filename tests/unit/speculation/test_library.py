"""Texts of problems: what is kept, what goes first, what a checkpoint holds."""

from __future__ import annotations

import numpy as np
import pytest
from history_world import commits_of

from paceline.speculation.library import TAIL, Library
from paceline.types import Request, SamplingParams


def request(number: int, problem: str | None = "a", prompt: int = 3) -> Request:
    return Request(number, tuple(range(prompt)), SamplingParams(max_tokens=50), problem=problem)


def told(library: Library, number: int, problem: str | None, version: int, *tokens: int) -> None:
    library.begin(request(number, problem), version)
    library.hear(commits_of({number: list(tokens)}))
    library.end(number)


def said(library: Library, problem: str) -> list[list[int]]:
    return [text.said.tolist() for text in library.texts(problem)]


def test_texts_grow_and_siblings_see_them() -> None:
    library = Library()
    library.begin(request(0), 0)
    library.begin(request(1, prompt=40), 0)
    library.hear(commits_of({0: [7, 8], 1: [9]}))
    library.hear(commits_of({0: list(range(200))}))
    assert said(library, "a") == [[*range(40 - TAIL, 40), 9], [0, 1, 2, 7, 8, *range(200)]]
    assert library.live[0].room == 53 and library.num_bytes == 4 * (TAIL + 1 + 5 + 200)
    assert not library.texts("b")


def test_a_problem_keeps_its_last_versions_and_who_lives() -> None:
    library = Library(max_versions=2)
    library.begin(request(9), 1)
    for version in (1, 4, 6):
        told(library, version, "a", version, version)
    told(library, 0, "b", 0, 5)
    assert said(library, "a") == [[0, 1, 2, 6], [0, 1, 2, 4], [0, 1, 2]] and said(library, "b") == [[0, 1, 2, 5]]
    library.end(9)
    assert said(library, "a") == [[0, 1, 2, 6], [0, 1, 2, 4]]
    assert library.remove(4) == 1 and said(library, "a") == [[0, 1, 2, 6]]


def test_beyond_its_bytes_the_oldest_go() -> None:
    library = Library(max_bytes=4 * 12)
    for i, problem in enumerate("abcd"):
        told(library, i, problem, 0, 5)
    assert list(library.problems) == ["b", "c", "d"] and library.num_bytes == 48
    library.begin(request(7, "b"), 0)
    library.hear(commits_of({7: [1] * 30}))
    library.end(7)
    assert list(library.problems) == [] and library.num_bytes == 0


def test_without_a_problem_nobody_hears() -> None:
    library = Library()
    told(library, 0, None, 0, 5)
    assert not library.problems and not library.num_bytes and not library.live


def test_a_state_told_again_is_the_same() -> None:
    library = Library()
    for i, problem in enumerate("abca"):
        told(library, i, problem, i // 2, *range(i))
    other = Library()
    told(other, 0, "x", 0, 1)
    other.restore(library.state())
    assert {name: said(other, name) for name in other.problems} == {name: said(library, name) for name in "abc"}
    assert other.num_bytes == library.num_bytes and [t.version for t in other.texts("a")] == [1, 0]
    empty = Library()
    empty.restore(Library().state())
    assert not empty.problems
    with pytest.raises(ValueError, match="was speculation"):
        empty.restore({"logs": np.zeros(1)})
