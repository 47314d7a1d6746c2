"""The policy `das`: longer drafts for rows that are expected to end last (DAS, arXiv 2511.13841).

Every few steps the budgets of the running rows are computed (`budgets`), from expected lengths (the length model), the
cost table at the present load, and the acceptance model. A row's budget is distributed over its remaining steps.
Fractions of tokens are carried over: a row with 0.5 drafts one token every other step.

Invariant: caps depend on lengths, load and past drafts, never on the drafts of this step, so every acceptance rule may
be used. The same inputs give the same caps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.speculation import budgets
from paceline.speculation.acceptance import KEPT_BY_NEW_VERSION
from paceline.speculation.batch import Commits, Load, Rows, places_of
from paceline.speculation.cost import CostTable, is_representative
from paceline.speculation.policy import Decision, SpeculationPolicy, shorten_longest
from paceline.types import Request, StepTrace

SOLVE_EVERY = 16  # steps
SOLVE_CHANGED = 4  # steps, if rows were added or removed
OWN_PRIOR = 32.0  # outcomes of all requests that count beside a request's own
MIN_SHARE, MIN_ACCEPTED = 1e-6, 1e-3  # of steps in which a position is drafted; of draft tokens that are accepted
SAME_COST = 0.05  # relative difference of costs per token that does not matter
MAX_ROUNDS = 4  # solutions until the cost per token and the number of tokens agree
PHASE = (5**0.5 - 1) / 2  # of carried fractions, so that requests do not all draft in the same step
BELOW_ONE = float(np.nextafter(1, 0))


def fit(survival: np.ndarray, drafted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(α, k) of each row: float64 [B]. `survival` [B, K]: the probability that a token is drafted and accepted at each
    position. `drafted` [B, K]: the probability that one is drafted.

    With drafts of up to m positions a step verifies V(m) = Σ_{j<m} drafted_j tokens and emits 1 + S(m), with
    S(m) = Σ_{j<m} survival_j. So per emitted token, V/(1+S) are spent and the share S/(1+S) is accepted. The model has
    k(1 − e^{−αb}) for a spending of b. Two parameters meet two conditions: the value of the first tokens,
    α·k = S(1)/V(1), which decides whether to draft at all, and the share at full length. With x = αb and
    ρ = (S(K)/V(K)) / (S(1)/V(1)):

        (1 − e^{−x}) / x = ρ,    k = b · αk / x

    If k would be more than 1, only the first condition is met, with k = 1: that underestimates the drafts.
    """
    first = survival[:, 0] / drafted[:, 0]
    num_accepted, num_verified = survival.sum(1), drafted.sum(1)
    rho = np.clip(num_accepted / (num_verified * first), 1e-6, 1.0)
    x = 1 / rho  # above the root of a concave function: Newton's method does not pass it
    for _ in range(8):
        x = x - (1 - np.exp(-x) - rho * x) / np.minimum(np.exp(-x) - rho, -1e-12)
    k = np.clip(first * num_verified / (1 + num_accepted) / np.maximum(x, 1e-9), 1e-6, 1.0)
    return first / k, k


@dataclass(frozen=True, slots=True)
class _Solution:
    """Draft lengths of some rows, and what is expected of them."""

    lengths: np.ndarray  # float64 [B], tokens per step, with fractions
    survival: np.ndarray  # float64 [B, K], see `fit`
    drafted: np.ndarray
    reason: str


@dataclass(frozen=True, slots=True)
class _Planned:
    """A planned step."""

    request_ids: np.ndarray
    caps: np.ndarray  # int32 [B]
    carried: np.ndarray  # float64 [B], fractions of a token that are left for the next step
    solution: _Solution | None  # if budgets were computed for it


class DasPolicy(SpeculationPolicy):
    """`solve` computes the budgets."""

    name = "das"
    reads_lengths = reads_acceptance = True

    def __init__(self, costs: CostTable, max_tokens: int, solve: budgets.Solver = budgets.solve) -> None:
        if max_tokens < 1:
            raise ValueError(
                f"speculation.num_speculative_tokens = {max_tokens}: the das policy needs at least 1; to draft "
                "nothing, use speculation.policy = 'static' with 0"
            )
        self.costs, self.max_tokens, self.solve = costs, max_tokens, solve
        super().__init__()
        self._version = -1  # of the policy; none yet
        self._reason = ""
        self._num_steps = SOLVE_EVERY  # since the last solution
        self._solved_for = np.zeros(0, np.int64)
        # Of live requests, by index.
        self._num_begun = 0
        self._indices: dict[int, int] = {}
        self._free: list[int] = []
        self._outcomes = np.zeros((0, 2))  # accepted tokens, and tokens with a known outcome
        self._lengths = np.zeros(0)  # tokens per step, with fractions
        self._carried = np.zeros(0)  # fractions of a token, below 1
        self._survival = np.zeros((0, max_tokens))
        self._drafted = np.zeros((0, max_tokens))

    # -- requests ---------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        if not self._free:
            self._grow()
        index = self._indices[request.request_id] = self._free.pop()
        for array in (self._outcomes, self._lengths, self._survival, self._drafted):
            array[index] = 0
        self._carried[index] = self._num_begun * PHASE % 1
        self._num_begun += 1

    def end(self, request_id: int) -> None:
        self._free.append(self._indices.pop(request_id))

    def _grow(self) -> None:
        num, more = len(self._lengths), max(16, len(self._lengths))
        for name in ("_outcomes", "_lengths", "_carried", "_survival", "_drafted"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]))
        self._free += range(num + more - 1, num - 1, -1)

    def _indices_of(self, request_ids: np.ndarray) -> np.ndarray:
        return np.array([self._indices[request_id] for request_id in request_ids.tolist()], np.int64)

    # -- a step -----------------------------------------------------------------------------------------------------

    def plan(self, rows: Rows) -> np.ndarray:
        assert len(rows.expected_left) == len(rows)
        if rows.version != self._version:
            if self._version >= 0:
                self._outcomes *= KEPT_BY_NEW_VERSION
            self._version, self._num_steps = rows.version, SOLVE_EVERY
        at = self._indices_of(rows.request_ids)
        changed = not np.array_equal(rows.request_ids, self._solved_for)
        is_due = self._num_steps >= (SOLVE_CHANGED if changed else SOLVE_EVERY)
        new = self._solve(rows, at) if is_due else None
        solution = new or _Solution(self._lengths[at], self._survival[at], self._drafted[at], self._reason)
        lengths = rows.limited(solution.lengths)
        if (total := float(lengths.sum())) > rows.draft_budget:
            lengths = lengths * (rows.draft_budget / total)
        wanted = rows.limited(np.minimum(lengths + self._carried[at], self.max_tokens))
        caps = wanted.astype(np.int32)
        if int(caps.sum()) > rows.draft_budget:  # many carried fractions became a token at once
            caps = shorten_longest(caps, rows.draft_budget)
        reached = np.arange(self.max_tokens) < caps[:, None]
        num_verified = round(float((solution.drafted * reached).sum()))
        self.decision = Decision(
            f"{caps.sum()} for {(caps > 0).sum()} of {len(rows)} rows; {solution.reason}",
            float((solution.survival * reached).sum()),
            float(self.costs.steps_s(rows.load, num_verified)[num_verified]) + self._draft_s(rows.drafter, caps),
            about=_Planned(rows.request_ids, caps, np.minimum(wanted - caps, BELOW_ONE), new),
        )
        return caps

    def launched(self, decision: Decision) -> None:
        planned: _Planned = decision.about
        at, new = self._indices_of(planned.request_ids), planned.solution
        self._carried[at] = planned.carried
        if new is not None:
            self._lengths[at], self._survival[at], self._drafted[at] = new.lengths, new.survival, new.drafted
            self._reason, self._num_steps, self._solved_for = new.reason, 0, planned.request_ids.copy()
        self._num_steps += 1

    def _acceptance(self, rows: Rows, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """`survival` and `drafted` of each row, [B, K]: those of the drafter's latest drafts, with probabilities scaled
        by how a request's own draft tokens did, compared with all requests'."""
        survival = rows.acceptance.survival(rows.drafter, self.max_tokens).mean(0)
        drafted = np.maximum(rows.acceptance.is_drafted(rows.drafter, self.max_tokens).mean(0), MIN_SHARE)
        survival = np.maximum(survival, MIN_ACCEPTED * drafted)
        reached = np.minimum(drafted, np.concatenate([[1.0], survival[:-1]]))
        mean = float(survival.sum() / reached.sum())  # of all draft tokens with an outcome
        accepted, known = self._outcomes[at].T
        scale = (accepted + OWN_PRIOR * mean) / (known + OWN_PRIOR) / mean
        own = survival * scale[:, None] ** np.arange(1, 1 + self.max_tokens)
        drafted_BK = np.broadcast_to(drafted, own.shape)
        return np.minimum.accumulate(np.minimum(own, drafted_BK), axis=1), drafted_BK

    def _solve(self, rows: Rows, at: np.ndarray) -> _Solution:
        """Compute budgets and distribute them over the rows' steps. The cost per token depends on how many tokens a
        step has: start with the most, and repeat until both agree."""
        lengths = rows.expected_left
        survival, drafted = self._acceptance(rows, at)
        alpha_B, k_B = fit(survival, drafted)
        # Full drafts reduce the last row to so many steps. No row needs to end before that.
        enough_B = budgets.needed(lengths, alpha_B, k_B, (lengths / (1 + survival.sum(1))).max(initial=0))
        low, high = 0, int(np.ceil(drafted.sum()))
        # The steps to come compute no prompts.
        load = Load(len(rows), len(rows), rows.load.num_context_tokens)
        seconds = self.costs.steps_s(load, high)
        num_verified, cost, num_steps = high, 0.0, 0.0
        draft_lengths = np.full(len(rows), float(self.max_tokens))
        draft_s = self._draft_s(rows.drafter, draft_lengths)
        for again in range(MAX_ROUNDS):
            now = (float(seconds[num_verified] - seconds[0]) + draft_s) / max(1, num_verified)
            if again and abs(now - cost) <= SAME_COST * cost:
                break
            cost = now
            p_B = np.minimum(enough_B, self.solve(lengths, alpha_B, k_B, float(seconds[0]), cost).budgets)
            steps_B = lengths - budgets.accepted(lengths, alpha_B, k_B, p_B)
            rates = np.minimum(p_B / np.maximum(steps_B, 1e-9), drafted.sum(1))
            draft_lengths, num_steps = _draft_lengths(rates, drafted), float(steps_B.max(initial=0))
            used = int(np.ceil(rates.sum()))
            draft_s = self._draft_s(rows.drafter, draft_lengths) if used else draft_s
            low, high = (num_verified, high) if used >= num_verified else (low, num_verified)
            num_verified = used if low < used < high else (low + high) // 2
        reason = (
            f"{num_steps:.0f} steps left instead of {lengths.max(initial=0):.0f}, "
            f"a token costs {cost / float(seconds[0]):.1%} of a step"
        )
        return _Solution(draft_lengths, survival, drafted, reason)

    def _draft_s(self, drafter: str, lengths: np.ndarray) -> float:
        return self.costs.draft_s(drafter, int((lengths > 0).sum()), int(np.ceil(lengths.max(initial=0))))

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        planned: _Planned = decision.about
        caps = planned.caps[places_of(commits.request_ids, planned.request_ids)]
        self.costs.observe(trace, trace.draft_s)
        if is_representative(trace):
            self.costs.observe_drafting(trace.drafter, trace.num_rows, int(caps.max(initial=0)), trace.draft_s)
        self._outcomes[self._indices_of(commits.request_ids)] += np.stack([commits.num_accepted, commits.num_known], 1)


def _draft_lengths(rates: np.ndarray, drafted: np.ndarray) -> np.ndarray:
    """Draft lengths, with fractions, at which V(length) = rate: see `fit`."""
    num_verified = np.concatenate([np.zeros((len(drafted), 1)), np.cumsum(drafted, 1)], 1)  # V(0) … V(K)
    whole = np.minimum((num_verified[:, 1:] <= rates[:, None]).sum(1), drafted.shape[1] - 1)
    row = np.arange(len(drafted))
    return whole + np.clip((rates - num_verified[row, whole]) / drafted[row, whole], 0, 1)
