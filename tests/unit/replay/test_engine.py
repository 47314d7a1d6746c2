"""Times, epochs, turns and recorded heads of a replay. tests/e2e/test_replay_live.py compares it with a live engine."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from paceline.drafters.hybrid import HybridDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.replay.engine import Replay
from paceline.replay.recorded_head import RecordedHead
from paceline.replay.round_state import RoundState
from paceline.replay.rounds import Record, RoundSplitter
from paceline.speculation.batch import Commits, Drafter, Load, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.policy import StaticPolicy
from paceline.types import StepTrace


class Clock:
    """A step takes 1 s and 0.1 s per draft token; a head takes 0.01 s per draft position."""

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray:
        return 1 + 0.1 * np.arange(num_extra + 1) + 100 * (load.num_query_tokens - load.num_rows)

    def draft_s(self, drafter: str, num_rows: int, k: int) -> float:
        return 0.01 * k if drafter == "eagle3" else 0.0


def record(problem: str, num: int, **changes: object) -> Record:
    prompt = np.array([ord(letter) for letter in problem], np.int32)
    return Record(problem, prompt, 100 + np.arange(num, dtype=np.int32), **changes)  # type: ignore[arg-type]


def run_replay(records: list[Record], k: int = 0, drafter: Drafter | None = None, **options: object) -> Replay:
    engine = Replay(StaticPolicy(k), Clock(), drafter, **options)  # type: ignore[arg-type]
    for recorded in RoundSplitter(64).split(records):
        engine.run_round(recorded)
    return engine


def with_head(records: list[Record], k: int, **options: object) -> Replay:
    round_state = RoundState()
    return run_replay(records, k, RecordedHead(round_state), round_state=round_state, **options)


def test_without_drafts_a_round_takes_one_step_per_token_of_the_longest() -> None:
    engine = run_replay([record("a", 7), record("b", 3)], max_num_seqs=2)
    assert engine.now_s == 7 and engine.stats.summary()["num_steps"] == 7
    assert run_replay([record("a", 7), record("b", 3)], max_num_seqs=1).now_s == 10


def test_prompts_take_time_only_with_prefill() -> None:
    records = [record("abc", 2)]
    assert run_replay(records).now_s == 2
    assert run_replay(records, prefill=True).now_s == 2 + 100 * 2  # three query tokens in a step of one row


@pytest.mark.parametrize("k", [1, 3, 9])
def test_a_recorded_head_has_its_recorded_acceptance(k: int) -> None:
    engine = with_head([record("p", 8, head_accepted=np.array([1, 0, 2, 9, 9, 9, 9, 9], np.uint8), max_tokens=8)], k)
    summary = engine.stats.summary()
    emitted, recorded, steps = 0, [1, 0, 2, 9, 9, 9, 9, 9], []
    while emitted < 8:
        drafted = min(k, 9, 8 - emitted - 1)
        accepted = min(drafted, recorded[emitted])
        steps.append((drafted, accepted))
        emitted += accepted + 1
    assert summary["num_steps"] == len(steps)
    assert summary["num_draft_tokens"] == sum(drafted for drafted, _ in steps)
    assert summary["num_accepted_tokens"] == sum(accepted for _, accepted in steps)
    assert engine.now_s == pytest.approx(sum(1 + 0.1 * drafted + 0.01 * drafted for drafted, _ in steps))


def test_accepted_tokens_end_at_the_end_of_the_sequence() -> None:
    """Its length limit is further away, so the draft is longer than the rest of the sequence."""
    engine = with_head([record("p", 3, head_accepted=np.array([9, 9, 9], np.uint8), max_tokens=50)], 7)
    summary = engine.stats.summary()
    assert (summary["num_steps"], summary["num_draft_tokens"], summary["num_accepted_tokens"]) == (1, 7, 3)
    assert summary["num_tokens"] == 3 and summary["tokens_per_row_step"] == 3


def test_a_head_without_recorded_acceptance_drafts_nothing() -> None:
    assert with_head([record("p", 5)], 3).stats.summary()["num_drafts"] == 0


def test_the_acceptance_of_a_recorded_head_is_learned_by_position() -> None:
    accepted = np.full(60, 2, np.uint8)
    engine = with_head([record("p", 60, head_accepted=accepted, max_tokens=60)] * 20, 5, max_num_seqs=4)
    survival = engine.acceptance.survival("eagle3", 3).mean(0)
    assert survival[0] > 0.9 and survival[1] > 0.85 and survival[2] < 0.1


def test_a_recorded_head_keeps_no_state() -> None:
    head = RecordedHead(RoundState())
    head.load_state_dict(head.state_dict())
    with pytest.raises(ValueError, match="keeps none"):
        head.load_state_dict({"x": np.zeros(1)})


def test_hybrid_uses_history_and_the_head() -> None:
    accepted = np.full(40, 1, np.uint8)
    records = [record("p", 40, step=step, head_accepted=accepted) for step in range(4) for _ in range(3)]
    round_state, traces = RoundState(), []
    hybrid = HybridDrafter(SuffixDrafter(), RecordedHead(round_state), 0.05)
    run_replay(records, 4, hybrid, round_state=round_state, on_step=traces.append)
    sources = [dict((name, accepted) for name, _, accepted in trace.per_drafter) for trace in traces]
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


def test_a_steps_time_is_divided_among_epochs_by_rows() -> None:
    """One request of a known problem, three of a new one."""
    first = [record("a", 4, step=0)]
    mixed = [record("a", 6, step=1), *(record("b", 6, step=1) for _ in range(3))]
    stats = run_replay([*first, *mixed], max_num_seqs=4).stats
    assert stats.num_epochs == 2
    assert stats.total_s.tolist() == pytest.approx([4 + 6 * 3 / 4 + 0, 6 / 4])
    assert stats.summary(slice(0, 1))["num_tokens"] == 4 + 18 and stats.summary(slice(1, None))["num_tokens"] == 6
    assert stats.summary(slice(0, 1))["num_steps"] == 10 and stats.summary(slice(1, 2))["num_steps"] == 6
    assert stats.summary()["num_steps"] == stats.num_steps == 10


def test_speed_up_is_relative_to_the_baseline() -> None:
    records = [record("p", 20, head_accepted=np.full(20, 9, np.uint8), max_tokens=20)]
    stats, baseline = with_head(records, 4).stats, run_replay(records).stats
    summary = stats.summary(baseline=baseline)
    assert summary["plain_makespan_s"] == 20
    assert summary["speedup"] == pytest.approx(20 / summary["makespan_s"]) and summary["speedup"] > 2
    assert summary["mean_acceptance_length"] == 20 / summary["num_steps"] == 5
    assert summary["draft_share"] == pytest.approx(0.01 * summary["num_draft_tokens"] / summary["makespan_s"])


class RecordingDrafter(SuffixDrafter):
    """Records its calls and the tokens of each request, and checks the rows that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.tokens: dict[int, list[int]] = {}

    def begin(self, request, version=0):  # type: ignore[no-untyped-def]
        super().begin(request, version)
        self.calls.append(("begin", request.request_id))
        self.tokens[request.request_id] = list(request.prompt_ids)

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        assert len(rows.tokens) == len(rows)
        for request_id, tokens in zip(rows.request_ids.tolist(), rows.tokens, strict=True):
            assert tokens.tolist() == self.tokens[request_id]
        return super().propose(rows, caps)

    def observe(self, commits: Commits) -> None:
        super().observe(commits)
        for i, request_id in enumerate(commits.request_ids.tolist()):
            self.tokens[request_id] += commits.tokens[i, : commits.num[i]].tolist()
            assert not commits.tokens[i, commits.num[i] :].any()

    def end(self, request_id: int) -> None:
        super().end(request_id)
        self.calls.append(("end", request_id))


def test_a_turn_begins_when_the_previous_turn_ends() -> None:
    mask = np.array([1, 1, 1, 0, 0, 1, 1], bool)
    drafter = RecordingDrafter()
    engine = run_replay([record("p", 7, mask=mask), record("q", 9)], 3, drafter, max_num_seqs=4)
    assert drafter.calls == [("begin", 0), ("begin", 2), ("end", 0), ("begin", 1), ("end", 1), ("end", 2)]
    assert drafter.tokens[0] == [ord("p"), 100, 101, 102]
    assert drafter.tokens[1] == [ord("p"), *range(100, 107)]  # its prompt has the previous turn and the environment
    assert engine.stats.summary()["num_tokens"] == 5 + 9


def test_step_traces_are_consistent() -> None:
    traces: list[StepTrace] = []
    records = [record("p", 30, step=step) for step in range(2) for _ in range(4)]
    engine = run_replay(records, 3, SuffixDrafter(), on_step=traces.append, max_num_seqs=3)
    assert [t.step for t in traces] == list(range(len(traces))) and sum(t.num_emitted for t in traces) == 240
    assert all(t.num_query_tokens == t.num_rows + t.num_draft_tokens for t in traces)
    assert sum(t.num_accepted_tokens for t in traces) == engine.stats.summary()["num_accepted_tokens"] > 0
    assert traces[-1].start_s + traces[-1].total_s == pytest.approx(engine.now_s)
    assert {t.version for t in traces} == {0, 1}
    for t in traces:
        assert sum(t.accepted_per_position) == t.num_accepted_tokens == sum(a for _, _, a in t.per_drafter)
        assert sum(t.drafted_per_position) == t.num_draft_tokens
        assert len(t.accepted_per_position) == len(t.drafted_per_position)


def test_drafts_stay_within_max_num_batched_tokens() -> None:
    records = [record("p", 30, head_accepted=np.full(30, 9, np.uint8), max_tokens=30) for _ in range(4)]
    traces: list[StepTrace] = []
    with_head(records, 5, max_num_seqs=4, max_num_batched_tokens=10, on_step=traces.append, prefix_sharing=False)
    assert max(t.num_query_tokens for t in traces) == 10
