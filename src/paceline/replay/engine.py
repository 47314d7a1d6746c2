"""An engine without a model: recorded tokens replace the target, and a cost table gives the time of each step.

It does the same as engine/engine.py and engine/scheduler.py, through the same protocols and in the same order. So the
drafts and the acceptance of deterministic drafters are exactly those of a live engine (tests/e2e/test_replay_live.py).
Recorded tokens can replace the target with the `coupled` rule, because there they do not depend on the drafter.

Simplifications: memory is unlimited, so nothing is preempted and the prefix cache is only cleared when the weights
change; all requests of a round arrive at once, and a further turn arrives when the turn before it ends; weights change
only between rounds.

Prompts are scheduled as in the live engine (in chunks; requests with the same prompt wait for it). Unless `prefill` is
set they take no time and do not count in a step's load, because cost tables are usually measured on decoding alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from paceline.replay.emitting_rows import EmittingRows
from paceline.replay.prefixes import BLOCK, Prefixes
from paceline.replay.round_state import RoundState
from paceline.replay.rounds import Round
from paceline.replay.stats import ReplayStats
from paceline.speculation.acceptance import AcceptanceModel
from paceline.speculation.batch import Commits, Drafter, Load
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.lengths import LengthModel
from paceline.speculation.policy import Decision, SpeculationPolicy
from paceline.types import Request, StepTrace

NO_DECISION = Decision()


class Clock(Protocol):
    """The methods of a cost table that a replay uses (speculation/cost.py)."""

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray: ...
    def draft_s(self, drafter: str, num_rows: int, k: int) -> float: ...


@dataclass(slots=True)
class _Step:
    """One engine step."""

    emitting: EmittingRows
    load: Load
    num_query: int  # query tokens, including prompts
    prefilling: list[tuple[int, int, bool]]  # (request, its query tokens, whether it emits) of rows in their prompt
    num_drafted: np.ndarray  # [B]
    drafts: DraftBatch | None = None
    next_tokens: np.ndarray | None = None  # [B, K + 1], recorded tokens; None if nothing was drafted
    num_planned: int = 0
    num_emitted: int = 0
    draft_s: float = 0.0


class Replay:
    def __init__(
        self,
        policy: SpeculationPolicy,
        clock: Clock,
        drafter: Drafter | None = None,
        *,
        round_state: RoundState | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 8192,
        prefix_sharing: bool = True,
        order: str = "arrival",
        prefill: bool = False,
        on_step: Callable[[StepTrace], None] | None = None,
    ) -> None:
        """`round_state`: given if the drafter reads it too (`RecordedHead`). `order`: as in engine.order."""
        self.policy, self.clock, self.drafter = policy, clock, drafter
        self.round_state = round_state or RoundState()
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.prefix_sharing, self.prefill, self.on_step = prefix_sharing, prefill, on_step
        self.longest_first = order == "longest"
        self.lengths, self.acceptance = LengthModel(), AcceptanceModel(policy.has_probes)
        self.stats = ReplayStats()
        self.now_s = 0.0
        self.version = -1  # of the policy; -1 before the first round
        self._prefixes = Prefixes()
        self._waiting: deque[int] = deque()
        self._promoted: set[int] = set()  # requests moved to the front of the queue (order "longest")
        self._running = np.zeros(0, np.int64)
        self._steady: EmittingRows | None = None  # all running requests, if all of them decode
        self._num_steps = 0

    def run_round(self, recorded: Round) -> None:
        """Run all requests of a round until they end."""
        if not len(recorded):
            return
        state = self.round_state
        state.set_round(recorded)
        if recorded.version != self.version:
            self._prefixes.clear()
            self.version = recorded.version
        self.stats.grow(int(recorded.epochs.max()) + 1)
        self._one_epoch = (recorded.epochs == recorded.epochs[0]).all()
        self._keys = [state.prefix(i, num).tobytes() for i, num in enumerate(recorded.num_prompt.tolist())]
        self._prompts: dict[bytes, tuple[int, ...]] = {}
        self._requests: dict[int, Request] = {}
        self._promoted.clear()
        self._next_turn = {before: i for i, before in enumerate(recorded.previous_turn.tolist()) if before >= 0}
        for i in np.flatnonzero(recorded.previous_turn < 0).tolist():
            self._submit(i)
        while len(self._running) or self._waiting:
            self._step()

    def _submit(self, i: int) -> None:
        key, state = self._keys[i], self.round_state
        prompt_ids = self._prompts.get(key)
        if prompt_ids is None:
            prompt_ids = self._prompts[key] = tuple(np.frombuffer(key, np.int32).tolist())
        request = Request(state.first_id + i, prompt_ids, state.sampling[i], 0, state.round.problems[i])
        self._waiting.append(i)
        self._requests[i] = request
        self.lengths.begin(request)
        self.policy.begin(request)
        if self.drafter is not None:
            self.drafter.begin(request, self.version)

    # -- a step -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        step = self._schedule()
        num_accepted = step.num_drafted
        if self.drafter is not None and len(step.emitting):
            num_accepted = self._draft(self.drafter, step)
        commits = self._commit(step, num_accepted)
        if self.drafter is not None and len(step.emitting):
            self.drafter.observe(commits)
        self._trace(step, commits)
        if not step.emitting.num_left.all():
            self._finish(step.emitting)

    def _schedule(self) -> _Step:
        """As `Scheduler.schedule`: running requests first, then waiting ones while tokens and rows are left."""
        num_running = len(self._running)
        can_admit = bool(self._waiting) and num_running < self.max_num_seqs
        if self._steady is not None and not (can_admit and num_running < self.max_num_batched_tokens):
            steady = self._steady
            return _Step(steady, Load(num_running, num_running, steady.context), num_running, [], steady.zeros)
        state, running = self.round_state, self._running
        pending = np.where(
            state.positions[running] > state.prompt_end[running],
            1,
            state.round.num_prompt[running] - state.num_computed[running],
        )
        # Each row takes its pending tokens from what the rows before it leave of the budget.
        query = np.clip(self.max_num_batched_tokens - (np.cumsum(pending) - pending), 0, pending)
        budget = self.max_num_batched_tokens - int(query.sum())
        if budget and can_admit:
            new = np.array(self._admit(budget), np.int64).reshape(-1, 3)  # (request, query tokens, pending tokens)
            self._running = running = np.concatenate([running, new[:, 0]])
            query, pending = np.concatenate([query, new[:, 1]]), np.concatenate([pending, new[:, 2]])
        emits = query == pending
        emitting = EmittingRows(state, running[emits])
        self._steady = emitting if emits.all() and len(running) <= self.max_num_batched_tokens else None
        at_prompt = (query > 0) & (state.positions[running] == state.prompt_end[running])
        prefilling = list(
            zip(running[at_prompt].tolist(), query[at_prompt].tolist(), emits[at_prompt].tolist(), strict=True)
        )
        num_query = int(query.sum())
        load = Load(len(emitting), len(emitting), emitting.context)
        if self.prefill:
            # Rows that do not emit have the computed part of their prompt and this chunk as context.
            num_other = sum(int(state.num_computed[i]) + num for i, num, row_emits in prefilling if not row_emits)
            load = Load(int((query > 0).sum()), num_query, emitting.context + num_other)
        return _Step(emitting, load, num_query, prefilling, emitting.zeros)

    def _admit(self, budget: int) -> list[tuple[int, int, int]]:
        """As `Scheduler._admit`: a request waits while another request computes the same prompt, then shares it."""
        state, num_prompt = self.round_state, self.round_state.round.num_prompt
        at_prompt = self._running[state.positions[self._running] == state.prompt_end[self._running]]
        computing = {self._keys[i] for i in at_prompt.tolist() if state.num_computed[i] < num_prompt[i] - 1}
        held_back: list[int] = []
        new: list[tuple[int, int, int]] = []
        num_free = self.max_num_seqs - len(self._running)
        while budget and self._waiting and len(new) < num_free:
            if self.longest_first and len(new) + len(held_back) >= num_free:
                break
            i = self._next()
            last = int(num_prompt[i]) - 1
            num_computed = 0
            if self.prefix_sharing:
                if self._keys[i] in computing:
                    held_back.append(i)
                    continue
                num_computed = state.num_computed[i] = self._prefixes.match(state.prefix(i, last))
            if num_computed < last:
                computing.add(self._keys[i])
            pending = last + 1 - num_computed
            new.append((i, min(pending, budget), pending))
            budget -= min(pending, budget)
        self._waiting.extendleft(reversed(held_back))
        return new

    def _next(self) -> int:
        """As `Scheduler._next`: in order of arrival, or requests of the problem with the longest expected length
        first."""
        if self.longest_first and self._waiting[0] not in self._promoted:
            problems: dict[str, list[int]] = {}
            for i in self._waiting:
                problems.setdefault(self.round_state.round.problems[i], []).append(i)
            longest = max(problems.values(), key=lambda group: self.lengths.expected(self._requests[group[0]]))
            self._promoted.update(longest)
            promoted = set(longest)
            self._waiting = deque([*longest, *(i for i in self._waiting if i not in promoted)])
        return self._waiting.popleft()

    def _draft(self, drafter: Drafter, step: _Step) -> np.ndarray:
        """Draft, and return how many draft tokens of each row are accepted."""
        emitting, state = step.emitting, self.round_state
        view = emitting.view(self.version, step.load, max(0, self.max_num_batched_tokens - step.num_query))
        if self.policy.reads_lengths:
            view.expected_left = self.lengths.expected_left(
                emitting.ids, emitting.positions - state.prompt_end[emitting.requests]
            )
        view.drafter, view.acceptance = drafter.name, self.acceptance
        self.acceptance.set_version(self.version)
        caps = view.limited(self.policy.plan(view))
        step.num_planned = int(caps.sum())
        if not step.num_planned:
            self.policy.launched(self.policy.decision)
            return emitting.zeros
        step.drafts = drafts = drafter.propose(view, caps)
        assert (drafts.num <= caps).all()
        self.acceptance.rate(drafts, drafter.name)
        if drafts.caps is None:
            drafts.caps = caps
        step.num_drafted = self.policy.select(drafts)
        assert int(step.num_drafted.sum()) <= view.draft_budget
        self.policy.launched(self.policy.decision)
        step.draft_s = self._draft_s(drafter, drafts, caps)
        num_rows, k = drafts.tokens.shape
        step.next_tokens = state.next_tokens(emitting.positions, k + 1)
        wrong = np.ones((num_rows, k + 1), bool)
        np.not_equal(drafts.tokens, step.next_tokens[:, :k], out=wrong[:, :k])
        num_correct = wrong.argmax(1).astype(np.int32)  # before the first wrong one
        return np.minimum(np.minimum(num_correct, step.num_drafted), emitting.num_left)

    def _draft_s(self, drafter: Drafter, drafts: DraftBatch, caps: np.ndarray) -> float:
        if drafts.sources is None:
            return self.clock.draft_s(drafter.name, int(np.count_nonzero(caps)), int(caps.max()))
        total_s = 0.0
        for source, name in enumerate(drafts.names):
            num = drafts.num[drafts.sources == source]
            total_s += self.clock.draft_s(name, int(np.count_nonzero(num)), int(num.max(initial=0)))
        return total_s

    def _commit(self, step: _Step, num_accepted: np.ndarray) -> Commits:
        emitting, state = step.emitting, self.round_state
        if step.next_tokens is None:
            num, tokens, step.num_emitted = emitting.ones, state.next_tokens(emitting.positions, 1), len(emitting)
        else:
            num = np.minimum(num_accepted + 1, emitting.num_left)
            emitted = num.tolist()
            width, step.num_emitted = max(emitted), sum(emitted)
            tokens = step.next_tokens[:, :width] * (np.arange(width, dtype=np.int32) < num[:, None])
        emitting.advance(num, step.num_emitted)
        if step.prefilling:
            self._update_prefixes(step.prefilling)
        return Commits(emitting.ids, tokens, num, step.num_drafted, num_accepted)

    def _update_prefixes(self, prefilling: list[tuple[int, int, bool]]) -> None:
        """Add prompts that filled a block or are complete to the prefix cache, as the live engine does."""
        state = self.round_state
        for i, num_query, emits in prefilling:
            before = int(state.num_computed[i])
            after = int(state.positions[i] - state.round.start[i]) - 1 if emits else before + num_query
            state.num_computed[i] = after
            if self.prefix_sharing and (emits or after // BLOCK > before // BLOCK):
                self._prefixes.add(state.prefix(i, after))

    def _trace(self, step: _Step, commits: Commits) -> None:
        drafted: tuple[int, ...] = ()
        accepted: tuple[int, ...] = ()
        if step.drafts is not None:
            drafted, accepted = _per_position(commits.num_drafted), _per_position(commits.num_accepted)
            accepted += (0,) * (len(drafted) - len(accepted))
        num_draft_tokens, num_accepted_tokens = sum(drafted), sum(accepted)
        forward_s = float(self.clock.steps_s(step.load, num_draft_tokens)[-1]) if step.load.num_rows else 0.0
        drafter = self.drafter
        planned = drafter is not None and len(step.emitting) > 0
        decision = self.policy.decision if planned else NO_DECISION
        per_drafter: tuple[tuple[str, int, int], ...] = ()
        if drafter is not None and step.drafts is not None and drafted:
            total = (drafter.name, num_draft_tokens, num_accepted_tokens)
            per_drafter = (total,) if step.drafts.sources is None else _per_drafter(step.drafts, commits)
        trace = StepTrace(
            step=self._num_steps,
            start_s=self.now_s,
            num_rows=step.load.num_rows,
            num_query_tokens=step.load.num_query_tokens + num_draft_tokens,
            num_context_tokens=step.load.num_context_tokens + num_draft_tokens,
            num_emitted=step.num_emitted,
            num_drafts=drafted[0] if drafted else 0,
            num_draft_tokens=num_draft_tokens,
            num_accepted_tokens=num_accepted_tokens,
            accepted_per_position=accepted,
            drafted_per_position=drafted,
            num_preempted=0,
            num_free_blocks=0,
            draft_s=step.draft_s,
            forward_s=forward_s,
            sample_s=0.0,
            total_s=forward_s + step.draft_s,
            version=self.version,
            drafter_version=drafter.version if drafter is not None else 0,
            drafter=drafter.name if drafter is not None else "none",
            policy=self.policy.name,
            reason=decision.reason,
            is_probe=decision.is_probe,
            num_planned=step.num_planned,
            num_proposed=int(step.drafts.num.sum()) if step.drafts is not None else 0,
            expected_accepted=decision.expected_accepted,
            expected_s=decision.expected_s,
            plain_s=decision.plain_s,
            per_drafter=per_drafter,
            num_history_bytes=drafter.num_bytes if drafter is not None else 0,
        )
        self._num_steps += 1
        self.now_s += trace.total_s
        epochs = self.round_state.round.epochs
        if self._one_epoch:
            self.stats.count(int(epochs[0]), trace, len(step.emitting))
        else:
            rows = np.concatenate([step.emitting.requests, [i for i, _, emits in step.prefilling if not emits]])
            self.stats.count_mixed(epochs[rows.astype(np.int64)], trace, commits)
        if drafter is not None and step.drafts is not None:
            self.acceptance.observe(step.drafts, drafter.name, None, commits.num_accepted, commits.num_known)
        if planned:
            self.policy.observe(commits, trace, decision)
        if self.on_step is not None:
            self.on_step(trace)

    def _finish(self, emitting: EmittingRows) -> None:
        finished = emitting.num_left == 0
        state, done = self.round_state, emitting.requests[finished]
        self._running = self._running[~np.isin(self._running, done)]
        if self._steady is not None:
            self._steady = emitting.without(finished) if len(self._running) else None
        for i in done.tolist():
            request_id = state.first_id + i
            if self.drafter is not None:
                self.drafter.end(request_id)
            self.policy.end(request_id)
            self.lengths.end(request_id, int(state.end[i] - state.prompt_end[i]))
            if i in self._next_turn:
                self._prefixes.add(state.prefix(i, int(state.round.num_total[i]) - 1))
                self._submit(self._next_turn[i])


def _per_position(num: np.ndarray) -> tuple[int, ...]:
    """Number of rows with more than 0, 1, … tokens, up to the longest row."""
    return tuple(len(num) - up_to for up_to in accumulate(np.bincount(num).tolist()[:-1]))


def _per_drafter(drafts: DraftBatch, commits: Commits) -> tuple[tuple[str, int, int], ...]:
    """(drafter, verified tokens, accepted tokens) of each drafter with verified tokens."""
    assert drafts.sources is not None
    verified, accepted = (
        np.bincount(drafts.sources, num, len(drafts.names)).astype(int).tolist()
        for num in (commits.num_drafted, commits.num_accepted)
    )
    return tuple(each for each in zip(drafts.names, verified, accepted, strict=True) if each[1])
