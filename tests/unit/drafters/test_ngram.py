"""Prompt lookup: the native code against the Python code, and both against expected drafts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafters import ngram
from paceline.drafters.ngram import NgramDrafter, lookup
from paceline.native import NativeUnavailable
from paceline.speculation.batch import Rows
from paceline.types import SamplingParams


def rows_of(*sequences: list[int]) -> Rows:
    num = len(sequences)
    tokens = [np.array(sequence, np.int32) for sequence in sequences]
    return Rows(np.arange(num), tokens, np.zeros(num, np.uint64), [SamplingParams()] * num)


@pytest.mark.skipif(NgramDrafter()._native is None, reason="no C compiler")
@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_native_and_python_agree(data: st.DataObject, shortest: int, extra: int) -> None:
    token = st.integers(0, data.draw(st.integers(0, 3)))
    sequences = data.draw(st.lists(st.lists(token, min_size=1, max_size=30), max_size=4))
    caps = np.array([data.draw(st.integers(0, 6)) for _ in sequences], np.int32)
    fast, slow = (
        NgramDrafter(shortest, shortest + extra, native).propose(rows_of(*sequences), caps) for native in (True, False)
    )
    np.testing.assert_array_equal(fast.num, slow.num)
    np.testing.assert_array_equal(fast.tokens, slow.tokens)
    np.testing.assert_array_equal(fast.scores, slow.scores)
    if sequences:
        np.testing.assert_array_equal(fast.match, slow.match)


@pytest.mark.parametrize("native", [True, False])
def test_copies_what_followed_the_longest_then_the_latest_match(native: bool) -> None:
    drafter = NgramDrafter(2, 3, native)
    sequences = (
        [1, 2, 3, 4, 9, 2, 3, 5, 8, 1, 2, 3],  # 4 followed 1 2 3, although 5 followed 2 3 later
        [2, 3, 4, 9, 2, 3, 5, 8, 2, 3],  # the later of two matches
        [1, 2, 7, 1, 2, 7, 1],  # continues with its own draft: a loop
        [3, 1, 4, 3],  # only one token matches
        [5],
    )
    drafts = drafter.propose(rows_of(*sequences), np.array([2, 3, 5, 4, 4], np.int32))
    proposed = [row[:n].tolist() for row, n in zip(drafts.tokens, drafts.num, strict=True)]
    assert proposed == [[4, 9], [5, 8, 2], [2, 7, 1, 2, 7], [], []]
    assert drafts.scores[0, 0] > drafts.scores[1, 0] > 0
    assert drafts.match is not None
    assert drafts.match.tolist() == [3, 2, 3, 0, 0]
    assert drafts.match.dtype == np.int32
    without_cap = drafter.propose(rows_of(*sequences), np.zeros(5, np.int32))
    assert without_cap.match is not None
    assert not without_cap.match.any(), "no draft, no match"


def test_no_rows_no_drafts() -> None:
    drafts = NgramDrafter().propose(rows_of(), np.zeros(0, np.int32))
    assert drafts.tokens.shape == (0, 0)


def test_reads_views_of_a_larger_buffer() -> None:
    buffer = np.array([7, 7, 1, 2, 3, 1, 2, 0, 0], np.int32)
    view = buffer[2:7]
    view.flags.writeable = False
    rows = Rows(np.arange(1), [view], np.zeros(1, np.uint64), [SamplingParams()])
    assert NgramDrafter().propose(rows, np.array([3], np.int32)).tokens.tolist() == [[3, 1, 2]]
    assert lookup(view.tolist(), 2, 5, 3) == ([3, 1, 2], 2)


def test_refuses_weights_and_bad_parameters() -> None:
    with pytest.raises(ValueError, match="no weights"):
        NgramDrafter().update({}, 1)
    with pytest.raises(ValueError, match="prompt_lookup_min = 0"):
        NgramDrafter(prompt_lookup_min=0)
    with pytest.raises(ValueError, match="prompt_lookup_max = 1"):
        NgramDrafter(prompt_lookup_min=2, prompt_lookup_max=1)


def test_falls_back_to_python_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise NativeUnavailable("no C compiler")

    monkeypatch.setattr(ngram, "load", unavailable)
    assert not NgramDrafter()._native
