"""Steps that fly, on a CPU: a runner that knows tokens before the host does, as one on a GPU does."""

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

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.accept import RULES, Proposal, Verdict
from paceline.engine.engine import LocalEngine
from paceline.engine.runner import EagerRunner, Landed
from paceline.engine.scheduler import Row
from paceline.engine.sequence import Sequence
from paceline.engine.step import Step
from paceline.model.paged import PagedDecoder, Span
from paceline.model.sample import Sampler, SamplingArrays
from paceline.model.weights import hf_state
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.policy import Decision, StaticPolicy
from paceline.types import Completion, Request, SamplingParams, StepTrace

TOOK = 0.25, 0.5  # seconds: a forward, and its draws


@dataclass
class Late:
    """Computed when it was launched, told when it lands."""

    landed: Landed
    may_wait: bool
    interrupted: str = ""  # in which of its calls, once

    def land(self) -> Landed:
        self._interrupt("land")
        return self.landed

    def took(self) -> tuple[float, float]:
        self._interrupt("took")
        return TOOK

    def _interrupt(self, call: str) -> None:
        if self.interrupted == call:
            self.interrupted = ""
            raise KeyboardInterrupt


class FlyingRunner(EagerRunner):
    """A sequence's tokens up to the last launch, by arrival, whether the host has heard of them or not."""

    def __init__(self, paged: PagedDecoder) -> None:
        super().__init__(paged, Sampler(), RULES["coupled"])
        self.known: dict[int, list[int]] = {}
        self.interrupts: dict[int, str] = {}  # launches of which a call is interrupted once, and which
        self.num_launched = self.num_blind = self.num_handed_over = 0

    def launch(self, rows: list[Row], q: dict[int, Tensor], num_slots: int | None = None) -> Late:  # type: ignore[override]
        spans = []
        for row in rows:
            sequence = row.sequence
            if sequence.num_flying:
                assert row.num_query == 1 and row.decides
                self.num_blind += 1
                self.num_handed_over += len(row.draft)
                tokens, size = self.known[sequence.arrival], 1 + len(row.draft)
                assert 16 * len(sequence.table.blocks) >= len(tokens) + len(row.draft), "no memory for what flies"
                new = np.array([tokens[-1], *row.draft], np.int32)
                spans.append(Span(new, len(tokens) - 1, sequence.table, size))
            else:
                self.known[sequence.arrival] = sequence.tokens.tolist()
                spans.append(row.span())
        logits = self.paged.forward(spans)
        deciding = [row for row in rows if row.decides]
        verdict = self._judge(deciding, logits) if deciding else Verdict.empty(0, 1)
        for row, tokens, num in zip(deciding, verdict.tokens, verdict.num_accepted, strict=True):
            self.known[row.sequence.arrival] += tokens[: num + 1].tolist()
        may_wait = all(row.num_query == 1 and row.decides for row in rows)
        self.num_launched += 1
        return Late(Landed(verdict), may_wait, self.interrupts.get(self.num_launched, ""))

    def _judge(self, rows: list[Row], logits: Tensor) -> Verdict:
        sizes = np.array([1 + len(row.draft) for row in rows])
        return self.rule(
            Proposal(
                logits_PV=logits,
                drafts=[row.draft for row in rows],
                q=[None] * len(rows),
                noise_keys=np.array([row.sequence.request.noise_key for row in rows], np.uint64),
                lengths=np.array([len(self.known[row.sequence.arrival]) for row in rows], np.int64),
                params=SamplingArrays.of([row.sequence.request.sampling for row in rows], sizes),
                starts=np.concatenate([[0], np.cumsum(sizes)]),
            ),
            self.sampler,
        )

    def leave(self, sequence: Sequence) -> None:
        self.known.pop(sequence.arrival, None)


def engine(flies: bool, num_blocks: int = 64, drafts: bool = False) -> LocalEngine:
    paged = PagedDecoder(tiny_decoder(), num_blocks)
    return LocalEngine(
        paged,
        runner=FlyingRunner(paged) if flies else None,
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


def said(completions: list[Completion]) -> list[tuple[list[int], str, float]]:
    return [(c.token_ids.tolist(), c.finish_reason, round(float(c.logprobs.sum()), 9)) for c in completions]


@cache
def plain() -> list[tuple[list[int], str, float]]:
    return said(engine(False).generate(requests()))


@pytest.mark.parametrize("num_blocks", [64, 9])
@pytest.mark.parametrize("drafts", [False, True])
def test_tokens_are_those_of_steps_that_do_not_fly(num_blocks: int, drafts: bool) -> None:
    flying = engine(True, num_blocks, drafts)
    completions = flying.generate(requests())
    assert said(completions) == plain()
    assert not flying.has_work and flying.paged.pool.num_free == num_blocks
    check_blocks(flying)
    traces = flying.drain_trace()
    assert sum(t.num_emitted for t in traces) == sum(len(c.token_ids) for c in completions)
    assert flying.runner.num_blind > 30 and (flying.runner.num_handed_over > 20) == drafts
    assert num_blocks > 9 or sum(t.num_preempted for t in traces) > 0


def test_what_history_knows_beyond_a_stop_is_not_counted() -> None:
    flying = engine(True, drafts=True)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    whole = flying.generate([Request(0, (1, 2, 3), sampling, 0, "a")])[0].token_ids.tolist()
    stop = next(token for i, token in enumerate(whole) if i > 10 and i % 4 < 2 and token not in whole[:i])
    flying.drain_trace()
    short = replace(sampling, stop_token_ids=(stop,))
    completion = flying.generate([Request(1, (1, 2, 3), short, 0, "a")])[0]
    assert completion.token_ids.tolist() == whole[: whole.index(stop) + 1]
    assert sum(t.num_emitted for t in flying.drain_trace()) == len(completion.token_ids)


@pytest.mark.parametrize("call", range(1, 10))
def test_whatever_progress_raises_nothing_stays_behind(call: int) -> None:
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
def test_closed_in_mid_flight_all_are_done(drafts: bool) -> None:
    for num_steps in range(1, 12):
        running = engine(True, drafts=drafts)
        handles = [running.submit(request) for request in requests()]
        for _ in range(num_steps):
            running.step()
        running.close()
        assert all(handle.done for handle in handles) and running.paged.pool.num_free == 64


@pytest.mark.parametrize("launches", [(3, 4, 9, 14), range(1, 999), range(1, 999, 5)])
@pytest.mark.parametrize("call", ["land", "took"])
@pytest.mark.parametrize("drafts", [False, True])
def test_an_interrupt_while_waiting_loses_nothing(drafts: bool, call: str, launches: Iterable[int]) -> None:
    """Whatever flies: rows that decode, prompts, both."""
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
    assert not running.has_work, "who is over goes on"
    assert num_interrupts == sum(launch <= running.runner.num_launched for launch in launches) >= 4
    assert said([h.completion for h in handles if h.completion is not None]) == plain()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("drafts", [False, True])
def test_an_interrupt_while_a_step_comes_down_loses_nothing(
    drafts: bool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody takes the next step's tokens for its own."""
    running, fly, num_landed = engine(True, drafts=drafts), Step.fly, 0

    def interrupted(step: Step, sign: int = 1) -> None:
        nonlocal num_landed
        num_landed += sign < 0
        interrupts = sign < 0 and num_landed % 3 == 0
        if interrupts and when == "before":
            raise KeyboardInterrupt
        fly(step, sign)
        if interrupts:
            raise KeyboardInterrupt

    monkeypatch.setattr(Step, "fly", interrupted)
    handles = [running.submit(request) for request in requests()]
    for _ in range(500):
        if running.has_work:
            with contextlib.suppress(KeyboardInterrupt):
                running.step()
    assert not running.has_work and num_landed > 30
    assert said([h.completion for h in handles if h.completion is not None]) == plain()


@pytest.mark.parametrize("flies", [False, True])
def test_whoever_is_over_ends_though_the_drafter_raises(flies: bool) -> None:
    class Rude(SuffixDrafter):
        num_heard = 0

        def observe(self, commits: Commits) -> None:
            self.num_heard += 1
            if self.num_heard % 2:
                raise KeyboardInterrupt
            super().observe(commits)

    running = engine(flies, drafts=True)
    running.set_drafter(Rude())
    handles = [running.submit(request) for request in requests()]
    for _ in range(500):
        if running.has_work:
            with contextlib.suppress(KeyboardInterrupt):
                running.step()
    assert not running.has_work and not running._handles
    assert said([h.completion for h in handles if h.completion is not None]) == plain()


def test_a_trace_has_what_its_step_took() -> None:
    running = engine(True)
    running.generate(requests()[:3])
    assert {(t.forward_s, t.sample_s) for t in running.drain_trace()} == {TOOK}


def test_after_weights_that_diverged_good_ones_go_on() -> None:
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


@pytest.mark.parametrize("flies", [False, True])
def test_asleep_it_says_so(flies: bool) -> None:
    running = engine(flies)
    running.sleep()
    for _ in range(2):
        with pytest.raises(ValueError, match="wake it"):
            running.generate(requests())
    running.wake()
    assert said(running.generate(requests())) == plain()


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

    def commit(self, decision: Decision) -> None:
        self.committed.append(decision)

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        self.observed.append(decision)


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_a_policy_commits_the_steps_that_are_launched_and_no_others(num_blocks: int) -> None:
    flying, policy = engine(True, num_blocks, drafts=True), Counting()
    flying.policy = policy
    assert said(flying.generate(requests())) == plain()
    assert [d.about for d in policy.committed] == [d.about for d in policy.observed]
    assert len(policy.committed) == len({d.about for d in policy.committed})
    assert num_blocks > 9 or len(policy.planned) > len(policy.committed), "or no plan was ever discarded"


def test_a_policy_is_replaced_between_steps_in_flight() -> None:
    """Those in flight are finished first: their decisions are the old policy's."""
    flying, first, second = engine(True, drafts=True), Counting(), Counting()
    flying.policy = first
    wanted = requests()
    handles = [flying.submit(request) for request in wanted]
    while not flying._flying:
        flying.step()
    flying.policy = second
    assert not flying._flying and len(first.observed) == len(first.committed)
    while flying.has_work:
        flying.step()
    assert len(second.observed) == len(second.committed) > 10
    assert said([handle.completion for handle in handles]) == plain()


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
    assert running._flying, "nothing was in flight"
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


@pytest.mark.parametrize("drafts", [False, True])
def test_new_weights_that_do_not_wait_are_caught(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the test above."""
    update = LocalEngine.update_weights

    def impatient(self: LocalEngine, *args: object) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(self, "_land_all", lambda: None)
            return update(self, *args)

    monkeypatch.setattr(LocalEngine, "update_weights", impatient)
    with pytest.raises(AssertionError):
        test_new_weights_wait_for_the_steps_in_flight(drafts, "keep", 5)
