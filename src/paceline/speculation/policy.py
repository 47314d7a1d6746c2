"""How many tokens to draft, for whom. Zero is a fine answer: it is plain decoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from paceline.speculation.batch import Commits, DraftBatch, Rows
from paceline.types import Request, StepTrace


@dataclass(frozen=True, slots=True)
class Decision:
    """Why a step verifies what it verifies; the trace keeps it."""

    reason: str = ""
    expected_accepted: float = 0.0
    expected_s: float = 0.0  # 0: not estimated
    about: Any = field(default=None, repr=False, compare=False)  # the policy's own, which `observe` gets back


class SpeculationPolicy(Protocol):
    """`plan` caps every row's draft before anything is drafted; `select` then says how much of each draft is worth
    verifying, and is not asked where nothing was. What it selects adds up to at most `Rows.draft_budget`: the policy,
    which sees all rows, shares the budget out.

    The engine may discard a step after `plan` or `select` and plan again. So these two change nothing that a later
    plan depends on: `commit` does, and is called once for every step that is launched, with its decision.

    `reads_drafts` tells whether `select` looks at what was drafted: harmless under `coupled`, a bias under the
    rejection rules, which therefore refuse it. `takes_best` tells that it takes the likeliest of all: who knows better
    by then which these are may take others, as many. After every step that was launched `observe` learns what stood and
    what it took; fewer tokens than selected may have been verified, where memory was short, and further steps may have
    been launched meanwhile. `begin` and `end` bracket a request's life, as for a drafter."""

    name: str
    reads_drafts: bool
    reads_lengths: bool  # wants `Rows.expected_left`
    takes_best: bool
    decision: Decision  # of the step that was planned last

    def begin(self, request: Request) -> None: ...
    def plan(self, rows: Rows) -> np.ndarray: ...  # int32 [B]
    def select(self, drafts: DraftBatch) -> np.ndarray: ...  # int32 [B], at most drafts.num
    def commit(self, decision: Decision) -> None: ...  # the step with this decision was launched
    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None: ...
    def end(self, request_id: int) -> None: ...
    def state(self) -> dict[str, np.ndarray]: ...  # what it learned, for a checkpoint
    def restore(self, state: Mapping[str, np.ndarray]) -> None: ...  # ValueError for another policy's


class StaticPolicy:
    """A fixed number of tokens per batch-size bucket: {1: 6, 8: 3} drafts 6 for a single row, 3 for up to 8 rows, and
    none for more. A plain number means any batch size. A draft ends before the first position that it is less likely
    than `min_confidence` to survive to, by the drafter's own estimate."""

    name = "static"
    reads_lengths = takes_best = False

    def __init__(self, num_speculative_tokens: int | Mapping[int, int], min_confidence: float = 0.0) -> None:
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"speculation.min_confidence = {min_confidence}: must be from 0 (off) to 1")
        self.min_confidence = min_confidence
        self.reads_drafts = min_confidence > 0
        given = num_speculative_tokens
        self.buckets = sorted(given.items()) if isinstance(given, Mapping) else [(2**31 - 1, given)]
        for bound, k in self.buckets:
            if bound < 1 or k < 0:
                raise ValueError(
                    f"speculation.num_speculative_tokens: bucket {bound} = {k}: batch sizes start at 1, draft "
                    "lengths at 0"
                )
        self.decision = Decision()

    def begin(self, request: Request) -> None:
        pass

    def plan(self, rows: Rows) -> np.ndarray:
        k = next((k for bound, k in self.buckets if len(rows) <= bound), 0)
        caps = rows.limited(np.full(len(rows), k, np.int32))
        reason = f"{k} for {len(rows)} rows"
        if int(caps.sum()) > rows.draft_budget:
            caps = level(caps, rows.draft_budget)
            reason += f", shortened to {rows.draft_budget} tokens: engine.max_num_batched_tokens"
        self.decision = Decision(reason)
        return caps

    def select(self, drafts: DraftBatch) -> np.ndarray:
        if self.min_confidence == 0:
            return drafts.num
        survival = drafts.confidence.cumprod(1, np.float64)  # P(positions 0..j are all accepted), [B, K]
        likely = np.logical_and.accumulate(survival >= self.min_confidence, axis=1)
        return np.minimum(drafts.num, likely.sum(1, dtype=np.int32))

    def commit(self, decision: Decision) -> None:
        pass

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        pass

    def end(self, request_id: int) -> None:
        pass

    def state(self) -> dict[str, np.ndarray]:
        return {}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            raise ValueError(
                f"not a state of the static policy: it holds {sorted(state)}; was speculation.policy changed?"
            )


def level(caps: np.ndarray, budget: int) -> np.ndarray:
    """Caps shortened so that they add up to `budget`, the longest ones first: all rows keep min(cap, level), and what
    is left of the budget gives one token more to the first of those that were shortened. int32 [B]."""
    assert 0 <= budget < caps.sum()
    # sums[n]: what the rows use at level n.
    sums = np.minimum(caps[:, None], np.arange(int(caps.max()) + 1)).sum(0)
    height = int(sums.searchsorted(budget, "right")) - 1
    leveled = np.minimum(caps, height)
    leveled[np.flatnonzero(caps > height)[: budget - int(sums[height])]] += 1
    return leveled.astype(np.int32)
