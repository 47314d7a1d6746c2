"""vLLM as an engine: our requests in, our completions and traces out, weights with receipts.

vLLM runs in this process, its workers too unless the model is cut over several devices; all that concerns the workers
goes by the names of `WorkerExtension`'s methods, so that it makes no difference. Tokens are drawn with a seed of the
request's own, from its noise key: a run repeats, but vLLM's draws with drafts are others than without.
"""

from __future__ import annotations

import os
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
from vllm.v1.metrics.loggers import StatLoggerBase

from paceline.cluster.vllm_extension import HAS_SEAM
from paceline.cluster.vllm_names import BACKEND, EXTENSION, PROBLEM, VERSION
from paceline.cluster.vllm_provenance import provenance
from paceline.cluster.vllm_shared import MAX_BYTES, parcels
from paceline.engine.interface import Handle, Learned, Weights
from paceline.engine.sequence import NOBODY, Sequence
from paceline.engine.trace_log import TraceLog
from paceline.types import Completion, Provenance, Receipt, Request, StepTrace, with_noise_key

SEED_MASK = (1 << 63) - 1


class _Live:
    def __init__(self, handle: Handle, sequence: Sequence, name: str) -> None:
        self.handle, self.sequence = handle, sequence
        self.name = name  # vLLM's own
        self.chunks: list[int] = []  # tokens by step


class VllmEngine:
    """`options` are vLLM's EngineArgs but for what is the same for everybody. `drafter` is the name that traces and
    completions call it by. `kv_tokens`, where there are fewer than the model's context is long: a request that
    might need more is refused."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        tokenizer: Any,
        eos_token_ids: tuple[int, ...] = (),
        drafter: str = "none",
        threads: int | None = None,
        kv_tokens: int | None = None,
        seam: bool = HAS_SEAM,
        version: int = 0,
    ) -> None:
        self._stats = _Stats()
        self._seam = seam
        self._vllm = _start(options, self._stats, threads, seam)
        self._config = self._vllm.vllm_config
        self.tokenizer, self.version = tokenizer, version
        self.drafter_version = 0
        self._eos, self._drafter, self._kv_tokens = eos_token_ids, drafter, kv_tokens
        self._live: dict[int, _Live] = {}
        self._traces = TraceLog()
        self._num_steps = self._num_submitted = 0
        self._call("paceline_leave_signals", os.getpid())
        speculative = self._config.speculative_config
        self._has_history = speculative is not None and speculative.method == "custom_class"
        self._has_draft_weights = speculative is not None and speculative.method in ("eagle3", "draft_model")
        if speculative is not None:
            self._call("paceline_check_sampler")
        if self._has_history:
            self._call("paceline_meet")

    @property
    def dtype(self) -> torch.dtype:
        return self._config.model_config.dtype

    @property
    def crowds(self) -> bool:
        """On a GPU vLLM takes nearly all the memory there is."""
        return bool(self._config.model_config.enable_sleep_mode)

    @property
    def changes_transformers(self) -> bool:
        """Whether vLLM computes this architecture with transformers' own classes, which it makes over for its use in
        the whole process."""
        return self._config.model_config.using_transformers_backend()

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Handle:
        self._check(request)
        request = with_noise_key(request, 0, self._num_submitted)
        assert request.noise_key is not None
        sampling = request.sampling
        max_length, vocab_size = self._config.model_config.max_model_len, self._config.model_config.get_vocab_size()
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._eos)}
        sequence = Sequence(request, self._num_submitted, max_length, self._eos)
        params = VllmSampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            max_tokens=sequence.num_left,
            stop_token_ids=sorted(token for token in stops if 0 <= token < vocab_size),  # vLLM refuses others
            ignore_eos=True,  # the end tokens are among the others; vLLM has no tokenizer to know them by
            seed=request.noise_key & SEED_MASK,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={PROBLEM: request.problem, VERSION: self.version} if self._has_history else None,
        )
        prompt = TokensPrompt(prompt_token_ids=list(request.prompt_ids))
        name = self._vllm.add_request(str(request.request_id), prompt, params)
        self._num_submitted += 1
        handle = Handle(request)
        self._live[request.request_id] = _Live(handle, sequence, name)
        return handle

    def _check(self, request: Request) -> None:
        name, num_prompt = f"request {request.request_id}", len(request.prompt_ids)
        max_length, vocab_size = self._config.model_config.max_model_len, self._config.model_config.get_vocab_size()
        if request.request_id in self._live:
            raise ValueError(f"{name}: a request with this id is still running")
        longest = num_prompt + request.sampling.max_tokens
        if self._kv_tokens is not None and self._kv_tokens < longest:
            raise ValueError(
                f"{name}: prompt and max_tokens may reach {longest} tokens, but engine.kv_tokens = {self._kv_tokens}; "
                "raise it or lower max_tokens"
            )
        if num_prompt >= max_length:
            raise ValueError(
                f"{name}: its prompt has {num_prompt} tokens, but the model's context is {max_length} and must hold at "
                "least one more; shorten the prompt"
            )
        bad = [t for t in (min(request.prompt_ids), max(request.prompt_ids)) if not 0 <= t < vocab_size]
        if bad:
            raise ValueError(f"{name}: token id {bad[0]} is not in the vocabulary (0 to {vocab_size - 1})")
        if request.sampling.stop and self.tokenizer is None:
            raise ValueError(f"{name}: stop strings need a tokenizer, and this engine has none; use stop_token_ids")

    def abort(self, request_id: int) -> None:
        """End a request now; its completion has what it emitted so far."""
        live = self._live.get(request_id)
        if live is None:
            raise ValueError(f"request {request_id} is not running")
        live.sequence.finish_reason = "abort"
        self._complete(live, self._give_up(live))

    # -- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> list[Completion]:
        started = time.perf_counter()
        finished: list[Completion] = []
        num_rows = num_emitted = num_context = 0
        with self._workers_alive():
            outputs = self._vllm.step()
        for output in outputs:
            live = self._live.get(int(output.request_id))
            if live is None:
                continue
            emitted = output.outputs[0]
            num_rows += 1
            num_emitted += self._take(live, emitted)
            num_context += live.sequence.num_tokens
            if output.finished and live.sequence.finish_reason is None:
                live.sequence.finish_reason, live.sequence.stop_reason = emitted.finish_reason, emitted.stop_reason
            if live.sequence.finish_reason is not None:
                # Not finished: a stop string, which vLLM knows nothing of.
                metrics = emitted.spec_decode_metrics if output.finished else self._give_up(live)
                finished.append(self._complete(live, metrics))
        self._trace(started, num_rows, num_emitted, num_context)
        return finished

    def _give_up(self, live: _Live) -> Any:
        """End a request in vLLM; what became of its drafts, which vLLM tells by itself only of those that end there."""
        scheduled = self._vllm.engine_core.engine_core.scheduler.requests.get(live.name)
        self._vllm.abort_request([str(live.sequence.request.request_id)])
        return scheduled.spec_decode_metrics if scheduled is not None else None

    def _take(self, live: _Live, emitted: Any) -> int:
        """One step's tokens of a request, up to its stop; how many that were."""
        tokens = list(emitted.token_ids)
        if not tokens:
            return 0
        sampling = live.sequence.request.sampling
        told = np.array([entry[token].logprob for entry, token in zip(emitted.logprobs, tokens, strict=True)])
        if not np.isfinite(told).all():
            raise ValueError(
                f"request {live.sequence.request.request_id}: the model's logits at position "
                f"{live.sequence.num_tokens} are not finite: the weights of version {self.version} have diverged"
            )
        # vLLM tells logprobs of the distribution it draws from; greedily, of the model's own.
        known = sampling.is_greedy or (sampling.temperature == 1 and not sampling.truncates)
        raw = told if known else np.full(len(tokens), np.nan)
        logprobs = np.zeros(len(tokens)) if sampling.is_greedy else told
        decode = self.tokenizer.decode if self.tokenizer is not None else None
        start = live.sequence.num_tokens
        count = live.sequence.take(tokens, decode)
        live.sequence.book(start, count, logprobs, raw, 0, 0, self.version, None)  # drafts: see `_complete`
        live.chunks.append(count)
        return count

    def _complete(self, live: _Live, metrics: Any) -> Completion:
        sequence = live.sequence
        del self._live[sequence.request.request_id]
        accepted, drafted = (metrics.per_step_accepted, metrics.per_step_drafted) if metrics else ([], [])
        origin = provenance(live.chunks, accepted, drafted)
        guessed = (origin == Provenance.ACCEPTED) | (origin == Provenance.CORRECTED)
        completion = replace(
            sequence.completion(),
            provenance=origin,
            sources=np.where(guessed, 0, NOBODY).astype(np.uint8),
            drafters=(self._drafter,) if guessed.any() else (),
            num_drafts=len(drafted),
            num_draft_tokens=sum(drafted),
            num_accepted_tokens=int((origin == Provenance.ACCEPTED).sum()) if drafted else 0,
        )
        live.handle.completion = completion
        return completion

    def _trace(self, started: float, num_rows: int, num_emitted: int, num_context: int) -> None:
        scheduler, iteration = self._stats.take()
        drafts = scheduler.spec_decoding_stats if scheduler is not None else None
        num_drafted = drafts.num_draft_tokens if drafts is not None else 0
        num_accepted = drafts.num_accepted_tokens if drafts is not None else 0
        depth = max((i + 1 for i, n in enumerate(drafts.num_draft_tokens_per_pos) if n), default=0) if drafts else 0
        num_prompt = iteration.num_prompt_tokens if iteration is not None else 0
        num_begun = len(iteration.time_to_first_tokens_iter) if iteration is not None else 0
        num_blocks = self._config.cache_config.num_gpu_blocks or 0
        trace = StepTrace(
            step=self._num_steps,
            start_s=started,
            num_rows=num_rows,
            num_query_tokens=num_prompt + num_rows - num_begun + num_drafted,
            num_context_tokens=num_context,
            num_emitted=num_emitted,
            num_drafts=drafts.num_drafts if drafts is not None else 0,
            num_draft_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            accepted_per_position=tuple(drafts.num_accepted_tokens_per_pos[:depth]) if drafts is not None else (),
            drafted_per_position=tuple(drafts.num_draft_tokens_per_pos[:depth]) if drafts is not None else (),
            num_preempted=iteration.num_preempted_reqs if iteration is not None else 0,
            num_free_blocks=round(num_blocks * (1 - scheduler.kv_cache_usage)) if scheduler is not None else 0,
            draft_s=0.0,  # vLLM does not part a step's time
            forward_s=0.0,
            sample_s=0.0,
            total_s=time.perf_counter() - started,
            version=self.version,
            drafter_version=self.drafter_version,
            drafter=self._drafter,
            num_planned=num_drafted,
            num_proposed=num_drafted,
            sources=((self._drafter, num_drafted, num_accepted),) if num_drafted else (),
        )
        self._traces.add([trace])
        self._num_steps += 1

    # -- weights ----------------------------------------------------------------------------------------------------

    def update_weights(self, weights: Weights, version: int, inflight: str = "recompute") -> Receipt:
        """New policy weights from here on; running sequences compute their KV again. The receipt's checksum is of what
        vLLM's model holds then."""
        if inflight not in ("keep", "recompute"):
            raise ValueError(f"inflight = {inflight!r}: must be 'keep' or 'recompute'")
        if inflight == "keep" and self._live:
            raise ValueError(
                "inflight = 'keep': vLLM can't forget prompts that the old weights computed while requests run; use "
                "'recompute'"
            )
        started = time.perf_counter()
        self._send(weights, draft=False)
        receipt = self._receipt(version, draft=False, started=started)
        self.forget()
        self.version = version
        return receipt

    def update_drafter(self, weights: Weights, version: int) -> Receipt:
        """The checksum is of what the drafter holds: a transfer that missed it can't look like one that did not."""
        if not self._has_draft_weights:
            raise ValueError(f"update_drafter: the drafter has no weights (speculation.method = {self._drafter!r})")
        if not self._seam:
            raise ValueError("update_drafter: this vLLM has no weight transfer for drafters; use a newer one")
        started = time.perf_counter()
        self._send(weights, draft=True)
        self.drafter_version = version
        return self._receipt(version, draft=True, started=started)

    def _send(self, weights: Weights, draft: bool) -> None:
        if not self._seam:
            for parcel in parcels(weights, max_bytes=None):
                self._call("paceline_reload", parcel)
            return
        self._call("start_draft_weight_update" if draft else "start_weight_update")
        for parcel in parcels(weights, MAX_BYTES):
            self._call("update_weights", parcel)
        self._call("finish_weight_update")

    def _receipt(self, version: int, draft: bool, started: float) -> Receipt:
        checksum, num_tensors, num_bytes = self._call("paceline_holdings", draft)
        return Receipt(version, checksum, num_tensors, num_bytes, time.perf_counter() - started)

    # -- between steps ----------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Prompts in memory; what runs is computed again."""
        self._vllm.reset_prefix_cache(reset_running_requests=True)

    def learned(self) -> Learned:
        return {"drafter": self._call("paceline_learned")} if self._has_history else {}

    def teach(self, learned: Learned) -> None:
        if self._has_history and "drafter" in learned:
            self._call("paceline_teach", dict(learned["drafter"]))

    def sleep(self) -> None:
        """Give the memory back while training. Only between requests; on a platform where vLLM can't, nothing happens,
        and that is said."""
        if self._live:
            raise ValueError("sleep: requests are still running; finish or abort them first")
        if self._config.model_config.enable_sleep_mode:
            self._vllm.sleep(level=1)
        else:
            warnings.warn(
                f"engine.sleep: vLLM can't give memory back on {current_platform.device_type}; it keeps it",
                stacklevel=2,
            )

    def wake(self) -> None:
        if self._config.model_config.enable_sleep_mode:
            self._vllm.wake_up()

    def drain_trace(self) -> list[StepTrace]:
        return self._traces.drain()

    def close(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)
        self._vllm.engine_core.shutdown()

    def _call(self, method: str, *args: Any) -> Any:
        """On every worker; the first one's answer."""
        with self._workers_alive():
            return self._vllm.collective_rpc(method, args=args)[0]

    @contextmanager
    def _workers_alive(self) -> Iterator[None]:
        """vLLM says of a call to a worker that is no more only that it was cancelled."""
        try:
            yield
        except RuntimeError as error:
            if not getattr(self._vllm.engine_core.engine_core.model_executor, "is_failed", False):
                raise
            raise ValueError(
                "one of vLLM's worker processes has died (was there enough memory?); go on from the last checkpoint: "
                "`paceline train --resume RUN`"
            ) from error


class _Stats(StatLoggerBase):
    """What vLLM counts in a step, until it is taken."""

    def __init__(self) -> None:
        self._last: tuple[Any, Any] = None, None

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._last = scheduler_stats, iteration_stats

    def log_engine_initialized(self) -> None:
        pass

    def take(self) -> tuple[Any, Any]:
        last, self._last = self._last, (None, None)
        return last


def _start(options: Mapping[str, Any], stats: _Stats, threads: int | None, seam: bool) -> LLMEngine:
    args = EngineArgs(
        **options,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
        per_request_spec_decode_metrics="detailed" if options.get("speculative_config") else "none",
        worker_extension_cls=EXTENSION,
        **({"weight_transfer_config": {"backend": BACKEND}} if seam else {}),
    )
    set_num_threads, before = torch.set_num_threads, torch.get_num_threads()
    try:
        if threads is not None:
            set_num_threads(threads)
        try:
            config = args.create_engine_config()
        except ValidationError as error:  # pydantic's own text is long, and hides what is meant
            reasons = [": ".join((*map(str, e["loc"]), e["msg"].removeprefix("Value error, "))) for e in error.errors()]
            raise ValueError(f'engine.kind = "vllm": vLLM refuses its settings: {"; ".join(reasons)}') from None
        return LLMEngine(
            config, Executor.get_class(config), log_stats=True, stat_loggers=[lambda *_: stats], multiprocess_mode=False
        )
    finally:
        torch.set_num_threads = set_num_threads  # on a CPU vLLM puts a function in its place that does nothing
        set_num_threads(threads or before)
