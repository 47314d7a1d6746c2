"""An audit generates the same tokens twice, and does not change the engine's state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support import tiny_decoder

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.rl.audit import Auditor, check_audit, overall
from paceline.rl.collection import Collected
from paceline.speculation.batch import Commits, Rows
from paceline.speculation.policy import Decision, StaticPolicy
from paceline.types import Completion, Request, SamplingParams, StepTrace


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine(PagedDecoder(tiny_decoder(), 64), drafter=SuffixDrafter(), policy=StaticPolicy(4))


REQUESTS = [Request(i, (1, 2, 3 + i // 3), SamplingParams(max_tokens=12), i, f"p{i // 3}") for i in range(6)]


def test_audit_leaves_the_engine_as_it_was(engine: LocalEngine) -> None:
    drafter, rows = engine.drafter, engine.scheduler.max_num_seqs
    auditor = Auditor(engine, SuffixDrafter)
    state_before = engine.state_dict()
    completions = engine.generate(REQUESTS)
    engine.drain_trace()
    drafter_state = {name: array.copy() for name, array in drafter.state_dict().items()}
    audit = auditor.audit([Collected([], REQUESTS, completions)], state_before)
    assert (
        audit is not None and audit["identical"] and audit["speedup"] == audit["plain_s"] / audit["speculative_s"] > 0
    )
    assert audit["num_tokens"] == sum(len(c.token_ids) for c in completions)
    assert set(audit["tail_speedup"]) == {"1", "2", "4"}
    assert engine.drafter is drafter and engine.scheduler.max_num_seqs == rows
    assert all(np.array_equal(drafter_state[name], array) for name, array in drafter.state_dict().items())
    assert engine.drain_trace() == [], "the steps of an audit are not in the trace of the run"


def test_runs_with_captures_do_not_count(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    auditor, seconds = Auditor(engine, SuffixDrafter), iter([5.0, 1.0, 2.0])

    def generate(batches: object, drafting: bool, rows: int | None) -> tuple[float, list[Completion]]:
        elapsed_s = next(seconds)
        if elapsed_s == 5.0:
            monkeypatch.setattr(type(engine.runner), "num_captured", 3)
        return elapsed_s, []

    monkeypatch.setattr(auditor, "_generate", generate)
    assert [auditor._time([], drafting)[0] for drafting in (False, True)] == [1.0, 2.0]


def test_different_tokens_are_caught(engine: LocalEngine) -> None:
    auditor = Auditor(engine, SuffixDrafter)
    state_before = engine.state_dict()
    completions = engine.generate(REQUESTS)
    completions[2] = replace(completions[2], token_ids=completions[2].token_ids[::-1] + 1)
    audit = auditor.audit([Collected([], REQUESTS, completions)], state_before)
    assert audit is not None and not audit["identical"] and not audit["must_be_identical"]  # plain torch
    check_audit(3, audit)
    with pytest.raises(ValueError, match="step 4: an audit generated other tokens"):
        check_audit(3, audit | {"must_be_identical": True})
    check_audit(3, audit | {"must_be_identical": True, "identical": True})
    check_audit(3, None)


def test_different_logprobs_are_caught_with_batch_invariant_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(PagedDecoder(tiny_decoder(), 64), drafter=SuffixDrafter(), policy=StaticPolicy(4))
    auditor = Auditor(engine, SuffixDrafter)
    completion = engine.generate(REQUESTS[:1])[0]
    other = replace(completion, logprobs=completion.logprobs + 1e-12)
    assert auditor._is_identical(other, completion), "plain torch: logprobs may differ"
    ops = engine.paged.decoder.ops
    monkeypatch.setattr(type(ops), "is_cuda", True)
    monkeypatch.setattr(type(ops), "is_batch_invariant", True)
    assert auditor._is_identical(completion, completion) and not auditor._is_identical(other, completion)


def test_rounds_are_audited_one_after_the_other(engine: LocalEngine) -> None:
    """Dynamic sampling generates in rounds; all of them at once would be another batch size."""
    auditor = Auditor(engine, SuffixDrafter)
    state_before = engine.state_dict()
    rounds = [Collected([], part, engine.generate(part)) for part in (REQUESTS[:3], REQUESTS[3:])]
    max_running, step = 0, engine.step

    def counted() -> list[Completion]:
        nonlocal max_running
        max_running = max(max_running, len(engine.scheduler.running))
        return step()

    engine.step = counted  # type: ignore[method-assign]
    try:
        audit = auditor.audit(rounds, state_before)
    finally:
        del engine.step  # type: ignore[method-assign]
    assert audit is not None and audit["identical"] and max_running == 4  # 3 per round, 4 for the tail


def test_few_requests(engine: LocalEngine) -> None:
    auditor = Auditor(engine, SuffixDrafter)
    state_before = engine.state_dict()
    assert auditor.audit([Collected([], [], [])], state_before) is None
    audit = auditor.audit([Collected([], REQUESTS[:2], engine.generate(REQUESTS[:2]))], state_before)
    assert audit is not None and set(audit["tail_speedup"]) == {"1", "2"}, "4 sequences need 4 requests"


def test_overall_sums_times() -> None:
    assert overall([]) == {"generation_speedup": None, "tail_speedup": {}, "identical": None, "must_be_identical": None}
    audits = [
        {
            "plain_s": p,
            "speculative_s": s,
            "identical": same,
            "must_be_identical": True,
            "tail_s": {k: {"plain_s": p, "speculative_s": 1.0} for k in "124"},
        }
        for p, s, same in ((1.0, 1.0, True), (9.0, 4.0, False))
    ]
    assert overall(audits) == {
        "generation_speedup": 2.0, "tail_speedup": {"1": 5.0, "2": 5.0, "4": 5.0}, "identical": False,
        "must_be_identical": True,
    }  # fmt: skip


def test_a_policy_observes_only_the_steps_that_it_planned(engine: LocalEngine) -> None:
    """Otherwise it would attribute the time of steps without drafts to the drafter."""

    class Counting(StaticPolicy):
        num_planned = num_observed = 0

        def plan(self, rows: Rows) -> np.ndarray:
            self.num_planned += 1
            return super().plan(rows)

        def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
            self.num_observed += 1

    drafter, own, policy = engine.drafter, engine.policy, Counting(4)
    engine.set_drafter(drafter, policy)
    state_before = engine.state_dict()
    completions = engine.generate(REQUESTS)
    num_steps = len(engine.drain_trace())
    assert Auditor(engine, SuffixDrafter).audit([Collected([], REQUESTS, completions)], state_before) is not None
    assert policy.num_planned == policy.num_observed > num_steps
    engine.set_drafter(None)
    engine.generate(REQUESTS)
    assert engine.drain_trace() and policy.num_planned == policy.num_observed
    engine.set_drafter(drafter, own)
