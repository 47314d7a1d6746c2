"""vLLM as an engine: takes Paceline's requests, returns its completions, traces and weight receipts.

vLLM runs in this process; with tensor parallelism its workers are processes of their own. The engine calls the methods
of `WorkerExtension` by name, so both cases work alike. Every request samples with a seed from its noise key: a run is
reproducible, but with drafts vLLM emits other tokens than without.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from vllm import SamplingParams as VllmSampling
from vllm import TokensPrompt
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from paceline.cluster.vllm_extension import HAS_WEIGHT_TRANSFER
from paceline.cluster.vllm_names import BACKEND, EXTENSION, PROBLEM, VERSION
from paceline.cluster.vllm_provenance import provenance
from paceline.cluster.vllm_shared import MAX_BYTES, write_buckets
from paceline.cluster.vllm_trace import StepStats, step_trace
from paceline.engine.checks import check_request, check_sampling
from paceline.engine.interface import Handle, SpeculationState, Weights
from paceline.engine.sequence import NO_SOURCE, Record, Sequence
from paceline.engine.trace_log import TraceLog
from paceline.types import Completion, Provenance, Receipt, Request, StepTrace, with_noise_key

SEED_MASK = (1 << 63) - 1


class _RunningRequest:
    def __init__(self, handle: Handle, sequence: Sequence, vllm_id: str) -> None:
        self.handle, self.sequence = handle, sequence
        self.vllm_id = vllm_id  # vLLM's internal request id
        self.tokens_per_step: list[int] = []


class VllmEngine:
    """`options` are the EngineArgs that vary between runs. `drafter` is the drafter's name in traces and completions.
    `kv_tokens` is set if the KV cache is smaller than the model's context: a request that may need more is rejected."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        tokenizer: Any,
        eos_token_ids: tuple[int, ...] = (),
        drafter: str = "none",
        threads: int | None = None,
        kv_tokens: int | None = None,
    ) -> None:
        self._stats = StepStats()
        self._vllm = _start(options, self._stats, threads)
        self._config = self._vllm.vllm_config
        self.tokenizer, self.version, self.drafter_version = tokenizer, 0, 0
        self._eos, self._drafter, self._kv_tokens = eos_token_ids, drafter, kv_tokens
        self._running: dict[int, _RunningRequest] = {}
        self._traces = TraceLog()
        self._num_steps = self._num_submitted = 0
        self._call_workers("paceline_ignore_signals", os.getpid())
        speculative = self._config.speculative_config
        self._has_history = speculative is not None and speculative.method == "custom_class"
        self._has_draft_weights = speculative is not None and speculative.method in ("eagle3", "draft_model")
        if speculative is not None:
            self._call_workers("paceline_check_sampler")
        if self._has_history:
            self._call_workers("paceline_attach_history")

    @property
    def dtype(self) -> torch.dtype:
        return self._config.model_config.dtype

    @property
    def max_model_len(self) -> int:
        return int(self._config.model_config.max_model_len)

    @property
    def wants_sleep(self) -> bool:
        """On a GPU vLLM takes nearly all of the memory."""
        return bool(self._config.model_config.enable_sleep_mode)

    @property
    def patches_transformers(self) -> bool:
        """Whether vLLM runs this architecture with transformers' classes, which it patches for the whole process."""
        return self._config.model_config.using_transformers_backend()

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        if request.request_id in self._running:
            raise ValueError(f"request {request.request_id}: a request with this id is still running")
        max_length, vocab_size = self._config.model_config.max_model_len, self._config.model_config.get_vocab_size()
        if self._kv_tokens is None:
            check_request(request, max_length, vocab_size, max_length, self.tokenizer is not None)
        else:  # then the KV cache limits `max_length`: a request must not end there silently
            check_request(request, sys.maxsize, vocab_size, self._kv_tokens, self.tokenizer is not None)
        check_sampling(request, "the vLLM engine")
        request = with_noise_key(request, 0, self._num_submitted)
        assert request.noise_key is not None
        sampling = request.sampling
        sequence = Sequence(request, self._num_submitted, max_length, self._eos)
        sequence.move(Record(sequence.limit))
        params = VllmSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sequence.limit - sequence.num_tokens,
            # vLLM rejects ids outside the vocabulary.
            stop_token_ids=sorted(token for token in sequence.stop_ids if 0 <= token < vocab_size),
            ignore_eos=True,  # EOS tokens are in stop_token_ids: vLLM has no tokenizer here
            seed=request.noise_key & SEED_MASK,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={PROBLEM: request.problem, VERSION: self.version} if self._has_history else None,
        )
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
        vllm_id = self._vllm.add_request(str(request.request_id), prompt, params)
        self._num_submitted += 1
        handle = Handle(request)
        self._running[request.request_id] = _RunningRequest(handle, sequence, vllm_id)
        return handle

    def abort(self, request_id: int) -> None:
        """End a request now; its completion has the tokens emitted so far."""
        running = self._running.get(request_id)
        if running is None:
            raise ValueError(f"request {request_id} is not running")
        running.sequence.finish_reason = "abort"
        self._complete(running, self._abort_in_vllm(running))

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        started = time.perf_counter()
        finished: list[Completion] = []
        num_rows = num_emitted = num_context = 0
        with self._dead_workers_reported():
            outputs = self._vllm.step()
        for output in outputs:
            running = self._running.get(int(output.request_id))
            if running is None:
                continue
            emitted, sequence = output.outputs[0], running.sequence
            num_rows += 1
            num_emitted += self._commit(running, emitted)
            num_context += sequence.num_tokens
            if output.finished and sequence.finish_reason is None:
                sequence.finish_reason, sequence.stop_reason = emitted.finish_reason, emitted.stop_reason
            if sequence.finish_reason is not None:
                # If vLLM has not finished it, a stop string ended it, which vLLM does not check.
                metrics = emitted.spec_decode_metrics if output.finished else self._abort_in_vllm(running)
                finished.append(self._complete(running, metrics))
        trace = step_trace(
            *self._stats.take(),
            self._config.cache_config.num_gpu_blocks or 0,
            step=self._num_steps,
            start_s=started,
            num_rows=num_rows,
            num_emitted=num_emitted,
            num_context_tokens=num_context,
            version=self.version,
            drafter_version=self.drafter_version,
            drafter=self._drafter,
        )
        self._traces.add([trace])
        self._num_steps += 1
        return finished

    def _abort_in_vllm(self, running: _RunningRequest) -> Any:
        """Abort a request in vLLM and return its draft metrics. vLLM reports these only for requests that it finishes
        itself, so they are read from its scheduler."""
        scheduled = self._vllm.engine_core.engine_core.scheduler.requests.get(running.vllm_id)
        self._vllm.abort_request([str(running.sequence.request.request_id)])
        return scheduled.spec_decode_metrics if scheduled is not None else None

    def _commit(self, running: _RunningRequest, emitted: Any) -> int:
        """Append a step's tokens up to the request's stop; return their number."""
        tokens = list(emitted.token_ids)
        if not tokens:
            return 0
        sequence, sampling = running.sequence, running.sequence.request.sampling
        reported = np.array([entry[token].logprob for entry, token in zip(emitted.logprobs, tokens, strict=True)])
        if not np.isfinite(reported).all():
            raise ValueError(
                f"request {sequence.request.request_id}: the model's logits at position {sequence.num_tokens} are not "
                f"finite: the weights of version {self.version} have diverged"
            )
        # vLLM reports logprobs of the distribution that it samples from; for greedy requests, of the unprocessed one.
        is_raw = sampling.is_greedy or (sampling.temperature == 1 and not sampling.truncates)
        raw = reported if is_raw else np.full(len(tokens), np.nan)
        logprobs = np.zeros(len(tokens)) if sampling.is_greedy else reported
        decode = self.tokenizer.decode if self.tokenizer is not None else None
        record, start = sequence.record, sequence.num_tokens
        count, _ = sequence.find_stop(tokens[: sequence.limit - start], start, decode)
        new = slice(start, start + count)  # `_complete` sets provenance and sources
        record.tokens[new], record.versions[new] = tokens[:count], self.version
        record.logprobs[new], record.raw_logprobs[new] = logprobs[:count], raw[:count]
        sequence.num_tokens += count
        sequence.update_finish_reason(decode)
        running.tokens_per_step.append(count)
        return count

    def _complete(self, running: _RunningRequest, metrics: Any) -> Completion:
        sequence = running.sequence
        del self._running[sequence.request.request_id]
        accepted, drafted = (metrics.per_step_accepted, metrics.per_step_drafted) if metrics else ([], [])
        origin = provenance(running.tokens_per_step, accepted, drafted)
        has_draft = (origin == Provenance.ACCEPTED) | (origin == Provenance.CORRECTED)
        completion = replace(
            sequence.completion(),
            provenance=origin,
            sources=np.where(has_draft, 0, NO_SOURCE).astype(np.uint8),
            drafters=(self._drafter,) if has_draft.any() else (),
            num_drafts=len(drafted),
            num_draft_tokens=sum(drafted),
            num_accepted_tokens=int((origin == Provenance.ACCEPTED).sum()) if drafted else 0,
        )
        running.handle.completion = completion
        return completion

    # -- weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt:
        """Load new policy weights. Running sequences compute their KV again. The receipt has the checksum of the
        weights in vLLM's model."""
        if inflight not in ("keep", "recompute"):
            raise ValueError(f"inflight = {inflight!r}: must be 'keep' or 'recompute'")
        if inflight == "keep" and self._running:
            raise ValueError(
                "inflight = 'keep': vLLM can't drop cached prompts of the old weights while requests run; use "
                "'recompute'"
            )
        started = time.perf_counter()
        self._send(weights, draft=False)
        receipt = self._receipt(version, draft=False, started=started)
        self.reset_prefix_cache()
        self.version = version
        return receipt

    def update_drafter(self, weights: Weights, version: int) -> Receipt:
        """Load new drafter weights. The checksum is of the weights in the drafter, so a transfer that did not reach it
        is detected."""
        if not self._has_draft_weights:
            raise ValueError(f"update_drafter: the drafter has no weights (speculation.method = {self._drafter!r})")
        if not HAS_WEIGHT_TRANSFER:
            raise ValueError("update_drafter: this vLLM has no weight transfer for drafters; use a newer one")
        started = time.perf_counter()
        self._send(weights, draft=True)
        self.drafter_version = version
        return self._receipt(version, draft=True, started=started)

    def _send(self, weights: Weights, draft: bool) -> None:
        if not HAS_WEIGHT_TRANSFER:
            for bucket in write_buckets(weights, math.inf):
                self._call_workers("paceline_reload_weights", bucket)
            return
        self._call_workers("start_draft_weight_update" if draft else "start_weight_update")
        for bucket in write_buckets(weights, MAX_BYTES):
            self._call_workers("update_weights", bucket)
        self._call_workers("finish_weight_update")

    def _receipt(self, version: int, draft: bool, started: float) -> Receipt:
        receipt = self._call_workers("paceline_receipt", version, draft)
        return replace(receipt, seconds=time.perf_counter() - started)

    # -- between steps ----------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. Running sequences are computed again."""
        self._vllm.reset_prefix_cache(reset_running_requests=True)

    def state_dict(self) -> SpeculationState:
        return {"drafter": self._call_workers("paceline_state_dict")} if self._has_history else {}

    def load_state_dict(self, state_dict: SpeculationState) -> None:
        if self._has_history and "drafter" in state_dict:
            self._call_workers("paceline_load_state_dict", dict(state_dict["drafter"]))

    def sleep(self) -> None:
        """Free the memory while the learner trains; only between requests. Where vLLM can't do it, only warn."""
        if self._running:
            raise ValueError("sleep: requests are still running; finish or abort them first")
        if self._config.model_config.enable_sleep_mode:
            self._vllm.sleep(level=1)
        else:
            warnings.warn(
                f"engine.sleep: vLLM can't free its memory on {current_platform.device_type}; it keeps it",
                stacklevel=2,
            )

    def wake(self) -> None:
        if self._config.model_config.enable_sleep_mode:
            self._vllm.wake_up()

    def drain_trace(self) -> list[StepTrace]:
        return self._traces.drain()

    def close(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)
        self._vllm.engine_core.shutdown()

    def _call_workers(self, method: str, *args: Any) -> Any:
        """Call a method on every worker; return the first worker's result."""
        with self._dead_workers_reported():
            return self._vllm.collective_rpc(method, args=args)[0]

    @contextmanager
    def _dead_workers_reported(self) -> Iterator[None]:
        """If a worker is dead, vLLM only reports that the call was cancelled. Raise a clear error instead."""
        try:
            yield
        except RuntimeError as error:
            if not getattr(self._vllm.engine_core.engine_core.model_executor, "is_failed", False):
                raise
            raise ValueError(
                "one of vLLM's worker processes has died (was there enough memory?); continue from the last "
                "checkpoint: `paceline train --resume RUN`"
            ) from error


def _start(options: Mapping[str, Any], stats: StepStats, threads: int | None) -> LLMEngine:
    args = EngineArgs(
        **options,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        per_request_spec_decode_metrics="detailed" if options.get("speculative_config") else "none",
        worker_extension_cls=EXTENSION,
        **({"weight_transfer_config": {"backend": BACKEND}} if HAS_WEIGHT_TRANSFER else {}),
    )
    set_num_threads, before = torch.set_num_threads, torch.get_num_threads()
    try:
        if threads is not None:
            set_num_threads(threads)
        try:
            config = args.create_engine_config()
        except ValidationError as error:  # pydantic's own message is long and hides the reason
            reasons = [": ".join((*map(str, e["loc"]), e["msg"].removeprefix("Value error, "))) for e in error.errors()]
            raise ValueError(f'engine.kind = "vllm": vLLM rejects its settings: {"; ".join(reasons)}') from None
        return LLMEngine(
            config, Executor.get_class(config), log_stats=True, stat_loggers=[lambda *_: stats], multiprocess_mode=False
        )
    finally:
        torch.set_num_threads = set_num_threads  # on a CPU vLLM replaces it by a function that does nothing
        set_num_threads(threads or before)
