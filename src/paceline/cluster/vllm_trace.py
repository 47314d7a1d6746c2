"""The trace of a vLLM step, from vLLM's own statistics."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from paceline.types import StepTrace


class StepStats(StatLoggerBase):
    """Keeps vLLM's statistics of the last step until `take`."""

    def __init__(self) -> None:
        self._last: tuple[Any, Any] = None, None

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self._last = scheduler_stats, iteration_stats

    def log_engine_initialized(self) -> None:
        pass

    def take(self) -> tuple[Any, Any]:
        """SchedulerStats and IterationStats; None where vLLM recorded none."""
        last, self._last = self._last, (None, None)
        return last


def step_trace(
    scheduler: Any, iteration: Any, num_blocks: int, *, start_s: float, num_rows: int, drafter: str, **fields: Any
) -> StepTrace:
    """`fields` are the other fields that the engine knows. The step ends now."""
    drafts = (scheduler.spec_decoding_stats if scheduler is not None else None) or SpecDecodingStats(0)
    iteration = iteration or IterationStats()
    num_drafted, num_accepted = drafts.num_draft_tokens, drafts.num_accepted_tokens
    depth = max((i + 1 for i, n in enumerate(drafts.num_draft_tokens_per_pos) if n), default=0)
    num_prefilled = len(iteration.time_to_first_tokens_iter)
    return StepTrace(
        start_s=start_s,
        num_rows=num_rows,
        num_query_tokens=iteration.num_prompt_tokens + num_rows - num_prefilled + num_drafted,
        num_drafts=drafts.num_drafts,
        num_draft_tokens=num_drafted,
        num_accepted_tokens=num_accepted,
        accepted_per_position=tuple(drafts.num_accepted_tokens_per_pos[:depth]),
        drafted_per_position=tuple(drafts.num_draft_tokens_per_pos[:depth]),
        num_preempted=iteration.num_preempted_reqs,
        num_free_blocks=round(num_blocks * (1 - scheduler.kv_cache_usage)) if scheduler is not None else 0,
        draft_s=0.0,  # vLLM reports only a step's total time
        forward_s=0.0,
        sample_s=0.0,
        total_s=time.perf_counter() - start_s,
        drafter=drafter,
        num_planned=num_drafted,
        num_proposed=num_drafted,
        per_drafter=((drafter, num_drafted, num_accepted),) if num_drafted else (),
        **fields,
    )
