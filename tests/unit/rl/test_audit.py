"""The honest speed-up: the same tokens twice, and the engine as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support import tiny_decoder

from paceline.drafters.suffix import SuffixDrafter
from paceline.engine.engine import LocalEngine
from paceline.model.paged import PagedDecoder
from paceline.rl.audit import Auditor, overall
from paceline.rl.collect import Collected
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
    known = engine.learned()
    completions = engine.generate(REQUESTS)
    engine.drain_trace()
    learned = {name: array.copy() for name, array in drafter.state().items()}
    audit = auditor.audit([Collected([], REQUESTS, completions, 0.0)], known)
    assert (
        audit is not None and audit["identical"] and audit["speedup"] == audit["plain_s"] / audit["speculative_s"] > 0
    )
    assert audit["tokens"] == sum(len(c.token_ids) for c in completions) and set(audit["tail"]) == {"1", "2", "4"}
    assert engine.drafter is drafter and engine.scheduler.max_num_seqs == rows
    assert all(np.array_equal(learned[name], array) for name, array in drafter.state().items())
    assert engine.drain_trace() == [], "an audit's steps are not the run's"


def test_what_is_captured_on_first_use_does_not_count(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    auditor, seconds = Auditor(engine, SuffixDrafter), iter([5.0, 1.0, 2.0])

    def generate(batches: object, drafting: bool, rows: int | None) -> tuple[float, list[Completion]]:
        took = next(seconds)
        if took == 5.0:
            monkeypatch.setattr(engine.runner, "num_captured", 3)
        return took, []

    monkeypatch.setattr(auditor, "_generate", generate)
    assert [auditor._time([], drafting)[0] for drafting in (False, True)] == [1.0, 2.0]


def test_other_tokens_are_noticed(engine: LocalEngine) -> None:
    auditor = Auditor(engine, SuffixDrafter)
    known = engine.learned()
    completions = engine.generate(REQUESTS)
    completions[2] = replace(completions[2], token_ids=completions[2].token_ids[::-1] + 1)
    audit = auditor.audit([Collected([], REQUESTS, completions, 0.0)], known)
    assert audit is not None and not audit["identical"]


def test_rounds_are_audited_one_after_the_other(engine: LocalEngine) -> None:
    """Dynamic sampling generates in rounds: an audit with all of them at once would run at another batch size."""
    auditor = Auditor(engine, SuffixDrafter)
    known = engine.learned()
    rounds = [Collected([], part, engine.generate(part), 0.0) for part in (REQUESTS[:3], REQUESTS[3:])]
    most, step = 0, engine.step

    def watched() -> list[Completion]:
        nonlocal most
        most = max(most, len(engine.scheduler.running))
        return step()

    engine.step = watched  # type: ignore[method-assign]
    try:
        audit = auditor.audit(rounds, known)
    finally:
        del engine.step  # type: ignore[method-assign]
    assert audit is not None and audit["identical"] and most == 4  # three a round; four in the tail's measurement


def test_little_to_audit(engine: LocalEngine) -> None:
    auditor = Auditor(engine, SuffixDrafter)
    known = engine.learned()
    assert auditor.audit([Collected([], [], [], 0.0)], known) is None
    audit = auditor.audit([Collected([], REQUESTS[:2], engine.generate(REQUESTS[:2]), 0.0)], known)
    assert audit is not None and set(audit["tail"]) == {"1", "2"}, "four never run where there are two"


def test_overall_sums_times() -> None:
    assert overall([]) == {"generation_speedup": None, "tail_speedup": {}, "identical": None}
    audits = [
        {
            "plain_s": p,
            "speculative_s": s,
            "identical": same,
            "tail_s": {k: {"plain_s": p, "speculative_s": 1.0} for k in "124"},
        }
        for p, s, same in ((1.0, 1.0, True), (9.0, 4.0, False))
    ]
    assert overall(audits) == {
        "generation_speedup": 2.0, "tail_speedup": {"1": 5.0, "2": 5.0, "4": 5.0}, "identical": False,
    }  # fmt: skip


def test_a_policy_hears_of_the_steps_that_it_planned_and_of_no_others(engine: LocalEngine) -> None:
    """What plain steps take, between steps that draft, would be put down to the drafter."""

    class Counting(StaticPolicy):
        num_planned = num_observed = 0

        def plan(self, rows: Rows) -> np.ndarray:
            self.num_planned += 1
            return super().plan(rows)

        def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
            self.num_observed += 1

    drafter, own, policy = engine.drafter, engine.policy, Counting(4)
    engine.set_drafter(drafter, policy)
    known = engine.learned()
    completions = engine.generate(REQUESTS)
    num_steps = len(engine.drain_trace())
    assert Auditor(engine, SuffixDrafter).audit([Collected([], REQUESTS, completions, 0.0)], known) is not None
    assert policy.num_planned == policy.num_observed > num_steps
    engine.set_drafter(None)
    engine.generate(REQUESTS)
    assert engine.drain_trace() and policy.num_planned == policy.num_observed
    engine.set_drafter(drafter, own)
