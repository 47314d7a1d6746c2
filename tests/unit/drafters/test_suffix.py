"""The history drafter: who shares what and when, what is dropped, what a checkpoint keeps."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from history_world import HISTORIES, commits_of, drafts_of, rows_of

from paceline.drafters import history as history_module
from paceline.drafters.history import NativeHistory
from paceline.drafters.slow_history import MAX_COUNTED, SlowHistory
from paceline.drafters.suffix import SuffixDrafter
from paceline.native import NativeUnavailable
from paceline.types import Request


def tokens_of(drafter: SuffixDrafter, sequences: dict[int, list[int]], cap: int = 8) -> list[list[int]]:
    caps = np.full(len(sequences), cap, np.int32)
    return [[token for token, _ in draft] for _, draft in drafts_of(drafter.propose(rows_of(sequences), caps))]


def shards_of(drafter: SuffixDrafter) -> list[tuple[str | None, int]]:
    return [(shard.problem.name, shard.version) for shard in drafter._shelf]


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
    assert fast[0][1], "a loop is easy to predict"
    assert drafters[0].num_tokens == drafters[1].num_tokens == 1 + 3 * 20 * MAX_COUNTED


@pytest.mark.parametrize("history", HISTORIES)
def test_siblings_speak_while_they_live(history: type) -> None:
    drafter = SuffixDrafter(history=history())
    for i in range(2):
        drafter.begin(Request(i, (1, 2), problem="p"))
    drafter.begin(Request(2, (1, 2), problem="other"))
    drafter.begin(Request(3, (1, 2)))
    drafter.observe(commits_of({0: [3, 4, 5]}))
    assert tokens_of(drafter, {1: [1, 2]}) == [[3, 4, 5]]
    quiet = tokens_of(drafter, {2: [1, 2], 3: [1, 2]})
    assert quiet == [[], []], "what one problem said is no business of another's, nor of a request without one"


@pytest.mark.parametrize("history", HISTORIES)
def test_older_versions_speak_and_count_less(history: type) -> None:
    drafter = SuffixDrafter(recency=0.4, history=history())
    for version, token in enumerate([5, 5, 6]):
        drafter.begin(Request(version, (1, 2), problem="p"), version)
        drafter.observe(commits_of({version: [token]}))
        drafter.end(version)
    drafter.begin(Request(9, (1, 2), problem="p"), 3)
    batch = drafter.propose(rows_of({9: [1, 2]}), np.ones(1, np.int32))
    # 6 once, a version ago: 0.4; 5 twice, two and three versions ago: 0.16 + 0.064
    assert batch.tokens.tolist() == [[6]]
    assert batch.match is not None
    assert batch.match.tolist() == [2]
    np.testing.assert_allclose(batch.confidence, [[0.6 * 0.4 / (0.4 + 0.16 + 0.064 + 2 / 2)]], rtol=1e-6)
    even = SuffixDrafter(recency=1, history=history())
    even.restore(drafter.state())
    even.begin(Request(9, (1, 2), problem="p"), 3)
    assert even.propose(rows_of({9: [1, 2]}), np.ones(1, np.int32)).tokens.tolist() == [[5]]


@pytest.mark.parametrize("history", HISTORIES)
def test_the_window_counts_a_problems_own_versions(history: type) -> None:
    """Problem q comes once in ten versions and keeps its two epochs all the same."""
    drafter = SuffixDrafter(max_versions=2, history=history())
    for version in range(21):
        for i, problem in enumerate(["p", "q"] if version % 10 == 0 else ["p"]):
            drafter.begin(Request(i, (1,), problem=problem), version)
            drafter.observe(commits_of({i: [100 + version]}))
        for i in range(1 + (version % 10 == 0)):
            drafter.end(i)
    assert sorted(shards_of(drafter)) == [("p", 19), ("p", 20), ("q", 10), ("q", 20)]
    drafter.begin(Request(5, (1,), problem="p"), 21)
    assert sorted(shards_of(drafter)) == [("p", 20), ("p", 21), ("q", 10), ("q", 20)]
    assert tokens_of(drafter, {5: [1]}) == [[120]]


@pytest.mark.parametrize("history", HISTORIES)
def test_a_request_outlives_its_version(history: type) -> None:
    """What it says goes where it began, also beyond the window, and is heard by the next version's requests."""
    drafter = SuffixDrafter(max_versions=2, history=history())
    drafter.begin(Request(0, (1,), problem="p"), 0)
    drafter.begin(Request(1, (1,), problem="p"), 1)
    drafter.begin(Request(2, (1,), problem="p"), 2)
    assert drafter.num_shards == 3, "nobody's words are taken from him while he speaks"
    drafter.observe(commits_of({0: [3, 4], 1: [5, 6]}))
    assert tokens_of(drafter, {0: [1, 3, 4], 1: [1, 5, 6], 2: [1]}) == [[], [], [5, 6]], "2 hears 1, 1 only what 0 said"
    drafter.end(0)
    assert shards_of(drafter) == [("p", 1), ("p", 2)]
    drafter.observe(commits_of({1: [1]}))
    assert tokens_of(drafter, {1: [1, 5, 6, 1], 2: [1]}) == [[5, 6, 1, 5, 6, 1, 5, 6], [5, 6, 1, 5, 6, 1, 5, 6]]


@pytest.mark.parametrize("history", HISTORIES)
def test_drops_the_shards_begun_in_least_recently(history: type) -> None:
    rng = np.random.default_rng(0)
    drafter = SuffixDrafter(history=history())
    drafter.begin(Request(0, (1,), problem="live"), 0)
    sizes = []
    for i, (problem, version) in enumerate([("p", 1), ("q", 1), ("q", 2), ("p", 3), ("r", 3)], 1):
        drafter.begin(Request(i, (1,), problem=problem), version)
        drafter.observe(commits_of({i: rng.integers(0, 50, 200).tolist()}))
        drafter.end(i)
        sizes.append(drafter.num_bytes)
    drafter.begin(Request(9, (1,), problem="q"), 1)  # one more sample of an old version
    drafter.end(9)
    assert drafter.num_bytes == sizes[-1]
    drafter._shelf.max_bytes = sizes[-1] - 1
    drafter.observe(commits_of({0: [1] * 40}))
    assert shards_of(drafter) == [("live", 0), ("q", 2), ("p", 3), ("r", 3), ("q", 1)]
    assert drafter.num_bytes <= sizes[-1] - 1
    drafter._shelf.max_bytes = 1
    drafter.observe(commits_of({0: [2] * 300}))
    assert shards_of(drafter) == [("live", 0)], "a shard that a live request speaks in is never dropped"
    drafter.end(0)
    assert drafter.num_problems == drafter.num_shards == drafter.num_bytes == drafter.num_tokens == 0


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("how", ["remove", "bytes", "window"])
def test_a_shard_may_go_while_others_follow_it(history: type, how: str) -> None:
    drafter = SuffixDrafter(max_versions=2, history=history())
    for i, problem in enumerate(["p", "q"]):
        drafter.begin(Request(i, (1, 2), problem=problem), 0)
        drafter.observe(commits_of({i: [3, 4, 5]}))
        drafter.end(i)
    drafter.begin(Request(2, (1, 2), problem="p"), 1)
    drafter.begin(Request(3, (1, 2), problem="q"), 1)
    assert tokens_of(drafter, {2: [1, 2], 3: [1, 2]}) == [[3, 4, 5]] * 2
    if how == "remove":
        assert drafter.remove(0) == 2
    elif how == "bytes":
        drafter._shelf.max_bytes = 1
        drafter._shelf.fit()
    else:
        drafter.begin(Request(4, (7,), problem="p"), 2)
        drafter.begin(Request(5, (7,), problem="q"), 2)
    assert tokens_of(drafter, {2: [1, 2], 3: [1, 2]}) == [[], []]
    drafter.observe(commits_of({2: [3], 3: [3, 1, 2]}))
    assert tokens_of(drafter, {2: [1, 2, 3], 3: [1, 2, 3, 1, 2]}, 2) == [[], [3, 1]]
    assert {version for _, version in shards_of(drafter)} == ({1, 2} if how == "window" else {1})


@pytest.mark.parametrize("history", HISTORIES)
def test_a_removed_version_goes_on_alone(history: type) -> None:
    drafter = SuffixDrafter(history=history())
    for i in range(2):
        drafter.begin(Request(i, (1,), problem="p"), 3)
    assert drafter.remove(2) == 0
    assert drafter.remove(3) == 1
    drafter.begin(Request(2, (1,), problem="p"), 3)
    drafter.observe(commits_of({0: [2, 3]}))
    assert tokens_of(drafter, {1: [1], 2: [1]}) == [[2, 3], []]
    assert (drafter.num_shards, drafter.num_problems) == (2, 1)
    drafter.end(0)
    drafter.end(1)
    assert drafter.num_shards == 1
    drafter.end(2)
    assert drafter.num_tokens == 1


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
    """Three problems and versions with interleaved rollouts that share much, two prompts in one of them, one begun
    again last."""
    rng = np.random.default_rng(0)
    drafter = SuffixDrafter(history=history())
    for round_ in range(3):
        for i, (problem, prompt) in enumerate(
            [("eins", (1, 2)), ("zwei", (1,)), ("zwei", (2, 2)), ("drei 🎲", (3, 1))]
        ):
            drafter.begin(Request(i, prompt, problem=problem), round_ // 2 * (1 + i % 2))
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
    assert shards_of(restored) == shards_of(drafter)
    assert set(shards_of(drafter)) == {
        ("eins", 0), ("eins", 1), ("zwei", 0), ("zwei", 1), ("zwei", 2), ("drei 🎲", 0), ("drei 🎲", 2)
    }  # fmt: skip
    assert shards_of(drafter)[-1] == ("eins", 0)
    for one, other in zip(drafter._shelf, restored._shelf, strict=True):
        assert one.prompts == other.prompts, "every state has the number it had"
    assert restored.num_tokens == drafter.num_tokens
    if source is target:
        assert restored.num_bytes == drafter.num_bytes, "so that the same shards are dropped at the same time"
    for name, prompt in (("eins", (1, 2)), ("zwei", (2, 2)), ("drei 🎲", (3, 1)), ("eins", (7,))):
        for one in (drafter, restored):
            one.begin(Request(0, prompt, problem=name), 3)
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
    assert tokens_of(restored, {5: [1]}) == [[3]]


def a_state(**changes: list[int]) -> dict[str, np.ndarray]:
    state = {"names": [112, 113], "name_ends": [1, 2], "versions": [0, 0], "logs": [-1, 1, -2, 2], "log_ends": [4, 4]}
    return {key: np.array(value, np.int64) for key, value in (state | changes).items()}


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize(
    "changes",
    [
        {"logs": [-1, 1, -99, 2]},
        {"logs": [-1, 1, 2, -4]},
        {"logs": [-1, 1, -(2**31), 3]},
        {"log_ends": [3, 3]},
        {"log_ends": [5, 4]},
        {"log_ends": [4]},
        {"versions": [0]},
        {"names": [112, 112]},
        {"names": [255, 113]},
        {"name_ends": [-1, 2]},
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(history: type, changes: dict[str, list[int]]) -> None:
    drafter = SuffixDrafter(history=history())
    drafter.restore(a_state())
    assert shards_of(drafter) == [("p", 0), ("q", 0)]
    with pytest.raises(ValueError, match="damaged"):
        drafter.restore(a_state(**changes))
    assert drafter.num_shards == drafter.num_bytes == 0


@pytest.mark.parametrize("history", HISTORIES)
def test_a_smaller_window_restores_the_newest(history: type) -> None:
    drafter = told(history)
    small = SuffixDrafter(max_versions=1, history=history())
    small.restore(drafter.state())
    assert sorted(shards_of(small)) == [("drei 🎲", 2), ("eins", 1), ("zwei", 2)]
    poor = SuffixDrafter(max_bytes=small.num_bytes, max_versions=4, history=history())
    poor.restore(drafter.state())
    assert 0 < poor.num_bytes <= small.num_bytes
    assert shards_of(poor)[-1] == ("eins", 0)


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
    for max_versions in (0, 65):
        with pytest.raises(ValueError, match=f"max_versions = {max_versions}"):
            SuffixDrafter(max_versions=max_versions)
    for recency in (0, 1.5):
        with pytest.raises(ValueError, match=f"recency = {recency}"):
            SuffixDrafter(recency=recency)


def test_falls_back_where_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise NativeUnavailable("no C compiler")

    monkeypatch.setattr(history_module, "load", unavailable)
    assert not SuffixDrafter().is_native


def test_one_that_is_left_when_modules_are_emptied_goes_quietly() -> None:
    script = """
import sys, torch
from paceline.drafters.suffix import SuffixDrafter
from paceline.types import Request

drafter = SuffixDrafter()
drafter.begin(Request(0, (1, 2), problem="a"))
torch._kept = sys._kept = drafter
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and not ended.stderr
