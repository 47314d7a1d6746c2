"""Expected lengths: as defined, for sequences that are longer than others, and after a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculation import lengths as lengths_module
from paceline.speculation.lengths import ALL, OWN, PRIOR, LengthModel
from paceline.types import Request, SamplingParams

LIMIT = 1000


def request(request_id: int, problem: str | None, max_tokens: int = LIMIT) -> Request:
    return Request(request_id, (1,), SamplingParams(max_tokens=max_tokens), 0, problem)


def model_of(*lengths: tuple[str | None, int]) -> LengthModel:
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
    """E[L - n | L > n]: own lengths with weight 1, those of all problems together with weight PRIOR."""
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
def test_expected_lengths_are_as_defined(lengths, problem, n):
    expected = min(max(1.0, by_definition(lengths, problem, n)), LIMIT - n)
    assert left(model_of(*lengths), problem, n) == pytest.approx(expected)


def test_another_definition_is_detected(monkeypatch):
    """Broken: the lengths of other problems do not count."""
    lengths = [("a", 10), ("b", 100)]
    assert left(model_of(*lengths), "a", 0) == pytest.approx((10 + 2 * 110) / 5)
    monkeypatch.setattr(lengths_module, "PRIOR", 1e-9)
    assert left(model_of(*lengths), "a", 0) == pytest.approx(10)


def test_without_lengths_half_of_the_limit_is_expected():
    model = LengthModel()
    assert model.expected(request(0, "a", 80)) == 40
    assert left(model, None, 20, max_tokens=80) == 30
    assert left(model, None, 79, max_tokens=80) == 1


def test_at_least_one_and_at_most_the_limit_is_expected():
    model = model_of(*[("a", 500)] * 10)
    assert model.expected(request(0, "a", 30)) == 30
    assert left(model, "a", 25, max_tokens=30) == 5
    assert left(model, "a", 30, max_tokens=30) == 1
    # Longer than any before: as long again, but at most half of what the limit leaves.
    assert left(model, "a", 500, max_tokens=5000) == 500
    assert left(model, "a", 500, max_tokens=600) == 50


def test_a_batch_gives_the_same_as_its_rows_one_by_one():
    model = model_of(*[(f"p{i % 5}", 10 + 7 * i) for i in range(40)])
    for i in range(12):
        model.begin(request(i, f"p{i % 6}", 100 + i))
    ids, emitted = np.arange(12), np.arange(0, 60, 5)
    together = model.expected_left(ids, emitted)
    alone = [model.expected_left(ids[i : i + 1], emitted[i : i + 1])[0] for i in range(12)]
    assert together.tolist() == alone and together.dtype == np.float64


def test_aborted_requests_do_not_count():
    model = model_of(("a", 10))
    model.begin(request(0, "a"))
    model.end(0, 900, whole=False)
    assert model.expected(request(1, "a")) == pytest.approx(10)


def test_only_recent_lengths_count():
    model = model_of(*[("a", 10)] * 500, *[("a", 70)] * OWN)
    assert model.expected(request(0, "a")) == pytest.approx(
        (OWN * 70 + PRIOR * (500 * 10 + OWN * 70) / (500 + OWN)) / (OWN + PRIOR)
    )
    assert model_of(*[("a", 10)] * 500, *[("b", 70)] * ALL).expected(request(0, None)) == pytest.approx(70)


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
    # A problem that is dropped while its requests run is like a new one; it does not get another's lengths.
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
    state = model.state_dict()
    again = LengthModel(max_problems=5)
    again.load_state_dict({name: array.copy() for name, array in state.items()})
    for name, array in again.state_dict().items():
        assert array.dtype == state[name].dtype and array.tolist() == state[name].tolist(), name
    # Both continue alike, also in what they drop.
    for i in range(200):
        for m in (model, again):
            m.begin(request(i, f"new{i % 3}"))
            m.end(i, i + 1)
    assert {k: v.tolist() for k, v in model.state_dict().items()} == {
        k: v.tolist() for k, v in again.state_dict().items()
    }
    for problem in (None, "ä", "b", "new0"):
        assert model.expected(request(1, problem)) == again.expected(request(1, problem))
    empty = LengthModel()
    empty.load_state_dict(LengthModel().state_dict())
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
def test_damaged_states_are_refused(broken):
    state = model_of(("a", 5), ("b", 7)).state_dict()
    LengthModel().load_state_dict(state)
    model = model_of(("x", 9))
    with pytest.raises(ValueError, match="length model"):
        model.load_state_dict(state | broken if broken else {"counts": np.zeros(3)})
    assert list(model._rows) == ["x"]
