"""When a run audits: after every n-th step, or so that audits take a small share of its time."""

from __future__ import annotations

import pytest

from paceline.rl.audit_schedule import SHARE, AuditSchedule


def is_due(schedule: AuditSchedule, step: int, generation_s: float) -> bool:
    """After a step of one second."""
    schedule.observe_step(1.0)
    return schedule.is_due(step, generation_s)


@pytest.mark.parametrize(("every", "steps"), [(0, []), (1, [0, 1, 2, 3, 4]), (2, [1, 3]), (9, [])])
def test_every_nth_step(every: int, steps: list[int]) -> None:
    schedule = AuditSchedule(every)
    assert [step for step in range(5) if is_due(schedule, step, 1.0)] == steps


@pytest.mark.parametrize("generation_s", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("audit_cost", [1.5, 2.2, 6.0])
def test_audits_take_a_small_share(generation_s: float, audit_cost: float) -> None:
    """Also if an audit takes longer than is expected of the first one; then the next ones come later."""
    schedule, audit_s, total_s, steps = AuditSchedule(None), 0.0, 0.0, []
    for step in range(2000):
        total_s += 1.0
        if is_due(schedule, step, generation_s):
            steps.append(step)
            audit_s += audit_cost * generation_s
            total_s += audit_cost * generation_s
            schedule.observe_audit(audit_cost * generation_s, generation_s)
            assert audit_s <= max(1.0, audit_cost / 3) * SHARE * total_s + 1e-9
    assert 0.8 * SHARE * total_s < audit_s <= SHARE * total_s  # it uses its share


def test_a_short_run_has_no_audit() -> None:
    schedule = AuditSchedule(None)
    assert not any(is_due(schedule, step, 0.5) for step in range(20))


def test_the_first_audit_waits_until_it_is_cheap() -> None:
    """With generation as half of a step, an audit is expected to take 1.5 steps: 3% of 50."""
    schedule = AuditSchedule(None)
    due = next(step for step in range(100) if is_due(schedule, step, 0.5))
    assert due in (48, 49)
