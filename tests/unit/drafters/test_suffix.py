"""The history drafter against a dictionary of every (context, next token) event ever said."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceline.drafters import suffix
from paceline.drafters.suffix import MAX_COUNTED, NativeHistory, SlowHistory, SuffixDrafter, confidence
from paceline.native import NativeUnavailable
from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Request, SamplingParams

try:
    NativeHistory()
    HISTORIES = [NativeHistory, SlowHistory]
except NativeUnavailable:
    HISTORIES = [SlowHistory]


def rows_of(sequences: dict[int, list[int]]) -> Rows:
    ids = np.array(list(sequences), np.int64)
    tokens = [np.array(sequence, np.int32) for sequence in sequences.values()]
    return Rows(ids, tokens, np.zeros(len(ids), np.uint64), [SamplingParams()] * len(ids))


def commits_of(said: dict[int, list[int]]) -> Commits:
    num = np.array([len(tokens) for tokens in said.values()], np.int32)
    tokens = np.full((len(said), num.max(initial=0)), -7, np.int32)
    for row, new in zip(tokens, said.values(), strict=True):
        row[: len(new)] = new
    none = np.zeros(len(said), np.int32)
    return Commits(np.array(list(said), np.int64), tokens, num, none, none)


def drafts_of(batch: DraftBatch) -> list[list[tuple[int, float]]]:
    return [
        list(zip(batch.tokens[i, :n].tolist(), batch.confidence[i, :n].tolist(), strict=True))
        for i, n in enumerate(batch.num)
    ]


@dataclass
class Events:
    """The slow obvious twin: all contexts, all counts, no automaton."""

    count: dict[tuple[int, ...], dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    prompts: set[tuple[int, ...]] = field(default_factory=set)

    def say(self, before: list[int], token: int) -> None:
        for start in range(len(before) + 1):
            count = self.count[tuple(before[start:])]
            count[token] = count.pop(token, 0) + 1  # to the end: the most recent is last

    def insert_prompt(self, prompt: tuple[int, ...]) -> None:
        if prompt not in self.prompts:
            self.prompts.add(prompt)
            for i, token in enumerate(prompt):
                self.say(list(prompt[:i]), token)

    def propose(self, sequence: list[int], cap: int, min_match: int) -> list[tuple[int, float]]:
        draft: list[tuple[int, float]] = []
        while len(draft) < cap:
            text = sequence + [token for token, _ in draft]
            known = (tuple(text[i:]) for i in range(len(text) - min_match + 1) if tuple(text[i:]) in self.count)
            context = next(known, None)
            if context is None:
                break
            count = self.count[context]
            token = max(reversed(count), key=count.__getitem__)
            draft.append((token, float(np.float32(confidence(count[token], sum(count.values()), len(context))))))
        return draft


class World:
    """Requests that come, speak and go, told to drafters and to the twin alike."""

    def __init__(self, drafters: list[SuffixDrafter], min_match: int) -> None:
        self.drafters, self.min_match = drafters, min_match
        self.events: dict[object, Events] = {}
        self.live: dict[int, list[int]] = {}
        self.key: dict[int, object] = {}
        self.num_begun = 0

    def begin(self, problem: str | None, prompt: tuple[int, ...]) -> None:
        request = Request(self.num_begun, prompt, problem=problem)
        self.num_begun += 1
        key = self.key[request.request_id] = ("private", request.request_id) if problem is None else problem
        self.events.setdefault(key, Events()).insert_prompt(prompt)
        self.live[request.request_id] = list(prompt)
        for drafter in self.drafters:
            drafter.begin(request)

    def observe(self, said: dict[int, list[int]]) -> None:
        for drafter in self.drafters:
            drafter.observe(commits_of(said))
        for request_id, tokens in said.items():
            for token in tokens:
                self.events[self.key[request_id]].say(self.live[request_id], token)
                self.live[request_id].append(token)

    def end(self, request_id: int) -> None:
        for drafter in self.drafters:
            drafter.end(request_id)
        del self.live[request_id]

    def check(self, caps: list[int]) -> None:
        expected = [
            self.events[self.key[i]].propose(sequence, cap, self.min_match)
            for (i, sequence), cap in zip(self.live.items(), caps, strict=True)
        ]
        for drafter in self.drafters:
            batch = drafter.propose(rows_of(self.live), np.array(caps, np.int32))
            assert batch.tokens.shape == batch.confidence.shape == (len(caps), max(caps, default=0))
            assert drafts_of(batch) == expected


def live_a_life(draw, drafters: list[SuffixDrafter], min_match: int) -> None:
    """`draw(strategy)` decides everything; small alphabets make contexts meet and states split."""
    world = World(drafters, min_match)
    token = st.integers(0, draw(st.integers(1, 3)))
    prompt = st.lists(token, min_size=1, max_size=6).map(tuple)
    prompts = draw(st.lists(prompt, min_size=1, max_size=3))
    for _ in range(draw(st.integers(1, 12))):
        for _ in range(draw(st.integers(0, 2))):
            world.begin(draw(st.sampled_from(["a", "b", None])), draw(st.sampled_from(prompts)))
        said = {i: draw(st.lists(token, max_size=4)) for i in world.live if draw(st.booleans())}
        world.observe(said)
        world.check([draw(st.integers(0, 5)) for _ in world.live])
        for request_id in [i for i in world.live if draw(st.integers(0, 4)) == 0]:
            world.end(request_id)


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 3))
def test_proposes_what_the_longest_known_context_said_most(data: st.DataObject, min_match: int) -> None:
    live_a_life(data.draw, [SuffixDrafter(min_match, history=history()) for history in HISTORIES], min_match)


class ForgetsEdges(suffix._SlowAutomaton):
    def _split(self, p: int, token: int, q: int, length: int) -> int:
        clone = super()._split(p, token, q, length)
        self.edges[clone] = {self.best[q]: self.edges[q][self.best[q]]} if self.edges[q] else {}
        return clone


class CountsBeforeSplitting(suffix._SlowAutomaton):
    def _split(self, p: int, token: int, q: int, length: int) -> int:
        clone = super()._split(p, token, q, length)
        self.count[clone] += 1
        return clone


class ForgetsRedirect(suffix._SlowAutomaton):
    def _split(self, p: int, token: int, q: int, length: int) -> int:
        before = dict(self.edges[self.link[p]]) if self.link[p] >= 0 else None
        clone = super()._split(p, token, q, length)
        if before is not None:
            self.edges[self.link[p]] = before
        return clone


@pytest.mark.parametrize("broken", [ForgetsEdges, CountsBeforeSplitting, ForgetsRedirect])
def test_catches_broken_automata(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_SlowAutomaton", broken)

    @settings(max_examples=200, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(st.data())
    def life(data: st.DataObject) -> None:
        live_a_life(data.draw, [SuffixDrafter(history=SlowHistory())], 1)

    with pytest.raises((AssertionError, KeyError)):
        life()


@pytest.mark.skipif(len(HISTORIES) < 2, reason="no C compiler")
@pytest.mark.parametrize("loop", [(1,), (1, 2, 3), tuple(range(40))])
def test_twins_agree_past_the_counted_contexts(loop: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    drafters = [SuffixDrafter(history=history()) for history in HISTORIES]
    sequences = {i: [9] for i in range(3)}
    for drafter in drafters:
        for i in sequences:
            drafter.begin(Request(i, (9,), problem="loop"))
    for step in range(20 * MAX_COUNTED):
        said = {i: [int(rng.integers(50)) if rng.random() < 0.01 else loop[step % len(loop)]] for i in sequences}
        fast, slow = (drafts_of(d.propose(rows_of(sequences), np.full(3, 6, np.int32))) for d in drafters)
        assert fast == slow
        for drafter in drafters:
            drafter.observe(commits_of(said))
    assert fast[0], "a loop is easy to predict"
    assert drafters[0].num_tokens == drafters[1].num_tokens == 1 + 3 * 20 * MAX_COUNTED


@pytest.mark.parametrize("history", HISTORIES)
def test_siblings_speak_while_they_live(history: type) -> None:
    drafter = SuffixDrafter(history=history())
    for i in range(2):
        drafter.begin(Request(i, (1, 2), problem="p"))
    drafter.begin(Request(2, (1, 2), problem="other"))
    drafter.begin(Request(3, (1, 2)))
    drafter.observe(commits_of({0: [3, 4, 5]}))
    sequences = {1: [1, 2], 2: [1, 2], 3: [1, 2]}
    drafts = drafts_of(drafter.propose(rows_of(sequences), np.full(3, 8, np.int32)))
    assert [token for token, _ in drafts[0]] == [3, 4, 5]
    assert drafts[1:] == [[], []], "what one problem said is no business of another's, nor of a request without one"


@pytest.mark.parametrize("history", HISTORIES)
def test_drops_the_least_recently_begun_problems_without_live_requests(history: type) -> None:
    rng = np.random.default_rng(0)
    drafter = SuffixDrafter(history=history(), max_bytes=1)
    drafter.begin(Request(0, (1,), problem="live"))
    sizes = []
    for i in range(1, 4):
        drafter._max_bytes = 1 << 40
        drafter.begin(Request(i, (1,), problem=f"p{i}"))
        drafter.observe(commits_of({i: rng.integers(0, 50, 200).tolist()}))
        drafter.end(i)
        sizes.append(drafter.num_bytes)
    drafter.begin(Request(9, (1,), problem="p1"))  # p1 is now the most recent
    drafter.end(9)
    assert drafter.num_problems == 4
    drafter._max_bytes = sizes[-1] - 1
    drafter.observe(commits_of({0: [1] * 100}))
    assert set(drafter._problems) == {"live", "p3", "p1"}
    drafter._max_bytes = 1
    drafter.observe(commits_of({0: [2] * 300}))
    assert set(drafter._problems) == {"live"}, "a live problem is never dropped"
    drafter.end(0)
    assert drafter.num_problems == drafter.num_bytes == drafter.num_tokens == 0


@pytest.mark.parametrize("history", HISTORIES)
def test_private_histories_end_with_their_request(history: type) -> None:
    drafter = SuffixDrafter(history=history())
    for i in range(200):  # more than there are slots at first
        drafter.begin(Request(i, (1, 2, 1)))
    assert drafter.num_bytes > 0
    drafts = drafter.propose(rows_of({i: [1, 2, 1] for i in range(200)}), np.full(200, 2, np.int32))
    assert (drafts.tokens == [2, 1]).all()
    for i in range(200):
        drafter.end(i)
    assert drafter.num_bytes == 0
    drafter.close()


@pytest.mark.skipif(len(HISTORIES) < 2, reason="no C compiler")
def test_a_history_that_cannot_grow_warns_and_goes_quiet() -> None:
    drafter = SuffixDrafter(history=NativeHistory(max_states=100))
    drafter.begin(Request(0, (1, 2), problem="big"))
    drafter.begin(Request(1, (1, 2), problem="small"))
    said = np.random.default_rng(0).integers(0, 9, 300).tolist()
    with pytest.warns(RuntimeWarning, match="max_bytes"):
        drafter.observe(commits_of({0: said, 1: [3, 1, 2]}))
    drafter.observe(commits_of({0: said, 1: [3]}))
    drafts = drafter.propose(rows_of({0: [1, 2, *said, *said], 1: [1, 2, 3, 1, 2, 3]}), np.full(2, 3, np.int32))
    assert drafts.num.tolist() == [0, 3]
    with pytest.warns(RuntimeWarning, match="max_bytes"):
        drafter.begin(Request(2, tuple(range(1000)), problem="big"))
    for i in range(3):
        drafter.end(i)


def told(history: type) -> SuffixDrafter:
    """Three problems with interleaved rollouts that share much, two prompts in one of them, one begun again last."""
    rng = np.random.default_rng(0)
    drafter = SuffixDrafter(history=history())
    for round_ in range(3):
        for i, (problem, prompt) in enumerate(
            [("eins", (1, 2)), ("zwei", (1,)), ("zwei", (2, 2)), ("drei 🎲", (3, 1))]
        ):
            drafter.begin(Request(i, prompt, problem=problem))
        drafter.begin(Request(9, (1, 2, 3)))
        for _ in range(20):
            ids = sorted({*rng.integers(0, 4, 3).tolist(), 9})
            drafter.observe(commits_of({i: rng.integers(0, 3, rng.integers(0, 4)).tolist() for i in ids}))
        for i in (0, 1, 2, 3, 9):
            drafter.end(i)
        drafter.begin(Request(round_, (1, 2), problem="eins"))
        drafter.end(round_)
    return drafter


@pytest.mark.parametrize("target", HISTORIES)
@pytest.mark.parametrize("source", HISTORIES)
def test_a_restored_history_is_the_same_automaton(source: type, target: type) -> None:
    drafter, restored = told(source), SuffixDrafter(history=target())
    restored.begin(Request(0, (5, 5), problem="forgotten"))
    restored.end(0)
    restored.restore(drafter.state())
    assert list(restored._problems) == list(drafter._problems) == ["zwei", "drei 🎲", "eins"]
    for name, problem in drafter._problems.items():
        assert restored._problems[name].prompts == problem.prompts, "every state has the number it had"
    assert restored.num_tokens == drafter.num_tokens
    if source is target:
        assert restored.num_bytes == drafter.num_bytes, "so that the same problems are dropped at the same time"
    for name, prompt in (("eins", (1, 2)), ("zwei", (2, 2)), ("drei 🎲", (3, 1)), ("eins", (7,))):
        for one in (drafter, restored):
            one.begin(Request(0, prompt, problem=name))
        sequence = list(prompt)
        for token in np.random.default_rng(1).integers(0, 3, 30).tolist():
            drafts = [
                drafts_of(d.propose(rows_of({0: sequence}), np.full(1, 6, np.int32))) for d in (drafter, restored)
            ]
            assert drafts[0] == drafts[1]
            for one in (drafter, restored):
                one.observe(commits_of({0: [token]}))
            sequence.append(token)
        for one in (drafter, restored):
            one.end(0)
    drafter.restore(SuffixDrafter(history=SlowHistory()).state())
    assert drafter.num_problems == drafter.num_bytes == 0


@pytest.mark.parametrize("history", HISTORIES)
def test_the_order_in_which_siblings_spoke_is_kept(history: type) -> None:
    """The most recent of two equals is drafted: retelling one rollout after the other would get it wrong."""
    drafter, restored = SuffixDrafter(history=history()), SuffixDrafter(history=history())
    for i in range(2):
        drafter.begin(Request(i, (1,), problem="p"))
    drafter.observe(commits_of({1: [2]}))
    drafter.observe(commits_of({0: [3]}))
    for i in range(2):
        drafter.end(i)
    restored.restore(drafter.state())
    restored.begin(Request(5, (1,), problem="p"))
    assert restored.propose(rows_of({5: [1]}), np.ones(1, np.int32)).tokens.tolist() == [[3]]


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("log", [[-1, 1, -99, 2], [-1, 1, 2, -4, 3], [-1, 1, -(2**31), 3]])
def test_a_damaged_state_is_refused(history: type, log: list[int]) -> None:
    state = {
        "names": np.frombuffer(b"p", np.uint8), "name_ends": np.array([1]),
        "logs": np.array(log, np.int32), "log_ends": np.array([len(log)]),
    }  # fmt: skip
    with pytest.raises(ValueError, match="damaged"):
        SuffixDrafter(history=history()).restore(state)


@pytest.mark.parametrize("history", HISTORIES)
def test_what_was_said_is_counted_though_no_state_is_new(history: type) -> None:
    drafter = SuffixDrafter(history=history())
    for i in range(60):
        drafter.begin(Request(i, (1,), problem="p"))
        drafter.observe(commits_of({i: [2, 3, 4, 5]}))
        drafter.end(i)
        if i == 0:
            before = drafter.num_bytes
    assert drafter.num_bytes - before >= 4 * 4 * 59


def test_refuses_weights_and_bad_parameters() -> None:
    with pytest.raises(ValueError, match="no weights"):
        SuffixDrafter(history=SlowHistory()).update({}, 1)
    with pytest.raises(ValueError, match="min_match = 0"):
        SuffixDrafter(min_match=0)
    with pytest.raises(ValueError, match="max_bytes"):
        SuffixDrafter(max_bytes=0)


def test_falls_back_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise NativeUnavailable("no C compiler")

    monkeypatch.setattr(suffix, "load", unavailable)
    assert not SuffixDrafter().is_native
