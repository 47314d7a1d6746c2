"""A step on its way (`Step`), and when its tokens are known (`Taken`): who took part in it, and what is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.engine.drafting import Drafting, Drafts
from paceline.engine.lineup import Lineup
from paceline.engine.runner import Flight
from paceline.engine.sequence import Sequence
from paceline.speculation.batch import Commits
from paceline.types import StepTrace


@dataclass(slots=True)
class Step:
    flight: Flight
    rows: Lineup
    drafts: Drafts
    started: float
    draft_s: float
    num_preempted: int
    reach: np.ndarray  # int64 [R], tokens that each row may emit at most
    num_captured: int = 0  # sizes that the runner made ready while it was launched, or flew

    def fly(self, sign: int = 1) -> None:
        """Its rows' sequences have so many more tokens on their way; or, with -1, not any more."""
        rows, reach, left = self.rows, sign * self.reach, self.rows.left
        rows.seats.num_flying[rows.at if left is None else rows.at[~left]] += reach if left is None else reach[~left]


@dataclass(slots=True)
class Taken:
    """Tokens are known, and not yet what else there is to know of them."""

    rows: Lineup
    before: np.ndarray  # int64 [R], tokens that were in memory
    deciding: Lineup
    commits: Commits
    drafts: Drafts
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
            expected_accepted=drafts.decision.expected_accepted,
            expected_s=drafts.decision.expected_s,
            num_planned=drafts.num_planned,
            num_proposed=drafts.num_proposed,
            sources=self._sources(),
            num_history_bytes=drafter.num_bytes if drafter is not None else 0,
            **self.figures,
        )

    def _sources(self) -> tuple[tuple[str, int, int], ...]:
        """By drafter, in order of appearance: tokens verified, and accepted."""
        drafted = self.commits.num_drafted > 0
        numbers = self.deciding.drafters[drafted]
        names = self.deciding.seats.drafters
        verified, stood = (
            np.bincount(numbers, num[drafted], len(names)).astype(int).tolist()
            for num in (self.commits.num_drafted, self.commits.num_accepted)
        )
        return tuple((names[i], verified[i], stood[i]) for i in dict.fromkeys(numbers.tolist()))
