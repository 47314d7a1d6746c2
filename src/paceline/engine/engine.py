"""The engine's whole life: schedule, draft, forward, accept, commit.

Always: given the policy version at each position, a request's tokens depend on its prompt, its sampling parameters
and its noise key alone (rule `coupled`), or are exact samples of the same distribution (`rejection`, `block`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from paceline.engine.accept import RULES, Proposal, Verdict
from paceline.engine.scheduler import Row, Scheduler
from paceline.engine.sequence import Detokenize, Sequence
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler, SamplingArrays
from paceline.speculation.batch import Commits, Drafter, Load, Rows
from paceline.speculation.lengths import LengthModel
from paceline.speculation.policy import Decision, SpeculationPolicy, StaticPolicy
from paceline.types import Completion, Receipt, Request, StepTrace

Weights = Iterable[tuple[str, Tensor]]


class Handle:
    """A submitted request; `completion` is there once it is done."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.completion: Completion | None = None

    @property
    def done(self) -> bool:
        return self.completion is not None


class Engine(Protocol):
    """What the loop above knows of an engine."""

    def submit(self, request: Request) -> Handle: ...
    def step(self) -> list[Completion]: ...
    def abort(self, request_id: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt: ...
    def update_drafter(self, weights: Weights, version: int) -> Receipt: ...
    def drain_trace(self) -> list[StepTrace]: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class _Drafts:
    """What drafting came to: the policy's decision, and the drafts' distributions by request where there are any."""

    decision: Decision = field(default_factory=Decision)
    num_planned: int = 0
    num_proposed: int = 0
    q: dict[int, Tensor] = field(default_factory=dict)


class LocalEngine:
    def __init__(
        self,
        paged: PagedDecoder,
        *,
        sampler: Sampler | None = None,
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
        self.rule = RULES[rule]
        self.drafter, self.policy = drafter, policy or StaticPolicy(0)
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

    def _check_drafting(self, drafter: Drafter | None, policy: SpeculationPolicy) -> None:
        if self.rule is RULES["coupled"]:
            return
        name = next(name for name, rule in RULES.items() if rule is self.rule)
        if policy.reads_drafts:
            raise ValueError(
                f"speculation.rule = {name!r} is biased by a policy that cuts drafts by what is in them; "
                "use rule = 'coupled' with it, or a policy that does not look (speculation.min_confidence = 0)"
            )
        if drafter is not None and drafter.reads_drafts:
            raise ValueError(
                f"speculation.rule = {name!r} is biased by a drafter that chooses among drafts by what it sampled; use "
                "rule = 'coupled' with it, or choose before sampling (speculation.hybrid_choice = 'before')"
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
        """End a request now; its completion has what it emitted so far."""
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            if sequence.request.request_id == request_id:
                if sequence in self.scheduler.running:
                    self.scheduler.finish(sequence)
                else:
                    self.scheduler.waiting.remove(sequence)
                sequence.finish_reason = "abort"
                self._complete(sequence)
                return
        raise ValueError(f"request {request_id} is not running")

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

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
        return [h.completion for h in handles if h.completion is not None]

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        """One forward for all rows. Returns what finished."""
        started = time.perf_counter()
        rows = self.scheduler.schedule()
        drafting = time.perf_counter()
        drafts = self._draft(rows)
        draft_s = time.perf_counter() - drafting
        rows, num_preempted = self.scheduler.reserve(rows)
        if not rows:
            return []
        ready = time.perf_counter()
        logits_PV = self.paged.forward([row.span() for row in rows])
        forwarded = time.perf_counter()
        deciding = [row for row in rows if row.reaches_end]
        verdict = self._accept(deciding, drafts.q, logits_PV) if deciding else Verdict([], [], [], [])
        sampled = time.perf_counter()
        num_query = sum(row.num_query + len(row.draft) for row in rows)
        num_context = sum(row.sequence.num_computed + row.num_query + len(row.draft) for row in rows)
        finished, commits = self._commit(rows, deciding, verdict)
        if self.drafter is not None and deciding:
            observing = time.perf_counter()
            self.drafter.observe(commits)
            draft_s += time.perf_counter() - observing
        self._trace(
            started,
            deciding,
            commits,
            drafts,
            num_rows=len(rows),
            num_query_tokens=num_query,
            num_context_tokens=num_context,
            num_preempted=num_preempted,
            draft_s=draft_s,
            forward_s=forwarded - ready,
            sample_s=sampled - forwarded,
        )
        completions = []
        for sequence in finished:
            self.scheduler.finish(sequence)
            completions.append(self._complete(sequence))
        return completions

    def _draft(self, rows: list[Row]) -> _Drafts:
        """Put drafts on the rows that decide tokens. A draft is never longer than what may still be emitted before its
        last token."""
        deciding = [row for row in rows if row.reaches_end]
        if self.drafter is None or not deciding:
            return _Drafts()
        view = Rows(
            request_ids=np.array([r.sequence.request.request_id for r in deciding], np.int64),
            tokens=[r.sequence.tokens for r in deciding],
            noise_keys=np.array([r.sequence.request.noise_key for r in deciding], np.uint64),
            sampling=[r.sequence.request.sampling for r in deciding],
            version=self.version,
            load=Load(
                len(rows),
                sum(r.num_query for r in rows),
                sum(r.sequence.num_computed + r.num_query for r in rows),
            ),
            num_computed=np.array([r.sequence.num_computed for r in deciding], np.int64),
            features=lambda spans: self.paged.features(
                [(deciding[row].sequence.table, start, end) for row, start, end in spans]
            ),
        )
        if self.policy.reads_lengths:
            view.expected_left = self.lengths.expected_left(
                view.request_ids, np.array([r.sequence.num_tokens - r.sequence.num_prompt for r in deciding])
            )
        left = np.array([r.sequence.num_left - 1 for r in deciding], np.int32)
        caps = np.minimum(self.policy.plan(view), left)
        budget = self.scheduler.max_num_batched_tokens - sum(r.num_query for r in rows)
        caps = np.minimum(caps, np.maximum(0, budget - (np.cumsum(caps) - caps))).astype(np.int32)
        found = _Drafts(self.policy.decision, num_planned=int(caps.sum()))
        if not found.num_planned:
            return found
        drafts = self.drafter.propose(view, caps)
        assert (drafts.num <= caps).all()
        lengths = self.policy.select(drafts)
        found.decision, found.num_proposed = self.policy.decision, int(drafts.num.sum())
        for i, row in enumerate(deciding):
            if lengths[i]:
                row.draft = drafts.tokens[i, : lengths[i]]
                row.drafter = self.drafter.name if drafts.sources is None else drafts.names[drafts.sources[i]]
                if drafts.q is not None:
                    found.q[row.sequence.request.request_id] = drafts.q[i, : lengths[i]]
        return found

    def _accept(self, rows: list[Row], q: dict[int, Tensor], logits_PV: Tensor) -> Verdict:
        sizes = np.array([1 + len(row.draft) for row in rows])
        verdict = self.rule(
            Proposal(
                logits_PV=logits_PV,
                drafts=[row.draft for row in rows],
                q=[
                    q[row.sequence.request.request_id][: len(row.draft)] if q and len(row.draft) else None
                    for row in rows
                ],
                noise_keys=np.array([row.sequence.request.noise_key for row in rows], np.uint64),
                lengths=np.array([row.sequence.num_tokens for row in rows], np.int64),
                params=SamplingArrays.of([row.sequence.request.sampling for row in rows], sizes),
                starts=np.concatenate([[0], np.cumsum(sizes)]),
            ),
            self.sampler,
        )
        for row, raw_logprobs in zip(rows, verdict.raw_logprobs, strict=True):
            if not np.isfinite(raw_logprobs).all():
                raise ValueError(
                    f"request {row.sequence.request.request_id}: the model's logits at position "
                    f"{row.sequence.num_tokens} are not finite: the weights of version {self.version} have diverged"
                )
        return verdict

    def _commit(self, rows: list[Row], deciding: list[Row], verdict: Verdict) -> tuple[list[Sequence], Commits]:
        width = max((len(tokens) for tokens in verdict.tokens), default=1)
        commits = Commits(
            request_ids=np.array([row.sequence.request.request_id for row in deciding], np.int64),
            tokens=np.zeros((len(deciding), width), np.int32),
            num=np.zeros(len(deciding), np.int32),
            num_drafted=np.array([len(row.draft) for row in deciding], np.int32),
            num_accepted=np.zeros(len(deciding), np.int32),
        )
        finished: list[Sequence] = []
        for i, row in enumerate(deciding):
            sequence = row.sequence
            before = sequence.num_tokens
            count = sequence.commit(
                verdict.tokens[i],
                verdict.logprobs[i],
                verdict.raw_logprobs[i],
                verdict.num_accepted[i],
                len(row.draft),
                self.version,
                row.drafter,
                self.detokenize,
            )
            commits.tokens[i, :count] = sequence.tokens[before:]
            commits.num[i] = count
            commits.num_accepted[i] = min(count, verdict.num_accepted[i])
            if sequence.finish_reason is not None:
                finished.append(sequence)
        for row in rows:  # what was computed for tokens that stand; a deciding row's last token is new
            sequence = row.sequence
            self.scheduler.settle(
                row, min(sequence.num_computed + row.num_query + len(row.draft), sequence.num_tokens - 1)
            )
        return finished, commits

    def _complete(self, sequence: Sequence) -> Completion:
        completion = sequence.completion()
        request_id = sequence.request.request_id
        self._handles.pop(request_id).completion = completion
        if self.drafter is not None:
            self.drafter.end(request_id)
        self.policy.end(request_id)
        self.lengths.end(request_id, len(completion.token_ids), whole=completion.finish_reason != "abort")
        return completion

    def _trace(self, started: float, deciding: list[Row], commits: Commits, drafts: _Drafts, **figures: Any) -> None:
        depth = int(commits.num_drafted.max(initial=0))
        sources: dict[str, list[int]] = {}
        for i, row in enumerate(deciding):
            if len(row.draft):
                counts = sources.setdefault(row.drafter or "", [0, 0])
                counts[0] += len(row.draft)
                counts[1] += int(commits.num_accepted[i])
        trace = StepTrace(
            step=self._num_steps,
            start_s=started,
            num_emitted=int(commits.num.sum()),
            num_drafts=int((commits.num_drafted > 0).sum()),
            num_draft_tokens=int(commits.num_drafted.sum()),
            num_accepted_tokens=int(commits.num_accepted.sum()),
            accepted_per_position=tuple(int((commits.num_accepted > j).sum()) for j in range(depth)),
            drafted_per_position=tuple(int((commits.num_drafted > j).sum()) for j in range(depth)),
            num_free_blocks=self.paged.pool.num_free,
            total_s=time.perf_counter() - started,
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
            **figures,
        )
        self._num_steps += 1
        self._traces.append(trace)
        if self.drafter is not None and deciding:
            self.policy.observe(commits, trace)

    # -- between steps ----------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt:
        """New policy weights from here on. Running sequences `keep` their KV as the old weights computed it, or
        `recompute` it under the new ones; the tokens they have emitted stay, each with the version that chose it.
        The receipt's checksum is of what the engine now holds, not of what it was sent."""
        if inflight not in ("keep", "recompute"):
            raise ValueError(f"inflight = {inflight!r}: must be 'keep' or 'recompute'")
        receipt = self.paged.update(weights, version)
        if inflight == "recompute":
            for sequence in list(reversed(self.scheduler.running)):
                self.scheduler.preempt(sequence)
        self.version = version
        return receipt

    def update_drafter(self, weights: Weights, version: int) -> Receipt:
        if self.drafter is None:
            raise ValueError("update_drafter: this engine has no drafter (speculation.method = 'none')")
        return self.drafter.update(weights, version)

    def set_drafter(self, drafter: Drafter | None, policy: SpeculationPolicy | None = None) -> None:
        """Another drafter from here on; running requests go on with it. Where it reads other hidden states than the one
        before, they are computed again."""
        self._check_drafting(drafter, policy or self.policy)
        wanted = drafter.wants_hidden if drafter is not None else ()
        if wanted and wanted != self.paged.taps:
            for sequence in list(reversed(self.scheduler.running)):
                self.scheduler.preempt(sequence)
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

    def learned(self) -> dict[str, dict[str, np.ndarray]]:
        """What drafter, policy and length model have learned from what was generated: their states."""
        return {
            "drafter": self.drafter.state() if self.drafter is not None else {},
            "policy": self.policy.state(),
            "lengths": self.lengths.state(),
        }

    def sleep(self) -> None:
        """Give the KV memory back while training. Only between requests."""
        if self.has_work:
            raise ValueError("sleep: requests are still running; finish or abort them first")
        self.paged.sleep()

    def wake(self) -> None:
        self.paged.wake()

    def drain_trace(self) -> list[StepTrace]:
        traces, self._traces = self._traces, []
        return traces

    def close(self) -> None:
        for request_id in list(self._handles):
            self.abort(request_id)
