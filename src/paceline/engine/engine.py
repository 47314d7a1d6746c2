"""The engine's whole life: schedule, draft, forward, accept, commit.

Always: given the policy version at each position, a request's tokens depend on its prompt, its sampling parameters
and its noise key alone (rule `coupled`), or are exact samples of the same distribution (`rejection`, `block`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.engine.accept import RULES, Verdict
from paceline.engine.interface import Handle, Learned, Weights
from paceline.engine.runner import EagerRunner, Flight, Landed, Runner
from paceline.engine.scheduler import Row, Scheduler
from paceline.engine.sequence import Detokenize, Sequence
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.batch import Ahead, Commits, Drafter, Listener, Load, Rows
from paceline.speculation.lengths import LengthModel
from paceline.speculation.policy import Decision, SpeculationPolicy, StaticPolicy
from paceline.types import Completion, Receipt, Request, StepTrace


class _Roster:
    """Sequences that decide tokens together, and what is the same of them at every step."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.request_ids = np.array([s.request.request_id for s in sequences], np.int64)
        self.noise_keys = np.array([s.request.noise_key for s in sequences], np.uint64)
        self.sampling = [s.request.sampling for s in sequences]
        self.stop_ids = sorted(frozenset[int]().union(*(s.stop_ids for s in sequences)))
        self.stops_at_text = any(s.request.sampling.stop for s in sequences)


@dataclass(slots=True)
class _Drafts:
    """What drafting came to: the policy's decision, and the drafts' distributions by request where there are any."""

    decision: Decision = field(default_factory=Decision)
    num_planned: int = 0
    num_proposed: int = 0
    num_slots: int | None = None  # drafted tokens to be verified, the best; None: all that the rows have
    q: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Plan:
    """A step's rows that decide, as drafters see them, how much they may be given, and what comes of it."""

    deciding: list[Row]
    view: Rows | None
    caps: np.ndarray  # int32 [B]
    drafts: _Drafts


@dataclass(slots=True)
class _Step:
    """On its way."""

    flight: Flight
    rows: list[Row]
    deciding: list[Row]
    reach: list[int]  # tokens that each of these may emit at most
    drafts: _Drafts
    started: float
    draft_s: float
    num_preempted: int


@dataclass(slots=True)
class _Landed:
    """A step whose tokens are known, and not yet what else there is to know of them."""

    rows: list[Row]
    deciding: list[Row]
    verdict: Verdict
    commits: Commits
    drafts: _Drafts
    starts: list[int]  # of the deciding rows: the position of what was taken
    before: list[int]  # of all rows: tokens that were in memory
    finished: list[Sequence]
    figures: dict[str, Any]  # for the trace


class LocalEngine:
    """`runner` computes the steps; if none is given, one that any device and any rule will do with."""

    def __init__(
        self,
        paged: PagedDecoder,
        *,
        sampler: Sampler | None = None,
        runner: Runner | None = None,
        drafter: Drafter | None = None,
        policy: SpeculationPolicy | None = None,
        lengths: LengthModel | None = None,
        rule: str = "coupled",
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
        prefix_sharing: bool = True,
        order: str = "arrival",
        tokenizer: Any = None,
        version: int = 0,
    ) -> None:
        self.paged = paged
        self.model_config = paged.decoder.config
        self.sampler = sampler or Sampler()
        if rule not in RULES:
            raise ValueError(f"speculation.rule = {rule!r}: must be one of {', '.join(RULES)}")
        self.rule = rule
        self.runner = runner or EagerRunner(paged, self.sampler, RULES[rule])
        self.runner.equip(drafter)
        self.drafter, self.policy = drafter, policy or StaticPolicy(0)
        self._ahead = drafter if isinstance(drafter, Ahead) else None
        self._listens = isinstance(drafter, Listener) and drafter.listens
        self.lengths = lengths or LengthModel()
        self._check_drafting(drafter, self.policy)
        paged.tap(drafter.wants_hidden if drafter is not None else ())
        by_length = self.lengths.expected if order == "longest" else None
        self.scheduler = Scheduler(paged, max_num_seqs, max_num_batched_tokens, prefix_sharing, by_length)
        self.tokenizer = tokenizer
        self.detokenize: Detokenize | None = tokenizer.decode if tokenizer is not None else None
        self.version = version
        self._handles: dict[int, Handle] = {}
        self._traces: list[StepTrace] = []
        self._num_steps = self._num_submitted = 0
        self._roster = _Roster([])  # of the last step
        self._flying: list[_Step] = []  # the oldest first
        self._finished: list[Completion] = []  # and not returned by `step` yet
        self._landed_at = 0.0

    def _check_drafting(self, drafter: Drafter | None, policy: SpeculationPolicy) -> None:
        if self.rule == "coupled":
            return
        if policy.reads_drafts:
            raise ValueError(
                f"speculation.rule = {self.rule!r} is biased by a policy that cuts drafts by what is in them; "
                "use rule = 'coupled' with it, or a policy that does not look (speculation.min_confidence = 0)"
            )
        if drafter is not None and drafter.reads_drafts:
            raise ValueError(
                f"speculation.rule = {self.rule!r} is biased by a drafter that chooses among drafts by what it "
                "sampled; use rule = 'coupled' with it, or choose before (speculation.hybrid_choice = 'before')"
            )

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        self._check(request)
        handle = self._handles[request.request_id] = Handle(request)
        config = self.model_config
        sequence = Sequence(request, self._num_submitted, config.max_positions, config.eos_token_ids)
        self._num_submitted += 1
        self.scheduler.waiting.append(sequence)
        self.lengths.begin(request)
        self.policy.begin(request)
        if self.drafter is not None:
            self.drafter.begin(request, self.version)
        return handle

    def _check(self, request: Request) -> None:
        config, num_prompt = self.model_config, len(request.prompt_ids)
        name = f"request {request.request_id}"
        if request.request_id in self._handles:
            raise ValueError(f"{name}: a request with this id is still running")
        if num_prompt >= config.max_positions:
            raise ValueError(
                f"{name}: its prompt has {num_prompt} tokens, but the model's context is {config.max_positions} and "
                "must hold at least one more; shorten the prompt"
            )
        bad = [t for t in (min(request.prompt_ids), max(request.prompt_ids)) if not 0 <= t < config.vocab_size]
        if bad:
            raise ValueError(f"{name}: token id {bad[0]} is not in the vocabulary (0 to {config.vocab_size - 1})")
        longest = min(num_prompt + request.sampling.max_tokens, config.max_positions)
        room = self.paged.pool.num_blocks * BLOCK
        if longest > room:
            raise ValueError(
                f"{name}: prompt and max_tokens may reach {longest} tokens, but engine.kv_tokens = {room}; "
                "raise it or lower max_tokens"
            )
        if request.sampling.stop and self.detokenize is None:
            raise ValueError(f"{name}: stop strings need a tokenizer, and this engine has none; use stop_token_ids")

    def abort(self, request_id: int) -> None:
        """End a request now; its completion has what it emitted so far, which may be all."""
        handle = self._handles.get(request_id)
        if handle is None:
            raise ValueError(f"request {request_id} is not running")
        self._land_all()
        if handle.done:
            return
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request.request_id == request_id:
                if sequence in self.scheduler.running:
                    self._retire(sequence)
                else:
                    self.scheduler.waiting.remove(sequence)
                sequence.finish_reason = "abort"
                self._complete(sequence)
                return

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._flying or self._finished)

    def generate(self, requests: Seq[Request], progress: Callable[[int, int], None] | None = None) -> list[Completion]:
        """Run these to their end; completions in the order of the requests. On an error or Ctrl-C nothing stays
        behind in the engine."""
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(self.submit(request))
            while not all(h.done for h in handles):
                self.step()
                if progress is not None:
                    progress(sum(h.done for h in handles), len(handles))
        except BaseException:
            for handle in handles:
                if not handle.done:
                    self.abort(handle.request.request_id)
            raise
        finally:
            self._land_all()  # what was launched before it was known that all were done
        return [h.completion for h in handles if h.completion is not None]

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        """One forward for all rows; returns what finished. Where the runner flies, the forward that is launched here
        lands in the next call: after that one's launch where nobody on the host need know its tokens before; else its
        tokens are taken, the next one is launched, and all else that is to be done about them is done meanwhile."""
        while len(self._flying) > 1:  # where the call before was interrupted
            self._land()
        launched = self._hand_over() if self._flying and not self._overlaps else self._launch()
        keep = 1 if launched and self._flying[-1].flight.may_wait else 0
        while len(self._flying) > keep:
            self._land()
        finished, self._finished = self._finished, []
        return finished

    @property
    def _overlaps(self) -> bool:
        """Whether a step can be launched before it is known what the one before it brought."""
        if self._ahead is not None and self._ahead.blind:
            return self.policy.takes_best or not self.policy.reads_drafts
        return self.drafter is None

    def _launch(self) -> bool:
        """Whether there was anything to launch."""
        if self.paged.kv is None:
            raise ValueError("the engine sleeps: wake it before it is to generate")
        started = time.perf_counter()
        rows = self.scheduler.schedule()
        drafting = time.perf_counter()
        drafts = self._propose(self._plan(rows))
        draft_s = time.perf_counter() - drafting
        if self._flying and not self.scheduler.has_room(rows):
            return False  # first let it land: it may bring room
        rows, preempted = self.scheduler.reserve(rows)
        for sequence in preempted:
            self.runner.leave(sequence)
        if not rows:
            return False
        if self._overlaps:
            draft_s = 0.0  # nobody waited for it
        self._send(rows, drafts, started, draft_s, len(preempted))
        return True

    def _send(self, rows: list[Row], drafts: _Drafts, started: float, draft_s: float, num_preempted: int) -> None:
        flight = self.runner.launch(rows, drafts.q, drafts.num_slots)
        deciding = [row for row in rows if row.decides]
        reach = [row.num_query + len(row.draft) for row in deciding]
        for row, num in zip(deciding, reach, strict=True):
            row.sequence.num_flying += num
        self._flying.append(_Step(flight, rows, deciding, reach, drafts, started, draft_s, num_preempted))

    def _hand_over(self) -> bool:
        """Launch a step as soon as it is known what the flying one has brought. All that can be done before is done
        while it flies, and all that can wait when the next one does."""
        plan = self._plan_ahead()
        landed = self._flying[0].flight.land()
        started = time.perf_counter()
        if plan is None or self._halts(landed.verdict):
            taken = self._learn(landed)
            try:
                return self._launch()
            finally:
                self._book(taken)
        heard = self._hear(self._flying[0], landed.verdict)
        drafting = time.perf_counter()
        try:
            drafts = self._propose(plan)
            self._send(plan.deciding, drafts, started, time.perf_counter() - drafting, 0)
        finally:
            self._book(self._learn(landed, heard, drafting - started))
        return True

    def _plan_ahead(self) -> _Plan | None:
        """The next step, but for its drafts, if it will be of the rows that fly and drafts are made of what those bring
        alone; with memory for it. None where it may come differently."""
        step, scheduler = self._flying[0], self.scheduler
        if not (self._listens and step.flight.may_wait):
            return None
        if scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs:
            return None
        sequences = [row.sequence for row in step.deciding]
        if len(step.rows) != len(sequences) or sequences != scheduler.running:
            return None
        if self._roster_of(sequences).stops_at_text:
            return None
        rows = scheduler.schedule()
        if len(rows) != len(sequences):
            return None  # someone may be done
        plan = self._plan(rows)
        for row, cap in zip(rows, plan.caps.tolist(), strict=True):
            row.draft = np.zeros(cap, np.int32)
        if not scheduler.has_room(rows):
            return None
        scheduler.reserve(rows)
        self.runner.prepare(plan.deciding)
        return plan

    def _halts(self, verdict: Verdict) -> bool:
        """Whether a sequence ends with what was emitted."""
        emitted = np.arange(verdict.tokens.shape[1]) <= verdict.num_accepted[:, None]
        return any([((verdict.tokens == token) & emitted).any() for token in self._roster.stop_ids])

    def _hear(self, step: _Step, verdict: Verdict) -> Commits:
        """The drafter is told what a step brought, which all stands."""
        assert self.drafter is not None
        heard = Commits(
            request_ids=self._roster.request_ids,
            tokens=verdict.tokens,
            num=verdict.num_accepted.astype(np.int32) + 1,
            num_drafted=np.array([len(row.draft) for row in step.deciding], np.int32),
            num_accepted=verdict.num_accepted.astype(np.int32),
        )
        self.drafter.observe(heard)
        return heard

    def _land(self) -> None:
        """The oldest step that flies comes down: tokens are taken, and who is done leaves."""
        self._book(self._learn())

    def _learn(self, landed: Landed | None = None, heard: Commits | None = None, hearing_s: float = 0.0) -> _Landed:
        """What the oldest step that flies has emitted. Interrupted while it is waited for, it flies on; if what it
        brought can't be taken, sequences go on from what is known of them. `heard`: what the drafter was told."""
        landed = landed or self._flying[0].flight.land()
        step = self._ground()
        try:
            return self._take(step, landed, heard, hearing_s)
        except BaseException:
            while self._flying:
                self._ground()
            for sequence in self.scheduler.running:
                self.runner.leave(sequence)
            raise

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _ground(self) -> _Step:
        step = self._flying.pop(0)
        for row, num in zip(step.deciding, step.reach, strict=True):
            row.sequence.num_flying -= num
        return step

    def _take(self, step: _Step, landed: Landed, heard: Commits | None, hearing_s: float) -> _Landed:
        rows, deciding, verdict = self._still_running(step, landed.verdict)
        self._check_finite(deciding, verdict)
        before = [row.sequence.num_computed for row in rows]
        num_query = sum([row.num_query + len(row.draft) for row in rows])
        num_context = sum(before) + num_query
        starts, counts = [row.sequence.num_tokens for row in deciding], []
        for row, tokens, num in zip(deciding, verdict.tokens.tolist(), verdict.num_accepted.tolist(), strict=True):
            counts.append(row.sequence.take(tokens[: num + 1], self.detokenize))
        for row in rows:  # what was computed for tokens that stand; a deciding row's last token is new
            sequence = row.sequence
            reached = sequence.num_computed + row.num_query + len(row.draft)
            sequence.num_computed = min(reached, sequence.num_tokens - 1)
        num = np.array(counts, np.int32)
        commits = heard or Commits(
            request_ids=self._roster_of([row.sequence for row in deciding]).request_ids,
            tokens=verdict.tokens,
            num=num,
            num_drafted=np.array([len(row.draft) for row in deciding], np.int32),
            num_accepted=np.minimum(num, verdict.num_accepted),
        )
        if heard is None and self.drafter is not None and deciding:
            observing = time.perf_counter()
            if self._ahead is not None and self._ahead.blind:
                commits.drafts = self._ahead.verified(commits.request_ids)
            self.drafter.observe(commits)
            hearing_s = 0.0 if self._overlaps else time.perf_counter() - observing
        draft_s = step.draft_s + hearing_s
        started, self._landed_at = max(step.started, self._landed_at), time.perf_counter()
        figures = {
            "start_s": started,
            "total_s": self._landed_at - started,
            "draft_s": draft_s,
            "forward_s": landed.forward_s,
            "sample_s": landed.sample_s,
            "num_rows": len(rows),
            "num_query_tokens": num_query,
            "num_context_tokens": num_context,
            "num_preempted": step.num_preempted,
            "num_free_blocks": self.paged.pool.num_free,
        }
        finished = []
        for i, row in enumerate(rows):
            if row.sequence.finish_reason is not None:
                self.scheduler.settle(row.sequence, before[i])
                self._retire(row.sequence)
                finished.append(row.sequence)
        return _Landed(rows, deciding, verdict, commits, step.drafts, starts, before, finished, figures)

    def _retire(self, sequence: Sequence) -> None:
        """Its memory and its place in the runner are another's from here on."""
        self.scheduler.finish(sequence)
        self.runner.leave(sequence)

    def _book(self, landed: _Landed) -> None:
        self._trace(landed)
        verdict, num_accepted = landed.verdict, landed.verdict.num_accepted.tolist()
        counts = landed.commits.num.tolist()
        for i, row in enumerate(landed.deciding):
            row.sequence.book(
                landed.starts[i], counts[i], verdict.logprobs[i], verdict.raw_logprobs[i], num_accepted[i],
                len(row.draft), self.version, row.drafter,
            )  # fmt: skip
        for row, before in zip(landed.rows, landed.before, strict=True):
            if row.sequence.finish_reason is None:
                self.scheduler.settle(row.sequence, before)
        for sequence in landed.finished:
            self._finished.append(self._complete(sequence))

    def _still_running(self, step: _Step, verdict: Verdict) -> tuple[list[Row], list[Row], Verdict]:
        """The step's rows, those of them that decide, and what they emit; without sequences that ended while it
        flew."""
        keep = [i for i, row in enumerate(step.deciding) if row.sequence.finish_reason is None]
        if len(keep) == len(step.deciding):
            return step.rows, step.deciding, verdict
        rows = [row for row in step.rows if row.sequence.finish_reason is None]
        columns = verdict.tokens, verdict.num_accepted, verdict.logprobs, verdict.raw_logprobs
        return rows, [step.deciding[i] for i in keep], Verdict(*(column[keep] for column in columns))

    def _plan(self, rows: list[Row]) -> _Plan:
        """How long the drafts of the rows that decide tokens may be: never longer than what may still be emitted before
        their last token."""
        deciding = [row for row in rows if row.decides]
        none = np.zeros(len(deciding), np.int32)
        if self.drafter is None or not deciding:
            return _Plan(deciding, None, none, _Drafts())
        sequences = [row.sequence for row in deciding]
        roster, num_query = self._roster_of(sequences), sum([row.num_query for row in rows])
        view = Rows(
            request_ids=roster.request_ids,
            tokens=[s.tokens for s in sequences],
            noise_keys=roster.noise_keys,
            sampling=roster.sampling,
            version=self.version,
            load=Load(len(rows), num_query, num_query + sum([row.sequence.num_computed for row in rows])),
            num_computed=np.array([s.num_computed for s in sequences], np.int64),
            features=lambda spans: self.paged.features(
                [(sequences[row].table, start, end) for row, start, end in spans]
            ),
        )
        if self.policy.reads_lengths:
            view.expected_left = self.lengths.expected_left(
                view.request_ids, np.array([s.num_tokens - s.num_prompt for s in sequences])
            )
        caps = self.policy.plan(view)
        if self._ahead is not None:
            self._ahead.ask(view, caps)
            self.scheduler.lookahead = int(caps.max(initial=0))
        if not caps.any():
            return _Plan(deciding, view, none, _Drafts(self.policy.decision))
        caps = np.minimum(caps, np.array([s.limit - s.num_tokens - 1 - s.num_flying for s in sequences], np.int32))
        num_planned, budget = int(caps.sum()), self.scheduler.max_num_batched_tokens - num_query
        if num_planned > budget:
            caps = np.minimum(caps, np.maximum(0, budget - (np.cumsum(caps) - caps))).astype(np.int32)
            num_planned = int(caps.sum())
        return _Plan(deciding, view, caps, _Drafts(self.policy.decision, num_planned=num_planned))

    def _propose(self, plan: _Plan) -> _Drafts:
        """Put drafts on the rows."""
        deciding, found = plan.deciding, plan.drafts
        if not found.num_planned:
            return found
        assert self.drafter is not None and plan.view is not None
        drafts = self.drafter.propose(plan.view, plan.caps)
        assert (drafts.num <= plan.caps).all()
        lengths = self.policy.select(drafts).tolist()
        found.decision, found.num_proposed = self.policy.decision, int(drafts.num.sum())
        if self._overlaps and self.policy.takes_best:  # by the time they are verified it is known which are the best
            found.num_slots = sum(lengths)
            lengths = drafts.num.tolist() if found.num_slots else lengths
        for i, row in enumerate(deciding):
            num = lengths[i]
            row.draft = drafts.tokens[i, :num]
            if num:
                row.drafter = self.drafter.name if drafts.sources is None else drafts.names[drafts.sources[i]]
                if drafts.q is not None:
                    found.q[row.sequence.request.request_id] = drafts.q[i, :num]
        return found

    def _roster_of(self, sequences: list[Sequence]) -> _Roster:
        if sequences != self._roster.sequences:
            self._roster = _Roster(sequences)
        return self._roster

    def _check_finite(self, rows: list[Row], verdict: Verdict) -> None:
        if np.isfinite(verdict.raw_logprobs).all():
            return
        emitted = np.arange(verdict.tokens.shape[1]) <= verdict.num_accepted[:, None]
        wrong = np.flatnonzero((~np.isfinite(verdict.raw_logprobs) & emitted).any(1))
        if len(wrong):
            sequence = rows[wrong[0]].sequence
            raise ValueError(
                f"request {sequence.request.request_id}: the model's logits at position {sequence.num_tokens} are not "
                f"finite: the weights of version {self.version} have diverged"
            )

    def _complete(self, sequence: Sequence) -> Completion:
        completion = sequence.completion()
        request_id = sequence.request.request_id
        self._handles.pop(request_id).completion = completion
        if self.drafter is not None:
            self.drafter.end(request_id)
        self.policy.end(request_id)
        self.lengths.end(request_id, len(completion.token_ids), whole=completion.finish_reason != "abort")
        return completion

    def _trace(self, landed: _Landed) -> None:
        commits, drafts = landed.commits, landed.drafts
        num_drafted, num_accepted = commits.num_drafted.tolist(), commits.num_accepted.tolist()
        positions = np.arange(max(num_drafted, default=0))[:, None]
        sources: dict[str, list[int]] = {}
        for row, num, stood in zip(landed.deciding, num_drafted, num_accepted, strict=True):
            if num:
                counts = sources.setdefault(row.drafter or "", [0, 0])
                counts[0] += num
                counts[1] += stood
        trace = StepTrace(
            step=self._num_steps,
            num_emitted=int(commits.num.sum()),
            num_drafts=len(num_drafted) - num_drafted.count(0),
            num_draft_tokens=sum(num_drafted),
            num_accepted_tokens=sum(num_accepted),
            accepted_per_position=tuple((commits.num_accepted > positions).sum(1).tolist()),
            drafted_per_position=tuple((commits.num_drafted > positions).sum(1).tolist()),
            version=self.version,
            drafter_version=self.drafter.version if self.drafter is not None else 0,
            drafter=self.drafter.name if self.drafter is not None else "none",
            policy=self.policy.name,
            reason=drafts.decision.reason,
            expected_accepted=drafts.decision.expected_accepted,
            expected_s=drafts.decision.expected_s,
            num_planned=drafts.num_planned,
            num_proposed=drafts.num_proposed,
            sources=tuple((name, num, stood) for name, (num, stood) in sources.items()),
            num_history_bytes=self.drafter.num_bytes if self.drafter is not None else 0,
            **landed.figures,
        )
        self._num_steps += 1
        self._traces.append(trace)
        if self.drafter is not None and landed.deciding:
            self.policy.observe(commits, trace, drafts.decision)

    # -- between steps ----------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt:
        """New policy weights from here on. Running sequences `keep` their KV as the old weights computed it, or
        `recompute` it under the new ones; the tokens they have emitted stay, each with the version that chose it.
        The receipt's checksum is of what the engine now holds, not of what it was sent."""
        if inflight not in ("keep", "recompute"):
            raise ValueError(f"inflight = {inflight!r}: must be 'keep' or 'recompute'")
        self._land_all()
        receipt = self.paged.update(weights, version)
        if inflight == "recompute":
            self._send_back()
        self.version = version
        return receipt

    def _send_back(self) -> None:
        """All that run wait, and will be computed again."""
        for sequence in list(reversed(self.scheduler.running)):
            self.scheduler.preempt(sequence)
            self.runner.leave(sequence)

    def update_drafter(self, weights: Weights, version: int) -> Receipt:
        if self.drafter is None:
            raise ValueError("update_drafter: this engine has no drafter (speculation.method = 'none')")
        return self.drafter.update(weights, version)

    def set_drafter(self, drafter: Drafter | None, policy: SpeculationPolicy | None = None) -> None:
        """Another drafter from here on; running requests go on with it. Where it reads other hidden states than the one
        before, they are computed again."""
        self._check_drafting(drafter, policy or self.policy)
        self._land_all()
        wanted = drafter.wants_hidden if drafter is not None else ()
        if wanted and wanted != self.paged.taps:
            self._send_back()
        self.paged.tap(wanted)
        live = [*self.scheduler.running, *self.scheduler.waiting]
        if self.drafter is not None:
            for sequence in live:
                self.drafter.end(sequence.request.request_id)
        if policy is not None:
            for sequence in live:
                self.policy.end(sequence.request.request_id)
                policy.begin(sequence.request)
        self.drafter, self.policy = drafter, policy or self.policy
        self._ahead = drafter if isinstance(drafter, Ahead) else None
        self._listens = isinstance(drafter, Listener) and drafter.listens
        self.runner.equip(drafter)
        self.scheduler.lookahead = 0
        if drafter is not None:
            for sequence in live:
                drafter.begin(sequence.request, self.version)
                emitted = sequence.tokens[sequence.num_prompt :]
                if len(emitted):
                    none = np.zeros(1, np.int32)
                    drafter.observe(
                        Commits(
                            np.array([sequence.request.request_id]),
                            emitted[None].copy(),
                            np.array([len(emitted)], np.int32),
                            none,
                            none,
                        )
                    )

    def learned(self) -> Learned:
        return {
            "drafter": self.drafter.state() if self.drafter is not None else {},
            "policy": self.policy.state(),
            "lengths": self.lengths.state(),
        }

    def teach(self, learned: Learned) -> None:
        if self.drafter is not None and "drafter" in learned:
            self.drafter.restore(learned["drafter"])
        if "policy" in learned:
            self.policy.restore(learned["policy"])
        if "lengths" in learned:
            self.lengths.restore(learned["lengths"])

    def forget(self) -> None:
        self.paged.pool.forget_all()

    @property
    def dtype(self) -> torch.dtype:
        return self.paged.decoder.dtype

    @property
    def crowds(self) -> bool:
        """Where its KV takes an eighth of a GPU's memory."""
        device, kv = self.paged.decoder.device, self.paged.kv
        if device.type != "cuda" or kv is None:
            return False
        return 8 * kv.num_bytes > torch.cuda.get_device_properties(device).total_memory

    def sleep(self) -> None:
        """Give the KV memory back while training. Only between requests."""
        self._land_all()
        if self.scheduler.running or self.scheduler.waiting:
            raise ValueError("sleep: requests are still running; finish or abort them first")
        self.paged.sleep()
        self.runner.forget()

    def wake(self) -> None:
        self.paged.wake()

    def drain_trace(self) -> list[StepTrace]:
        traces, self._traces = self._traces, []
        return traces

    def close(self) -> None:
        for handle in list(self._handles.values()):
            if not handle.done:
                self.abort(handle.request.request_id)
