"""Computes a step: from scheduled rows to what each of them emits.

A step is launched and waited for. The eager runner has verified all rows when `launch` returns; `GraphRunner` computes
on the device while the host goes on. Rows that do not emit (chunks of prompts) have no part in the result.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from paceline.engine.accept import Rule, VerificationInput, VerificationResult
from paceline.engine.logits_processor import process_logits, report_dead_ends, report_logprobs
from paceline.engine.scheduled_batch import ScheduledBatch
from paceline.engine.sequence import Sequence
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.model.sampling_arrays import SamplingArrays
from paceline.speculation.batch import Drafter


@dataclass(slots=True)
class StepOutput:
    result: VerificationResult  # of the emitting rows, in their order
    num_verified: np.ndarray | None = None  # int [B], draft tokens; None: all that were scheduled
    num_drafted_on_device: int = 0  # draft tokens that the device proposed for each row of the next step
    num_outside_graph: int = 0  # rows that the step's CUDA graph could not compute


class PendingStep(Protocol):
    @property
    def is_async(self) -> bool: ...  # whether the next step may be launched before this one is committed

    def wait(self) -> StepOutput: ...

    def times(self) -> tuple[float, float]:
        """Seconds of its forward pass and of sampling. Only after `wait`."""
        ...


class Runner(ABC):
    """Base of the runners; only `launch` must be overridden."""

    # Whether a step with prompts takes as long as several others. Then several prompts should start together.
    batches_prompts = False

    @property
    def num_captured(self) -> int:
        """CUDA graphs captured so far. Capturing takes as long as dozens of steps."""
        return 0

    @property
    def drafts_on_device(self) -> bool:
        """Whether the current drafter is a `DeviceDrafter`."""
        return False

    def set_drafter(self, drafter: Drafter | None) -> None:
        """Use this drafter from now on. No step is in flight."""

    def set_draft_length(self, num: int) -> None:
        """Draft so many tokens on the device from now on, for measuring step times. In the engine the drafter says how
        many."""

    @abstractmethod
    def launch(self, batch: ScheduledBatch, q: dict[int, Tensor], draft_budget: int | None = None) -> PendingStep:
        """q: by request, the distributions that its draft was sampled from. draft_budget: verify about so many
        draft tokens in all, the most probable ones, which the device selects; None: all, 0: none."""

    def remove(self, sequence: Sequence) -> None:
        """It does not run any more, or its tokens will be computed again."""

    def reset(self) -> None:
        """Wait for the device and forget all sequences."""

    def release_memory(self) -> None:
        """The KV memory will be freed, and allocated anew."""


@dataclass(slots=True)
class FinishedStep:
    """A step that has finished when `launch` returns."""

    output: StepOutput
    forward_s: float
    sample_s: float
    is_async: bool = False

    def wait(self) -> StepOutput:
        return self.output

    def times(self) -> tuple[float, float]:
        return self.forward_s, self.sample_s


class EagerRunner(Runner):
    """For any device and any acceptance rule. The host waits for the forward pass and for verification."""

    def __init__(self, paged: PagedDecoder, sampler: Sampler, rule: Rule) -> None:
        self.paged, self.sampler, self.rule = paged, sampler, rule

    def launch(self, batch: ScheduledBatch, q: dict[int, Tensor], draft_budget: int | None = None) -> FinishedStep:
        assert draft_budget is None, "only a device that drafts can select"
        started = time.perf_counter()
        logits_PV = self.paged.forward(batch.spans())
        forwarded = time.perf_counter()
        emitting = batch.emitting
        result = self.verify(emitting, q, logits_PV) if len(emitting) else VerificationResult.empty(0, 1)
        return FinishedStep(StepOutput(result), forwarded - started, time.perf_counter() - forwarded)

    def prefill(self, batch: ScheduledBatch) -> None:
        """Compute each row's tokens before the one that emits, without waiting for the device."""
        self.paged.forward(batch.prefill_spans())

    def verify(self, batch: ScheduledBatch, q: dict[int, Tensor], logits_PV: Tensor) -> VerificationResult:
        sequences, num_draft = batch.sequences, batch.num_draft.tolist()
        sizes = 1 + batch.num_draft.astype(np.int64)
        result = self.rule(
            VerificationInput(
                logits_PV=process_logits(logits_PV, batch),
                drafts=[batch.draft(i) for i in range(len(batch))],
                q=[
                    q[sequence.request.request_id][:num] if q and num else None
                    for sequence, num in zip(sequences, num_draft, strict=True)
                ],
                noise_keys=batch.seq_table.noise_key[batch.slots],
                lengths=batch.seq_table.num_tokens[batch.slots],
                params=SamplingArrays.of([sequence.request.sampling for sequence in sequences], sizes),
                starts=np.concatenate([[0], np.cumsum(sizes)]),
            ),
            self.sampler,
        )
        report_logprobs(result, batch, logits_PV)
        report_dead_ends(result, batch)
        return result
