"""Speculation policies decide how many tokens to draft and to verify, for each row. 0 is plain decoding."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.speculation.batch import Commits, Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.types import Request, StepTrace


@dataclass(frozen=True, slots=True)
class Decision:
    """What a policy decided about a step; the trace keeps all but `about`."""

    reason: str = ""
    expected_accepted: float = 0.0
    expected_s: float = 0.0  # 0: not estimated
    plain_s: float = 0.0  # of the step without drafts; 0: not estimated
    is_probe: bool = False
    about: Any = field(default=None, repr=False, compare=False)  # the policy's own data


class SpeculationPolicy(ABC):
    """`plan` limits every row's draft before anything is drafted. `select` then chooses how many tokens of each draft
    are verified; it is not called if nothing was drafted. It selects at most `Rows.draft_budget` tokens.

    The engine may discard a step after `plan` or `select` and plan again. So these two change nothing that a later
    plan depends on. `launched` does; it is called once for every launched step with emitting rows, with its decision.
    `observe` is called with the step's outcome and time, unless all its requests ended meanwhile or it was interrupted.
    Further steps may have been launched by then. Fewer tokens than selected may have been verified if memory was short,
    and more if the device selects. `begin` and `end` are called for every request, as for a drafter."""

    name = ""
    reads_drafts = False  # `select` depends on the draft tokens: a bias under the rejection rules, which refuse it
    reads_lengths = False  # needs `Rows.expected_left`
    reads_acceptance = False  # needs `Rows.acceptance` or `DraftBatch.probabilities`
    has_probes = False  # tries a drafter again after most of its draft tokens were rejected
    takes_best = False  # selects the most probable tokens: a device that knows them better may select as many others

    def __init__(self) -> None:
        self.decision = Decision()  # of the step that was planned last

    @property
    def pauses_drafter(self) -> bool:
        """Read before each step: whether a drafter on the device may skip it, and so save the time that it takes even
        if it drafts nothing. `plan` then returns zeros. It can't draft well for requests that run meanwhile."""
        return False

    def begin(self, request: Request) -> None:
        pass

    @abstractmethod
    def plan(self, rows: Rows) -> np.ndarray:
        """The longest draft of each row: int32 [B]. With a drafter on the device see `Drafting.propose`."""

    def select(self, drafts: DraftBatch) -> np.ndarray:
        """How many tokens of each draft to verify: int32 [B]."""
        return drafts.num

    def launched(self, decision: Decision) -> None:
        pass

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        pass

    def end(self, request_id: int) -> None:
        pass

    def drafter_updated(self) -> None:
        """The drafter has new weights."""

    def state_dict(self) -> dict[str, np.ndarray]:
        return {}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        if state:
            raise ValueError(
                f"not a state of the {self.name} policy, which keeps none: it holds {sorted(state)}; was "
                "speculation.policy changed?"
            )


class StaticPolicy(SpeculationPolicy):
    """A fixed number of tokens per batch-size bucket: {1: 6, 8: 3} drafts 6 for a single row, 3 for up to 8 rows, and
    none for more. A plain number is for any batch size. A draft is cut before the first token whose survival
    probability is below `min_confidence`."""

    name = "static"

    def __init__(self, num_speculative_tokens: int | Mapping[int, int], min_confidence: float = 0.0) -> None:
        super().__init__()
        if not 0 <= min_confidence <= 1:
            raise ValueError(f"speculation.min_confidence = {min_confidence}: must be from 0 (off) to 1")
        self.min_confidence = min_confidence
        self.reads_drafts = self.reads_acceptance = min_confidence > 0
        given = num_speculative_tokens
        self.buckets = sorted(given.items()) if isinstance(given, Mapping) else [(2**31 - 1, given)]
        for bound, k in self.buckets:
            if bound < 1 or k < 0:
                raise ValueError(
                    f"speculation.num_speculative_tokens: bucket {bound} = {k}: batch sizes start at 1, draft "
                    "lengths at 0"
                )

    def plan(self, rows: Rows) -> np.ndarray:
        k = next((k for bound, k in self.buckets if len(rows) <= bound), 0)
        caps = rows.limited(np.full(len(rows), k, np.int32))
        reason = f"{k} for {len(rows)} rows"
        if int(caps.sum()) > rows.draft_budget:
            caps = shorten_longest(caps, rows.draft_budget)
            reason += f", shortened to {rows.draft_budget} tokens: engine.max_num_batched_tokens"
        self.decision = Decision(reason)
        return caps

    def select(self, drafts: DraftBatch) -> np.ndarray:
        if self.min_confidence == 0:
            return drafts.num
        assert drafts.probabilities is not None
        survival = drafts.probabilities.cumprod(1)  # P(positions 0..j are all accepted), [B, K]
        likely = np.logical_and.accumulate(survival >= self.min_confidence, axis=1)
        return np.minimum(drafts.num, likely.sum(1, dtype=np.int32))


def shorten_longest(caps: np.ndarray, budget: int) -> np.ndarray:
    """Shorten caps to a sum of `budget`, the longest ones first: each becomes min(cap, n), and the rest of the
    budget is one token more for the first ones that were shortened. int32 [B]."""
    assert 0 <= budget < caps.sum()
    # sums[n]: the sum if each is at most n.
    sums = np.minimum(caps[:, None], np.arange(int(caps.max()) + 1)).sum(0)
    most = int(sums.searchsorted(budget, "right")) - 1
    shortened = np.minimum(caps, most)
    shortened[np.flatnonzero(caps > most)[: budget - int(sums[most])]] += 1
    return shortened.astype(np.int32)
