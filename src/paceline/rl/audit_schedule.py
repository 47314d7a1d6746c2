"""Decides after which RL steps to audit."""

from __future__ import annotations

SHARE = 0.03  # of the run's time, for audits
# Time of an audit relative to the step's generation, until one was measured: it generates twice, and on a GPU it may
# capture graphs for plain steps.
FIRST_COST = 3.0


class AuditSchedule:
    """After every n-th step. With None, audits take at most SHARE of the time since the run was started or resumed, by
    an estimate of the next audit's time. Which steps are audited then depends on the machine's speed."""

    def __init__(self, every: int | None) -> None:
        self.every = every
        self._elapsed_s = self._audit_s = 0.0  # `_elapsed_s` includes audits
        self._cost: float | None = None  # of the last audit, relative to its step's generation

    def observe_step(self, seconds: float) -> None:
        self._elapsed_s += seconds

    def is_due(self, step: int, generation_s: float) -> bool:
        """After this step, which counts from 0. `generation_s`: time of its generation."""
        if self.every is not None:
            return self.every > 0 and (step + 1) % self.every == 0
        expected_s = generation_s * (FIRST_COST if self._cost is None else self._cost)
        return self._audit_s + expected_s <= SHARE * (self._elapsed_s + expected_s)

    def observe_audit(self, seconds: float, generation_s: float) -> None:
        self._elapsed_s += seconds
        self._audit_s += seconds
        self._cost = seconds / generation_s if generation_s else None
