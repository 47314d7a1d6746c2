"""A step in flight, and a step whose tokens are committed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.engine.drafting import Drafting, StepDrafts
from paceline.engine.runner import PendingStep
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import Sequence
from paceline.speculation.batch import Commits
from paceline.types import StepTrace


@dataclass(slots=True)
class InFlightStep:
    """A step that was launched and is not committed yet: made after `Scheduler.launched`."""

    pending: PendingStep
    batch: ScheduledBatch
    drafts: StepDrafts
    started: float
    draft_s: float
    num_preempted: int
    num_captured: int = 0  # CUDA graphs that were captured while it was launched or in flight
    num_tokens: np.ndarray = field(init=False)  # int64 [R], positions by which it extends each emitting row, at most
    _num_prompt_context: int = field(init=False)  # context tokens of the rows that do not emit

    def __post_init__(self) -> None:
        batch = self.batch
        self.num_tokens = (1 + batch.num_draft) * batch.emits
        self._num_prompt_context = int(batch.seq_table.num_computed[batch.slots[~batch.emits]].sum())

    def num_context_tokens(self, emitting: ScheduledBatch) -> int:
        """Of all rows, before the step is committed."""
        return self._num_prompt_context + int(
            (emitting.seq_table.num_tokens[emitting.slots] + emitting.num_draft).sum()
        )

    def count_in_flight(self, sign: int) -> None:
        """Add (1) or subtract (-1) its tokens to its sequences' `num_in_flight`."""
        batch, ended = self.batch, self.batch.ended
        running = slice(None) if ended is None else ~ended
        batch.seq_table.num_in_flight[batch.slots[running]] += sign * self.num_tokens[running]


@dataclass(slots=True)
class CommittedStep:
    batch: ScheduledBatch  # without sequences that ended while it was in flight
    num_computed_before: np.ndarray  # int64 [R], just before it was committed
    emitting: ScheduledBatch
    commits: Commits
    drafts: StepDrafts
    finished: list[Sequence]
    figures: dict[str, Any]  # for the trace

    def trace(self, number: int, version: int, drafting: Drafting) -> StepTrace:
        commits, drafts, drafter = self.commits, self.drafts, drafting.drafter
        num_drafted, num_accepted = commits.num_drafted, commits.num_accepted
        positions = np.arange(num_drafted.max(initial=0))[:, None]
        return StepTrace(
            step=number,
            num_emitted=int(commits.num.sum()),
            num_drafts=int((num_drafted > 0).sum()),
            num_draft_tokens=int(num_drafted.sum()),
            num_accepted_tokens=int(num_accepted.sum()),
            accepted_per_position=tuple((num_accepted > positions).sum(1).tolist()),
            drafted_per_position=tuple((num_drafted > positions).sum(1).tolist()),
            version=version,
            drafter_version=drafter.version if drafter is not None else 0,
            drafter=drafter.name if drafter is not None else "none",
            policy=drafting.policy.name,
            reason=drafts.decision.reason,
            is_probe=drafts.decision.is_probe,
            expected_accepted=drafts.decision.expected_accepted,
            expected_s=drafts.decision.expected_s,
            plain_s=drafts.decision.plain_s,
            num_planned=drafts.num_planned,
            num_proposed=drafts.num_proposed,
            per_drafter=self._per_drafter(),
            num_history_bytes=drafter.num_bytes if drafter is not None else 0,
            **self.figures,
        )

    def _per_drafter(self) -> tuple[tuple[str, int, int], ...]:
        """By drafter, in order of appearance: tokens verified, and accepted."""
        drafted = self.commits.num_drafted > 0
        numbers = self.emitting.drafters[drafted]
        names = self.emitting.seq_table.drafters
        verified, accepted = (
            np.bincount(numbers, num[drafted], len(names)).astype(int).tolist()
            for num in (self.commits.num_drafted, self.commits.num_accepted)
        )
        return tuple((names[i], verified[i], accepted[i]) for i in dict.fromkeys(numbers.tolist()))
