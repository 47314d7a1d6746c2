"""Length-aware budgets: drafts go to the rows that would keep everybody waiting (DAS, arXiv 2511.13841).

Every few steps the long tail's problem (`budgets`) is solved for the rows that run: expected lengths from the length
model, prices from the cost table at the present load, and how drafts fare from what became of earlier ones. A row's
budget is then spread over the steps it has left. Parts of tokens are carried over, so that a row with 0.5 drafts one
token every other step.

Always: caps depend on lengths, load and past outcomes, never on what is drafted now, so every verification rule may be
used. The same inputs give the same caps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from paceline.speculation import budgets
from paceline.speculation.batch import Commits, DraftBatch, Load, Rows, places_of
from paceline.speculation.cost import CostTable
from paceline.speculation.policy import Decision, level
from paceline.types import Request, StepTrace

EVERY = 16  # steps between two solutions
CHANGED = 4  # and where rows came or went
FADE = 0.5  # what a new policy version leaves of the outcomes counted
PRIOR = 0.6  # chance of a drafted token before any was seen, …
PRIOR_STEPS = 16.0  # … worth so many rows' steps
OWN_STEPS = 32.0  # rows' steps that all others' outcomes are worth beside a request's own
PRICE = 0.05  # a price per token this close to the one solved with is the same
ROUNDS = 4  # solutions at most, until price and use agree
PHASE = (5**0.5 - 1) / 2  # sets requests' carried parts apart, so that they do not all draft in the same step
BELOW_ONE = float(np.nextafter(1, 0))
OFFERED, DRAFTED, ACCEPTED = range(3)  # rows of the counts: caps, drafts and acceptances that got beyond a position


def chance(counts: np.ndarray) -> float:
    """That a drafted token stands if those before it do, at any position."""
    reached = counts[DRAFTED].copy()
    reached[1:] = np.minimum(reached[1:], counts[ACCEPTED, :-1])
    return float((counts[ACCEPTED].sum() + PRIOR_STEPS * PRIOR) / (reached.sum() + PRIOR_STEPS))


def shares(counts: np.ndarray, ratios: np.ndarray, weight: float) -> np.ndarray:
    """Of the steps in which position j was offered: in how many a token stood there, and in how many one was drafted.
    [2, ..., K], never rising with j. ratios [2, K] says beforehand what position j has of what the one before it has,
    as if seen `weight` times."""
    found = np.empty((2, *counts.shape[:-2], counts.shape[-1]))
    for kind, row in enumerate((ACCEPTED, DRAFTED)):
        level = np.ones(counts.shape[:-2])
        for j in range(counts.shape[-1]):
            expected = counts[..., row, j] + weight * ratios[kind, j] * level
            level = np.minimum(level, expected / (counts[..., OFFERED, j] + weight))
            found[kind, ..., j] = level
    return found


def fit(standing: np.ndarray, filled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(α, k) of rows whose positions fare so, both [B].

    Draft up to m positions at every step: a step then verifies V(m) = Σ_{j<m} filled_j tokens and emits 1 + S(m), with
    S(m) = Σ_{j<m} standing_j. So per emitted token, V/(1+S) are spent and the share S/(1+S) is accepted. The model has
    k(1 − e^{−αb}) for a spending of b. Two parameters meet two facts: the first tokens' worth, α·k = S(1)/V(1), which
    decides whether to draft at all, and the share at full length. With x = αb and ρ = (S(K)/V(K)) / (S(1)/V(1)):

        (1 − e^{−x}) / x = ρ,    k = b · αk / x

    Drafts so good that k would pass 1 keep the first fact and k = 1: they are underrated, never overrated.
    """
    worth = standing[:, 0] / filled[:, 0]
    brings, takes = standing.sum(1), filled.sum(1)
    rho = np.clip(brings / (takes * worth), 1e-6, 1.0)
    x = 1 / rho  # right of the root of a concave function, from where Newton comes down without passing it
    for _ in range(8):
        x = x - (1 - np.exp(-x) - rho * x) / np.minimum(np.exp(-x) - rho, -1e-12)
    k = np.clip(worth * takes / (1 + brings) / np.maximum(x, 1e-9), 1e-6, 1.0)
    return worth / k, k


@dataclass(frozen=True, slots=True)
class _Spread:
    """Budgets of some rows, spread over their steps."""

    depths: np.ndarray  # float64 [B], positions per step, parts included
    standing: np.ndarray  # float64 [B, K], see `shares`
    filled: np.ndarray
    why: str


@dataclass(frozen=True, slots=True)
class _Planned:
    """What a step was planned with."""

    request_ids: np.ndarray
    caps: np.ndarray  # int32 [B]
    carried: np.ndarray  # float64 [B], parts of a token that are left for the next step
    solved: _Spread | None  # where budgets were solved anew for it


class DasPolicy:
    """`solve` is the rule that makes budgets: `budgets.solve`, or another to compare it with."""

    name = "das"
    reads_drafts = False
    reads_lengths = True
    takes_best = False

    def __init__(self, costs: CostTable, max_tokens: int, solve: budgets.Solver = budgets.solve) -> None:
        if max_tokens < 1:
            raise ValueError(
                f"speculation.num_speculative_tokens = {max_tokens}: the das policy needs at least 1; to draft "
                "nothing, use speculation.policy = 'static' with 0"
            )
        self.costs, self.max_tokens, self.solve = costs, max_tokens, solve
        self.counts = np.zeros((3, max_tokens))
        self.decision = Decision()
        self._version = -1  # of the policy; none yet
        self._why = ""
        self._drafter = ""  # as traces call it; none seen yet
        self._num_steps = EVERY  # since the last solution
        self._solved_for = np.zeros(0, np.int64)
        # Of live requests, by slot.
        self._num_begun = 0
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._own = np.zeros((0, 3, max_tokens))
        self._depths = np.zeros(0)  # positions per step, parts included
        self._carried = np.zeros(0)  # parts of a token, below 1
        self._standing = np.zeros((0, max_tokens))
        self._filled = np.zeros((0, max_tokens))

    # -- requests ---------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> None:
        if not self._free:
            self._grow()
        slot = self._slots[request.request_id] = self._free.pop()
        self._own[slot], self._depths[slot] = 0, 0
        self._carried[slot] = self._num_begun * PHASE % 1
        self._num_begun += 1
        self._standing[slot], self._filled[slot] = 0, 0

    def end(self, request_id: int) -> None:
        self._free.append(self._slots.pop(request_id))

    def _grow(self) -> None:
        num, more = len(self._own), max(16, len(self._own))
        for name in ("_own", "_depths", "_carried", "_standing", "_filled"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((more, *array.shape[1:]), array.dtype)]))
        self._free += range(num + more - 1, num - 1, -1)

    def _slots_of(self, request_ids: np.ndarray) -> np.ndarray:
        return np.array([self._slots[request_id] for request_id in request_ids.tolist()], np.int64)

    # -- a step -----------------------------------------------------------------------------------------------------

    def plan(self, rows: Rows) -> np.ndarray:
        assert len(rows.expected_left) == len(rows)
        if rows.version != self._version:
            if self._version >= 0:
                self.counts *= FADE
                self._own *= FADE
            self._version, self._num_steps = rows.version, EVERY
        slots = self._slots_of(rows.request_ids)
        changed = not np.array_equal(rows.request_ids, self._solved_for)
        solved = self._spread(rows, slots) if self._num_steps >= (CHANGED if changed else EVERY) else None
        spread = solved or _Spread(self._depths[slots], self._standing[slots], self._filled[slots], self._why)
        depths = rows.limited(spread.depths)
        if (total := float(depths.sum())) > rows.draft_budget:
            depths = depths * (rows.draft_budget / total)  # shares stay: the longest rows keep the longest drafts
        wanted = rows.limited(np.minimum(depths + self._carried[slots], self.max_tokens))
        caps = wanted.astype(np.int32)
        if int(caps.sum()) > rows.draft_budget:  # many carried parts came to a token at once
            caps = level(caps, rows.draft_budget)
        reached = np.arange(self.max_tokens) < caps[:, None]
        num_extra = round(float((spread.filled * reached).sum()))
        self.decision = Decision(
            f"{caps.sum()} for {(caps > 0).sum()} of {len(rows)} rows; {spread.why}",
            float((spread.standing * reached).sum()),
            float(self.costs.steps_s(rows.load, num_extra)[num_extra]) + self._draft_s(caps),
            _Planned(rows.request_ids, caps, np.minimum(wanted - caps, BELOW_ONE), solved),
        )
        return caps

    def commit(self, decision: Decision) -> None:
        planned: _Planned = decision.about
        slots, solved = self._slots_of(planned.request_ids), planned.solved
        self._carried[slots] = planned.carried
        if solved is not None:
            self._depths[slots], self._standing[slots], self._filled[slots] = (
                solved.depths, solved.standing, solved.filled
            )  # fmt: skip
            self._why, self._num_steps, self._solved_for = solved.why, 0, planned.request_ids.copy()
        self._num_steps += 1

    def _spread(self, rows: Rows, slots: np.ndarray) -> _Spread:
        """Solve, and spread each row's budget over its steps. A token's price is what all tokens of a step add to it,
        shared out, and so depends on how many there are; start from all that might be, and look again until price and
        use agree."""
        lengths = rows.expected_left
        ratios = np.array([[chance(self.counts)], [1.0]]).repeat(self.max_tokens, 1)
        levels = shares(self.counts, ratios, PRIOR_STEPS)
        ratios = levels / np.concatenate([np.ones((2, 1)), levels[:, :-1]], 1)
        standing, filled = shares(self._own[slots], ratios, OWN_STEPS)
        alpha_B, k_B = fit(standing, filled)
        # Full drafts get the last row down to so many steps. Nobody needs to be done before that.
        enough_B = budgets.needed(lengths, alpha_B, k_B, (lengths / (1 + standing.sum(1))).max(initial=0))
        low, high = 0, int(np.ceil(filled.sum()))
        # As the steps to come will be: prompts that this one computes are no part of them.
        load = Load(len(rows), len(rows), rows.load.num_context_tokens)
        seconds = self.costs.steps_s(load, high)
        num_extra, price, num_steps = high, 0.0, 0.0
        depths = np.full(len(rows), float(self.max_tokens))
        draft_s = self._draft_s(depths)
        for again in range(ROUNDS):
            now = (float(seconds[num_extra] - seconds[0]) + draft_s) / max(1, num_extra)
            if again and abs(now - price) <= PRICE * price:
                break
            price = now
            p_B = np.minimum(enough_B, self.solve(lengths, alpha_B, k_B, float(seconds[0]), price).budgets)
            steps_B = lengths - budgets.accepted(lengths, alpha_B, k_B, p_B)
            rates = np.minimum(p_B / np.maximum(steps_B, 1e-9), filled.sum(1))
            depths, num_steps, used = _depths(rates, filled), float(steps_B.max(initial=0)), int(np.ceil(rates.sum()))
            draft_s = self._draft_s(depths) if used else draft_s
            low, high = (num_extra, high) if used >= num_extra else (low, num_extra)
            num_extra = used if low < used < high else (low + high) // 2
        why = (
            f"{num_steps:.0f} steps to go instead of {lengths.max(initial=0):.0f}, "
            f"a token costs {price / float(seconds[0]):.1%} of a step"
        )
        return _Spread(depths, standing, filled, why)

    def _draft_s(self, depths: np.ndarray) -> float:
        return self.costs.draft_s(self._drafter, int((depths > 0).sum()), int(np.ceil(depths.max(initial=0))))

    def select(self, drafts: DraftBatch) -> np.ndarray:
        return drafts.num

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        self._drafter = trace.drafter
        slots = self._slots_of(commits.request_ids)
        planned: _Planned = decision.about
        offered = planned.caps[places_of(commits.request_ids, planned.request_ids)]
        self.costs.observe(trace, int(offered.max(initial=0)))
        position = np.arange(self.max_tokens)
        beyond = np.stack(
            [count[:, None] > position for count in (offered, commits.num_drafted, commits.num_accepted)],
            1,
        )  # [B, 3, K]
        # A draft that its sequence's end cut short was not wrong.
        beyond &= (commits.num > commits.num_accepted)[:, None, None]
        self._own[slots] += beyond
        self.counts += beyond.sum(0)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, np.ndarray]:
        return {"counts": self.counts.copy(), "version": np.array([self._version])}

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state.keys() != {"counts", "version"}:
            raise ValueError(
                f"not a state of the das policy: it holds {sorted(state) or 'nothing'}; was speculation.policy changed?"
            )
        if state["counts"].ndim != 2 or len(state["counts"]) != 3 or state["version"].shape != (1,):
            raise ValueError("the das policy's state is damaged: its arrays have other shapes than it saves")
        known = min(self.max_tokens, state["counts"].shape[1])  # positions; there may have been more, or fewer
        self.counts = np.zeros((3, self.max_tokens))
        self.counts[:, :known] = state["counts"][:, :known]
        self._version = int(state["version"][0])


def _depths(rates: np.ndarray, filled: np.ndarray) -> np.ndarray:
    """How many positions to offer, so that as many as `rates` are drafted: V(m) = rate, between two positions in
    parts."""
    takes = np.concatenate([np.zeros((len(filled), 1)), np.cumsum(filled, 1)], 1)  # V(0) … V(K)
    whole = np.minimum((takes[:, 1:] <= rates[:, None]).sum(1), filled.shape[1] - 1)
    row = np.arange(len(filled))
    return whole + np.clip((rates - takes[row, whole]) / filled[row, whole], 0, 1)
