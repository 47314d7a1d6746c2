"""The graph runner's host side, on a CPU: with a Python simulation of the device in place of CUDA graphs."""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter, OrderedDict
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference_engine
import simulated_device
import torch
from simulated_device import (
    EOS,
    TABLE,
    VOCAB,
    Fails,
    K,
    SimulatedEagle3,
    device,
    make,
    naive,
    requests,
    run,
    run_with_failures,
    tokens,
)
from support import naive_generate, tiny_decoder, tiny_dspark, tiny_head

from paceline.build.config import load_config
from paceline.build.cost import time_step
from paceline.build.drafter import _build_device_drafter
from paceline.drafters.device import DeviceHistoryDrafter, DeviceHybridDrafter
from paceline.engine.accept import RULES
from paceline.engine.runner import EagerRunner
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import Sequence
from paceline.engine.sequence_table import EMPTY_SLOT, SequenceTable
from paceline.model.kv import BLOCK, PagedKV
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.device_drafter import MAX_DRAFT
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.history_store import HistoryStore
from paceline.speculation.policy import StaticPolicy, shorten_longest
from paceline.types import Provenance, Request, SamplingParams


class Half(StaticPolicy):
    """Half of the draft tokens, chosen by the device."""

    takes_best = True

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.reads_drafts = self.reads_acceptance = True

    def select(self, drafts: DraftBatch) -> np.ndarray:
        return drafts.num // 2


class SometimesHalf(Half):
    num_selected = 0

    def select(self, drafts: DraftBatch) -> np.ndarray:
        self.num_selected += 1
        return drafts.num // 2 if self.num_selected % 3 else drafts.num


@pytest.mark.parametrize("kind", ["eagle3", "hybrid"])
def test_the_step_after_drafts_that_stopped_early_selects(
    cuda: SimpleNamespace, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the policy then takes all draft tokens."""
    monkeypatch.setattr(cuda.graphs, "MIN_STOP_ROWS", 3)
    engine = make(cuda, kind, policy=SometimesHalf(K))
    assert tokens(run(engine)) == naive()
    assert device(engine).num_stopped > 20


def test_a_drafter_that_may_draft_less_makes_the_next_step_select(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a policy that verifies all draft tokens. Otherwise the device would verify tokens that were not drafted."""
    engine = make(cuda, "history")
    completions = run(engine)
    simulated, traces = device(engine), engine.drain_trace()
    assert tokens(completions) == naive() and simulated.num_not_found > 100
    assert simulated.num_selections >= sum(trace.num_drafts > 0 for trace in traces) > 20
    assert sum(trace.num_draft_tokens for trace in traces) < sum(trace.num_proposed for trace in traces)
    engine = make(cuda, "history")
    monkeypatch.setattr(cuda.graph_history.GraphHistory, "may_draft_less", False)
    with pytest.raises(AssertionError, match="not drafted"):
        run(engine)


KINDS = {
    "none": StaticPolicy, "random": StaticPolicy, "suffix": StaticPolicy, "eagle3": StaticPolicy,
    "history": StaticPolicy, "hybrid": StaticPolicy, "eagle3, selected": Half, "history, selected": Half,
    "hybrid, selected": Half, "dspark": StaticPolicy, "dspark hybrid": StaticPolicy,
}  # fmt: skip


@pytest.mark.parametrize("num_blocks", [64, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_equal_the_naive_engines(cuda: SimpleNamespace, kind: str, num_blocks: int) -> None:
    name, is_selected, hybrids = kind.split(",")[0], "selected" in kind, ("hybrid", "dspark hybrid")
    engine = make(cuda, name, num_blocks, KINDS[kind](K))
    found = run(engine)
    assert tokens(found) == naive()
    traces, simulated = engine.drain_trace(), device(engine)
    assert sum(trace.num_emitted for trace in traces) == sum(len(c.token_ids) for c in found)
    launches = [launch for trace in traces if (launch := round(trace.forward_s / 1e3))]
    assert launches == list(range(1, simulated.num_runs + 1))
    assert launches[-1] * 1e3 in engine.runner._current_graphs().seconds.values()
    assert simulated.num_sent_blocks > 8 and bool(simulated.num_fitted) == is_selected
    assert bool(simulated.num_selections) == (is_selected or name in ("history", *hybrids))
    assert (sum(trace.num_preempted for trace in traces) > 0) == (num_blocks == 9)
    on_device = name in ("eagle3", "dspark", "history", *hybrids)
    assert engine.runner.drafts_on_device == on_device and engine.drafting.overlaps == (on_device or name == "none")
    if name in ("history", *hybrids):
        store = engine.drafter.store
        assert not store.live and all(len(entry.emitted) for entry in store.entries("0")) and store.entries("0")
        assert simulated.num_appended > 100
    if on_device:
        num, accepted = (sum(getattr(c, f"num_{what}_tokens") for c in found) for what in ("draft", "accepted"))
        assert num > 100 and 0.4 < accepted / num < 0.9
        assert num == sum(trace.num_draft_tokens for trace in traces)
        assert (engine.drafting.acceptance.num_outcomes() > 100) == (is_selected or name in hybrids)
    per_drafter = Counter({drafter: n for trace in traces for drafter, n, _ in trace.per_drafter})
    wanted = {"none": set(), "random": {"adversarial"}, "history": {"suffix"}, "hybrid": {"suffix", "eagle3"}}
    wanted["dspark hybrid"] = {"suffix", "dspark"}
    assert set(per_drafter) == wanted.get(name, {name})
    if name in hybrids:
        assert {drafter for c in found for drafter in c.drafters} == wanted[name]


def test_state_that_is_not_sent_to_the_device_changes_tokens(cuda: SimpleNamespace) -> None:
    """Broken: new blocks are not sent; a sequence that takes another's slot is not sent; or the host's tokens are sent
    although a step is in flight."""
    base = cuda.runner.GraphRunner

    class NoBlocks(base):  # type: ignore[misc]
        def _collect_new_blocks(self, seq_table: Any, slots: np.ndarray) -> None:
            pass

    class NoNewSequences(base):  # type: ignore[misc]
        def _send_new_sequences(self, seq_table: Any, slots: np.ndarray) -> None:
            super()._send_new_sequences(seq_table, slots[self._sent_arrivals[slots] < 0])

        def remove(self, sequence: Any) -> None:
            pass

    class IgnoresInFlight(base):  # type: ignore[misc]
        def _write_inputs(self, batch: Any, *more: Any) -> None:
            table = batch.seq_table
            in_flight, table.num_in_flight = table.num_in_flight, np.zeros_like(table.num_in_flight)
            super()._write_inputs(batch, *more)
            table.num_in_flight = in_flight

    for broken in (NoBlocks, NoNewSequences, IgnoresInFlight):
        assert tokens(run(make(cuda, "none", runner_class=broken))) != naive(), broken


@pytest.fixture
def graphs(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Real `Graphs` without a device. Capturing a graph takes a second."""
    made = object.__new__(cuda.graphs.Graphs)
    made.enforce_eager = made._out_of_memory = False
    made.num_captured = 0
    made._lost_s, made._captured, made.seconds, made._capture_s = Counter(), OrderedDict(), {}, math.inf
    made._capture, now = (lambda size: lambda: None), count()
    monkeypatch.setattr(cuda.graphs, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    return made


def test_a_larger_graph_is_used_until_its_padding_has_cost_a_capture(graphs: Any, cuda: SimpleNamespace) -> None:
    size = cuda.graphs.GraphSize
    wanted = size(96, 256, 4, 2)
    others = {
        "rows": size(128, 256, 4, 2), "too many": size(96, 640, 4, 2), "fewer tokens": size(96, 192, 4, 2),
        "queries": size(96, 256, 2, 2), "shorter drafts": size(96, 256, 4, 1), "no drafts": size(96, 256, 4, 0),
        "drafts without blocks": size(96, 256, 4, 4),
    }  # fmt: skip
    good = [size(96, 512, 8, 2, True, True), size(96, 384, 4, 3)]
    for one in (*others.values(), *good):
        graphs.prepare(one)
    graphs.seconds[good[1]] = 0.11
    # A third of its work (468, not 320) is padding: that has cost a second after 29 steps.
    assert [graphs.fit(wanted, 3) for _ in range(40)] == [good[1]] * 28 + [wanted] * 12
    assert graphs.fit(replace(wanted, selects_drafts=True), 3) == good[0]
    assert graphs.fit(size(96, 96, 1), 3) == size(96, 96, 1), "without drafts there may be no blocks for them"


def test_the_first_graph_for_a_number_of_rows_is_a_wide_one(graphs: Any, cuda: SimpleNamespace) -> None:
    """So that one graph fits all steps of 8 rows that verify about as many tokens."""
    size, rng = cuda.graphs.GraphSize, np.random.default_rng(0)
    first = graphs.fit(size(8, 16, 2, 1), 3)
    assert first == size(8, 16, 4, 3, False, True)
    graphs.prepare(first)
    for _ in range(100):
        num_tokens, draft_length = int(rng.choice([12, 16, 24])), int(rng.integers(1, 4))
        assert graphs.fit(size(8, num_tokens, 4, draft_length, selects_drafts=bool(rng.integers(2))), 3) == first
    assert graphs.fit(size(8, 32, 4, 1), 3) == size(8, 32, 4, 3, False, True), "a third of the draft tokens"
    assert graphs.fit(size(8, 8, 1, 3), 3).num_tokens == 16
    assert not graphs.fit(size(2048, 4096, 2, 1), 3).selects_drafts, "too many rows to select from"


def test_a_smaller_graph_is_used_if_it_suits_a_step_better(graphs: Any, cuda: SimpleNamespace) -> None:
    size = cuda.graphs.GraphSize
    small, large = size(256, 896, 8, 7, selects_drafts=True), size(256, 2048, 8, 7, selects_drafts=True)
    for one in (small, large):
        graphs.prepare(one)
        graphs.seconds[one] = 0.01
    assert graphs.fit(size(256, 1024, 8, 7, selects_drafts=True), 7) == small
    assert graphs.fit(size(256, 1792, 8, 7, selects_drafts=True), 7) == large
    assert graphs.fit(size(256, 256, 1), 7) == size(256, 256, 1), "without drafts"
    unselected = size(256, 896, 8, 7)
    graphs.prepare(unselected)
    graphs._captured.pop(small)
    assert graphs.fit(size(256, 1024, 8, 7), 7) == large, "a graph that verifies all draft tokens has room for them"
    deep, shallow = size(32, 64, 8, 7, selects_drafts=True), size(32, 128, 2, 1, selects_drafts=True)
    assert deep.lost_share(size(32, 96, 2, 1)) > shallow.lost_share(size(32, 96, 2, 1)), "drafts too much"
    # A third of the work of a graph of 2048 tokens would be padding, so in the end another one is captured.
    wanted = size(256, 1152, 8, 7, selects_drafts=True)
    assert graphs.fit(wanted, 7) == large
    assert [graphs.fit(wanted, 7) for _ in range(400)][-1] == wanted


def test_without_memory_for_a_wide_graph_an_exact_one_is_used(graphs: Any, cuda: SimpleNamespace) -> None:
    size, tried, prepare = cuda.graphs.GraphSize, [], graphs.prepare

    def prepare_small(wanted: Any) -> None:
        tried.append(wanted.draft_length)
        if wanted.draft_length > 1:
            raise ValueError("no device memory")
        prepare(wanted)

    graphs.prepare = prepare_small
    for wanted in (size(8, 16, 2, 1), size(16, 32, 2, 1)):
        assert graphs.fit(wanted, 3) == wanted
    assert tried == [3], "it is not tried again"


class RandomPolicy(StaticPolicy):
    """Drafts for all rows or for one, of a length that changes now and then; selects some of the tokens."""

    takes_best = True

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.reads_drafts = True
        self.most, self.rng, self.num_steps, self.k = most, np.random.default_rng(most), 0, 0

    def plan(self, rows: Any) -> np.ndarray:
        super().plan(rows)
        self.budget = rows.draft_budget
        if self.num_steps % 3 == 0:
            self.k = int(self.rng.integers(self.most + 1))
        self.num_steps += 1
        caps = np.full(len(rows), self.k, np.int32)
        if self.rng.random() < 0.3:
            caps[np.arange(len(rows)) != self.rng.integers(len(rows))] = 0
        return caps

    def select(self, drafts: DraftBatch) -> np.ndarray:
        lengths = (drafts.num * self.rng.random()).astype(np.int32)
        return lengths if lengths.sum() <= self.budget else shorten_longest(lengths, self.budget)


class PausingPolicy(RandomPolicy):
    """Pauses the drafter for some steps, at any time."""

    is_paused = False

    @property
    def pauses_drafter(self) -> bool:
        return self.is_paused

    def plan(self, rows: Any) -> np.ndarray:
        was_paused, self.is_paused = self.is_paused, (self.num_steps // 5) % 2 == 1
        caps = super().plan(rows)
        return np.zeros_like(caps) if was_paused else caps


class ScriptedPolicy(StaticPolicy):
    """Drafts `k` tokens, unless a test pauses the drafter."""

    takes_best = True
    is_paused = False

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.reads_drafts = self.reads_acceptance = True
        self.k = k

    @property
    def pauses_drafter(self) -> bool:
        return self.is_paused

    def plan(self, rows: Any) -> np.ndarray:
        super().plan(rows)
        return np.full(len(rows), 0 if self.is_paused else self.k, np.int32)

    def select(self, drafts: DraftBatch) -> np.ndarray:
        return drafts.num


def test_a_prompt_that_was_computed_in_a_pause_is_computed_again(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the head would not have its tokens."""
    head, policy = simulated_device.SimulatedHead(), ScriptedPolicy(3)
    read, prefill = list[int](), head.prefill

    def recorded(spans: Any, paged: Any) -> None:
        prefill(spans, paged)
        read.extend(position for span in spans for position in range(span.start, span.start + len(span.tokens)))

    head.prefill = recorded  # type: ignore[method-assign]
    monkeypatch.setattr(simulated_device.SimulatedEagle3, "build", lambda self, context: head)
    engine, sampling = make(cuda, "eagle3", policy=policy), SamplingParams(max_tokens=4, ignore_eos=True)
    prompt = tuple(np.random.default_rng(0).integers(0, VOCAB, 49).tolist())
    policy.is_paused = True
    engine.generate([Request(0, prompt, sampling, 1)])
    assert not read
    policy.is_paused = False
    engine.generate([Request(1, prompt, sampling, 2)])
    assert sorted(read) == list(range(48))


def test_a_pause_adds_nothing_to_the_latest_drafts(cuda: SimpleNamespace) -> None:
    policy = ScriptedPolicy(3)
    engine, request = make(cuda, "eagle3", policy=policy), Request(0, (1, 2), SamplingParams(max_tokens=100), 1)
    engine.submit(replace(request, sampling=SamplingParams(max_tokens=100, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    policy.k, policy.is_paused = 0, True
    before, num_steps = engine.drafting.acceptance.num_drafts("eagle3"), 0
    while engine.has_work:
        engine.step()
        num_steps += 1
    assert num_steps > 10 and engine.drafting.acceptance.num_drafts("eagle3") - before <= 4, "of the steps in flight"


@pytest.mark.parametrize("kind", ["eagle3", "hybrid"])
def test_a_heads_memory_is_freed_while_the_engine_sleeps(cuda: SimpleNamespace, kind: str) -> None:
    engine = make(cuda, kind)
    run(engine)
    parts = [weakref.ref(graphs.drafter) for graphs in engine.runner._graphs.values()]
    engine.runner.release_memory()
    gc.collect()
    assert parts and [part() for part in parts] == [None]


@pytest.mark.parametrize("num_blocks", [64, 12])
def test_pauses_of_a_head_change_no_token(cuda: SimpleNamespace, num_blocks: int) -> None:
    engine = make(cuda, "eagle3", num_blocks, PausingPolicy(4))
    simulated = device(engine)
    assert tokens(run(engine)) == naive()
    drafter, graphs = engine.drafter, engine.runner._graphs
    assert set(graphs) == {None, drafter.graph_key} and simulated.draft_lengths
    traces = engine.drain_trace()
    assert sum(t.num_accepted_tokens for t in traces) > 0


@pytest.mark.parametrize("kind", ["eagle3", "hybrid"])
@pytest.mark.parametrize("num_blocks", [64, 12])
def test_a_head_writes_only_into_blocks_of_its_row(
    cuda: SimpleNamespace, graphs: Any, num_blocks: int, kind: str
) -> None:
    """Whatever graphs there are: of a policy with longer drafts, of steps that were timed, of another drafter with the
    same head. Checks the block of each position after a row's end that is drafted for."""
    engine = make(cuda, kind, num_blocks, RandomPolicy(7))
    simulated, used, wrong, num_checked = device(engine), engine.runner._current_graphs(), [], 0
    used.fit, used.prepare, draft = graphs.fit, graphs.prepare, used._draft

    def checked(row: int, slot: int, k: int) -> None:
        nonlocal num_checked
        draft(row, slot, k)
        sequence, state = engine.scheduler.seq_table.sequences[slot], used.state
        length, limit = int(state.length[slot]), int(state.limit[slot])
        if sequence is None:  # a timed step
            return
        for i in range(1, k):
            index = min(length - 2 + i, limit - 1) // BLOCK
            blocks = sequence.table.blocks
            num_checked += 1
            if index >= len(blocks) or blocks[index] != int(state.block_tables[slot, index]):
                wrong.append((slot, k, engine.scheduler.lookahead))

    used._draft = checked
    for num_rows in (1, 2, 3, 4, 6):
        time_step(engine.paged, engine.runner, num_rows, 1, 16, 7)
    for most in (2, 7, 2):
        head = SimulatedEagle3(engine.drafter.head if kind == "eagle3" else engine.drafter.head.head)
        drafter = head if kind == "eagle3" else DeviceHybridDrafter(HistoryStore(), head)
        engine.set_drafter(drafter, RandomPolicy(most))
        assert tokens(run(engine)) == naive()
    assert engine.runner._current_graphs() is used and simulated.num_runs > 100
    assert not wrong and num_checked > 1000


class CountingPolicy(StaticPolicy):
    """Counts plans, and which of them were launched and observed."""

    def __init__(self) -> None:
        super().__init__(K)
        self.num_planned, self.committed, self.observed = 0, list[int](), list[int]()

    def plan(self, rows: Any) -> np.ndarray:
        caps = super().plan(rows)
        self.decision = replace(self.decision, about=self.num_planned)
        self.num_planned += 1
        return caps

    def launched(self, decision: Any) -> None:
        self.committed.append(decision.about)

    def observe(self, commits: Any, trace: Any, decision: Any) -> None:
        self.observed.append(decision.about)


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_a_policy_commits_the_steps_that_are_launched_and_no_others(cuda: SimpleNamespace, num_blocks: int) -> None:
    """A plan is discarded if a step in flight may free the blocks that it needs."""
    policy = CountingPolicy()
    assert tokens(run(make(cuda, "eagle3", num_blocks, policy))) == naive()
    assert policy.committed == policy.observed == sorted(set(policy.committed))
    assert num_blocks > 9 or policy.num_planned > len(policy.committed) > 20


@pytest.mark.parametrize("kind", ["none", "suffix", "eagle3"])
def test_traces_count_the_captures_that_delayed_a_step(cuda: SimpleNamespace, kind: str) -> None:
    """Of the step that needed the graph, and of the step that was in flight meanwhile."""

    class Captures(cuda.runner.GraphRunner):  # type: ignore[misc]
        num_launched, num_captured = 0, 0

        def launch(self, *step: Any) -> Any:
            self.num_launched += 1
            self.num_captured += self.num_launched in (9, 15)
            return super().launch(*step)

    engine = make(cuda, kind, runner_class=Captures)
    run(engine)
    captured = {trace.step for trace in engine.drain_trace() if trace.num_captured}
    own = {8, 14}  # counted from 0
    assert own <= captured <= own | {7, 13} and (captured > own or kind == "suffix")


@pytest.mark.parametrize("kind", ["eagle3", "history", "hybrid"])
def test_a_request_that_is_repeated_has_no_drafts_at_first(cuda: SimpleNamespace, kind: str) -> None:
    """The last token of its prompt is not verified with what was drafted for the first one."""
    engine = make(cuda, kind)
    request = requests()[1]
    first, again = (engine.generate([request])[0] for _ in range(2))
    assert first.provenance[0] == again.provenance[0] == Provenance.SAMPLED
    assert tokens([first]) == tokens([again]) == [naive()[1]] and again.num_drafts > 3


@pytest.mark.parametrize("kind", ["none", "eagle3", "history", "hybrid"])
def test_timed_steps_draft_and_leave_nothing_behind(cuda: SimpleNamespace, kind: str) -> None:
    engine = make(cuda, kind)
    paged, runner, simulated = engine.paged, engine.runner, device(engine)
    for num in (0, 3, 0):
        assert time_step(paged, runner, 2, 1, 16, num) > 0
    assert simulated.draft_lengths == ([] if kind == "none" else [0, 0, 3, 3, 0, 0]) and not any(paged.pool.ref_counts)
    assert time_step(paged, runner, 2, 1 + K, 16) > 0 and not simulated.num_selections  # these drafts are the host's
    assert (runner._sent_arrivals == EMPTY_SLOT).all()
    assert tokens(run(engine)) == naive()


@pytest.mark.parametrize("kind", ["none", "suffix", "eagle3", "hybrid"])
def test_sequences_may_reach_the_end_of_the_context(cuda: SimpleNamespace, kind: str) -> None:
    """No block is needed past the end of a block table on the device."""
    prompt = tuple(np.random.default_rng(3).integers(0, EOS, 102).tolist())
    wanted = [Request(i, prompt, SamplingParams(max_tokens=200, ignore_eos=True), i, "long") for i in range(3)]
    found = make(cuda, kind).generate(wanted)
    assert tokens(found) == naive_generate(TABLE, wanted, (EOS,), 128) and {len(c.token_ids) for c in found} == {26}


@pytest.mark.parametrize("kind", ["none", "suffix", "eagle3", "history", "hybrid"])
@pytest.mark.parametrize("call", ["launch", "wait"])
@pytest.mark.parametrize("n", [2, 9, 20])
def test_after_an_exception_sequences_are_sent_to_the_device_again(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str, call: str, n: int
) -> None:
    """The device has computed steps that the host dropped. All sequences get their state, also in the same slots."""
    engine, fails, running = make(cuda, kind), Fails(cuda, monkeypatch, call, n), set[int]()
    runner, sent = engine.runner, list[int]()
    send, reset = runner._send_new_sequences, runner.reset
    runner._send_new_sequences = lambda table, slots: sent.extend(table.arrival[slots].tolist()) or send(table, slots)

    def checked_reset() -> None:
        assert not running
        running.update(runner._sent_arrivals[runner._sent_arrivals != EMPTY_SLOT].tolist())
        reset()
        assert (runner._sent_arrivals == EMPTY_SLOT).all() and not runner._new_blocks
        sent.clear()

    runner.reset = checked_reset
    assert tokens(run_with_failures(engine)) == naive()
    # A sequence may end with the token that its recomputation emits.
    assert fails.num_failed == 1 and (len(running & set(sent)) > 3 or n == 2)
    if kind in ("history", "hybrid"):
        assert not engine.drafter.store.live and device(engine).num_appended > 100


def test_a_reset_that_forgets_nothing_is_caught(cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after an exception the runner relies on what it had sent before. Sometimes that is right by accident."""

    def is_right(n: int) -> bool:
        engine = make(cuda, "history")
        engine.runner.reset = lambda: None
        with monkeypatch.context() as patch:
            Fails(cuda, patch, "launch", n)
            try:
                return tokens(run_with_failures(engine)) == naive()
            except AssertionError:  # of the simulation
                return False

    assert not all(is_right(n) for n in (49, 53, 57))


def test_drafts_are_no_longer_than_the_device_allows(cuda: SimpleNamespace) -> None:
    assert MAX_DRAFT == cuda.device_state.MAX_DRAFT
    engine = make(cuda, "eagle3", policy=StaticPolicy(MAX_DRAFT + 5))
    assert tokens(run(engine)) == naive() and max(device(engine).draft_lengths) == MAX_DRAFT


def test_steps_with_a_few_missing_drafts_use_the_full_graph(cuda: SimpleNamespace) -> None:
    def size(rows: int, tokens: int, fills: bool = True, queries: int = 4) -> tuple[int, int]:
        found = cuda.runner._size(rows, tokens, queries, 3, False, False, fills)
        return found.num_rows, found.num_tokens

    assert {size(rows, 4 * rows - missing) for rows in (100, 110, 128) for missing in (0, 6, 40)} == {(128, 512)}
    assert {size(rows, 4 * rows - missing) for rows in (13, 16) for missing in (0, 5, 20)} == {(16, 64)}
    assert size(128, 300) == (128, 384) and size(16, 30) == (16, 32)  # most are missing: that would be too much
    assert size(100, 360, fills=False) == (128, 384) and size(13, 40, fills=False) == (16, 48)
    # The rows that rounding adds get no tokens.
    for rows, queries, wanted in ((100, 1, 128), (600, 1, 640), (140, 4, 640), (40, 6, 256), (140, 6, 896)):
        assert size(rows, rows * queries, queries=queries)[1] == wanted


def test_drafters_with_the_same_settings_share_graphs(cuda: SimpleNamespace) -> None:
    """Every audit has a drafter with its own history."""
    runner, found = make(cuda, "none").runner, list[Any]()
    for recency in (0.8, 0.8, 0.5, 0.8):
        runner.set_drafter(DeviceHistoryDrafter(HistoryStore(), recency))
        found.append(runner._current_graphs())
    assert found[0] is found[1] is found[3] is not found[2] and found[2].drafter.settings.recency == 0.5
    head: Any = SimpleNamespace(config=SimpleNamespace(aux_layers=(0,)))
    for same in (head, head, SimpleNamespace(config=head.config)):
        runner.set_drafter(DeviceHybridDrafter(HistoryStore(), SimulatedEagle3(same)))
        found.append(runner._current_graphs())
    assert found[4] is found[5] is not found[6]
    runner.set_drafter(None)
    assert runner._current_graphs().drafter is None


@pytest.mark.parametrize("kind", ["history", "hybrid"])
def test_a_shared_graph_reads_the_history_of_its_drafter(cuda: SimpleNamespace, kind: str) -> None:
    """Between two runs of the engine's drafter, another one with the same settings runs on the same graphs."""
    engine = make(cuda, kind)
    own = engine.drafter
    assert tokens(run(engine)) == naive()
    used, num_entries = engine.runner._current_graphs(), len(own.store.entries("0"))
    history = used.drafter if kind == "history" else used.drafter.history
    other = DeviceHistoryDrafter(HistoryStore()) if kind == "history" else DeviceHybridDrafter(HistoryStore(), own.head)
    engine.set_drafter(other)
    assert tokens(run(engine)) == naive() and engine.runner._current_graphs() is used
    assert len(own.store.entries("0")) == num_entries
    on_device = {entry for entry, number in history._numbers.items() if int(history.lengths[number])}
    assert set(other.store.entries("2")) & on_device
    engine.set_drafter(own)
    assert tokens(run(engine)) == naive() and len(own.store.entries("0")) == 2 * num_entries


@pytest.mark.parametrize("given", ["16", "{ 1 = 16, 8 = 2 }"])
def test_too_long_drafts_are_refused(cuda: SimpleNamespace, given: str) -> None:
    head = SimpleNamespace(config=SimpleNamespace(aux_layers=(0,)))
    for length, refused in ((given, True), ("15", False)):
        settings = ["method=eagle3", f"num_speculative_tokens={length}", "head_dtype=model"]
        config = load_config(None, [f"speculation.{setting}" for setting in settings])
        with pytest.raises(ValueError, match="at most 15; lower it") if refused else nullcontext():
            _build_device_drafter(config, head)


def head_kv(cuda: SimpleNamespace, kind: str, prompt: tuple[int, ...], draft: list[int]) -> tuple[torch.Tensor, ...]:
    """The eager runner computes a prompt and verifies a draft. Returns the keys and values that the device's head then
    has of it, by position, and the emitted tokens."""
    decoder = tiny_decoder()
    head, paged = {"eagle3": tiny_head, "dspark": tiny_dspark}[kind](decoder), PagedDecoder(decoder, 16)
    paged.set_aux_layers(head.config.aux_layers)
    sequence = Sequence(Request(0, prompt, SamplingParams(max_tokens=30, ignore_eos=True), 5), 0, 256, ())
    assert paged.pool.reserve(sequence.table, len(prompt) + len(draft) + 1)
    table = SequenceTable(1)
    table.add(sequence)
    batch = ScheduledBatch.make(table, np.zeros(1, np.int64), np.array([len(prompt)]), np.ones(1, bool))
    batch.set_drafts(np.array([draft], np.int32), np.array([len(draft)]), 0)
    result = EagerRunner(paged, Sampler(), RULES["coupled"]).launch(batch, {}).wait().result
    kv = PagedKV(head.config.layer, 16, decoder.dtype, "cpu")
    classes = {"eagle3": cuda.graph_eagle3.GraphEagle3, "dspark": cuda.graph_dspark.GraphDSpark}
    graph_head = object.__new__(classes[kind])  # its own constructor needs the kernels
    graph_head.head, graph_head.embed, graph_head.kv = head, decoder.embed, kv
    graph_head.prefill(cuda.runner._computed_spans(batch, result), paged)
    emitted = result.tokens[0, : result.num_accepted[0] + 1]
    num = len(prompt) + len(emitted) - 1
    of_layers = [kv.read(i, torch.tensor(sequence.table.blocks), num) for i in range(head.config.layer.num_layers)]
    keys, values = (torch.stack(each, 1) for each in zip(*of_layers, strict=True))
    return keys, values, torch.from_numpy(emitted.copy())


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
@pytest.mark.parametrize("num_right", [0, 2, 3])
def test_a_head_computes_the_accepted_tokens_of_a_prefill_row(cuda: SimpleNamespace, num_right: int, kind: str) -> None:
    """They are in the head's KV as if they had been part of the prompt."""
    prompt = tuple(range(1, 21))
    request = Request(0, prompt, SamplingParams(max_tokens=4, ignore_eos=True), 5)
    plain = reference_engine.generate(tiny_decoder(), [request])[0].token_ids.tolist()
    draft = [*plain[:num_right], *((token + 1) % 60 for token in plain[num_right:3])]
    keys, values, emitted = head_kv(cuda, kind, prompt, draft)
    assert emitted.tolist() == plain[: num_right + 1] and len(keys) == 20 + num_right
    whole_keys, whole_values, last = head_kv(cuda, kind, (*prompt, *plain[:num_right]), [])
    assert last.tolist() == plain[num_right : num_right + 1]
    torch.testing.assert_close(keys, whole_keys)
    torch.testing.assert_close(values, whole_values)
    assert keys.abs().amin(0).max() > 0 and (keys.abs().sum((2, 3)) > 0).all(), "a position that was never written"


def test_the_number_of_captured_graphs_is_bounded(
    graphs: Any, cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The least recently used one is dropped, and captured again when it is needed."""
    monkeypatch.setattr(cuda.graphs, "MAX_GRAPHS", 3)
    sizes = [cuda.graphs.GraphSize(1, n, n) for n in range(1, 6)]
    for size in sizes[:3]:
        graphs.prepare(size)
        graphs.seconds[size] = 1.0
    graphs.run(sizes[0])
    graphs.prepare(sizes[3])
    assert list(graphs._captured) == [sizes[2], sizes[0], sizes[3]] and sizes[1] not in graphs.seconds
    graphs.prepare(sizes[1])
    assert graphs.num_captured == 5 and list(graphs._captured) == [sizes[0], sizes[3], sizes[1]]


def test_graphs_of_the_last_drafters_are_kept(cuda: SimpleNamespace) -> None:
    runner, made = make(cuda, "none").runner, list[Any]()
    for i in range(6):
        runner.set_drafter(DeviceHistoryDrafter(HistoryStore(), recency=0.1 * i))
        made.append(runner._current_graphs())
        made[-1].num_captured = 2
        assert runner._current_graphs() is made[-1]
    assert len(set(map(id, made))) == 6 and list(runner._graphs.values()) == made[-cuda.runner.MAX_DRAFTERS :]
    assert runner.num_captured == 12


def test_graphs_are_dropped_with_the_kv_memory(cuda: SimpleNamespace) -> None:
    engine = make(cuda, "eagle3")
    assert tokens(run(engine)) == naive()
    before = engine.runner._current_graphs()
    engine.sleep()
    engine.wake()
    assert tokens(run(engine)) == naive() and engine.runner._current_graphs() is not before
