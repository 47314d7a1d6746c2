"""The policy that may be left on: drafts what pays at this step's load, for the rows where it pays, and nothing where
nothing does.

`plan` comes before drafting, since a head's time is spent before its guesses can be judged: from how deep its drafts
got so far, how much their chances differ and what a step costs it chooses one draft length for the batch, zero
included: the one whose best slots will bring most. Drafts from history cost next to nothing, so they may always be
offered.

`select` is an auction. A slot is one drafted position; its worth is its chance to stand, which is the product of the
chances up to it (so slots are taken in order within a row). Slots are taken best first, as long as tokens per second
rise: with b slots a step brings (rows + their chances) in T_draft + T(rows + b). Drafts that lie on a device alone are
auctioned there: how many slots are to be had follows from what such auctions bring (`Worth`).

Always: taking none is among the choices, and what is taken must beat it by a margin. What is not tried is not learned
of, so a small share of the time, and of the time that was saved, goes into probes: the best slot that was just refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from paceline.speculation.batch import HEAD_WINDOW, NO_LIMIT, Commits, DraftBatch, Load, Rows, are_same, places_of
from paceline.speculation.chances import Chances
from paceline.speculation.cost import CostTable
from paceline.speculation.depths import Depths
from paceline.speculation.policy import Decision
from paceline.speculation.worth import Worth
from paceline.types import Request, StepTrace

HEADS = {"eagle3": "eagle3", "hybrid": "eagle3", "draft_model": "draft_model"}  # who drafts with a model, by method
MARGIN, COMPANY = 0.01, 0.04  # gain that is wanted of a row alone, and how much more of one among many
PROBES = 0.001  # share of the time that may go into trying what does not seem to pay, …
REINVESTED = 0.02  # … and of the time that was saved
PROBATION = 16  # outcomes before a drafter's drafts are taken at their estimated worth; a slot at a time until then
NEGLIGIBLE = 0.002  # of a step: drafting that takes less is not worth a thought
MEMORY, PATIENCE = 32, 16  # auctions that are remembered, about, and that are held before they are judged by
PROBE_DEPTH = 2  # positions that a head's probe tries
MAX_POSITIONS = 16  # further ones are taken for the last
HEAD_PRIOR = 0.6  # a head's acceptance before any was seen


def margin(num_rows: int) -> float:
    """How much faster than plain decoding a choice must look. For wrong estimates; and since a token saved on one row
    of many hardly shortens a rollout that waits for another."""
    return 1 + MARGIN + COMPANY * (1 - 1 / num_rows)


class Yields:
    """What auctions brought, per row: tokens that stood, and slots that were taken for them. By powers of two of rows;
    None until some were held: at first, when little was said yet, they bring less than they will."""

    def __init__(self) -> None:
        self.figures = np.zeros((32, 3))  # by bit length of rows: tokens, slots, and how many auctions they are of

    def at(self, num_rows: int) -> tuple[float, float] | None:
        brought, taken, num = self.figures[num_rows.bit_length()].tolist()
        return (brought, taken) if num >= PATIENCE else None

    def observe(self, num_rows: int, brings: float, num_slots: float) -> None:
        mine = self.figures[num_rows.bit_length()]
        brought, taken, num = mine.tolist()
        num = min(num + 1, MEMORY)
        mine[:] = brought + (brings - brought) / num, taken + (num_slots - taken) / num, num


@dataclass(slots=True)
class _Step:
    """What is to be known of a step when it is over."""

    load: Load
    ids: np.ndarray
    load_s: float  # of the step without drafts
    is_ahead: bool = False  # as of the rows
    budget: int = NO_LIMIT  # draft tokens that may be verified, over all rows
    # What `commit` makes the policy's own once the step is launched.
    credit_s: float = 0.0  # for probes: what the step earns, less what it spends
    num_probes: int = 0
    probe_left: int = 0
    drafted_k: int = 0
    draft_s: float = 0.0
    probing: bool = False
    num_tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # as of the rows
    reads: dict[int, int] = field(default_factory=dict)  # positions that the head has computed, by request
    has_free_slot: bool = False  # one that is paid for, whether it seems to be worth it or not
    is_fair: bool = True  # no slots were left out for being on probation
    # With 0, 1, … drafted tokens, as far as it was asked for; as `load_s` from when the step was planned.
    steps_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    curves: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # of `Worth`
    asked: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # [B], for whom the head drafted, or was to
    cells: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))  # [B, K], of the drafts
    from_head: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # [B]
    chances: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # [B, K], 0 where nothing was drafted

    def follow(self, request_ids: np.ndarray) -> None:
        """Tell of these rows, in their order."""
        if are_same(request_ids, self.ids):
            return
        place = places_of(request_ids, self.ids)
        self.ids, self.asked, self.cells = request_ids, self.asked[place], self.cells[place]
        self.from_head, self.chances = self.from_head[place], self.chances[place]


class AutoPolicy:
    """For the drafter of this `method`."""

    name = "auto"
    reads_drafts = takes_best = True
    reads_lengths = False

    def __init__(self, costs: CostTable, max_tokens: int, method: str = "suffix") -> None:
        if max_tokens < 1:
            raise ValueError(
                f"speculation.num_speculative_tokens = {max_tokens}: the auto policy needs at least 1; to draft "
                "nothing, use speculation.method = 'none'"
            )
        self.costs, self.max_tokens = costs, max_tokens
        self.head = HEADS.get(method)  # who drafts with a model, if anyone
        self.has_history = self.head != method  # and whether anyone drafts without
        self.costly = self.head or method  # whose time the cost table knows
        self.yields = Yields()
        self.chances = Chances()
        self.depths = Depths(MAX_POSITIONS, HEAD_PRIOR)
        self.worth = Worth(max_tokens)
        self.decision = Decision()
        self._version = -1  # of the policy; none yet
        self._step = _Step(Load(), np.zeros(0, np.int64), 0.0)  # the one planned last
        self._credit_s = 0.0  # for probes
        self._num_probes = 0
        self._probe_left = 0  # steps that a probe still takes
        self._num_read: dict[int, int] = {}  # positions that the head has computed, by request

    def begin(self, request: Request) -> None:
        pass

    def end(self, request_id: int) -> None:
        self._num_read.pop(request_id, None)

    # -- before drafting --------------------------------------------------------------------------------------------

    def plan(self, rows: Rows) -> np.ndarray:
        if rows.version != self._version:
            if self._version >= 0:
                self.chances.fade()
                self.depths.fade()
                self.worth.renew()
                self._num_read.clear()  # a new version's head, or features, make it start again
            self._version = rows.version
        num_rows = len(rows)
        plain_s = self.costs.step_s(rows.load)
        credit_s = min(PROBES * plain_s, 10 * plain_s - self._credit_s)
        self._step = step = _Step(
            rows.load, rows.request_ids, plain_s, rows.is_ahead, rows.draft_budget,
            credit_s, self._num_probes, self._probe_left, num_tokens=rows.num_tokens,
        )  # fmt: skip
        caps = np.zeros(num_rows, np.int32)
        step.asked = np.zeros(num_rows, bool)
        if not step.budget:
            reason = "no room for drafts: engine.max_num_batched_tokens"
        else:
            if self.head is None:
                if self._history_pays(num_rows, plain_s):
                    caps[:] = step.drafted_k = self.max_tokens
            else:
                rows.head_caps = head_caps = self._head_caps(rows, plain_s)
                step.asked = head_caps > 0
                caps = np.maximum(caps, self.max_tokens) if self.has_history else head_caps
            reason = "nothing was drafted" if step.drafted_k else f"{self.costly} would not pay at {num_rows} rows"
        self.decision = Decision(reason, 0.0, plain_s, step)
        return rows.limited(caps)

    def commit(self, decision: Decision) -> None:
        step: _Step = decision.about
        self._credit_s += step.credit_s
        self._num_probes, self._probe_left = step.num_probes, step.probe_left
        self._num_read.update(step.reads)
        self.worth.grow_older()

    def _history_pays(self, num_rows: int, plain_s: float) -> bool:
        """Looking into history takes time too, where a fast GPU waits for it: is what auctions brought so far worth
        it?"""
        self._step.draft_s = draft_s = self.costs.draft_s(self.costly, num_rows, self.max_tokens)
        found = self.yields.at(num_rows)
        if draft_s < NEGLIGIBLE * plain_s or found is None:
            return True
        brings, num_slots = found  # per row
        num_taken = min(round(num_slots * num_rows), self._step.budget)
        seconds = draft_s + (float(self.costs.steps_s(self._step.load, num_taken)[-1]) if num_taken else plain_s)
        if (1 + brings) / seconds >= 1 / plain_s:  # what is taken of it then must look faster by a margin
            self._step.probe_left = 0
            return True
        price_s = draft_s + float(self.costs.steps_s(self._step.load, 1)[1]) - plain_s  # or nothing would be learned
        self._step.has_free_slot = True
        return self._goes_on(price_s, 2 if self._step.is_ahead else 0)

    def _head_caps(self, rows: Rows, plain_s: float) -> np.ndarray:
        """One draft length for all rows: argmax_k max_b (1 + G_k(b)) · rows / (T_draft(k) + T(rows + b)), G_k(b) the
        tokens that the best b slots of drafts of k bring a row."""
        num_rows, k_max, step = len(rows), self.max_tokens, self._step
        step.steps_s = self.costs.steps_s(step.load, num_rows * k_max)
        draft_s = [self.costs.draft_s(self.costly, num_rows, k) for k in range(1, 1 + k_max)]
        slots = self.worth.slots(num_rows)
        seconds = np.array(draft_s)[:, None] + step.steps_s[slots]
        step.curves = self.worth(self.depths)
        rates = np.where(slots <= step.budget, step.curves / seconds, 0.0)
        best = int(rates.argmax())
        caps = np.zeros(num_rows, np.int32)
        unread = self._num_unread(rows)
        gain = float(rates.flat[best]) * plain_s
        if gain >= margin(num_rows) and self._repays(rows, unread, gain, draft_s):
            step.probe_left = 0
            k = best // rates.shape[1] + 1
            caps[:] = step.drafted_k = k
            step.draft_s = draft_s[k - 1]
            return caps
        k = min(PROBE_DEPTH, k_max, step.budget)
        draft_once_s = self.costs.draft_s(self.costly, num_rows if step.is_ahead else 1, k)
        # Rows take turns where that costs nothing; else the one with the fewest positions to compute first.
        row = step.num_probes % num_rows if step.is_ahead else int(unread.argmin())
        read_s = self._read_s(int(unread[row]))
        price_s = draft_once_s + read_s + float(self.costs.steps_s(step.load, k)[k]) - plain_s
        if not self._goes_on(price_s, 1 if step.is_ahead else 0):
            return caps
        caps[row] = step.drafted_k = k
        step.draft_s, step.probing = draft_once_s, True
        return caps

    def _num_unread(self, rows: Rows) -> np.ndarray:
        """Positions of each row that the head has to compute before it can draft: int64 [B]. None for a head on a
        device, which computes them along with the target. A draft model computes all tokens but the last. An EAGLE-3
        head needs the target's features of these, so it can't draft before they are there."""
        if self._step.is_ahead or not len(rows.num_tokens):
            return np.zeros(len(rows), np.int64)
        read = np.array([self._num_read.get(request_id, 0) for request_id in rows.request_ids.tolist()])
        unread = np.maximum(rows.num_tokens - 1 - read, 0)
        if self.head == "draft_model":
            return unread
        return np.where(rows.num_computed >= rows.num_tokens - 1, np.minimum(unread, HEAD_WINDOW), 0)

    def _read_s(self, num_unread: int) -> float:
        """What it takes the head to compute so many positions: as many as a first draft token of as many rows."""
        return self.costs.draft_s(self.costly, num_unread, 1) if num_unread else 0.0

    def _repays(self, rows: Rows, unread: np.ndarray, gain: float, draft_s: list[float]) -> bool:
        """Whether what the head has to compute before its first draft is paid back by the tokens that rows may still
        emit. Judged by steps that only decode: next to a prompt's every draft seems to be cheap."""
        num_unread = int(unread.sum())
        if num_unread <= len(rows) * self.max_tokens:  # no more than what a step emits
            return True
        load = self._step.load
        decode = Load(load.num_rows, load.num_rows, load.num_context_tokens)
        plain_s = self.costs.step_s(decode)
        if load.num_query_tokens > load.num_rows:
            slots = np.minimum(self.worth.slots(load.num_rows), load.num_rows * self.max_tokens)
            steps_s = self.costs.steps_s(decode, int(slots[-1]))
            seconds = np.array(draft_s)[:, None] + steps_s[slots]
            gain = float((self._step.curves / seconds).max()) * plain_s
        num_left = math.inf if rows.draft_limits is None else 1 + float(rows.draft_limits.mean())
        return gain >= margin(len(rows)) and num_left * plain_s * (1 - 1 / gain) >= self._read_s(num_unread)

    def _goes_on(self, price_s: float, num_more: int) -> bool:
        """A probe, or another one if there is credit. Who drafts on a device, at the end of a step, is verified in the
        next, and what it is sure of is known in the one after that: so it takes some more steps."""
        step = self._step
        if step.probe_left:
            step.probe_left -= 1
            step.credit_s -= price_s  # a debt, if need be
            return True
        if not self._pay(price_s):
            return False
        step.num_probes += 1
        step.probe_left = num_more
        return True

    def _pay(self, price_s: float) -> bool:
        if self._credit_s + self._step.credit_s < price_s:
            return False
        self._step.credit_s -= price_s
        return True

    # -- after drafting ---------------------------------------------------------------------------------------------

    def select(self, drafts: DraftBatch) -> np.ndarray:
        num_rows, k = drafts.tokens.shape
        step, num_drafted = self._step, int(drafts.num.sum())
        if self._is_blind(step) and num_drafted and not step.probing and self.chances.least_seen() >= PROBATION:
            return self._select_unseen(drafts.num, num_drafted)
        self._look_at(drafts, step)
        chances = self.chances(step.cells)
        if num_drafted < chances.size:
            chances[np.arange(k) >= drafts.num[:, None]] = 0
        step.chances = chances
        survival = chances.cumprod(axis=1).ravel()
        order = self._admitted((-survival).argsort(kind="stable")[:num_drafted], num_rows)
        is_whole, order = len(order) == num_drafted, order[: step.budget]
        gain = np.zeros(len(order) + 1)
        survival[order].cumsum(out=gain[1:])
        if len(step.steps_s) <= len(order):
            step.steps_s = self.costs.steps_s(step.load, len(order))
        seconds = step.draft_s + step.steps_s[: len(order) + 1]
        rates = (num_rows + gain) / seconds
        best, verb = int(rates.argmax()), "takes"
        if rates[best] < margin(num_rows) * rates[0]:
            best = 0
        step.is_fair = not best or is_whole
        if step.probing:
            best, verb = max(best, min(PROBE_DEPTH, len(order))), "probes"
        elif not best and len(order) and self._may_try(order[:1], float(seconds[1] - seconds[0])):
            best, verb, step.is_fair = 1, "probes", False  # one of many is no auction
        self.decision = _decision(verb, best, len(order), float(gain[best]), float(seconds[best]), step)
        if best == num_drafted:
            return drafts.num
        return np.bincount(order[:best] // k, minlength=num_rows).astype(np.int32)

    def _is_blind(self, step: _Step) -> bool:
        """Whether drafts lie on the device alone: what is said of them here is of those before."""
        return step.is_ahead and not self.has_history

    def _select_unseen(self, num: np.ndarray, num_drafted: int) -> np.ndarray:
        """The same, by what auctions of such drafts bring. Which slots are the best is known where they lie; here they
        are shared evenly."""
        step, num_rows, num_drafting = self._step, len(num), int(np.count_nonzero(num))
        points, most = self.worth.slots(num_drafting), min(num_drafted, step.budget)
        slots = np.minimum(points[: max(1, int(points.searchsorted(most, "right")))], most)
        gain = (step.curves[int(num.max()) - 1, : len(slots)] - 1) * num_drafting
        gain[0] *= slots[0] / points[0]  # where there are fewer than the first point of the curve
        seconds = step.draft_s + step.steps_s[slots]
        rates = (num_rows + gain) / seconds
        at, verb = int(rates.argmax()), "takes"
        best, brings, takes_s = int(slots[at]), float(gain[at]), float(seconds[at])
        if rates[at] < margin(num_rows) * num_rows / (step.draft_s + step.steps_s[0]):
            best, brings, takes_s = 0, 0.0, step.draft_s + float(step.steps_s[0])
            if self._pay(price_s := float(step.steps_s[1] - step.steps_s[0])):
                best, verb, takes_s = 1, "probes", takes_s + price_s
        self.decision = _decision(verb, best, num_drafted, brings, takes_s, step)
        if best == num_drafted:
            return num
        each, more = divmod(best, num_drafting)
        return np.minimum(num, each + ((num > 0).cumsum() <= more)).astype(np.int32)

    def _look_at(self, drafts: DraftBatch, step: _Step) -> None:
        step.cells = self.chances.cells(drafts)
        step.from_head = self._are_from_head(drafts)
        if self.head is not None and not step.is_ahead and len(step.num_tokens) == len(drafts.num):
            read = step.from_head & (drafts.num > 0)
            step.reads = dict(zip(step.ids[read].tolist(), (step.num_tokens[read] - 1).tolist(), strict=True))

    def _are_from_head(self, drafts: DraftBatch) -> np.ndarray:
        if self.head is None or drafts.sources is None:
            return np.full(len(drafts.num), self.head is not None)
        return drafts.sources == drafts.names.index(self.head)

    def _admitted(self, order: np.ndarray, num_rows: int) -> np.ndarray:
        """Which of these slots may bid: of a drafter of which next to nothing is known only a few, whatever it says of
        them."""
        if self.chances.least_seen() >= PROBATION:
            return order
        unknown = self.chances.num_seen(self._step.cells.ravel()[order]) < PROBATION
        return order[~unknown | (np.cumsum(unknown) <= max(1, num_rows // 16))]

    def _may_try(self, slot: np.ndarray, price_s: float) -> bool:
        """One that does not seem to be worth it."""
        return self._step.has_free_slot or self._is_due(slot) or self._pay(price_s)

    def _is_due(self, slot: np.ndarray) -> bool:
        """Whether a head was asked of which next to nothing is known: where a step's first slot costs most, those that
        may bid never pay, and it would be asked on and on."""
        asked = self.head is not None and self._step.drafted_k > 0
        return asked and bool((self.chances.num_seen(self._step.cells.ravel()[slot]) < PROBATION).all())

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        step: _Step = decision.about
        unseen, is_curious = commits.drafts, self.head is not None and self.worth.is_curious
        if unseen is not None and unseen.tokens.shape[1]:  # other ones than were looked at
            self._account(commits, step, decision)
            if is_curious or not self._is_blind(step) or self.chances.least_seen() < PROBATION:
                step.ids = commits.request_ids
                step.asked = unseen.num > 0
                self._look_at(unseen, step)
                step.chances = self.chances(step.cells) * step.asked[:, None]
                self._learn(commits, step, is_curious)
        elif step.cells.shape[1]:
            self._account(commits, step, decision)
            step.follow(commits.request_ids)
            self._learn(commits, step, is_curious)
        if step.is_ahead:  # drafted for all, where the step was computed: as much of its time as was thought
            k, draft_s = step.drafted_k, step.draft_s
            if trace.num_guessed > k > 0:  # its graph could no less
                k = trace.num_guessed
                draft_s = self.costs.draft_s(self.costly, trace.num_rows, k)
            self.costs.observe(trace, k, self.costly, None, min(draft_s, trace.total_s / 2))
        else:
            self.costs.observe(trace, step.drafted_k, self.costly, 1 if step.probing else None, None)

    def _account(self, commits: Commits, step: _Step, decision: Decision) -> None:
        num = len(commits.num)
        brings = int(commits.num_accepted.sum()) / num
        if (step.is_fair or not commits.num_drafted.any()) and not step.probing:
            self.yields.observe(num, brings, int(commits.num_drafted.sum()) / num)
        saved_s = step.load_s * (1 + brings) - decision.expected_s
        self._credit_s += max(0.0, REINVESTED * saved_s)

    def _learn(self, commits: Commits, step: _Step, is_curious: bool) -> None:
        if is_curious:
            self._judge(commits, step)
        if commits.num_drafted.any():
            self.chances.observe(step.cells, commits.num_accepted, commits.num_known)

    def _judge(self, commits: Commits, step: _Step) -> None:
        """How deep a head's drafts get. One that was asked, and whose guesses (if any came) were then refused, is not
        worth asking again; and one of whose guesses only the likeliest are tried is not as good as those. So where all
        that was tried stood, what is thought of the guesses behind it counts as their outcome."""
        mine = step.from_head
        self.depths.observe(commits.num_accepted * mine, commits.num_known * mine)
        if int(commits.num_drafted.sum()) < step.chances.size:
            is_open = mine & step.asked & (commits.num_accepted == commits.num_drafted)
            self.depths.estimate(step.chances[is_open], commits.num_drafted[is_open])
        self.worth.hear(step.chances[mine & (step.chances[:, 0] > 0)])

    def state(self) -> dict[str, np.ndarray]:
        return {
            **self.chances.state(),
            "depths": self.depths.counts.copy(),
            "yields": self.yields.figures.copy(),
            "version": np.array([self._version]),
        }

    def restore(self, state: Mapping[str, np.ndarray]) -> None:
        if state.keys() != {"counts", "depths", "yields", "version"}:
            raise ValueError(
                f"not a state of the auto policy: it holds {sorted(state) or 'nothing'}; "
                "was speculation.policy changed?"
            )
        depths, yields = self.depths.counts.shape, self.yields.figures.shape
        if (state["depths"].shape, state["yields"].shape, state["version"].shape) != (depths, yields, (1,)):
            raise ValueError("the auto policy's state is damaged: its arrays have other shapes than it saves")
        self.chances.restore(state)
        self.depths.counts = state["depths"].copy()
        self.worth.renew()
        self.yields.figures = state["yields"].copy()
        self._version = int(state["version"][0])


def _decision(verb: str, num_taken: int, num_slots: int, brings: float, seconds: float, step: _Step) -> Decision:
    said = (
        f"{verb} {num_taken} of {num_slots} slots: {brings:.2f} tokens for {1e3 * (seconds - step.load_s):.2f} ms more"
    )
    return Decision(said, brings, seconds, step)
