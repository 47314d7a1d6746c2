"""The policy `auto`: drafts only if that makes a step's tokens per second higher, at the present load.

`plan` is called before drafting, because a head takes time to draft. From the acceptance of the drafter's latest drafts
(`DraftCurves`) and from the cost table it chooses one draft length for all rows, which may be 0.

`select` is called with the drafts and chooses the tokens to verify. A token's survival probability is the probability
that it and all tokens before it are accepted. Tokens are selected in order of survival, as long as tokens per second
rise: with n selected tokens a step emits (rows + the sum of their survival) tokens in T_draft + T(rows + n) seconds.
Drafts that only the device knows are selected there; the host decides how many, from the curves.

Invariants: a choice must be faster than plain decoding by a margin, by estimate. A small share of the time, and of the
time that was saved, is spent on probes: draft tokens that are verified only to measure how a drafter does. Now and then
a step runs without drafts though they would pay, so that the time of such steps is observed and not only estimated.

A head on the device that would not pay even for a single row is paused; see `Pauses`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from paceline.speculation.acceptance import MIN_OUTCOMES, AcceptanceModel
from paceline.speculation.batch import HEAD_WINDOW, Commits, Load, Rows
from paceline.speculation.cost import CostTable, is_representative, row_bucket
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.draft_curves import DraftCurves
from paceline.speculation.pauses import Pauses
from paceline.speculation.policy import Decision, SpeculationPolicy
from paceline.types import Request, StepTrace

# Gain that is required with one row, and how much more with many: a token saved on one row of many hardly shortens a
# rollout, which ends with its last row.
MARGIN, MARGIN_MANY_ROWS = 0.01, 0.04
PROBES = 0.001  # share of the time that may be spent on probes, …
REINVESTED = 0.02  # … and of the time that was saved
NEGLIGIBLE = 0.002  # of a step: a drafter that takes less may always draft
NUM_KEPT = MIN_OUTCOMES / 4  # outcomes of a history that still count when it has new entries
PROBE_LENGTH = 2  # draft tokens of a model's probe
PAUSE_OUTCOMES = 8  # of a head, before it is paused


def margin(num_rows: int) -> float:
    """How much faster than plain decoding a choice must be, by estimate."""
    return 1 + MARGIN + MARGIN_MANY_ROWS * (1 - 1 / num_rows)


@dataclass(slots=True)
class _Step:
    """A planned step."""

    load: Load
    acceptance: AcceptanceModel
    request_ids: np.ndarray
    num_tokens: np.ndarray  # int64 [B], or empty
    plain_s: float  # estimated time without drafts
    on_device: bool
    budget: int  # draft tokens that may be verified, over all rows
    # What `launched` makes part of the policy's state.
    credit_s: float  # for probes: what the step adds, minus what it spends
    num_probes: int
    probe_left: int
    num_drafting: int  # steps with drafts of about so many rows, since one without
    is_plain: bool = False  # without drafts though they would pay
    is_paused: bool = False  # without the head
    num_selected: int = -1  # draft tokens to verify, if there are any to select from
    num_read: dict[int, int] = field(default_factory=dict)  # positions that the model has computed, by request
    draft_length: int = 0
    draft_s: float = 0.0
    is_probe: bool = False
    probe_row: int = -1  # the row that a model on the host drafts for, to verify it in any case
    steps_s: np.ndarray = field(default_factory=lambda: np.zeros(0))  # time with 0, 1, … draft tokens verified
    curves: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # see `DraftCurves`


class AutoPolicy(SpeculationPolicy):
    """For the drafter of this `method`. `model`: the name of the model that drafts, alone or in a hybrid; None: drafts
    come from history only."""

    name = "auto"
    reads_drafts = takes_best = reads_acceptance = has_probes = True

    def __init__(self, costs: CostTable, max_tokens: int, method: str = "suffix", model: str | None = None) -> None:
        if max_tokens < 1:
            raise ValueError(
                f"speculation.num_speculative_tokens = {max_tokens}: the auto policy needs at least 1; to draft "
                "nothing, use speculation.method = 'none'"
            )
        self.costs, self.max_tokens, self.method = costs, max_tokens, method
        self.model = model
        self.cost_name = self.model or method  # in the cost table
        super().__init__()
        # A hybrid drafter on the device drafts with its head and from history at once; on the host, history's drafts
        # cost next to nothing and only the head's length is planned.
        is_history = self.model is None
        self._curves = {
            on_device: DraftCurves(method if on_device else self.cost_name, max_tokens, is_history)
            for on_device in (0, 1)
        }
        self._version = -1  # of the policy; none yet
        self._step: _Step  # the one planned last
        self._credit_s = 0.0  # for probes
        self._num_probes = 0
        self._probe_left = 0  # steps that a probe still takes
        self._num_drafting: dict[int, int] = {}  # steps with drafts since one without, by `row_bucket`
        self._num_read: dict[int, int] = {}  # positions that the model has computed, by request
        self._num_live, self._is_new_round = 0, False  # requests; whether there was none before them
        self._pauses = Pauses()

    @property
    def pauses_drafter(self) -> bool:
        return self._pauses.is_paused

    def begin(self, request: Request) -> None:
        if not self._num_live:
            self._is_new_round = True
            self._pauses.begin_round()
        self._num_live += 1

    def drafter_updated(self) -> None:
        self._pauses.drafter_updated()

    def end(self, request_id: int) -> None:
        self._num_read.pop(request_id, None)
        self._num_live -= 1

    # -- before drafting --------------------------------------------------------------------------------------------

    def plan(self, rows: Rows) -> np.ndarray:
        if self._is_new_round or rows.version != self._version:
            name = self._curves[rows.on_device].name
            if name != self.model:  # history may have drafts now that it did not have before
                rows.acceptance.forget(name, NUM_KEPT if rows.on_device else None)  # on the host it always drafts
            self._is_new_round = False
            for curves in self._curves.values():
                curves.reset()
        if rows.version != self._version:
            self._num_read.clear()  # KV of a head or a draft model is dropped when the policy changes
            self._version = rows.version
        num_rows, plain_s = len(rows), self.costs.step_s(rows.load)
        credit_s = min(PROBES * plain_s, 10 * plain_s - self._credit_s)
        self._step = step = _Step(
            rows.load, rows.acceptance, rows.request_ids, rows.num_tokens, plain_s, rows.on_device, rows.draft_budget,
            credit_s, self._num_probes, self._probe_left, self._num_drafting.get(row_bucket(num_rows), 0),
        )  # fmt: skip
        if not step.budget:
            self.decision = Decision(
                "no drafts: engine.max_num_batched_tokens is used up", 0.0, plain_s, plain_s, about=step
            )
            return np.zeros(num_rows, np.int32)
        if self.pauses_drafter:
            step.is_paused = True
            self.decision = Decision(f"{self.cost_name} is paused: it would not pay", 0.0, plain_s, plain_s, about=step)
            return np.zeros(num_rows, np.int32)
        caps = self._draft_lengths(rows)
        if step.is_plain:
            self.decision = Decision("a step without drafts, to observe its time", 0.0, plain_s, plain_s, about=step)
            return caps
        if self.model not in (None, self.method) and not step.on_device:
            rows.head_caps, rows.is_head_probe = caps, step.is_probe
            caps = np.full(num_rows, self.max_tokens, np.int32)
        reason = "nothing was drafted" if step.draft_length else f"{self.cost_name} would not pay at {num_rows} rows"
        self.decision = Decision(reason, 0.0, plain_s, plain_s, about=step)
        return rows.limited(caps)

    def launched(self, decision: Decision) -> None:
        step: _Step = decision.about
        self._credit_s += step.credit_s
        if step.on_device and self.model == self.method:
            self._pauses.step(step.draft_length > 0, lambda: self._best_gain(step))
        if step.is_paused:
            return
        self._num_probes, self._probe_left = step.num_probes, step.probe_left
        self._num_read.update(step.num_read)
        # Also if the step will not be observed, so that it is not planned again and again.
        if step.is_plain or (step.num_selected == 0 and not step.on_device):
            self._num_drafting[row_bucket(step.load.num_rows)] = 0
        elif step.draft_length:
            self._num_drafting[row_bucket(step.load.num_rows)] = step.num_drafting + 1
        self._curves[step.on_device].step_launched()

    def _best_gain(self, step: _Step) -> float:
        """Of drafting for a single row; infinite if the head's acceptance is not known yet."""
        if step.acceptance.num_outcomes(self.cost_name) < PAUSE_OUTCOMES:
            return math.inf
        curves, load = self._curves[True], Load(1, 1, step.load.num_context_tokens // step.load.num_rows)
        draft_s = [self.costs.draft_s(self.cost_name, 1, k) for k in range(1, 1 + self.max_tokens)]
        steps_s = self.costs.steps_s(load, self.max_tokens)[np.minimum(curves.num_verified(1), self.max_tokens)]
        rates = curves.tokens_per_row(step.acceptance) / (np.array(draft_s)[:, None] + steps_s)
        return float(rates.max()) * self.costs.step_s(load)

    def _draft_lengths(self, rows: Rows) -> np.ndarray:
        """argmax_k max_n rows · curve_k(n) / (T_draft(k) + T(rows + n)) for all rows; a probe; or none. int32 [B]."""
        num_rows, k_max, step = len(rows), self.max_tokens, self._step
        draft_s = [self.costs.draft_s(self.cost_name, num_rows, k) for k in range(1, 1 + k_max)]
        caps = np.zeros(num_rows, np.int32)
        if self.model is None and not step.on_device and draft_s[-1] < NEGLIGIBLE * step.plain_s:
            if self._needs_plain_step():
                return caps
            caps[:], step.draft_s = k_max, draft_s[-1]
            step.draft_length = k_max
            return caps
        curves = self._curves[step.on_device]
        step.curves = curves.tokens_per_row(step.acceptance)
        step.steps_s = self.costs.steps_s(step.load, num_rows * k_max)
        num_verified = curves.num_verified(num_rows)
        rates = step.curves / (np.array(draft_s)[:, None] + step.steps_s[num_verified])
        rates = np.where(num_verified <= step.budget, rates, 0.0)
        best = int(rates.argmax())
        num_unread = self._num_unread(rows)
        gain = float(rates.flat[best]) * step.plain_s
        if gain >= margin(num_rows) and self._repays(rows, num_unread, gain, draft_s):
            step.probe_left = 0
            if self._needs_plain_step():
                return caps
            k = best // rates.shape[1] + 1
            caps[:] = step.draft_length = k
            step.draft_s = draft_s[k - 1]
            return caps
        k = min(PROBE_LENGTH if self.model is not None else k_max, k_max, step.budget)
        # A model on the host drafts for one row only, the one with the fewest positions to compute first.
        for_all = step.on_device or self.model is None
        probe_s = self.costs.draft_s(self.cost_name, num_rows if for_all else 1, k)
        row = step.num_probes % num_rows if for_all else int(num_unread.argmin())
        cost_s = probe_s + self._read_s(int(num_unread[row])) + float(step.steps_s[min(k, PROBE_LENGTH)]) - step.plain_s
        if not self._needs_plain_step() and self._may_probe(max(cost_s, NEGLIGIBLE * step.plain_s)):
            caps[slice(None) if self.model is None else row] = step.draft_length = k
            step.draft_s, step.is_probe, step.probe_row = probe_s, True, -1 if for_all else row
        return caps

    def _needs_plain_step(self) -> bool:
        """Steps that compute prompts too are not observed."""
        step, load = self._step, self._step.load
        if load.num_query_tokens == load.num_rows:
            step.is_plain = self.costs.needs_plain_step(load.num_rows, step.num_drafting)
        return step.is_plain

    def _num_unread(self, rows: Rows) -> np.ndarray:
        """Positions of each row that a model has to compute before it can draft: int64 [B]. 0 on the device, where they
        are computed along with the target's. A draft model computes all tokens but the last. An EAGLE-3 head needs the
        target's hidden states of these, so it can't draft before they are computed."""
        if self._step.on_device or self.model is None or not len(rows.num_tokens):
            return np.zeros(len(rows), np.int64)
        read = np.array([self._num_read.get(request_id, 0) for request_id in rows.request_ids.tolist()])
        unread = np.maximum(rows.num_tokens - 1 - read, 0)
        if self.model == "draft_model":
            return unread
        return np.where(rows.num_computed >= rows.num_tokens - 1, np.minimum(unread, HEAD_WINDOW), 0)

    def _read_s(self, num_unread: int) -> float:
        """Time that a model needs to compute these positions: that of a first draft token for as many rows."""
        return self.costs.draft_s(self.cost_name, num_unread, 1) if num_unread else 0.0

    def _repays(self, rows: Rows, num_unread: np.ndarray, gain: float, draft_s: list[float]) -> bool:
        """Whether the tokens that rows may still emit save the time that a model needs before its first draft. Steps
        that only decode count here: in a step with a prompt a draft costs little more, and nearly always pays."""
        total = int(num_unread.sum())
        if total <= len(rows) * self.max_tokens:  # no more than what a step emits
            return True
        load = self._step.load
        decode = Load(load.num_rows, load.num_rows, load.num_context_tokens)
        plain_s = self.costs.step_s(decode)
        if load.num_query_tokens > load.num_rows:
            num_verified = self._curves[self._step.on_device].num_verified(load.num_rows)
            num_verified = np.minimum(num_verified, load.num_rows * self.max_tokens)
            seconds = np.array(draft_s)[:, None] + self.costs.steps_s(decode, int(num_verified[-1]))[num_verified]
            gain = float((self._step.curves / seconds).max()) * plain_s
        num_left = math.inf if rows.draft_limits is None else 1 + float(rows.draft_limits.mean())
        return gain >= margin(len(rows)) and num_left * plain_s * (1 - 1 / gain) >= self._read_s(total)

    def _may_probe(self, cost_s: float) -> bool:
        """Whether a probe goes on, or there is credit for another. On the device it takes two steps: a draft is made at
        the end of one and verified in the next."""
        step = self._step
        if step.probe_left:
            step.probe_left -= 1
            step.credit_s -= cost_s  # may become a debt
            return True
        if not self._pay(cost_s):
            return False
        step.num_probes += 1
        step.probe_left = 1 if step.on_device else 0
        return True

    def _pay(self, cost_s: float) -> bool:
        if self._credit_s + self._step.credit_s < cost_s:
            return False
        self._step.credit_s -= cost_s
        return True

    # -- after drafting ---------------------------------------------------------------------------------------------

    def select(self, drafts: DraftBatch) -> np.ndarray:
        if self._step.on_device:
            return self._select_on_device(drafts.num)
        num_rows, k = drafts.tokens.shape
        step, num_drafted = self._step, int(drafts.num.sum())
        assert drafts.probabilities is not None
        self._note_read(drafts)
        survival = drafts.probabilities.cumprod(axis=1).ravel()
        order = (-survival).argsort(kind="stable")[:num_drafted]
        order, forced = self._limit_unknown(drafts, order)
        if step.probe_row >= 0:
            forced = step.probe_row * k + np.arange(min(PROBE_LENGTH, int(drafts.num[step.probe_row])))
        if len(forced):
            order = np.concatenate([forced, order[~np.isin(order, forced)]])
        order = order[: step.budget]
        gain = np.zeros(len(order) + 1)
        survival[order].cumsum(out=gain[1:])
        if len(step.steps_s) <= len(order):
            step.steps_s = self.costs.steps_s(step.load, len(order))
        seconds = step.draft_s + step.steps_s[: len(order) + 1]
        rates = (num_rows + gain) / seconds
        best, is_probe = int(rates.argmax()), step.is_probe
        if rates[best] < margin(num_rows) * rates[0]:
            best = 0
        num_forced = min(PROBE_LENGTH if is_probe else len(forced), len(order))
        if best < num_forced:
            best, is_probe = num_forced, True
        elif not best and len(order):
            is_probe = self._pay(float(seconds[1] - seconds[0]))
            best = int(is_probe)
        self._decide(best, len(order), float(gain[best]), float(seconds[best]), is_probe)
        if best == num_drafted:
            return drafts.num
        return np.bincount(order[:best] // k, minlength=num_rows).astype(np.int32)

    def _select_on_device(self, num: np.ndarray) -> np.ndarray:
        """How many tokens the device selects. It knows which are the best; here they are distributed evenly."""
        step, num_rows, num_drafting = self._step, len(num), int(np.count_nonzero(num))
        num_drafted = int(num.sum())
        if not num_drafted:
            return num
        most, is_known = min(num_drafted, step.budget), step.acceptance.num_outcomes() >= MIN_OUTCOMES
        if not is_known:
            most = min(most, max(1, num_rows // 16))
        points = self._curves[True].num_verified(num_drafting)
        counts = np.minimum(points[: max(1, int(points.searchsorted(most, "right")))], most)
        gain = (step.curves[int(num.max()) - 1, : len(counts)] - 1) * num_drafting
        gain[0] *= counts[0] / points[0]  # if it is less than the curve's first point
        seconds = step.draft_s + step.steps_s[counts]
        rates = (num_rows + gain) / seconds
        at, is_probe, plain_s = int(rates.argmax()), step.is_probe, step.draft_s + float(step.steps_s[0])
        best, expected, expected_s = int(counts[at]), float(gain[at]), float(seconds[at])
        if rates[at] < margin(num_rows) * num_rows / plain_s:
            best, expected, expected_s = 0, 0.0, plain_s
            is_due = step.draft_length > 0 and not is_known  # as in `select`
            if is_probe or is_due or self._pay(float(step.steps_s[1] - step.steps_s[0])):
                best, is_probe = (min(PROBE_LENGTH, most) if is_probe else 1), True
                expected_s = step.draft_s + float(step.steps_s[best])
        self._decide(best, num_drafted, expected, expected_s, is_probe)
        if best == num_drafted:
            return num
        each, more = divmod(best, num_drafting)
        return np.minimum(num, each + ((num > 0).cumsum() <= more)).astype(np.int32)

    def _note_read(self, drafts: DraftBatch) -> None:
        step = self._step
        if self.model is None or len(step.num_tokens) != len(drafts.num):
            return
        read = drafts.num > 0
        if drafts.sources is not None:
            read &= drafts.sources == drafts.names.index(self.model)
        step.num_read = dict(zip(step.request_ids[read].tolist(), (step.num_tokens[read] - 1).tolist(), strict=True))

    def _limit_unknown(self, drafts: DraftBatch, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Leave only a few tokens of drafters with few outcomes, whatever their scores. Returns also tokens that are
        verified in any case: a drafter that takes time must get outcomes, or it would be asked on and on."""
        names = drafts.names or (self.cost_name,)
        unknown = np.array([self._step.acceptance.num_outcomes(name) < MIN_OUTCOMES for name in names])
        if not unknown.any():
            return order, order[:0]
        rows = order // drafts.tokens.shape[1]
        of_unknown = unknown[0 if drafts.sources is None else drafts.sources[rows]] & np.ones(len(order), bool)
        num_forced = int(self._step.draft_s > NEGLIGIBLE * self._step.plain_s)
        limited = order[~of_unknown | (np.cumsum(of_unknown) <= max(1, len(drafts.num) // 16))]
        return limited, order[of_unknown][:num_forced]

    def _decide(self, num: int, num_drafted: int, expected: float, expected_s: float, is_probe: bool) -> None:
        step = self._step
        step.num_selected = num
        verb, more_ms = "probes" if is_probe else "verifies", 1e3 * (expected_s - step.plain_s)
        reason = f"{verb} {num} of {num_drafted} draft tokens: {expected:.2f} accepted for {more_ms:.2f} ms more"
        self.decision = Decision(reason, expected, expected_s, step.plain_s, is_probe, step)

    def observe(self, commits: Commits, trace: StepTrace, decision: Decision) -> None:
        step: _Step = decision.about
        if commits.num_drafted.any() or step.draft_length:
            emitted = 1 + int(commits.num_accepted.sum()) / len(commits.num)
            self._credit_s += max(0.0, REINVESTED * (step.plain_s * emitted - decision.expected_s))
        if not is_representative(trace) or step.is_paused:
            return
        if step.on_device:
            self._observe_on_device(step, trace)
            return
        self.costs.observe(trace, trace.draft_s)
        num_rows = 1 if step.is_probe and self.model is not None else trace.num_rows
        self.costs.observe_drafting(self.cost_name, num_rows, step.draft_length, trace.draft_s)

    def _observe_on_device(self, step: _Step, trace: StepTrace) -> None:
        """The time of drafting is not measured. It is what a step without drafts to verify takes longer than a plain
        one; in other steps it is assumed to be as estimated."""
        if not step.draft_length:
            self.costs.observe(trace, 0.0)
        elif self.costs.knows_plain(trace.num_rows):
            k = max(step.draft_length, trace.num_drafted_on_device)  # the graph's draft length
            if trace.num_draft_tokens:
                draft_s = self.costs.draft_s(self.cost_name, trace.num_rows, k)
                self.costs.observe(trace, min(draft_s, trace.total_s / 2))
            else:
                draft_s = max(1e-9, trace.total_s - step.plain_s)
                self.costs.observe_drafting(self.cost_name, trace.num_rows, k, draft_s)
