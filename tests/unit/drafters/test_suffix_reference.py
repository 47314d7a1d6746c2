"""The native and the Python history against a reference implementation with dicts of all token strings."""

from __future__ import annotations

import pytest
from history_reference import HISTORIES, Simulation, by_tokens
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceline.drafters import python_history
from paceline.drafters.history_shards import HistoryShards
from paceline.drafters.python_history import PythonAutomaton, PythonHistory
from paceline.drafters.suffix import SuffixDrafter


def simulate(draw, histories: list[type]) -> None:
    """`draw(strategy)` makes all choices. Small vocabularies make contexts repeat and states split. Versions mostly
    rise. Requests outlive them, and some begin under an older one."""
    min_match, max_versions = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    recency, max_tokens = draw(st.sampled_from([1.0, 0.8, 0.3])), draw(st.sampled_from([1 << 40, 20]))
    drafters = [
        SuffixDrafter(min_match, 100 * max_tokens, max_versions, recency, by_tokens(history)()) for history in histories
    ]
    simulation = Simulation(drafters, min_match, max_versions, recency, max_tokens)
    token = st.integers(0, draw(st.integers(1, 3)))
    prompt = st.lists(token, min_size=1, max_size=6).map(tuple)
    prompts = draw(st.lists(prompt, min_size=1, max_size=3))
    version = 0
    for _ in range(draw(st.integers(1, 12))):
        version += draw(st.sampled_from([0, 0, 1]))
        for _ in range(draw(st.integers(0, 2))):
            begun_under = max(0, version - draw(st.sampled_from([0, 0, 0, 1])))
            problem = draw(st.sampled_from(["a", "a", "b", None]))
            simulation.begin(problem, draw(st.sampled_from(prompts)), begun_under)
        emitted = {i: draw(st.lists(token, max_size=4)) for i in simulation.live if draw(st.booleans())}
        simulation.observe(emitted)
        simulation.check([draw(st.integers(0, 5)) for _ in simulation.live])
        for request_id in [i for i in simulation.live if draw(st.integers(0, 2)) == 0]:
            simulation.end(request_id)
        if draw(st.integers(0, 7)) == 0:
            simulation.remove(draw(st.integers(0, version)))
        simulation.check([3] * len(simulation.live))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_proposes_the_most_frequent_continuation(data: st.DataObject) -> None:
    simulate(data.draw, HISTORIES)


class ForgetsEdges(PythonAutomaton):
    def _split(self, p: int, token: int, q: int, length: int) -> int:
        clone = super()._split(p, token, q, length)
        self.edges[clone] = {self.best[q]: self.edges[q][self.best[q]]} if self.edges[q] else {}
        return clone


class CountsBeforeSplitting(PythonAutomaton):
    def _split(self, p: int, token: int, q: int, length: int) -> int:
        clone = super()._split(p, token, q, length)
        self.count[clone] += 1
        return clone


class ForgetsRedirect(PythonAutomaton):
    def _split(self, p: int, token: int, q: int, length: int) -> int:
        before = dict(self.edges[self.link[p]]) if self.link[p] >= 0 else None
        clone = super()._split(p, token, q, length)
        if before is not None:
            self.edges[self.link[p]] = before
        return clone


class RestartsAtTheRoot(PythonAutomaton):
    """A cursor whose string has no such continuation moves to the root, not to a shorter suffix."""

    def advance(self, u: int, length: int, token: int) -> tuple[int, int]:
        return (self.edges[u][token], length + 1) if token in self.edges[u] else (0, 0)


def assert_caught() -> None:
    @settings(max_examples=300, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.data())
    def run(data: st.DataObject) -> None:
        simulate(data.draw, [PythonHistory])

    with pytest.raises((AssertionError, KeyError, IndexError)):
        run()


@pytest.mark.parametrize("broken", [ForgetsEdges, CountsBeforeSplitting, ForgetsRedirect, RestartsAtTheRoot])
def test_catches_broken_automata(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_history, "PythonAutomaton", broken)
    assert_caught()


def test_catches_cursors_in_dropped_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = HistoryShards._drop

    def leaves_cursors(self: HistoryShards, shard) -> None:
        shard.problem.slots, slots = set(), shard.problem.slots
        drop(self, shard)
        shard.problem.slots = slots

    monkeypatch.setattr(HistoryShards, "_drop", leaves_cursors)
    assert_caught()


@pytest.mark.parametrize("change", ["recency", "longest"])
def test_catches_wrong_votes(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "longest":
        monkeypatch.setattr(python_history, "LONG_MATCH", 1)  # history_reference keeps the true value
    else:
        propose = PythonHistory.propose

        def without_weights(self, slots, caps, k, min_match, weights):
            return propose(self, slots, caps, k, min_match, 0 * weights + 1)

        monkeypatch.setattr(PythonHistory, "propose", without_weights)
    assert_caught()


def split_under_a_cursor(histories: list[type]) -> None:
    """A request of the next version has a cursor at "3" in a shard where 3 always followed 9 1 2. Then a request of the
    old version emits 3 after another token, and continues differently, which splits the cursor's state."""
    simulation = Simulation([SuffixDrafter(recency=0.5, history=history()) for history in histories], 1, 4, 0.5)
    simulation.begin("p", (9,), 0)
    simulation.observe({0: [1, 2, 3, 4]})
    simulation.begin("p", (3,), 1)
    simulation.check([3, 3])
    simulation.observe({0: [5, 3]})
    simulation.observe({0: [7, 3]})
    simulation.check([3, 3])
    simulation.observe({0: [7], 1: [7]})
    simulation.check([3, 3])


def test_cursor_after_a_split() -> None:
    split_under_a_cursor(HISTORIES)


class IgnoresSplits(PythonAutomaton):
    """A cursor stays at its state after its string was split off."""

    def resolve_splits(self, u: int, length: int) -> int:
        return u


def test_catches_a_cursor_that_ignores_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_history, "PythonAutomaton", IgnoresSplits)
    with pytest.raises(AssertionError):
        split_under_a_cursor([PythonHistory])
