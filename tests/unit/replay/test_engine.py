"""The clock, the epochs, turns and heads of a replay; that it drafts as a live engine does is tests/e2e's to show."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.replay.engine import Replay
from paceline.replay.recorded_head import RecordedHead
from paceline.replay.rounds import Record, Rounds
from paceline.replay.tape import Tape
from paceline.speculation.batch import Commits, DraftBatch, Drafter, Load, Rows
from paceline.speculation.policy import StaticPolicy
from paceline.types import StepTrace


class Clock:
    """A step takes 1 s and 0.1 s per drafted token; a drafted position takes the head 0.01 s."""

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        return 1 + 0.1 * np.arange(num_extra + 1) + 100 * (load.num_query_tokens - load.num_rows)

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        return 0.01 * k if drafter == "eagle3" else 0.0


def record(problem: str, num: int, **changes: object) -> Record:
    prompt = np.array([ord(letter) for letter in problem], np.int32)
    return Record(problem, prompt, 100 + np.arange(num, dtype=np.int32), **changes)  # type: ignore[arg-type]


def play(records: list[Record], k: int = 0, drafter: Drafter | None = None, **options: object) -> Replay:
    engine = Replay(StaticPolicy(k), Clock(), drafter, **options)  # type: ignore[arg-type]
    for recorded in Rounds(64).of(records):
        engine.play(recorded)
    return engine


def with_head(records: list[Record], k: int, **options: object) -> Replay:
    tape = Tape()
    return play(records, k, RecordedHead(tape), tape=tape, **options)


def test_plain_decoding_takes_a_step_per_token_of_the_longest() -> None:
    engine = play([record("a", 7), record("b", 3)], max_num_seqs=2)
    assert engine.now_s == 7 and engine.tally.figures()["steps"] == 7
    assert play([record("a", 7), record("b", 3)], max_num_seqs=1).now_s == 10


def test_prompts_take_time_only_if_asked_for() -> None:
    prompts = [record("abc", 2)]
    assert play(prompts).now_s == 2
    assert play(prompts, prefill=True).now_s == 2 + 100 * 2  # three query tokens in a step of one row


@pytest.mark.parametrize("k", [1, 3, 9])
def test_a_recorded_head_drafts_as_far_as_it_was_right(k: int) -> None:
    engine = with_head([record("p", 8, matches=np.array([1, 0, 2, 9, 9, 9, 9, 9], np.uint8), max_tokens=8)], k)
    figures = engine.tally.figures()
    emitted, wanted, found = 0, [1, 0, 2, 9, 9, 9, 9, 9], []
    while emitted < 8:
        offered = min(k, 9, 8 - emitted - 1)
        stood = min(offered, wanted[emitted])
        found.append((offered, stood))
        emitted += stood + 1
    assert figures["steps"] == len(found)
    assert figures["draft_tokens"] == sum(offered for offered, _ in found)
    assert figures["accepted_tokens"] == sum(stood for _, stood in found)
    assert engine.now_s == pytest.approx(sum(1 + 0.1 * offered + 0.01 * offered for offered, _ in found))


def test_a_stop_ends_a_draft_that_goes_further() -> None:
    """It might have gone on, so drafts reach beyond its end; what is accepted does not."""
    engine = with_head([record("p", 3, matches=np.array([9, 9, 9], np.uint8), max_tokens=50)], 7)
    figures = engine.tally.figures()
    assert (figures["steps"], figures["draft_tokens"], figures["accepted_tokens"]) == (1, 7, 3)
    assert figures["tokens"] == 3 and figures["tokens_per_row_step"] == 3


def test_without_recorded_matches_a_head_drafts_nothing() -> None:
    assert with_head([record("p", 5)], 3).tally.figures()["drafts"] == 0


def test_a_head_learns_how_deep_its_drafts_get() -> None:
    right = np.full(60, 2, np.uint8)
    tape = Tape()
    head = RecordedHead(tape)
    play([record("p", 60, matches=right, max_tokens=60)] * 20, 5, head, tape=tape, max_num_seqs=4)
    said = head.stood / head.tried
    assert said[0] > 0.9 and said[1] > 0.9 and said[2] < 0.1 and said[4] == pytest.approx(0.6)
    other = RecordedHead(tape)
    other.restore(head.state())
    assert (other.stood == head.stood).all()
    with pytest.raises(ValueError, match="not a state of a recorded head"):
        other.restore({"x": said})


def test_hybrid_takes_history_where_it_knows_and_the_head_elsewhere() -> None:
    records = [record("p", 40, step=step, matches=np.full(40, 1, np.uint8)) for step in range(4) for _ in range(3)]
    tape, traces = Tape(), []
    hybrid = HybridDrafter(SuffixDrafter(), RecordedHead(tape), 0.05)
    play(records, 4, hybrid, tape=tape, watch=traces.append)
    sources = [dict((name, accepted) for name, _, accepted in trace.sources) for trace in traces]
    assert any("eagle3" in s for s in sources[:40]) and any(s.get("suffix", 0) > 4 for s in sources[-20:])


def test_no_torch_is_loaded_for_any_drafter() -> None:
    program = (
        "import sys; from paceline.build.replay import build_replay, frozen_costs; from paceline.replay import advice; "
        "from paceline.replay.run import Cell; import paceline.replay.reader\n"
        "for d in ('suffix', 'ngram', 'eagle3', 'hybrid'):\n"
        "    for p in ('static:3', 'das', 'auto'): build_replay(Cell(d, p, 4), frozen_costs(None, None))\n"
        "print(sys.modules.keys() & {'torch', 'transformers'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_epochs_share_a_step_by_their_rows() -> None:
    """One request of a problem that was there before, three of a new one."""
    first = [record("a", 4, step=0)]
    mixed = [record("a", 6, step=1), *(record("b", 6, step=1) for _ in range(3))]
    tally = play([*first, *mixed], max_num_seqs=4).tally
    assert tally.num_epochs == 2
    assert tally.total_s.tolist() == pytest.approx([4 + 6 * 3 / 4 + 0, 6 / 4])
    assert tally.figures(slice(0, 1))["tokens"] == 4 + 18 and tally.figures(slice(1, None))["tokens"] == 6
    assert tally.figures(slice(0, 1))["steps"] == 10 and tally.figures(slice(1, 2))["steps"] == 6
    assert tally.figures()["steps"] == tally.num_steps == 10


def test_speed_up_is_against_the_same_without_speculation() -> None:
    records = [record("p", 20, matches=np.full(20, 9, np.uint8), max_tokens=20)]
    fast, plain = with_head(records, 4).tally, play(records).tally
    figures = fast.figures(plain=plain)
    assert figures["plain_makespan_s"] == 20
    assert figures["speedup"] == pytest.approx(20 / figures["makespan_s"]) and figures["speedup"] > 2
    assert figures["mean_acceptance_length"] == 20 / figures["steps"] == 5
    assert figures["draft_share"] == pytest.approx(0.01 * figures["draft_tokens"] / figures["makespan_s"])


class Told(SuffixDrafter):
    """Remembers whom it was told to begin and end, and what was emitted."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int]] = []
        self.emitted: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}

    def begin(self, request, version=0):  # type: ignore[no-untyped-def]
        super().begin(request, version)
        self.told.append(("begin", request.request_id))
        self.texts[request.request_id] = list(request.prompt_ids)

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        assert len(rows.tokens) == len(rows)
        for request_id, seen in zip(rows.request_ids.tolist(), rows.tokens, strict=True):
            assert seen.tolist() == self.texts[request_id]
        return super().propose(rows, caps)

    def observe(self, commits: Commits) -> None:
        super().observe(commits)
        for i, request_id in enumerate(commits.request_ids.tolist()):
            self.texts[request_id] += commits.tokens[i, : commits.num[i]].tolist()
            assert not commits.tokens[i, commits.num[i] :].any()

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.told.append(("end", request_id))


def test_turns_begin_when_the_one_before_has_ended() -> None:
    mask = np.array([1, 1, 1, 0, 0, 1, 1], bool)
    drafter = Told()
    engine = play([record("p", 7, mask=mask), record("q", 9)], 3, drafter, max_num_seqs=4)
    assert drafter.told == [("begin", 0), ("begin", 2), ("end", 0), ("begin", 1), ("end", 1), ("end", 2)]
    assert drafter.texts[0] == [ord("p"), 100, 101, 102]
    assert drafter.texts[1] == [ord("p"), *range(100, 107)]  # its prompt holds the turn before and the answer
    assert engine.tally.figures()["tokens"] == 5 + 9


def test_steps_are_told_as_they_were() -> None:
    traces: list[StepTrace] = []
    records = [record("p", 30, step=step) for step in range(2) for _ in range(4)]
    engine = play(records, 3, SuffixDrafter(), watch=traces.append, max_num_seqs=3)
    assert [t.step for t in traces] == list(range(len(traces))) and sum(t.num_emitted for t in traces) == 240
    assert all(t.num_query_tokens == t.num_rows + t.num_draft_tokens for t in traces)
    assert sum(t.num_accepted_tokens for t in traces) == engine.tally.figures()["accepted_tokens"] > 0
    assert traces[-1].start_s + traces[-1].total_s == pytest.approx(engine.now_s)
    assert {t.version for t in traces} == {0, 1}
    for t in traces:
        assert sum(t.accepted_per_position) == t.num_accepted_tokens == sum(a for _, _, a in t.sources)
        assert sum(t.drafted_per_position) == t.num_draft_tokens and len(t.accepted_per_position) == len(
            t.drafted_per_position
        )


def test_drafts_keep_within_a_steps_tokens() -> None:
    records = [record("p", 30, matches=np.full(30, 9, np.uint8), max_tokens=30) for _ in range(4)]
    traces: list[StepTrace] = []
    with_head(records, 5, max_num_seqs=4, max_num_batched_tokens=10, watch=traces.append, prefix_sharing=False)
    assert max(t.num_query_tokens for t in traces) == 10
