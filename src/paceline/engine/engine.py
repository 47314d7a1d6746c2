"""The engine: schedule, draft, run, commit.

Invariant: given the policy version at each position, a request's tokens depend only on its prompt, its sampling
parameters and its noise key (rule `coupled`), or are exact samples of the same distribution (`rejection`, `block`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from paceline.engine.accept import RULES
from paceline.engine.checks import bad_word_ids, check_finite, check_request, check_tokens_left
from paceline.engine.drafting import Drafting
from paceline.engine.grammar import GrammarCompiler
from paceline.engine.interface import Handle, SpeculationState, Weights
from paceline.engine.runner import EagerRunner, Runner
from paceline.engine.scheduler import Scheduler
from paceline.engine.sequence import Detokenize, Sequence
from paceline.engine.step import CommittedStep, InFlightStep
from paceline.engine.trace_log import TraceLog
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.speculation.batch import Commits, Drafter
from paceline.speculation.lengths import LengthModel
from paceline.speculation.policy import SpeculationPolicy, StaticPolicy
from paceline.types import Completion, Receipt, Request, StepTrace, with_noise_key


class LocalEngine:
    """`runner` computes the steps; the default works on any device and with any acceptance rule."""

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
        max_num_prefill_tokens: int | None = None,  # of these, while sequences decode
        prefix_sharing: bool = True,
        order: str = "arrival",
        tokenizer: Any = None,
        version: int = 0,
        seed: int = 0,  # for requests without a noise key
    ) -> None:
        self.paged, self.seed = paged, seed
        self.model_config = paged.decoder.config
        self.sampler = sampler or Sampler()
        if rule not in RULES:
            raise ValueError(f"speculation.rule = {rule!r}: must be one of {', '.join(RULES)}")
        self.rule = rule
        self.runner = runner or EagerRunner(paged, self.sampler, RULES[rule])
        self.runner.set_drafter(drafter)
        self.lengths = lengths or LengthModel()
        by_length = self.lengths.expected if order == "longest" else None
        self.scheduler = Scheduler(
            paged, max_num_seqs, max_num_batched_tokens, prefix_sharing, by_length, max_num_prefill_tokens,
            self.runner.batches_prompts,
        )  # fmt: skip
        self.drafting = Drafting(paged, self.scheduler, rule, self.lengths, drafter, policy or StaticPolicy(0))
        paged.set_aux_layers(drafter.aux_layers if drafter is not None else ())
        self.tokenizer = tokenizer
        self.detokenize: Detokenize | None = tokenizer.decode if tokenizer is not None else None
        self.grammars = GrammarCompiler(tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)
        self.version = version
        self._sequences: dict[int, Sequence] = {}  # submitted and not completed, by request id
        self._handles: dict[int, Handle] = {}
        self._traces = TraceLog()
        self._num_steps = self._num_submitted = 0
        self._in_flight: deque[InFlightStep] = deque()
        self._finished: list[Completion] = []  # not returned by `step` yet
        self._committed_at = 0.0
        self._interrupted = False  # an exception ended a step: see `_recover`

    @property
    def drafter(self) -> Drafter | None:
        return self.drafting.drafter

    @property
    def policy(self) -> SpeculationPolicy:
        return self.drafting.policy

    @policy.setter
    def policy(self, policy: SpeculationPolicy) -> None:
        """Use another policy from now on. Steps in flight finish first: they carry the old policy's decisions."""
        self.drafting.check(self.drafter, policy)
        self._drain()
        self.drafting.set_policy(policy, self.sequences)

    # -- requests ---------------------------------------------------------------------------------------------------

    @property
    def max_model_len(self) -> int:
        return min(self.model_config.max_positions, self.paged.pool.num_blocks * BLOCK)

    def submit(self, request: Request) -> Handle:
        if request.request_id in self._handles:
            raise ValueError(f"request {request.request_id}: a request with this id is still running")
        config, kv_tokens = self.model_config, self.paged.pool.num_blocks * BLOCK
        check_request(request, config.max_positions, config.vocab_size, kv_tokens, self.detokenize is not None)
        request = with_noise_key(request, self.seed, self._num_submitted)
        bad_words = bad_word_ids(request.sampling.bad_words, self.tokenizer)
        grammar, arrival = self.grammars.matcher(request.sampling.structured_outputs), self._num_submitted
        sequence = Sequence(request, arrival, config.max_positions, config.eos_token_ids, bad_words, grammar)
        check_tokens_left(sequence, config.vocab_size)
        self._num_submitted += 1
        self.drafting.begin(request, self.version)
        handle = self._handles[request.request_id] = Handle(request)
        self._sequences[request.request_id] = sequence
        self.scheduler.waiting.append(sequence)
        return handle

    def abort(self, request_id: int) -> None:
        """End a request now. Its completion has the tokens that were emitted so far, which may be all."""
        handle = self._handles.get(request_id)
        if handle is None:
            raise ValueError(f"request {request_id} is not running")
        self._drain()
        if not handle.done:
            sequence = self._sequences[request_id]
            with self._recoverable():
                self._remove(sequence)
                sequence.finish_reason = "abort"
                self._complete(sequence, [])

    @property
    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight or self._finished)

    def generate(self, requests: Seq[Request], progress: Callable[[int, int], None] | None = None) -> list[Completion]:
        """Run these requests to their end and return the completions in their order. On an error or Ctrl-C, all of
        them are aborted."""
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(self.submit(request))
            for handle in handles:
                while not handle.done:
                    self.step()
                    if progress is not None:
                        progress(sum(h.done for h in handles), len(handles))
        finally:
            for handle in handles:
                if not handle.done:
                    self.abort(handle.request.request_id)
            self._drain()  # steps that were launched before the last sequence was known to be finished
            own = {handle.request.request_id for handle in handles}
            self._finished = [c for c in self._finished if c.request.request_id not in own]
        return [h.completion for h in handles if h.completion is not None]

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        """Run one engine step and return the completions that finished. With an asynchronous runner, the step launched
        here finishes in a later call: up to `pipeline_depth` steps are in flight, so that host work overlaps with the
        device. In the steady state `_commit_oldest` launches the next step."""
        with self._recoverable():
            while self._can_launch and self._launch():
                pass
            if self._in_flight:
                self._commit_oldest()
        finished, self._finished = self._finished, []
        return finished

    @property
    def pipeline_depth(self) -> int:
        """Two, if the next step does not depend on what the host does with the results of the last one."""
        return 2 if self.drafting.overlaps else 1

    @property
    def _can_launch(self) -> bool:
        if not self._in_flight:
            return True
        return len(self._in_flight) < self.pipeline_depth and self._in_flight[-1].pending.is_async

    def _launch(self) -> bool:
        """Whether a step was launched: not if nothing can run, or if a step in flight may free the blocks it needs."""
        if self.paged.kv is None:
            raise ValueError("the engine sleeps: call wake() before it generates")
        started = time.perf_counter()
        self.drafting.update_pause()
        batch = self.scheduler.schedule()
        scheduled = time.perf_counter()
        drafts = self.drafting.propose(batch, self.version)
        # If steps overlap, this is done while the device computes: it is assumed to cost no time.
        draft_s = 0.0 if self.drafting.overlaps else time.perf_counter() - scheduled
        reserved = self.scheduler.reserve(batch, preempt=not self._in_flight)
        if reserved is None:
            return False
        batch, preempted = reserved
        for sequence in preempted:
            self.runner.remove(sequence)
        if not len(batch):
            return False
        num_captured = self.runner.num_captured
        pending = self.runner.launch(batch, drafts.q, drafts.draft_budget)
        self.scheduler.count_prefill(batch)
        step = InFlightStep(pending, batch, drafts, started, draft_s, len(preempted))
        if self.drafter is not None and batch.emits.any():
            self.policy.launched(drafts.decision)
        step.count_in_flight(1)
        self._in_flight.append(step)
        for delayed in self._in_flight:
            delayed.num_captured += self.runner.num_captured - num_captured
        return True

    def _commit_oldest(self) -> None:
        """Wait for the oldest step and commit it. The next step is launched before the bookkeeping that can wait.
        Freed blocks can be used again at once: the device computes steps in the order of their launch."""
        committed = self._commit(self._in_flight.popleft())
        if self._in_flight and self._can_launch:
            self._launch()
        self._finish(committed)

    def _commit(self, step: InFlightStep) -> CommittedStep:
        """Wait, append the tokens, notify drafter, acceptance model and policy. Skips rows whose sequence has ended."""
        output, (forward_s, sample_s) = step.pending.wait(), step.pending.times()
        step.count_in_flight(-1)
        batch, result = step.batch, output.result
        if output.num_verified is not None:
            batch.limit_drafts(output.num_verified)
        if (ended := batch.ended) is not None:
            batch, result = batch.pick(~ended), result.pick(~ended[batch.emits])
        emitting, seq_table = batch.emitting, batch.seq_table
        check_finite(emitting, result, self.version)
        num_computed_before = seq_table.num_computed[batch.slots]
        verified = self.drafting.verified(emitting)
        num_context_tokens = step.num_context_tokens(emitting)
        num, is_finished = seq_table.commit(
            emitting.slots, result, emitting.num_draft, emitting.drafters, self.version, self.detokenize
        )
        # The KV of rejected tokens does not count, and that of the last token is not computed yet.
        seq_table.num_computed[emitting.slots] = seq_table.num_tokens[emitting.slots] - 1
        commits = Commits(
            seq_table.request_ids(emitting.slots), result.tokens, num.astype(np.int32),
            emitting.num_draft.astype(np.int32, copy=False), np.minimum(num, result.num_accepted).astype(np.int32),
        )  # fmt: skip
        observed_at = time.perf_counter()
        if self.drafter is not None and len(emitting):
            self.drafter.observe(commits)
        started, self._committed_at = max(step.started, self._committed_at), time.perf_counter()
        observe_s = 0.0 if self.drafting.overlaps else self._committed_at - observed_at
        finished = seq_table.of(emitting.slots[is_finished])
        committed = CommittedStep(batch, num_computed_before, emitting, commits, step.drafts, finished, {
            "start_s": started,
            "total_s": self._committed_at - started,
            "draft_s": step.draft_s + observe_s,
            "forward_s": forward_s,
            "sample_s": sample_s,
            "num_rows": len(batch),
            "num_query_tokens": int(batch.num_query.sum() + emitting.num_draft.sum()),
            "num_context_tokens": num_context_tokens,
            "num_preempted": step.num_preempted,
            "num_free_blocks": self.paged.pool.num_free,
            "num_captured": step.num_captured,
            "num_drafted_on_device": output.num_drafted_on_device,
            "num_outside_graph": output.num_outside_graph,
        })  # fmt: skip
        for sequence in finished:
            self._remove(sequence)
        trace = committed.trace(self._num_steps, self.version, self.drafting)
        self._num_steps += 1
        self._traces.add([trace])
        if self.drafter is not None and len(emitting):
            self.drafting.observe(commits, verified, trace, step.drafts)
        return committed

    def _finish(self, committed: CommittedStep) -> None:
        """Free blocks and complete the finished sequences."""
        batch, before, ended = committed.batch, committed.num_computed_before, committed.batch.ended
        if ended is not None:
            batch, before = batch.pick(~ended), before[~ended]
        self.scheduler.release_unused(batch, before)
        for sequence in committed.finished:
            self._complete(sequence, self._finished)

    def _remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.runner.remove(sequence)

    def _complete(self, sequence: Sequence, finished: list[Completion]) -> None:
        completion, request_id = sequence.completion(), sequence.request.request_id
        try:
            self.drafting.end(completion)
        finally:  # an exception must not lose it
            self._handles[request_id].completion = completion
            finished.append(completion)
            del self._sequences[request_id], self._handles[request_id]

    @property
    def sequences(self) -> list[Sequence]:
        """Submitted and not completed."""
        return list(self._sequences.values())

    def sequence(self, request_id: int) -> Sequence:
        """Of a request that has not completed."""
        return self._sequences[request_id]

    def _drain(self) -> None:
        """Commit all steps in flight."""
        with self._recoverable():
            while self._in_flight:
                self._finish(self._commit(self._in_flight.popleft()))

    @contextmanager
    def _recoverable(self) -> Iterator[None]:
        """If an exception ends the body, the next body starts with `_recover`."""
        if self._interrupted:
            self._recover()
        self._interrupted = True
        yield
        self._interrupted = False

    def _recover(self) -> None:
        """After an exception inside a step, Ctrl-C included. Only the committed tokens are relied on: steps in flight
        are dropped, and all sequences wait and are computed again."""
        self._in_flight.clear()
        self.runner.reset()
        sequences = self.sequences
        for sequence in sequences:
            sequence.update_finish_reason(self.detokenize)
        self.scheduler.reset(sequence for sequence in sequences if sequence.finish_reason is None)
        self.drafting.set_drafter(self.drafter, sequences, self.version)
        for sequence in sequences:
            if sequence.finish_reason is not None:
                self._complete(sequence, self._finished)
        self._interrupted = False

    # -- between steps ----------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt:
        """Use new policy weights from now on. Running sequences `keep` the KV that the old weights computed, or
        `recompute` it. Emitted tokens stay, each with the version that sampled it. The receipt's checksum is of the
        weights that the engine now holds."""
        if inflight not in ("keep", "recompute"):
            raise ValueError(f"inflight = {inflight!r}: must be 'keep' or 'recompute'")
        self._drain()
        receipt = self.paged.update(weights, version)
        if inflight == "recompute":
            self._preempt_all()
        self.version = version
        return receipt

    def _preempt_all(self) -> None:
        with self._recoverable():
            for sequence in reversed(self.scheduler.running.copy()):
                self.scheduler.preempt(sequence)
                self.runner.remove(sequence)

    def update_drafter(self, weights: Weights, version: int) -> Receipt:
        if self.drafter is None:
            raise ValueError("update_drafter: this engine has no drafter (speculation.method = 'none')")
        receipt = self.drafter.update(weights, version)
        self.policy.drafter_updated()
        return receipt

    def set_drafter(self, drafter: Drafter | None, policy: SpeculationPolicy | None = None) -> None:
        """Use another drafter from now on, for running requests too. If it reads other layers' hidden states, running
        sequences are computed again."""
        self.drafting.check(drafter, policy or self.policy)
        self._drain()
        layers = drafter.aux_layers if drafter is not None else ()
        if layers and layers != self.paged.aux_layers:
            self._preempt_all()
        self.paged.set_aux_layers(layers)
        if policy is not None:
            self.drafting.set_policy(policy, self.sequences)
        self.drafting.set_drafter(drafter, self.sequences, self.version)
        self.runner.set_drafter(drafter)

    def state_dict(self) -> SpeculationState:
        return self.drafting.state_dict()

    def load_state_dict(self, state_dict: SpeculationState) -> None:
        self.drafting.load_state_dict(state_dict)

    def reset_prefix_cache(self) -> None:
        self.paged.pool.reset_prefix_cache()

    @property
    def dtype(self) -> torch.dtype:
        return self.paged.decoder.dtype

    @property
    def wants_sleep(self) -> bool:
        return self.paged.has_large_kv

    def sleep(self) -> None:
        """Free the KV memory while training. Only without requests."""
        self._drain()
        if self._sequences:
            raise ValueError("sleep: requests are still running; finish or abort them first")
        self.runner.release_memory()
        self.paged.sleep()

    def wake(self) -> None:
        self.paged.wake()

    def drain_trace(self) -> list[StepTrace]:
        return self._traces.drain()

    def close(self) -> None:
        for handle in list(self._handles.values()):
            if not handle.done:
                self.abort(handle.request.request_id)
