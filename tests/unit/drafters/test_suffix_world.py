"""The history drafter and its twin against a dictionary of everything that was ever said."""

from __future__ import annotations

import pytest
from history_world import HISTORIES, World, by_tokens
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceline.drafters import slow_history
from paceline.drafters.shards import Shelf
from paceline.drafters.slow_history import SlowAutomaton, SlowHistory
from paceline.drafters.suffix import SuffixDrafter


def live_a_life(draw, histories: list[type]) -> None:
    """`draw(strategy)` decides everything; small alphabets make contexts meet and states split. Versions mostly rise;
    requests outlive them, and some begin under an older one."""
    min_match, max_versions = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    recency, max_tokens = draw(st.sampled_from([1.0, 0.8, 0.3])), draw(st.sampled_from([1 << 40, 20]))
    drafters = [
        SuffixDrafter(min_match, 100 * max_tokens, max_versions, recency, by_tokens(history)()) for history in histories
    ]
    world = World(drafters, min_match, max_versions, recency, max_tokens)
    token = st.integers(0, draw(st.integers(1, 3)))
    prompt = st.lists(token, min_size=1, max_size=6).map(tuple)
    prompts = draw(st.lists(prompt, min_size=1, max_size=3))
    version = 0
    for _ in range(draw(st.integers(1, 12))):
        version += draw(st.sampled_from([0, 0, 1]))
        for _ in range(draw(st.integers(0, 2))):
            begun_under = max(0, version - draw(st.sampled_from([0, 0, 0, 1])))
            world.begin(draw(st.sampled_from(["a", "a", "b", None])), draw(st.sampled_from(prompts)), begun_under)
        said = {i: draw(st.lists(token, max_size=4)) for i in world.live if draw(st.booleans())}
        world.observe(said)
        world.check([draw(st.integers(0, 5)) for _ in world.live])
        for request_id in [i for i in world.live if draw(st.integers(0, 2)) == 0]:
            world.end(request_id)
        if draw(st.integers(0, 7)) == 0:
            world.remove(draw(st.integers(0, version)))
        world.check([3] * len(world.live))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_proposes_what_the_known_contexts_said_most(data: st.DataObject) -> None:
    live_a_life(data.draw, HISTORIES)


class ForgetsEdges(SlowAutomaton):
    def _split(self, p: int, token: int, q: int, length: int) -> int:
        clone = super()._split(p, token, q, length)
        self.edges[clone] = {self.best[q]: self.edges[q][self.best[q]]} if self.edges[q] else {}
        return clone


class CountsBeforeSplitting(SlowAutomaton):
    def _split(self, p: int, token: int, q: int, length: int) -> int:
        clone = super()._split(p, token, q, length)
        self.count[clone] += 1
        return clone


class ForgetsRedirect(SlowAutomaton):
    def _split(self, p: int, token: int, q: int, length: int) -> int:
        before = dict(self.edges[self.link[p]]) if self.link[p] >= 0 else None
        clone = super()._split(p, token, q, length)
        if before is not None:
            self.edges[self.link[p]] = before
        return clone


class FollowsOnlyWhatIsThere(SlowAutomaton):
    """A cursor whose string did not go on starts again at nothing, not at a shorter one."""

    def follow(self, u: int, length: int, token: int) -> tuple[int, int]:
        return (self.edges[u][token], length + 1) if token in self.edges[u] else (0, 0)


def is_caught() -> None:
    @settings(max_examples=300, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.data())
    def life(data: st.DataObject) -> None:
        live_a_life(data.draw, [SlowHistory])

    with pytest.raises((AssertionError, KeyError, IndexError)):
        life()


@pytest.mark.parametrize("broken", [ForgetsEdges, CountsBeforeSplitting, ForgetsRedirect, FollowsOnlyWhatIsThere])
def test_catches_broken_automata(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_history, "SlowAutomaton", broken)
    is_caught()


def test_catches_a_shelf_that_leaves_cursors_in_dropped_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = Shelf._drop

    def careless(self: Shelf, shard) -> None:
        shard.problem.slots, slots = set(), shard.problem.slots
        drop(self, shard)
        shard.problem.slots = slots

    monkeypatch.setattr(Shelf, "_drop", careless)
    is_caught()


@pytest.mark.parametrize("change", ["recency", "longest"])
def test_catches_other_votes(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if change == "longest":
        monkeypatch.setattr(slow_history, "LONG", 1)  # history_world has its own
    else:
        propose = SlowHistory.propose

        def without_weights(self, slots, caps, k, min_match, weights):
            return propose(self, slots, caps, k, min_match, 0 * weights + 1)

        monkeypatch.setattr(SlowHistory, "propose", without_weights)
    is_caught()


def split_under_a_cursor(histories: list[type]) -> None:
    """A request of the next version stands at "3" in a shard where 3 always came after 9 1 2. While it stands there, a
    late request of the old version says 3 after something else, and goes on in another way."""
    world = World([SuffixDrafter(recency=0.5, history=history()) for history in histories], 1, 4, 0.5)
    world.begin("p", (9,), 0)
    world.observe({0: [1, 2, 3, 4]})
    world.begin("p", (3,), 1)
    world.check([3, 3])
    world.observe({0: [5, 3]})
    world.observe({0: [7, 3]})
    world.check([3, 3])
    world.observe({0: [7], 1: [7]})
    world.check([3, 3])


def test_a_cursor_follows_a_split() -> None:
    split_under_a_cursor(HISTORIES)


class NeverSettles(SlowAutomaton):
    """A cursor stays at a state whose longer strings were split from its own."""

    def settle(self, u: int, length: int) -> int:
        return u


def test_catches_a_cursor_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_history, "SlowAutomaton", NeverSettles)
    with pytest.raises(AssertionError):
        split_under_a_cursor([SlowHistory])
