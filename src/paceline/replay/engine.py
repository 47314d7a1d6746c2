"""The engine without its model: schedule, draft, look at the tape, commit, and a clock from a cost table.

It does what engine/engine.py and engine/scheduler.py do, through the same protocols and in the same order, so that
drafts and acceptance of deterministic drafters are those of a live engine to the token (tests/e2e/test_replay_live.py).
Recorded tokens stand for the model, which is right for `coupled`: there they do not depend on the drafter.

What it leaves out: memory is never short, so nothing is preempted and no prompt is forgotten before the weights change;
all of a round's requests arrive at once, further turns the moment that the one before ends; weights change between
rounds only.

Prompts are always scheduled as live (chunks, siblings that wait), but unless `prefill` is set they take no time, and a
step's load counts what decodes: a cost table that was measured on decoding knows nothing of prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.replay.deciding import Deciding
from paceline.replay.prefixes import BLOCK, Prefixes
from paceline.replay.rounds import Round
from paceline.replay.tally import Tally
from paceline.replay.tape import Tape
from paceline.speculation.batch import Commits, DraftBatch, Drafter, Load
from paceline.speculation.lengths import LengthModel
from paceline.speculation.policy import Decision, SpeculationPolicy
from paceline.types import Request, SamplingParams, StepTrace

NO_DECISION = Decision()


class Clock(Protocol):
    """What replay asks of a cost table (speculation/cost.py)."""

    def steps_s(self, load: Load, num_extra: int) -> np.ndarray: ...
    def draft_s(self, drafter: str, num_rows: int, k: int) -> float: ...


@dataclass(slots=True)
class _Step:
    """One engine step on its way."""

    deciding: Deciding
    load: Load
    num_query: int  # query tokens, prompts included
    prefilling: list[tuple[int, int, bool]]  # (request, its query tokens, whether it decides) of rows at their prompt
    num_drafted: np.ndarray  # [B]
    drafts: DraftBatch | None = None
    ahead: np.ndarray | None = None  # [B, K + 1], what the tape says where K tokens were drafted
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
        tape: Tape | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 8192,
        prefix_sharing: bool = True,
        order: str = "arrival",
        prefill: bool = False,
        watch: Callable[[StepTrace], None] | None = None,
    ) -> None:
        """`tape`: the one that the drafter reads too, where it knows what was recorded. `order`: engine.order."""
        self.policy, self.clock, self.drafter = policy, clock, drafter
        self.tape = tape or Tape()
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.prefix_sharing, self.prefill, self.watch = prefix_sharing, prefill, watch
        self.longest_first = order == "longest"
        self.lengths = LengthModel()
        self.tally = Tally()
        self.now_s = 0.0
        self.version = -1  # of the policy; none yet
        self._prefixes = Prefixes()
        self._waiting: deque[int] = deque()
        self._called: set[int] = set()  # those whose problem's turn it is; they wait in front
        self._running = np.zeros(0, np.int64)
        self._steady: Deciding | None = None  # all that runs, where all of it decodes
        self._num_steps = 0

    def play(self, recorded: Round) -> None:
        """All of a round's requests, from their arrival to their end."""
        if not len(recorded):
            return
        tape = self.tape
        tape.put(recorded)
        if recorded.version != self.version:
            self._prefixes.clear()
            self.version = recorded.version
        self.tally.grow(int(recorded.epochs.max()) + 1)
        self._one_epoch = (recorded.epochs == recorded.epochs[0]).all()
        params: dict[int, SamplingParams] = {}
        most = (recorded.limit - recorded.num_prompt).tolist()
        self._sampling = [params.setdefault(num, SamplingParams(max_tokens=num)) for num in most]
        self._keys = [tape.beginning(i, num).tobytes() for i, num in enumerate(recorded.num_prompt.tolist())]
        self._prompts: dict[bytes, tuple[int, ...]] = {}
        self._requests: dict[int, Request] = {}
        self._called.clear()
        self._next_turn = {before: i for i, before in enumerate(recorded.follows.tolist()) if before >= 0}
        for i in np.flatnonzero(recorded.follows < 0).tolist():
            self._submit(i)
        while len(self._running) or self._waiting:
            self._step()

    def _submit(self, i: int) -> None:
        key, tape = self._keys[i], self.tape
        prompt_ids = self._prompts.get(key)
        if prompt_ids is None:
            prompt_ids = self._prompts[key] = tuple(np.frombuffer(key, np.int32).tolist())
        request = Request(tape.first_id + i, prompt_ids, self._sampling[i], 0, tape.round.problems[i])
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
        if self.drafter is not None and len(step.deciding):
            num_accepted = self._draft(self.drafter, step)
        commits = self._commit(step, num_accepted)
        if self.drafter is not None and len(step.deciding):
            self.drafter.observe(commits)
        self._trace(step, commits)
        if not step.deciding.togo.all():
            self._finish(step.deciding)

    def _schedule(self) -> _Step:
        """As `Scheduler.schedule`: those who run first, then arrivals while tokens and rows last."""
        num_running = len(self._running)
        may_admit = bool(self._waiting) and num_running < self.max_num_seqs
        if self._steady is not None and not (may_admit and num_running < self.max_num_batched_tokens):
            steady = self._steady
            return _Step(steady, Load(num_running, num_running, steady.context), num_running, [], steady.nothing)
        tape, running = self.tape, self._running
        pending = np.where(
            tape.place[running] > tape.prompt_end[running],
            1,
            tape.round.num_prompt[running] - tape.num_computed[running],
        )
        # Each takes what those before it leave.
        query = np.clip(self.max_num_batched_tokens - (np.cumsum(pending) - pending), 0, pending)
        budget = self.max_num_batched_tokens - int(query.sum())
        if budget and may_admit:
            new = np.array(self._admit(budget), np.int64).reshape(-1, 3)  # (request, queries, pending)
            self._running = running = np.concatenate([running, new[:, 0]])
            query, pending = np.concatenate([query, new[:, 1]]), np.concatenate([pending, new[:, 2]])
        decides = query == pending
        deciding = Deciding(tape, running[decides], self._sampling)
        self._steady = deciding if decides.all() and len(running) <= self.max_num_batched_tokens else None
        at_prompt = (query > 0) & (tape.place[running] == tape.prompt_end[running])
        prefilling = [
            (i, num, done)
            for i, num, done in zip(
                running[at_prompt].tolist(), query[at_prompt].tolist(), decides[at_prompt].tolist(), strict=True
            )
        ]
        num_query = int(query.sum())
        if not self.prefill:
            load = Load(len(deciding), len(deciding), deciding.context)
            return _Step(deciding, load, num_query, prefilling, deciding.nothing)
        # A deciding row has all of its tokens in context, one at its prompt what was computed and what is.
        context = deciding.context + sum(int(tape.num_computed[i]) + num for i, num, done in prefilling if not done)
        load = Load(int((query > 0).sum()), num_query, context)
        return _Step(deciding, load, num_query, prefilling, deciding.nothing)

    def _admit(self, budget: int) -> list[tuple[int, int, int]]:
        """As `Scheduler._admit`: siblings of a prompt that is being computed wait for it, then share it."""
        tape, num_prompt = self.tape, self.tape.round.num_prompt
        at_prompt = self._running[tape.place[self._running] == tape.prompt_end[self._running]]
        computing = {self._keys[i] for i in at_prompt.tolist() if tape.num_computed[i] < num_prompt[i] - 1}
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
                num_computed = tape.num_computed[i] = self._prefixes.match(tape.beginning(i, last))
            if num_computed < last:
                computing.add(self._keys[i])
            pending = last + 1 - num_computed
            new.append((i, min(pending, budget), pending))
            budget -= min(pending, budget)
        self._waiting.extendleft(reversed(held_back))
        return new

    def _next(self) -> int:
        """As `Scheduler._next`: in order of arrival, or the problem first that may be expected to take longest."""
        if self.longest_first and self._waiting[0] not in self._called:
            problems: dict[str, list[int]] = {}
            for i in self._waiting:
                problems.setdefault(self.tape.round.problems[i], []).append(i)
            longest = max(problems.values(), key=lambda them: self.lengths.expected(self._requests[them[0]]))
            self._called.update(longest)
            chosen = set(longest)
            self._waiting = deque([*longest, *(i for i in self._waiting if i not in chosen)])
        return self._waiting.popleft()

    def _draft(self, drafter: Drafter, step: _Step) -> np.ndarray:
        """How many of each row's drafted tokens are right."""
        deciding, tape = step.deciding, self.tape
        view = deciding.view(self.version, step.load, max(0, self.max_num_batched_tokens - step.num_query))
        if self.policy.reads_lengths:
            view.expected_left = self.lengths.expected_left(
                deciding.ids, deciding.place - tape.prompt_end[deciding.requests]
            )
        caps = view.limited(self.policy.plan(view))
        step.num_planned = int(caps.sum())
        if not step.num_planned:
            self.policy.commit(self.policy.decision)
            return deciding.nothing
        step.drafts = drafts = drafter.propose(view, caps)
        assert (drafts.num <= caps).all()
        step.num_drafted = self.policy.select(drafts)
        assert int(step.num_drafted.sum()) <= view.draft_budget
        self.policy.commit(self.policy.decision)
        step.draft_s = self._draft_s(drafter, drafts, caps)
        num_rows, k = drafts.tokens.shape
        step.ahead = tape.ahead(deciding.place, k + 1)
        wrong = np.ones((num_rows, k + 1), bool)
        np.not_equal(drafts.tokens, step.ahead[:, :k], out=wrong[:, :k])
        num_right = wrong.argmax(1).astype(np.int32)  # before the first that is wrong
        return np.minimum(np.minimum(num_right, step.num_drafted), deciding.togo)

    def _draft_s(self, drafter: Drafter, drafts: DraftBatch, caps: np.ndarray) -> float:
        if drafts.sources is None:
            return self.clock.draft_s(drafter.name, int(np.count_nonzero(caps)), int(caps.max()))
        total_s = 0.0
        for source, name in enumerate(drafts.names):
            num = drafts.num[drafts.sources == source]
            total_s += self.clock.draft_s(name, int(np.count_nonzero(num)), int(num.max(initial=0)))
        return total_s

    def _commit(self, step: _Step, num_accepted: np.ndarray) -> Commits:
        deciding, tape = step.deciding, self.tape
        if step.ahead is None:
            num, tokens, step.num_emitted = deciding.one, tape.ahead(deciding.place, 1), len(deciding)
        else:
            num = np.minimum(num_accepted + 1, deciding.togo)
            emitted = num.tolist()
            width, step.num_emitted = max(emitted), sum(emitted)
            tokens = step.ahead[:, :width] * (np.arange(width, dtype=np.int32) < num[:, None])
        deciding.advance(num, step.num_emitted)
        if step.prefilling:
            self._settle(step.prefilling)
        return Commits(deciding.ids, tokens, num, step.num_drafted, num_accepted)

    def _settle(self, prefilling: list[tuple[int, int, bool]]) -> None:
        """As `Scheduler.settle`: prompts that filled a block, or came to their end, can be found from now on."""
        tape = self.tape
        for i, num_query, decides in prefilling:
            before = int(tape.num_computed[i])
            after = int(tape.place[i] - tape.round.start[i]) - 1 if decides else before + num_query
            tape.num_computed[i] = after
            if self.prefix_sharing and (decides or after // BLOCK > before // BLOCK):
                self._prefixes.add(tape.beginning(i, after))

    def _trace(self, step: _Step, commits: Commits) -> None:
        drafted: tuple[int, ...] = ()
        accepted: tuple[int, ...] = ()
        if step.drafts is not None:
            drafted, accepted = _per_position(commits.num_drafted), _per_position(commits.num_accepted)
            accepted += (0,) * (len(drafted) - len(accepted))
        num_draft_tokens, num_accepted_tokens = sum(drafted), sum(accepted)
        forward_s = float(self.clock.steps_s(step.load, num_draft_tokens)[-1]) if step.load.num_rows else 0.0
        drafter = self.drafter
        planned = drafter is not None and len(step.deciding) > 0
        decision = self.policy.decision if planned else NO_DECISION
        sources: tuple[tuple[str, int, int], ...] = ()
        if drafter is not None and step.drafts is not None and drafted:
            whole = (drafter.name, num_draft_tokens, num_accepted_tokens)
            sources = (whole,) if step.drafts.sources is None else _sources(step.drafts, commits)
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
            num_planned=step.num_planned,
            num_proposed=int(step.drafts.num.sum()) if step.drafts is not None else 0,
            expected_accepted=decision.expected_accepted,
            expected_s=decision.expected_s,
            sources=sources,
            num_history_bytes=drafter.num_bytes if drafter is not None else 0,
        )
        self._num_steps += 1
        self.now_s += trace.total_s
        epochs = self.tape.round.epochs
        if self._one_epoch:
            self.tally.count(int(epochs[0]), trace, len(step.deciding))
        else:
            rows = np.concatenate([step.deciding.requests, [i for i, _, done in step.prefilling if not done]])
            self.tally.count_mixed(epochs[rows.astype(np.int64)], trace, commits)
        if planned:
            self.policy.observe(commits, trace, decision)
        if self.watch is not None:
            self.watch(trace)

    def _finish(self, deciding: Deciding) -> None:
        gone = deciding.togo == 0
        tape, done = self.tape, deciding.requests[gone]
        self._running = self._running[~np.isin(self._running, done)]
        if self._steady is not None:
            self._steady = deciding.without(gone) if len(self._running) else None
        for i in done.tolist():
            request_id = tape.first_id + i
            if self.drafter is not None:
                self.drafter.end(request_id)
            self.policy.end(request_id)
            self.lengths.end(request_id, int(tape.end[i] - tape.prompt_end[i]))
            if i in self._next_turn:
                self._prefixes.add(tape.beginning(i, int(tape.round.num_total[i]) - 1))
                self._submit(self._next_turn[i])


def _per_position(num: np.ndarray) -> tuple[int, ...]:
    """How many rows have more than 0, 1, … up to the longest."""
    counts = np.bincount(num).tolist()
    rows, left = [], len(num)
    for count in counts[:-1]:
        left -= count
        rows.append(left)
    return tuple(rows)


def _sources(drafts: DraftBatch, commits: Commits) -> tuple[tuple[str, int, int], ...]:
    """(drafter, tokens verified, tokens accepted) of those that drafted."""
    counts = [[0, 0] for _ in drafts.names]
    assert drafts.sources is not None
    for source, num_drafted, num_accepted in zip(
        drafts.sources.tolist(), commits.num_drafted.tolist(), commits.num_accepted.tolist(), strict=True
    ):
        counts[source][0] += num_drafted
        counts[source][1] += num_accepted
    return tuple((name, num, stood) for name, (num, stood) in zip(drafts.names, counts, strict=True) if num)
