"""Asynchronous steps on a CPU: with a runner that has the tokens before the host does, like one on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from support import check_blocks, tiny_decoder
from torch import Tensor

from paceline.drafters.ngram import NgramDrafter
from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES, VerificationInput, VerificationResult
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner, StepOutput
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import NO_SOURCE, Sequence
from paceline.engine.step import InFlightStep
from paceline.model.paged import PagedDecoder, Span
from paceline.model.sample import Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.model.weights import hf_state
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.policy import Decision, StaticPolicy
from paceline.types import Completion, Request, SamplingParams, StepTrace

TIMES = 0.25, 0.5  # seconds: forward and sampling


@dataclass
class DelayedStep:
    """Computed at launch. The host gets the result in `wait`."""

    output: StepOutput
    is_async: bool
    interrupted: str = ""  # which of its calls raises KeyboardInterrupt, once

    def wait(self) -> StepOutput:
        self._interrupt("wait")
        return self.output

    def times(self) -> tuple[float, float]:
        self._interrupt("times")
        return TIMES

    def _interrupt(self, call: str) -> None:
        if self.interrupted == call:
            self.interrupted = ""
            raise KeyboardInterrupt


class AsyncRunner(EagerRunner):
    """Like a runner on a GPU: it has each sequence's tokens up to the last launch, before the host does."""

    def __init__(self, paged: PagedDecoder) -> None:
        super().__init__(paged, Sampler(), RULES["coupled"])
        self.known: dict[int, list[int]] = {}  # by arrival
        self.interrupts: dict[int, str] = {}  # launch -> which call is interrupted
        self.num_launched = self.num_overlapping = 0

    def launch(self, batch: ScheduledBatch, q: dict[int, Tensor], draft_budget: int | None = None) -> DelayedStep:  # type: ignore[override]
        spans, lengths = [], []
        for i, (sequence, span) in enumerate(zip(batch.sequences, batch.spans(), strict=True)):
            if sequence.num_in_flight:
                assert batch.num_query[i] == 1 and batch.emits[i]
                self.num_overlapping += 1
                tokens, draft = self.known[sequence.arrival], batch.draft(i)
                assert 16 * len(sequence.table.blocks) >= len(tokens) + len(draft), "no blocks for a step in flight"
                new = np.array([tokens[-1], *draft], np.int32)
                span = Span(new, len(tokens) - 1, sequence.table, 1 + len(draft))
            else:
                self.known[sequence.arrival] = sequence.tokens.tolist()
            spans.append(span)
            if batch.emits[i]:
                lengths.append(len(self.known[sequence.arrival]))
        logits, emitting = self.paged.forward(spans), batch.emitting
        result = VerificationResult.empty(0, 1)
        if len(emitting):
            sizes = 1 + emitting.num_draft.astype(np.int64)
            result = self.rule(
                VerificationInput(
                    logits_PV=logits,
                    drafts=[emitting.draft(i) for i in range(len(emitting))],
                    q=[None] * len(emitting),
                    noise_keys=emitting.seq_table.noise_key[emitting.slots],
                    lengths=np.array(lengths, np.int64),
                    params=SamplingArrays.of([sequence.request.sampling for sequence in emitting.sequences], sizes),
                    starts=np.concatenate([[0], np.cumsum(sizes)]),
                ),
                self.sampler,
            )
        for sequence, tokens, num in zip(emitting.sequences, result.tokens, result.num_accepted, strict=True):
            self.known[sequence.arrival] += tokens[: num + 1].tolist()
        is_async = bool((batch.num_query == 1).all()) and batch.all_emit
        self.num_launched += 1
        return DelayedStep(StepOutput(result), is_async, self.interrupts.get(self.num_launched, ""))

    def remove(self, sequence: Sequence) -> None:
        self.known.pop(sequence.arrival, None)

    def reset(self) -> None:
        self.known.clear()


def engine(is_async: bool, num_blocks: int = 64, drafts: bool = False) -> LocalEngine:
    paged = PagedDecoder(tiny_decoder(), num_blocks)
    return LocalEngine(
        paged,
        runner=AsyncRunner(paged) if is_async else None,
        drafter=SuffixDrafter() if drafts else None,
        policy=StaticPolicy(3 if drafts else 0),
        max_num_seqs=4,
    )


def requests() -> list[Request]:
    dice = np.random.default_rng(3)
    kinds = [{}, {"temperature": 0.0}, {"ignore_eos": True}, {"stop_token_ids": (3, 4, 5)}]
    return [
        Request(
            i,
            tuple(dice.integers(0, 59, dice.integers(1, 30)).tolist()),
            SamplingParams(max_tokens=int(dice.integers(1, 30)), **kinds[i % 4]),
            11 * i,
            str(i % 3),
        )
        for i in range(14)
    ]


def summary(completions: list[Completion]) -> list[tuple[list[int], str, float]]:
    return [(c.token_ids.tolist(), c.finish_reason, round(float(c.logprobs.sum()), 9)) for c in completions]


@cache
def plain() -> list[tuple[list[int], str, float]]:
    return summary(engine(False).generate(requests()))


@pytest.mark.parametrize("num_blocks", [64, 9])
@pytest.mark.parametrize("drafts", [False, True])
def test_asynchronous_steps_emit_the_same_tokens(num_blocks: int, drafts: bool) -> None:
    running = engine(True, num_blocks, drafts)
    completions = running.generate(requests())
    assert summary(completions) == plain()
    assert not running.has_work and running.paged.pool.num_free == num_blocks
    check_blocks(running)
    traces = running.drain_trace()
    assert sum(t.num_emitted for t in traces) == sum(len(c.token_ids) for c in completions)
    assert (running.runner.num_overlapping > 30) != drafts  # a drafter on the host needs the results
    assert num_blocks > 9 or sum(t.num_preempted for t in traces) > 0


def test_draft_tokens_after_a_stop_are_not_counted() -> None:
    running = engine(True, drafts=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    whole = running.generate([Request(0, (1, 2, 3), sampling, 0, "a")])[0].token_ids.tolist()
    stop = next(token for i, token in enumerate(whole) if i > 10 and i % 4 < 2 and token not in whole[:i])
    running.drain_trace()
    short = replace(sampling, stop_token_ids=(stop,))
    completion = running.generate([Request(1, (1, 2, 3), short, 0, "a")])[0]
    assert completion.token_ids.tolist() == whole[: whole.index(stop) + 1]
    assert sum(t.num_emitted for t in running.drain_trace()) == len(completion.token_ids)


@pytest.mark.parametrize("call", range(1, 10))
def test_an_exception_in_progress_leaves_no_request_behind(call: int) -> None:
    running, calls = engine(True), [0]

    def progress(done: int, total: int) -> None:
        calls[0] += 1
        if calls[0] == call:
            raise KeyError("mine")

    sampling = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 9)]
    wanted = [Request(i, (1, 2 + i), each, i) for i, each in enumerate(sampling)]
    with pytest.raises(KeyError, match="mine"):
        running.generate(wanted, progress)
    assert not running._handles and running.paged.pool.num_free == 64
    running.step()
    assert not running.has_work


@pytest.mark.parametrize("drafts", [False, True])
def test_close_completes_all_requests(drafts: bool) -> None:
    for num_steps in range(1, 12):
        running = engine(True, drafts=drafts)
        handles = [running.submit(request) for request in requests()]
        for _ in range(num_steps):
            running.step()
        running.close()
        assert all(handle.done for handle in handles) and running.paged.pool.num_free == 64


@pytest.mark.parametrize("launches", [(3, 4, 9, 14), range(1, 999, 4), range(1, 999, 5)])
@pytest.mark.parametrize("call", ["wait", "times"])
@pytest.mark.parametrize("drafts", [False, True])
def test_an_interrupt_while_waiting_loses_nothing(drafts: bool, call: str, launches: Iterable[int]) -> None:
    running = engine(True, drafts=drafts)
    running.runner.interrupts = dict.fromkeys(launches, call)
    handles = [running.submit(request) for request in requests()]
    num_interrupts = 0
    for _ in range(500):
        if running.has_work:
            try:
                running.step()
            except KeyboardInterrupt:
                num_interrupts += 1
    assert not running.has_work
    assert num_interrupts >= 3  # fewer than launches: an interrupt drops the other step in flight too
    assert summary([h.completion for h in handles if h.completion is not None]) == plain()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("drafts", [False, True])
def test_an_interrupt_during_commit_loses_nothing(drafts: bool, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    running, count, num_waited = engine(True, drafts=drafts), InFlightStep.count_in_flight, 0

    def interrupted(step: InFlightStep, sign: int) -> None:
        nonlocal num_waited
        num_waited += sign < 0
        interrupts = sign < 0 and num_waited % 3 == 0
        if interrupts and when == "before":
            raise KeyboardInterrupt
        count(step, sign)
        if interrupts:
            raise KeyboardInterrupt

    monkeypatch.setattr(InFlightStep, "count_in_flight", interrupted)
    handles = [running.submit(request) for request in requests()]
    for _ in range(500):
        if running.has_work:
            with contextlib.suppress(KeyboardInterrupt):
                running.step()
    assert not running.has_work and num_waited > 30
    assert summary([h.completion for h in handles if h.completion is not None]) == plain()


@pytest.mark.parametrize("is_async", [False, True])
def test_requests_finish_though_the_drafter_raises(is_async: bool) -> None:
    class Raising(SuffixDrafter):
        """Raises in every 11th call of `observe`, also during a recovery, which calls it once for each request."""

        num_calls = 0

        def observe(self, commits: Commits) -> None:
            self.num_calls += 1
            if self.num_calls % 11 == 0:
                raise KeyboardInterrupt
            super().observe(commits)

    running = engine(is_async, drafts=True)
    running.set_drafter(Raising())
    handles = [running.submit(request) for request in requests()]
    for _ in range(500):
        if running.has_work:
            with contextlib.suppress(KeyboardInterrupt):
                running.step()
    assert not running.has_work and not running._handles
    assert summary([h.completion for h in handles if h.completion is not None]) == plain()


def test_a_finished_request_is_returned_though_the_drafter_raises_at_its_end() -> None:
    class Raising(SuffixDrafter):
        num_calls = 0

        def end(self, request_id: int) -> None:
            self.num_calls += 1
            if self.num_calls == 2:
                raise KeyboardInterrupt
            super().end(request_id)

    running, returned = engine(False, drafts=True), list[Completion]()
    running.set_drafter(Raising())
    handles = [running.submit(request) for request in requests()]
    for _ in range(500):
        if running.has_work:
            with contextlib.suppress(KeyboardInterrupt):
                returned += running.step()
    assert sorted(c.request.request_id for c in returned) == sorted(h.request.request_id for h in handles)
    assert summary([h.completion for h in handles if h.completion is not None]) == plain()


def test_an_interrupted_abort_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine(False, drafts=True)
    handles = [running.submit(request) for request in requests()]
    for _ in range(3):
        running.step()
    remove, scheduler = running.scheduler.remove, running.scheduler

    def interrupted(sequence: Sequence) -> None:
        remove(sequence)
        monkeypatch.setattr(scheduler, "remove", remove)
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        running.abort(handles[0].request.request_id)
    running.abort(handles[0].request.request_id)
    while running.has_work:
        running.step()
    assert all(handle.done for handle in handles) and not running._handles
    check_blocks(running)


def test_tokens_keep_their_drafter_after_an_exception() -> None:
    def names(completion: Completion) -> list[str]:
        return ["" if i == NO_SOURCE else completion.drafters[i] for i in completion.sources.tolist()]

    running = engine(False, drafts=True)
    handles = [running.submit(request) for request in requests()]
    for drafter in (SuffixDrafter(), NgramDrafter(1)):
        running.set_drafter(drafter)
        for _ in range(12):
            running.step()
    before = {s.request.request_id: names(s.completion()) for s in running.sequences}
    assert {"suffix", "ngram"} <= {name for found in before.values() for name in found}
    running._interrupted = True
    while running.has_work:
        running.step()
    for handle in handles:
        found = before.get(handle.request.request_id, [])
        assert handle.completion is not None and names(handle.completion)[: len(found)] == found


def test_a_trace_has_the_times_of_its_step() -> None:
    running = engine(True)
    running.generate(requests()[:3])
    assert {(t.forward_s, t.sample_s) for t in running.drain_trace()} == {TIMES}


def test_the_engine_recovers_from_weights_that_diverged() -> None:
    running = engine(True)
    handle = running.submit(Request(0, (1, 2), SamplingParams(max_tokens=12, ignore_eos=True), 0))
    for _ in range(4):
        running.step()
    good = [(name, tensor.clone()) for name, tensor in hf_state(running.paged.decoder)]
    running.update_weights([(name, tensor * torch.nan) for name, tensor in good], 1, "keep")
    with pytest.raises(ValueError, match="not finite"):
        for _ in range(3):
            running.step()
    running.update_weights(good, 2, "recompute")
    while running.has_work:
        running.step()
    alone = engine(False).generate([handle.request])
    assert handle.completion is not None and handle.completion.token_ids.tolist() == alone[0].token_ids.tolist()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_sleeping_engine_refuses_to_generate(is_async: bool) -> None:
    running = engine(is_async)
    running.sleep()
    for _ in range(2):
        with pytest.raises(ValueError, match="call wake"):
            running.generate(requests())
    running.wake()
    assert summary(running.generate(requests())) == plain()


class Counting(StaticPolicy):
    """Counts plans, and which of them were launched."""

    def __init__(self) -> None:
        super().__init__(3)
        self.planned: list[Decision] = []
        self.committed: list[Decision] = []
        self.observed: list[Decision] = []

    def plan(self, rows: Rows) -> np.ndarray:
        caps = super().plan(rows)
        self.decision = replace(self.decision, about=len(self.planned))
        self.planned.append(self.decision)
        return caps

    def launched(self, decision: Decision) -> None:
        self.committed.append(decision)

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        self.observed.append(decision)


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_a_policy_commits_the_steps_that_are_launched_and_no_others(num_blocks: int) -> None:
    running, policy = engine(True, num_blocks, drafts=True), Counting()
    running.policy = policy
    assert summary(running.generate(requests())) == plain()
    assert [d.about for d in policy.committed] == [d.about for d in policy.observed]
    assert len(policy.committed) == len({d.about for d in policy.committed})


def test_a_policy_is_replaced_between_steps_in_flight() -> None:
    """Those in flight are finished first."""
    running, policy = engine(True), Counting()
    handles = [running.submit(request) for request in requests()]
    while not running._in_flight:
        running.step()
    running.policy = policy
    assert not running._in_flight and running.policy is policy
    while running.has_work:
        running.step()
    assert summary([handle.completion for handle in handles]) == plain()


@pytest.mark.parametrize("num_steps", [4, 5, 6])
@pytest.mark.parametrize("inflight", ["keep", "recompute"])
@pytest.mark.parametrize("drafts", [False, True])
def test_new_weights_wait_for_the_steps_in_flight(drafts: bool, inflight: str, num_steps: int) -> None:
    """A step that was launched under the old weights emits tokens of the old version, whenever the host learns of them:
    they are awaited before the weights change."""
    running = engine(True, drafts=drafts)
    sampling = SamplingParams(max_tokens=24, ignore_eos=True)
    handles = [running.submit(Request(i, (1, 2, 3 + i), sampling, i, "a")) for i in range(3)]
    for _ in range(num_steps):
        running.step()
    assert bool(running._in_flight) != drafts  # with a drafter on the host, each step waits for the one before
    launched = {i: len(running.runner.known[i]) - 3 for i in range(3)}  # tokens of all steps, known to the host or not
    running.update_weights(list(hf_state(tiny_decoder(seed=1))), 1, inflight)
    while running.has_work:
        running.step()
    for i, handle in enumerate(handles):
        assert handle.completion is not None
        versions = handle.completion.versions.tolist()
        assert versions == [0] * launched[i] + [1] * (24 - launched[i])
    if inflight == "recompute":
        for i, handle in enumerate(handles):
            before = handle.completion.token_ids[: launched[i]].tolist()
            rest = Request(i, (1, 2, 3 + i, *before), replace(sampling, max_tokens=24 - launched[i]), i)
            fresh = LocalEngine(PagedDecoder(tiny_decoder(seed=1), 64)).generate([rest])[0]
            assert handle.completion.token_ids[launched[i] :].tolist() == fresh.token_ids.tolist()


def test_weights_that_do_not_wait_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken implementation fails the test above."""
    update = LocalEngine.update_weights

    def impatient(self: LocalEngine, *args: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(self, "_drain", lambda: None)
            return update(self, *args)

    monkeypatch.setattr(LocalEngine, "update_weights", impatient)
    with pytest.raises(AssertionError):
        test_new_weights_wait_for_the_steps_in_flight(False, "keep", 5)
