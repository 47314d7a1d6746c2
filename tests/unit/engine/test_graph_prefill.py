"""Prompts and rows that need their logits, with the graph runner on a simulated device: prompts are computed without
waiting for the device, and their last token is in the step's graph."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import simulated_device
from simulated_device import (
    EOS,
    NUM_SEQS,
    TABLE,
    VOCAB,
    Fails,
    device,
    make,
    naive,
    requests,
    run,
    run_with_failures,
    tokens,
)  # fmt: skip
from support import check_blocks, letter_tokenizer, naive_generate

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.engine.scheduler import MANY_DECODING, Scheduler
from paceline.engine.sequence_table import EMPTY_SLOT
from paceline.model.paged import Span
from paceline.speculation.policy import StaticPolicy
from paceline.structured_outputs import StructuredOutputsParams
from paceline.types import Completion, Request, SamplingParams
from paceline.verify.table import TableDecoder

KINDS = ["none", "suffix", "eagle3", "history", "hybrid"]
OVERLAPPING = ["none", "eagle3", "history", "hybrid"]


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, EOS, length).tolist())


def decoding(engine: LocalEngine, num: int = 3) -> list[Any]:
    """Submit requests and step until all of them decode."""
    sampling = SamplingParams(max_tokens=80, ignore_eos=True)
    handles = [engine.submit(Request(i, prompt(5 + i, i), sampling, i, f"{i}")) for i in range(num)]
    for _ in range(4):
        engine.step()
    return handles


def launched(engine: LocalEngine) -> Iterator[Any]:
    """Run to the end. The last step that was launched, at each step."""
    while engine.has_work:
        if engine._in_flight:
            yield engine._in_flight[-1]
        engine.step()
        check_blocks(engine)


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_two_steps_stay_in_flight_while_a_prompt_is_computed(cuda: SimpleNamespace, kind: str) -> None:
    """The rows of a prompt are not in the step's output until its last token is in the graph."""
    engine = make(cuda, kind, max_num_prefill_tokens=16, prefix_sharing=False)
    decoding(engine)
    long = Request(9, prompt(100, 9), SamplingParams(max_tokens=5), 9, "long")
    handle, num_prefilled, num_both = engine.submit(long), 0, 0
    for step in launched(engine):
        assert step.pending.is_async
        num = int(step.batch.num_prefill.sum())
        num_prefilled += num
        num_both += num > 0 and len(engine._in_flight) == 2 and bool(engine._in_flight[0].batch.num_prefill.any())
        assert len(step.pending.graph_rows) == int(step.batch.emits.sum()) and not len(step.pending.eager_rows)
    assert num_prefilled == 99 and num_both >= 3
    assert [handle.completion.token_ids.tolist()] == naive_generate(TABLE, [long], (EOS,), 128)


@pytest.mark.parametrize("kind", OVERLAPPING)
def test_a_step_that_only_computes_prompts_has_no_rows(cuda: SimpleNamespace, kind: str) -> None:
    engine = make(cuda, kind)
    engine.submit(Request(0, prompt(120), SamplingParams(max_tokens=3, ignore_eos=True), 0))
    engine.step()
    first, *_ = engine.drain_trace()
    assert (first.num_rows, first.num_query_tokens, first.num_context_tokens, first.num_emitted) == (1, 64, 64, 0)
    assert len(engine._in_flight) == 2 == device(engine).num_runs, "the next steps were launched before"
    while engine.has_work:
        engine.step()
    assert [(t.num_query_tokens, t.num_context_tokens) for t in engine.drain_trace()[:1]] == [(56, 120)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [64, 9])
@pytest.mark.parametrize("limit", [1, 5, 16])
def test_tokens_do_not_depend_on_the_limit(cuda: SimpleNamespace, kind: str, num_blocks: int, limit: int) -> None:
    """Also if sequences are preempted, and computed again in pieces."""
    engine = make(cuda, kind, num_blocks, max_num_prefill_tokens=limit)
    assert tokens(run(engine)) == naive()
    traces = engine.drain_trace()
    assert limit == 1 or (sum(trace.num_preempted for trace in traces) > 0) == (num_blocks == 9)
    assert limit == 1 or sum(t.num_query_tokens > t.num_rows + t.num_draft_tokens for t in traces) > 10


@pytest.mark.parametrize("limit", [None, 1, 7])
def test_the_limit_holds_while_others_decode_and_not_otherwise(cuda: SimpleNamespace, limit: int | None) -> None:
    """It is larger if many sequences wait for their prompt."""
    engine = make(cuda, "none", max_num_prefill_tokens=limit)
    scheduler, lengths = engine.scheduler, dict[int, list[int]]()
    schedule = scheduler.schedule

    def recorded() -> Any:
        seq_table, running = scheduler.seq_table, scheduler.slots
        num_decoding = int((seq_table.num_tokens - seq_table.num_computed == 1)[running].sum())
        num_free = scheduler.max_num_seqs - len(running)
        num_prefilling = len(running) - num_decoding + min(len(scheduler.waiting), num_free)
        batch = schedule()
        new = (batch.num_query > 1) | ~np.isin(batch.slots, running)
        if new.any():
            factor = max(1, MANY_DECODING * num_prefilling // num_decoding) if num_decoding else 0
            lengths.setdefault(factor, []).append(int(batch.num_query[new].sum()))
        return batch

    scheduler.schedule = recorded
    assert tokens(run(engine)) == naive()
    assert max(lengths[0]) > 50, "nothing decodes: the whole budget"
    if limit is not None:
        assert all(max(found) <= limit * factor for factor, found in lengths.items() if factor)
        assert any(max(found) == limit * factor for factor, found in lengths.items() if factor)


def test_a_limit_below_one_token_is_refused(cuda: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="max_num_prefill_tokens = 0"):
        make(cuda, "none", max_num_prefill_tokens=0)


class RecordingHead(simulated_device.SimulatedHead):
    """Which token the head read at each position, by block table. Tables are kept so that none has another's id."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.read = list[Any](), defaultdict[int, Counter[tuple[int, int]]](Counter)

    def prefill(self, spans: list[Span], paged: Any) -> None:
        super().prefill(spans, paged)
        for span in spans:
            self.tables.append(span.table)
            self.read[id(span.table)].update(zip(range(span.start, 10**6), span.tokens.tolist(), strict=False))


@pytest.mark.parametrize("limit", [None, 1, 6])
def test_a_head_reads_every_token_of_a_prompt_once(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """At each position the token after it; at the last one, in the graph, the sampled token."""
    head = RecordingHead()
    monkeypatch.setattr(simulated_device.SimulatedEagle3, "build", lambda self, context: head)
    engine = make(cuda, "eagle3", prefix_sharing=False, max_num_prefill_tokens=limit)
    handles, sequences = simulated_device.submit(engine), dict(engine._sequences)
    firsts, write = Counter[int](), engine.runner._write_inputs

    def recorded(batch: Any, *more: Any) -> None:
        seq_table = batch.seq_table
        new = (seq_table.num_tokens == seq_table.num_prompt)[batch.slots] & (seq_table.num_in_flight == 0)[batch.slots]
        firsts.update(seq_table.request_id[batch.slots[new]].tolist())
        write(batch, *more)

    engine.runner._write_inputs = recorded
    while engine.has_work:
        engine.step()
    assert tokens([handle.completion for handle in handles]) == naive()
    assert firsts == {request.request_id: 1 for request in requests()}, "the last token, in a graph"
    for request in requests():
        read = head.read[id(sequences[request.request_id].table)]
        assert read == Counter(enumerate(request.prompt_ids[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_a_prompt_share_it_in_the_next_step(cuda: SimpleNamespace, kind: str) -> None:
    """Its blocks are in the prefix cache from the launch on: the next step is launched before the first has finished.
    Later the prompt is cached up to its last token, which a graph computes alone."""
    engine, prefill, num_prefilled = make(cuda, kind), None, list[int]()
    prefill = engine.runner.eager_runner.prefill
    engine.runner.eager_runner.prefill = lambda batch: (
        num_prefilled.append(int(batch.num_prefill.sum())), prefill(batch),
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    for length in (37, 33, 8, 1):
        group = [Request(i, prompt(length, length), sampling, 5 * i, "same") for i in range(NUM_SEQS)]
        wanted = naive_generate(TABLE, group, (EOS,), 128)
        assert tokens(engine.generate(group)) == wanted
        first, second, *_ = engine.drain_trace()
        assert (first.num_rows, second.num_rows) == ((1, NUM_SEQS) if length > 1 else (NUM_SEQS, NUM_SEQS))
        assert tokens(engine.generate(group)) == wanted
        again = engine.drain_trace()
        assert again[0].num_rows == again[0].num_query_tokens - again[0].num_draft_tokens == NUM_SEQS
    assert num_prefilled == [36, 32, 7]


def test_prompts_that_are_shared_only_when_committed_are_computed_twice(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: what the test above must be able to see."""
    launched = Scheduler.count_prefill

    def late(scheduler: Scheduler, batch: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(scheduler, "_cache_prompts", lambda *batch: None)
            launched(scheduler, batch)

    monkeypatch.setattr(Scheduler, "count_prefill", late)
    with pytest.raises(AssertionError):
        test_samples_of_a_prompt_share_it_in_the_next_step(cuda, "none")


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_can_end_in_the_middle_of_its_prompt(cuda: SimpleNamespace, kind: str) -> None:
    engine = make(cuda, kind, max_num_prefill_tokens=8)
    others = decoding(engine)
    long = Request(9, prompt(100, 9), SamplingParams(max_tokens=5, ignore_eos=True), 9, "long")
    aborted = engine.submit(long)
    for _ in range(5):
        engine.step()
    assert 0 < engine.sequence(9).num_computed < 99
    engine.abort(9)
    check_blocks(engine)
    assert aborted.completion.finish_reason == "abort" and not len(aborted.completion.token_ids)
    again = engine.generate([replace(long, request_id=10)])  # what was computed is shared
    assert tokens(again) == naive_generate(TABLE, [long], (EOS,), 128)
    while engine.has_work:
        engine.step()
    assert tokens([h.completion for h in others]) == naive_generate(TABLE, [h.request for h in others], (EOS,), 128)
    assert not any(engine.paged.pool.ref_counts)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", ["launch", "wait"])
@pytest.mark.parametrize("n", [2, 9, 20])
def test_after_an_exception_prompts_are_computed_again(
    cuda: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, kind: str, call: str, n: int
) -> None:
    engine, fails = make(cuda, kind, max_num_prefill_tokens=6), Fails(cuda, monkeypatch, call, n)
    assert tokens(run_with_failures(engine)) == naive() and fails.num_failed == 1


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
def test_weights_may_change_in_the_middle_of_a_prompt(cuda: SimpleNamespace, inflight: str) -> None:
    engine = make(cuda, "eagle3", max_num_prefill_tokens=3)
    engine.paged.update = lambda weights, version: engine.paged.pool.reset_prefix_cache()
    others = decoding(engine)
    long = Request(9, prompt(100, 9), SamplingParams(max_tokens=5, ignore_eos=True), 9, "long")
    handle = engine.submit(long)
    for version in range(1, 4):
        for _ in range(3):
            engine.step()
        assert engine.sequence(9).num_computed > 0
        engine.update_weights([], version, inflight)
        assert (engine.sequence(9).num_computed > 0) == (inflight == "keep")
    while engine.has_work:
        engine.step()
        check_blocks(engine)
    everything = [handle, *others]
    found, wanted = ([h.completion for h in everything], [h.request for h in everything])
    assert tokens(found) == naive_generate(TABLE, wanted, (EOS,), 128) and not any(engine.paged.pool.ref_counts)


def test_a_row_that_leaves_the_graphs_is_sent_again(cuda: SimpleNamespace) -> None:
    """A host's draft of more than 15 tokens is verified without a graph, and may fill several blocks."""
    engine = make(cuda, "suffix", policy=StaticPolicy(60))
    wanted = [Request(i, prompt(20, 1), SamplingParams(max_tokens=90, ignore_eos=True), 3, "p") for i in range(3)]
    expected = naive_generate(TABLE, wanted, (EOS,), 128)
    for request, one in zip(wanted, expected, strict=True):
        # The history knows half of it, so long drafts are accepted, then short ones are rejected.
        found = engine.generate([replace(request, sampling=replace(request.sampling, max_tokens=50))])
        assert tokens(found) == [one[:50]]
        assert tokens(engine.generate([request])) == [one]
    assert max(trace.num_accepted_tokens for trace in engine.drain_trace()) > 32


LOGITS: list[dict[str, Any]] = [
    {"logit_bias": ((2, 3.0),)}, {"logprobs": 3}, {"allowed_token_ids": (1, 3, 5)}, {"frequency_penalty": 0.7},
    {"bad_words": ((2, 3), (1,))}, {"min_tokens": 6}, {"repetition_penalty": 1.4, "logprobs": 2},
    {"presence_penalty": 0.5, "top_p": 0.8},
]  # fmt: skip


def mixed() -> list[Request]:
    """Every second request has one of these parameters."""
    plain = {"temperature": 1.0, "top_p": 1.0}
    return [
        replace(request, sampling=replace(request.sampling, **(plain | LOGITS[i // 2 % len(LOGITS)])))
        if i % 2
        else request
        for i, request in enumerate(requests())
    ]


def outcome(completions: list[Completion]) -> list[Any]:
    found = []
    for c in completions:
        top = c.top_logprobs
        tops = None if top is None else (top.token_ids.tolist(), top.logprobs.tolist())
        found.append((c.token_ids.tolist(), c.logprobs.tolist(), c.raw_logprobs.tolist(), c.finish_reason, tops))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [64, 9])
def test_requests_that_need_their_logits_run_beside_graphs(cuda: SimpleNamespace, kind: str, num_blocks: int) -> None:
    """They emit what an engine without graphs emits. A device does not draft for them; a host may."""
    plain = LocalEngine(TableDecoder(TABLE, 64, 128, (EOS,)), max_num_seqs=NUM_SEQS).generate(mixed())
    engine = make(cuda, kind, num_blocks, max_num_prefill_tokens=16)
    found = engine.generate(mixed())
    assert outcome(found) == outcome(plain) and sum(c.top_logprobs is not None for c in found) >= 3
    assert device(engine).num_runs > 30
    with_logits = [c for i, c in enumerate(found) if i % 2]
    if kind in ("eagle3", "history", "hybrid"):
        assert not any(c.num_draft_tokens for c in with_logits)
        assert sum(c.num_draft_tokens for i, c in enumerate(found) if not i % 2) > 20
    elif kind == "suffix":
        assert isinstance(engine.drafter, SuffixDrafter) and sum(c.num_draft_tokens for c in with_logits) > 0
    assert not any(engine.paged.pool.ref_counts)


@pytest.mark.parametrize("kind", KINDS)
def test_structured_outputs_run_beside_graphs(cuda: SimpleNamespace, kind: str) -> None:
    """Also those that end where no token is left."""
    structures = [
        {"structured_outputs": StructuredOutputsParams(regex="([a-c]{1,2}[d-f])*")},
        {"structured_outputs": StructuredOutputsParams(choice=("ab", "cde")), "min_tokens": 3, "max_tokens": 9},
    ]
    wanted = [
        replace(r, sampling=replace(r.sampling, ignore_eos=False, **structures[i // 2 % 2])) if i % 2 else r
        for i, r in enumerate(requests())
    ]
    options: dict[str, Any] = {"tokenizer": letter_tokenizer(VOCAB)}
    plain = LocalEngine(TableDecoder(TABLE, 64, 128, (EOS,)), max_num_seqs=NUM_SEQS, **options).generate(wanted)
    engine = make(cuda, kind, max_num_prefill_tokens=16, **options)
    assert outcome(engine.generate(wanted)) == outcome(plain)
    assert {"error", "length"} <= {c.finish_reason for c in plain} and device(engine).num_runs > 10
    assert not any(engine.paged.pool.ref_counts)


def test_only_rows_that_need_their_logits_run_without_a_graph(cuda: SimpleNamespace) -> None:
    engine = make(cuda, "eagle3")
    runner, rows = engine.runner, list[tuple[set[int], set[int]]]()
    launch = runner.launch

    def recorded(batch: Any, *more: Any) -> Any:
        step = launch(batch, *more)
        ids = batch.emitting.seq_table.request_id[batch.emitting.slots]
        rows.append((set(ids[step.graph_rows].tolist()), set(ids[step.eager_rows].tolist())))
        assert step.is_async == (not len(step.eager_rows))
        assert (runner._sent_arrivals[batch.emitting.slots[step.eager_rows]] == EMPTY_SLOT).all()
        return step

    runner.launch = recorded
    engine.generate(mixed())
    in_graphs, eager = (set().union(*each) for each in zip(*rows, strict=True))
    needs = {r.request_id for r in mixed() if r.sampling.logits_parameters or r.sampling.logprobs}
    assert eager == needs and in_graphs == {r.request_id for r in mixed()} - needs
