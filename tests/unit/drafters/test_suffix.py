"""The suffix drafter: which requests share history, which shards are dropped, and what a checkpoint keeps."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from history_reference import HISTORIES, commits_of, drafts_of, rows_of

from paceline.drafters import history as history_module
from paceline.drafters.history import NativeHistory
from paceline.drafters.python_history import MAX_COUNTED, PythonHistory
from paceline.drafters.suffix import SuffixDrafter
from paceline.native import NativeUnavailable
from paceline.types import Request


def tokens_of(drafter: SuffixDrafter, sequences: dict[int, list[int]], cap: int = 8) -> list[list[int]]:
    caps = np.full(len(sequences), cap, np.int32)
    return [[token for token, _ in draft] for _, draft in drafts_of(drafter.propose(rows_of(sequences), caps))]


def shards_of(drafter: SuffixDrafter) -> list[tuple[str | None, int]]:
    return [(shard.problem.name, shard.version) for shard in drafter._shards]


@pytest.mark.skipif(len(HISTORIES) < 2, reason="no C compiler")
@pytest.mark.parametrize("loop", [(1,), (1, 2, 3), tuple(range(40))])
def test_native_and_python_history_agree_beyond_max_counted(loop: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    drafters = [SuffixDrafter(history=history()) for history in HISTORIES]
    sequences = {i: [9] for i in range(3)}
    for drafter in drafters:
        for i in sequences:
            drafter.begin(Request(i, (9,), problem="loop"))
    for step in range(20 * MAX_COUNTED):
        emitted = {i: [int(rng.integers(50)) if rng.random() < 0.01 else loop[step % len(loop)]] for i in sequences}
        fast, slow = (drafts_of(d.propose(rows_of(sequences), np.full(3, 6, np.int32))) for d in drafters)
        assert fast == slow
        for drafter in drafters:
            drafter.observe(commits_of(emitted))
    assert fast[0][1], "a loop is easy to predict"
    assert drafters[0].num_tokens == drafters[1].num_tokens == 1 + 3 * 20 * MAX_COUNTED


@pytest.mark.parametrize("history", HISTORIES)
def test_live_requests_of_a_problem_share_history(history: type) -> None:
    drafter = SuffixDrafter(history=history())
    for i in range(2):
        drafter.begin(Request(i, (1, 2), problem="p"))
    drafter.begin(Request(2, (1, 2), problem="other"))
    drafter.begin(Request(3, (1, 2)))
    drafter.observe(commits_of({0: [3, 4, 5]}))
    assert tokens_of(drafter, {1: [1, 2]}) == [[3, 4, 5]]
    others = tokens_of(drafter, {2: [1, 2], 3: [1, 2]})
    assert others == [[], []], "other problems, and requests without a problem, do not share it"


@pytest.mark.parametrize("history", HISTORIES)
def test_older_versions_count_less(history: type) -> None:
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
    np.testing.assert_allclose(batch.scores, [[0.6 * 0.4 / (0.4 + 0.16 + 0.064 + 2 / 2)]], rtol=1e-6)
    equal_weights = SuffixDrafter(recency=1, history=history())
    equal_weights.load_state_dict(drafter.state_dict())
    equal_weights.begin(Request(9, (1, 2), problem="p"), 3)
    assert equal_weights.propose(rows_of({9: [1, 2]}), np.ones(1, np.int32)).tokens.tolist() == [[5]]


@pytest.mark.parametrize("history", HISTORIES)
def test_max_versions_counts_versions_of_each_problem(history: type) -> None:
    """Problem q comes up once in ten versions, and keeps its last two."""
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
def test_request_outlives_its_version(history: type) -> None:
    """Its tokens go to the shard it began in, even beyond max_versions, and requests of the next version read them."""
    drafter = SuffixDrafter(max_versions=2, history=history())
    drafter.begin(Request(0, (1,), problem="p"), 0)
    drafter.begin(Request(1, (1,), problem="p"), 1)
    drafter.begin(Request(2, (1,), problem="p"), 2)
    assert len(drafter._shards) == 3, "a shard is not dropped while a live request appends to it"
    drafter.observe(commits_of({0: [3, 4], 1: [5, 6]}))
    assert tokens_of(drafter, {0: [1, 3, 4], 1: [1, 5, 6], 2: [1]}) == [[], [], [5, 6]], (
        "2 reads 1's shard, 1 reads 0's"
    )
    drafter.end(0)
    assert shards_of(drafter) == [("p", 1), ("p", 2)]
    drafter.observe(commits_of({1: [1]}))
    assert tokens_of(drafter, {1: [1, 5, 6, 1], 2: [1]}) == [[5, 6, 1, 5, 6, 1, 5, 6], [5, 6, 1, 5, 6, 1, 5, 6]]


@pytest.mark.parametrize("history", HISTORIES)
def test_evicts_the_least_recently_used_shards(history: type) -> None:
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
    drafter._shards.max_bytes = sizes[-1] - 1
    drafter.observe(commits_of({0: [1] * 40}))
    assert shards_of(drafter) == [("live", 0), ("q", 2), ("p", 3), ("r", 3), ("q", 1)]
    assert drafter.num_bytes <= sizes[-1] - 1
    drafter._shards.max_bytes = 1
    drafter.observe(commits_of({0: [2] * 300}))
    assert shards_of(drafter) == [("live", 0)], "a shard that a live request appends to is never dropped"
    drafter.end(0)
    assert len(drafter._shards.problems) == len(drafter._shards) == drafter.num_bytes == drafter.num_tokens == 0


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("how", ["remove", "max_bytes", "max_versions"])
def test_drops_a_shard_that_newer_requests_have_cursors_in(history: type, how: str) -> None:
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
    elif how == "max_bytes":
        drafter._shards.max_bytes = 1
        drafter._shards.evict()
    else:
        drafter.begin(Request(4, (7,), problem="p"), 2)
        drafter.begin(Request(5, (7,), problem="q"), 2)
    assert tokens_of(drafter, {2: [1, 2], 3: [1, 2]}) == [[], []]
    drafter.observe(commits_of({2: [3], 3: [3, 1, 2]}))
    assert tokens_of(drafter, {2: [1, 2, 3], 3: [1, 2, 3, 1, 2]}, 2) == [[], [3, 1]]
    assert {version for _, version in shards_of(drafter)} == ({1, 2} if how == "max_versions" else {1})


@pytest.mark.parametrize("history", HISTORIES)
def test_removed_version_stays_until_its_requests_end(history: type) -> None:
    drafter = SuffixDrafter(history=history())
    for i in range(2):
        drafter.begin(Request(i, (1,), problem="p"), 3)
    assert drafter.remove(2) == 0
    assert drafter.remove(3) == 1
    drafter.begin(Request(2, (1,), problem="p"), 3)
    drafter.observe(commits_of({0: [2, 3]}))
    assert tokens_of(drafter, {1: [1], 2: [1]}) == [[2, 3], []]
    assert (len(drafter._shards), len(drafter._shards.problems)) == (2, 1)
    drafter.end(0)
    drafter.end(1)
    assert len(drafter._shards) == 1
    drafter.end(2)
    assert drafter.num_tokens == 1


@pytest.mark.parametrize("history", HISTORIES)
def test_request_without_a_problem_has_its_own_history(history: type) -> None:
    drafter = SuffixDrafter(history=history())
    for i in range(200):  # more than the initial number of slots
        drafter.begin(Request(i, (1, 2, 1)))
    assert drafter.num_bytes > 0
    drafts = drafter.propose(rows_of({i: [1, 2, 1] for i in range(200)}), np.full(200, 2, np.int32))
    assert (drafts.tokens == [2, 1]).all()
    for i in range(200):
        drafter.end(i)
    assert drafter.num_bytes == 0
    drafter.close()


@pytest.mark.skipif(len(HISTORIES) < 2, reason="no C compiler")
def test_history_that_cannot_grow_warns_and_drafts_nothing() -> None:
    drafter = SuffixDrafter(history=NativeHistory(max_states=100))
    drafter.begin(Request(0, (1, 2), problem="big"))
    drafter.begin(Request(1, (1, 2), problem="small"))
    tokens = np.random.default_rng(0).integers(0, 9, 300).tolist()
    with pytest.warns(RuntimeWarning, match="max_bytes"):
        drafter.observe(commits_of({0: tokens, 1: [3, 1, 2]}))
    drafter.observe(commits_of({0: tokens, 1: [3]}))
    drafts = drafter.propose(rows_of({0: [1, 2, *tokens, *tokens], 1: [1, 2, 3, 1, 2, 3]}), np.full(2, 3, np.int32))
    assert drafts.num.tolist() == [0, 3]
    with pytest.warns(RuntimeWarning, match="max_bytes"):
        drafter.begin(Request(2, tuple(range(1000)), problem="big"))
    for i in range(3):
        drafter.end(i)


def filled_drafter(history: type) -> SuffixDrafter:
    """Three problems and versions with interleaved rollouts that share much. One problem has two prompts, one is used
    again at the end."""
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
def test_restored_history_is_the_same_automaton(source: type, target: type) -> None:
    drafter, restored = filled_drafter(source), SuffixDrafter(history=target())
    restored.begin(Request(0, (5, 5), problem="replaced"))
    restored.end(0)
    restored.load_state_dict(drafter.state_dict())
    assert shards_of(restored) == shards_of(drafter)
    assert set(shards_of(drafter)) == {
        ("eins", 0), ("eins", 1), ("zwei", 0), ("zwei", 1), ("zwei", 2), ("drei 🎲", 0), ("drei 🎲", 2)
    }  # fmt: skip
    assert shards_of(drafter)[-1] == ("eins", 0)
    for one, other in zip(drafter._shards, restored._shards, strict=True):
        assert one.prompt_ends == other.prompt_ends, "states keep their numbers"
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
    drafter.load_state_dict(SuffixDrafter(history=PythonHistory()).state_dict())
    assert len(drafter._shards.problems) == drafter.num_bytes == 0


@pytest.mark.parametrize("history", HISTORIES)
def test_checkpoint_keeps_the_order_of_interleaved_rollouts(history: type) -> None:
    """On ties the most recent token is drafted, so replaying one rollout after the other would be wrong."""
    drafter, restored = SuffixDrafter(history=history()), SuffixDrafter(history=history())
    for i in range(2):
        drafter.begin(Request(i, (1,), problem="p"))
    drafter.observe(commits_of({1: [2]}))
    drafter.observe(commits_of({0: [3]}))
    for i in range(2):
        drafter.end(i)
    restored.load_state_dict(drafter.state_dict())
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
def test_refuses_a_damaged_state(history: type, changes: dict[str, list[int]]) -> None:
    drafter = SuffixDrafter(history=history())
    drafter.load_state_dict(a_state())
    assert shards_of(drafter) == [("p", 0), ("q", 0)]
    with pytest.raises(ValueError, match="damaged"):
        drafter.load_state_dict(a_state(**changes))
    assert len(drafter._shards) == drafter.num_bytes == 0


@pytest.mark.parametrize("history", HISTORIES)
def test_smaller_limits_restore_the_newest_shards(history: type) -> None:
    drafter = filled_drafter(history)
    small = SuffixDrafter(max_versions=1, history=history())
    small.load_state_dict(drafter.state_dict())
    assert sorted(shards_of(small)) == [("drei 🎲", 2), ("eins", 1), ("zwei", 2)]
    few_bytes = SuffixDrafter(max_bytes=small.num_bytes, max_versions=4, history=history())
    few_bytes.load_state_dict(drafter.state_dict())
    assert 0 < few_bytes.num_bytes <= small.num_bytes
    assert shards_of(few_bytes)[-1] == ("eins", 0)


@pytest.mark.parametrize("history", HISTORIES)
def test_num_bytes_counts_tokens_that_add_no_state(history: type) -> None:
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
        SuffixDrafter(history=PythonHistory()).update({}, 1)
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


def test_falls_back_to_python_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise NativeUnavailable("no C compiler")

    monkeypatch.setattr(history_module, "load", unavailable)
    assert isinstance(SuffixDrafter()._history, PythonHistory)


def test_no_error_at_interpreter_exit() -> None:
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
