"""Expected lengths: against the definition, as sequences outlive others, and through a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculation import lengths as lengths_module
from paceline.speculation.lengths import ALL, LONG, MEDIUM, OWN, PRIOR, SHORT, LengthModel
from paceline.types import Request, SamplingParams

LIMIT = 1000


def request(request_id: int, problem: str | None, max_tokens: int = LIMIT) -> Request:
    return Request(request_id, (1,), SamplingParams(max_tokens=max_tokens), 0, problem)


def told(*lengths: tuple[str | None, int]) -> LengthModel:
    model = LengthModel()
    for i, (problem, num_tokens) in enumerate(lengths):
        model.begin(request(10_000 + i, problem))
        model.end(10_000 + i, num_tokens)
    return model


def left(model: LengthModel, problem: str | None, num_emitted: int, max_tokens: int = LIMIT) -> float:
    model.begin(request(1, problem, max_tokens))
    found = model.expected_left(np.array([1]), np.array([num_emitted]))[0]
    model.end(1, 0, whole=False)
    return float(found)


def by_definition(lengths: list[tuple[str | None, int]], problem: str | None, n: int) -> float:
    """E[L - n | L > n], own lengths with weight 1, all together with weight PRIOR."""
    own = [length for p, length in lengths if p == problem and p is not None][-OWN:]
    everyone = [length for _, length in lengths][-ALL:]
    weights = [(length, 1.0) for length in own] + [(length, PRIOR / len(everyone)) for length in everyone]
    longer = [(length, weight) for length, weight in weights if length > n]
    if not longer:
        return min((LIMIT - n) / 2, n) if everyone else (LIMIT - n) / 2
    return sum(weight * (length - n) for length, weight in longer) / sum(weight for _, weight in longer)


LENGTHS = st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(1, 300)), max_size=100)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.sampled_from(["a", "b", "new", None]), st.integers(0, 400))
def test_as_the_definition_says(lengths, problem, n):
    expected = min(max(1.0, by_definition(lengths, problem, n)), LIMIT - n)
    assert left(told(*lengths), problem, n) == pytest.approx(expected)


def test_the_definition_can_be_missed(monkeypatch):
    """Broken twin: everyone's lengths count for nothing."""
    lengths = [("a", 10), ("b", 100)]
    assert left(told(*lengths), "a", 0) == pytest.approx((10 + 2 * 110) / 5)
    monkeypatch.setattr(lengths_module, "PRIOR", 1e-9)
    assert left(told(*lengths), "a", 0) == pytest.approx(10)


def test_before_anything_is_known_half_of_the_limit():
    model = LengthModel()
    assert model.expected(request(0, "a", 80)) == 40
    assert left(model, None, 20, max_tokens=80) == 30
    assert left(model, None, 79, max_tokens=80) == 1


def test_never_beyond_the_limit_never_below_one():
    model = told(*[("a", 500)] * 10)
    assert model.expected(request(0, "a", 30)) == 30
    assert left(model, "a", 25, max_tokens=30) == 5
    assert left(model, "a", 30, max_tokens=30) == 1
    # Longer than any before: as long again, at most half of what the limit leaves.
    assert left(model, "a", 500, max_tokens=5000) == 500
    assert left(model, "a", 500, max_tokens=600) == 50


def test_a_batch_is_its_rows_one_by_one():
    model = told(*[(f"p{i % 5}", 10 + 7 * i) for i in range(40)])
    for i in range(12):
        model.begin(request(i, f"p{i % 6}", 100 + i))
    ids, emitted = np.arange(12), np.arange(0, 60, 5)
    together = model.expected_left(ids, emitted)
    alone = [model.expected_left(ids[i : i + 1], emitted[i : i + 1])[0] for i in range(12)]
    assert together.tolist() == alone and together.dtype == np.float64


def test_classes_move_up_as_a_sequence_outlives_them():
    model = told(*[("short", 10)] * 20, *[("medium", 100)] * 20, *[("long", 400)] * 20)
    for i, problem in enumerate(("short", "medium", "long", None)):
        model.begin(request(i, problem))
    ids = np.arange(4)
    assert model.classes(ids, np.zeros(4, int)).tolist() == [SHORT, MEDIUM, LONG, MEDIUM]
    assert model.classes(ids, np.full(4, 50)).tolist()[1:3] == [MEDIUM, LONG]
    assert model.classes(ids, np.full(4, 150)).tolist() == [LONG] * 4
    history = [model.classes(ids[:1], np.array([n]))[0] for n in range(0, 500, 10)]
    assert history == sorted(history) and history[0] == SHORT and history[-1] == LONG
    assert LengthModel().classes(np.zeros(0, int), np.zeros(0, int)).tolist() == []
    model.begin(request(9, "long", max_tokens=10))
    assert model.classes(np.array([9]), np.array([0])).tolist() == [SHORT]  # its limit says so


def test_those_cut_short_teach_nothing():
    model = told(("a", 10))
    model.begin(request(0, "a"))
    model.end(0, 900, whole=False)
    assert model.expected(request(1, "a")) == pytest.approx(10)


def test_recent_lengths_push_out_older_ones():
    model = told(*[("a", 10)] * 500, *[("a", 70)] * OWN)
    assert model.expected(request(0, "a")) == pytest.approx(
        (OWN * 70 + PRIOR * (500 * 10 + OWN * 70) / (500 + OWN)) / (OWN + PRIOR)
    )
    assert told(*[("a", 10)] * 500, *[("b", 70)] * ALL).expected(request(0, None)) == pytest.approx(70)


def test_memory_is_bounded_and_the_latest_problems_stay():
    model = LengthModel(max_problems=4)
    for i in range(100):
        model.begin(request(i, f"p{i}"))
        model.end(i, 1 + i)
        model.begin(request(i, "kept"))
        model.end(i, 500)
    assert len(model._rows) == 4 and len(model._own) <= 65
    assert set(model._rows) == {"p97", "p98", "p99", "kept"}
    assert model.expected(request(0, "kept")) > 400 > model.expected(request(0, "p3"))
    # A problem that lives and is forgotten meanwhile is one like any other; nobody takes another's lengths for its own.
    model.begin(request(7, "kept"))
    for i in range(200, 210):
        model.begin(request(i, f"q{i}"))
        model.end(i, 2)
    assert model.expected_left(np.array([7]), np.array([0]))[0] == model.expected(request(0, "never seen"))
    model.end(7, 300)
    assert "kept" in model._rows


def test_state_round_trip():
    model = LengthModel(max_problems=5)
    rng = np.random.default_rng(0)
    for i in range(3000):
        model.begin(request(i, [None, "ä", "b", "c\0", "", "e", "f"][rng.integers(7)]))
        model.end(i, int(rng.integers(1, 400)))
    state = model.state()
    again = LengthModel(max_problems=5)
    again.restore({name: array.copy() for name, array in state.items()})
    for name, array in again.state().items():
        assert array.dtype == state[name].dtype and array.tolist() == state[name].tolist(), name
    # Both go on alike, also in what they forget.
    for i in range(200):
        for m in (model, again):
            m.begin(request(i, f"new{i % 3}"))
            m.end(i, i + 1)
    assert {k: v.tolist() for k, v in model.state().items()} == {k: v.tolist() for k, v in again.state().items()}
    for problem in (None, "ä", "b", "new0"):
        assert model.expected(request(1, problem)) == again.expected(request(1, problem))
    empty = LengthModel()
    empty.restore(LengthModel().state())
    assert not empty._rows


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"names": np.zeros(0, np.uint8)},
        {"lengths": np.array([1, -5])},
        {"length_ends": np.array([1])},
        {"name_ends": np.array([1, 2, 3])},
        {"lengths_of_all": np.ones(ALL + 1, np.int64)},
    ],
)
def test_foreign_states_are_refused(broken):
    state = told(("a", 5), ("b", 7)).state()
    LengthModel().restore(state)
    model = told(("x", 9))
    with pytest.raises(ValueError, match="length model"):
        model.restore(state | broken if broken else {"counts": np.zeros(3)})
    assert list(model._rows) == ["x"]
