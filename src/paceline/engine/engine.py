"""The engine's whole life: schedule, draft, forward, accept, commit.

Always: given the policy version at each position, a request's tokens depend on its prompt, its sampling parameters
and its noise key alone (rule `coupled`), or are exact samples of the same distribution (`rejection`, `block`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from paceline.engine.accept import RULES, Verdict
from paceline.engine.drafting import Drafting, Drafts, Plan
from paceline.engine.interface import Handle, Learned, Weights
from paceline.engine.lineup import Lineup
from paceline.engine.runner import EagerRunner, Landed, Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Detokenize, Sequence
from paceline.engine.step import Step, Taken
from paceline.engine.trace_log import TraceLog
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.batch import Commits, Drafter
from paceline.speculation.lengths import LengthModel
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy
from paceline.types import Completion, Receipt, Request, StepTrace, with_noise_key


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
        seed: int = 0,  # of requests without a noise key
    ) -> None:
        if max_num_batched_tokens < 1:
            raise ValueError(f"engine.max_num_batched_tokens = {max_num_batched_tokens}: must be >= 1 token a step")
        if max_num_seqs < 1:
            raise ValueError(f"engine.max_num_seqs = {max_num_seqs}: must be >= 1 sequence")
        self.paged, self.seed = paged, seed
        self.model_config = paged.decoder.config
        self.sampler = sampler or Sampler()
        if rule not in RULES:
            raise ValueError(f"speculation.rule = {rule!r}: must be one of {', '.join(RULES)}")
        self.rule = rule
        self.runner = runner or EagerRunner(paged, self.sampler, RULES[rule])
        self.runner.equip(drafter)
        self.lengths = lengths or LengthModel()
        by_length = self.lengths.expected if order == "longest" else None
        self.scheduler = Scheduler(paged, max_num_seqs, max_num_batched_tokens, prefix_sharing, by_length)
        self.drafting = Drafting(paged, self.scheduler, rule, self.lengths, drafter, policy or StaticPolicy(0))
        paged.tap(drafter.wants_hidden if drafter is not None else ())
        self.tokenizer = tokenizer
        self.detokenize: Detokenize | None = tokenizer.decode if tokenizer is not None else None
        self.version = version
        self._handles: dict[int, Handle] = {}
        self._traces = TraceLog()
        self._num_steps = self._num_submitted = 0
        self._flying: list[Step] = []  # the oldest first
        self._lost = False  # whether a step may fly of which nobody knows: then all land, and the runner is told anew
        self._finished: list[Completion] = []  # and not returned by `step` yet
        self._landed_at = 0.0

    @property
    def drafter(self) -> Drafter | None:
        return self.drafting.drafter

    @property
    def policy(self) -> SpeculationPolicy:
        return self.drafting.policy

    @policy.setter
    def policy(self, policy: SpeculationPolicy) -> None:
        """Another policy from here on. Steps in flight finish first: they carry the old policy's decisions."""
        self.drafting.check(self.drafter, policy)
        self._land_all()
        self.drafting.set_policy(policy, self.scheduler.everybody())

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        self._check(request)
        request = with_noise_key(request, self.seed, self._num_submitted)
        config = self.model_config
        sequence = Sequence(request, self._num_submitted, config.max_positions, config.eos_token_ids)
        self._num_submitted += 1
        self.drafting.begin(request, self.version)
        handle = self._handles[request.request_id] = Handle(request)
        self.scheduler.waiting.append(sequence)
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
        for sequence in self.scheduler.everybody():
            if sequence.request.request_id == request_id:
                self._retire(sequence)
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
            for handle in handles:
                while not handle.done:
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
        lands in a later call: in the next one, or, where nobody on the host need know its tokens before, in the one
        after it, so that two are always on their way. When one lands its tokens are taken, the next one is launched,
        and all else that is to be done about them, here and by the caller, is done meanwhile."""
        overlaps, flying = self.drafting.overlaps, self._flying
        while flying and (self._lost or len(flying) > 1 + overlaps or not flying[0].flight.may_wait):
            self._land()  # where the call before was interrupted
        self._lost = False
        if flying and not overlaps:
            launched = self._hand_over()
        else:
            launched = len(flying) > 1 or self._launch()
            if launched and len(flying) > 1 and flying[-1].flight.may_wait:
                launched = self._relay()
        if not launched or not flying[-1].flight.may_wait:
            self._land_all()
        finished, self._finished = self._finished, []
        return finished

    def _relay(self) -> bool:
        """The oldest step comes down, and another one follows that which still flies; what can wait is done then."""
        taken = self._learn()
        try:
            self._account(taken)
            return self._launch()
        finally:
            self._close(taken)

    def _launch(self) -> bool:
        """Whether there was anything to launch."""
        if self.paged.kv is None:
            raise ValueError("the engine sleeps: wake it before it is to generate")
        started = time.perf_counter()
        rows = self.scheduler.schedule()
        drafting = time.perf_counter()
        drafts = self.drafting.propose(self.drafting.plan(rows, self.version))
        # Where steps overlap, nobody waited for it.
        draft_s = 0.0 if self.drafting.overlaps else time.perf_counter() - drafting
        reserved = self.scheduler.reserve(rows, politely=bool(self._flying))
        if reserved is None:
            return False  # first let what flies land: it may bring room
        rows, preempted = reserved
        for sequence in preempted:
            self.runner.leave(sequence)
        if not len(rows):
            return False
        self._send(rows, drafts, started, draft_s, len(preempted))
        return True

    def _send(self, rows: Lineup, drafts: Drafts, started: float, draft_s: float, num_preempted: int) -> None:
        try:
            captured = self.runner.num_captured
            flight = self.runner.launch(rows, drafts.q, drafts.num_slots)
            reach = (rows.num_query + rows.num_draft) * rows.decides
            step = Step(flight, rows, drafts, started, draft_s, num_preempted, reach)
            if self.drafter is not None and rows.decides.any():
                self.policy.commit(drafts.decision)
            step.fly()
            self._flying.append(step)
            for held_up in self._flying:
                held_up.num_captured += self.runner.num_captured - captured
        except BaseException:
            self._lost = True
            self.scheduler.seats.num_flying[:] = 0
            for known in self._flying:
                known.fly()
            for sequence in self.scheduler.running:
                self.runner.leave(sequence)
            raise

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
        heard = self._commits(self._flying[0].rows, landed.verdict)
        self.drafting.hear(heard)
        drafting = time.perf_counter()
        try:
            drafts = self.drafting.propose(plan)
            self._send(plan.rows, drafts, started, time.perf_counter() - drafting, 0)
        finally:
            self._book(self._learn(landed, heard, drafting - started))
        return True

    def _plan_ahead(self) -> Plan | None:
        """The next step, but for its drafts, if it will be of the rows that fly and drafts are made of what those bring
        alone; with memory for it. None where it may come differently."""
        step, scheduler = self._flying[0], self.scheduler
        if not (self.drafting.listens and step.flight.may_wait):
            return None
        if scheduler.waiting and len(scheduler.running) < scheduler.max_num_seqs:
            return None
        seats, at = scheduler.seats, scheduler.at
        if not step.rows.all_decide or not np.array_equal(step.rows.arrivals, seats.arrival[at]):
            return None
        if seats.stops_at_text[at].any():
            return None
        rows = scheduler.schedule()
        if len(rows) != len(at):
            return None  # someone may be done
        plan = self.drafting.plan(rows, self.version)
        rows.num_draft = plan.caps
        if scheduler.reserve(rows, politely=True) is None:
            return None
        self.runner.prepare(rows)
        return plan

    def _halts(self, verdict: Verdict) -> bool:
        """Whether a sequence ends with what was emitted."""
        seats = self.scheduler.seats
        if seats.stop_ids.isdisjoint(verdict.tokens.ravel().tolist()):  # the device waits: sooner said than by arrays
            return False
        return bool((seats.stops(verdict.tokens) & verdict.emitted).any())

    def _commits(self, deciding: Lineup, verdict: Verdict, num: np.ndarray | None = None) -> Commits:
        """`num`: how much of what each row emitted was taken, if not all of it."""
        num_accepted, num_drafted = verdict.num_accepted, deciding.num_draft.astype(np.int32, copy=False)
        if num is None:
            num = num_accepted + 1
        else:
            num = num.astype(np.int32)
            num_accepted = np.minimum(num, num_accepted)
        return Commits(deciding.seats.request_ids(deciding.at), verdict.tokens, num, num_drafted, num_accepted)

    def _land(self) -> None:
        """The oldest step that flies comes down: tokens are taken, and who is done leaves."""
        self._book(self._learn())

    def _learn(self, landed: Landed | None = None, heard: Commits | None = None, hearing_s: float = 0.0) -> Taken:
        """What the oldest step that flies has emitted. Interrupted while it is waited for, it flies on; if what it
        brought can't be taken, sequences go on from what is known of them. `heard`: what the drafter was told."""
        flight = self._flying[0].flight
        landed, took = landed or flight.land(), flight.took()
        try:
            return self._take(self._ground(), landed, took, heard, hearing_s)
        except BaseException:
            self._flying.clear()
            self.scheduler.seats.num_flying[:] = 0
            for sequence in self.scheduler.running:
                self.runner.leave(sequence)
            raise

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _ground(self) -> Step:
        step = self._flying.pop(0)
        step.fly(-1)
        return step

    def _take(
        self, step: Step, landed: Landed, took: tuple[float, float], heard: Commits | None, hearing_s: float
    ) -> Taken:
        rows, verdict = self._still_running(step.rows, landed)
        deciding, seats = rows.deciding, rows.seats
        self._check_finite(deciding, verdict)
        before = seats.num_computed[rows.at]
        reached = before + rows.num_query + rows.num_draft
        num_query = int((rows.num_query + rows.num_draft).sum())
        num, over = seats.take(
            deciding.at, verdict, deciding.num_draft, deciding.drafters, self.version, self.detokenize
        )
        # What was computed for tokens that stand; a deciding row's last token is new.
        seats.num_computed[rows.at] = np.minimum(reached, seats.num_tokens[rows.at] - 1)
        commits = heard or self._commits(deciding, verdict, num)
        finished = seats.of(deciding.at[over])
        if heard is None and self.drafter is not None and len(deciding):
            observing = time.perf_counter()
            try:
                self.drafting.hear(commits)
            except BaseException:
                self._dismiss(finished)
                raise
            hearing_s = 0.0 if self.drafting.overlaps else time.perf_counter() - observing
        started, self._landed_at = max(step.started, self._landed_at), time.perf_counter()
        figures = {
            "start_s": started,
            "total_s": self._landed_at - started,
            "draft_s": step.draft_s + hearing_s,
            "forward_s": took[0],
            "sample_s": took[1],
            "num_rows": len(rows),
            "num_query_tokens": num_query,
            "num_context_tokens": int(before.sum()) + num_query,
            "num_preempted": step.num_preempted,
            "num_free_blocks": self.paged.pool.num_free,
            "num_captured": step.num_captured,
            "num_guessed": landed.num_guessed,
        }
        for sequence in finished:
            self._retire(sequence)
        return Taken(rows, before, deciding, commits, step.drafts, finished, figures)

    def _still_running(self, rows: Lineup, landed: Landed) -> tuple[Lineup, Verdict]:
        """The step's rows with what they have verified, and what those that decide emit; without sequences that ended
        while it flew."""
        if landed.num_verified is not None:
            rows.cut(landed.num_verified)
        if (left := rows.left) is None:
            return rows, landed.verdict
        return rows.pick(~left), landed.verdict.pick(~left[rows.decides])

    def _check_finite(self, rows: Lineup, verdict: Verdict) -> None:
        if np.isfinite(verdict.raw_logprobs).all():
            return
        wrong = np.flatnonzero((~np.isfinite(verdict.raw_logprobs) & verdict.emitted).any(1))
        if len(wrong):
            sequence = rows[int(wrong[0])].sequence
            raise ValueError(
                f"request {sequence.request.request_id}: the model's logits at position {sequence.num_tokens} are not "
                f"finite: the weights of version {self.version} have diverged"
            )

    def _retire(self, sequence: Sequence) -> None:
        """Its memory and its place in the runner are another's from here on."""
        self.scheduler.finish(sequence)
        self.runner.leave(sequence)

    def _dismiss(self, finished: list[Sequence]) -> None:
        for sequence in finished:
            self._retire(sequence)
            self._finished.append(self._complete(sequence))

    def _book(self, taken: Taken) -> None:
        self._account(taken)
        self._close(taken)

    def _account(self, taken: Taken) -> None:
        trace = taken.trace(self._num_steps, self.version, self.drafting)
        self._num_steps += 1
        self._traces.add([trace])
        if self.drafter is not None and len(taken.deciding):
            self.policy.observe(taken.commits, trace, taken.drafts.decision)

    def _close(self, taken: Taken) -> None:
        """Memory goes back, and who is done is told."""
        rows, before, left = taken.rows, taken.before, taken.rows.left
        self.scheduler.settle(*(rows, before) if left is None else (rows.pick(~left), before[~left]))
        for sequence in taken.finished:
            self._finished.append(self._complete(sequence))

    def _complete(self, sequence: Sequence) -> Completion:
        completion = sequence.completion()
        self._handles.pop(sequence.request.request_id).completion = completion
        self.drafting.end(completion)
        return completion

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
        self.drafting.check(drafter, policy or self.policy)
        self._land_all()
        wanted = drafter.wants_hidden if drafter is not None else ()
        if wanted and wanted != self.paged.taps:
            self._send_back()
        self.paged.tap(wanted)
        live = self.scheduler.everybody()
        if policy is not None:
            self.drafting.set_policy(policy, live)
        self.drafting.set_drafter(drafter, live, self.version)
        self.runner.equip(drafter)

    def learned(self) -> Learned:
        return self.drafting.learned()

    def teach(self, learned: Learned) -> None:
        self.drafting.teach(learned)

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
        return self._traces.drain()

    def close(self) -> None:
        for handle in list(self._handles.values()):
            if not handle.done:
                self.abort(handle.request.request_id)
