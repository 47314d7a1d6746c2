"""Event-based simulation of continuous batching, with emitted tokens per row as the clock.

On average every row of a step emits the same number of tokens. With tokens per row as the clock, the rows that run
together depend neither on step times nor on speculation. So the schedule is computed once per workload, and its time
with any step model and static policy is one evaluation over arrays (`rollout`).

Simplifications: the random variation of acceptance between rows is ignored (`rollout.simulate_steps` has it). Memory is
reserved for a row's final length, so nothing is preempted.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from paceline.config_io import ConfigError

COLUMNS = ("rows", "tokens", "context", "prompts")
MAX_SEGMENT = 1024  # tokens per row; longer segments are split because the context grows


@dataclass(frozen=True, slots=True)
class Schedule:
    """Segments in which the same rows run. S segments, D batches."""

    rows: np.ndarray  # int64 [S]
    tokens: np.ndarray  # float64 [S], emitted tokens per row
    context: np.ndarray  # float64 [S], mean context tokens per row
    prompts: np.ndarray  # float64 [S], prompt tokens that are computed at the segment's start
    last: np.ndarray  # int64 [D], the segment in which the last row of a batch ends

    @property
    def num_emitted(self) -> float:
        return float((self.rows * self.tokens).sum())

    @staticmethod
    def joined(schedules: list[Schedule]) -> Schedule:
        """Concatenate schedules. `last` becomes the end offset of each schedule."""
        columns = {name: np.concatenate([getattr(schedule, name) for schedule in schedules]) for name in COLUMNS}
        return Schedule(**columns, last=np.cumsum([len(schedule.rows) for schedule in schedules]))


def make_schedule(
    lengths: list[np.ndarray], prompts: list[np.ndarray], max_rows: int, kv_tokens: int, lag: int = 1
) -> Schedule:
    """Schedule batches of requests on one engine, in order of arrival. Batch b arrives when b + 1 - lag batches are
    done. The first `lag` batches arrive at even intervals, as they do in the steady state."""
    longest = max((int((n + p).max(initial=0)) for n, p in zip(lengths, prompts, strict=True)), default=0)
    if longest > kv_tokens:
        raise ConfigError(
            f"workload.max_tokens: a sequence has {longest} tokens, but an engine's memory holds {kv_tokens}; raise "
            "engine.gpus, or lower workload.max_tokens or engine.kv_precision"
        )
    batches = [
        [(int(n), int(p), b) for n, p in zip(lengths_of_batch.tolist(), prompts_of_batch.tolist(), strict=True)]
        for b, (lengths_of_batch, prompts_of_batch) in enumerate(zip(lengths, prompts, strict=True))
    ]
    num_left = [len(batch) for batch in batches]
    interval = -(-int(lengths[0].max(initial=0)) // lag) if lengths else 0
    arrivals = [b * interval for b in range(1, min(lag, len(batches)))]  # clocks at which the first batches arrive
    num_arrived = min(1, len(batches))
    waiting = [request for batch in batches[:num_arrived] for request in reversed(batch)]
    running: list[tuple[int, int, int]] = []  # (end clock, reserved tokens, batch)
    clock = num_reserved = num_due = 0  # tokens that are reserved in memory; batches that arrive next
    base = 0  # Σ (prompt - start clock) of running rows: a row's context is prompt + clock - start
    rows_S: list[int] = []
    tokens_S: list[int] = []
    context_S: list[float] = []
    prompts_S: list[int] = []
    last = [0] * len(batches)
    while running or waiting:
        admitted = 0
        while waiting and len(running) < max_rows and num_reserved + waiting[-1][0] + waiting[-1][1] <= kv_tokens:
            length, prompt, b = waiting.pop()
            heapq.heappush(running, (clock + length, length + prompt, b))
            num_reserved += length + prompt
            base += prompt - clock
            admitted += prompt
        until = min(running[0][0], arrivals[0]) if arrivals else running[0][0]
        num = len(running)
        while clock < until:
            num_tokens = min(until - clock, MAX_SEGMENT)
            rows_S.append(num)
            tokens_S.append(num_tokens)
            context_S.append(base / num + clock + num_tokens / 2)
            prompts_S.append(admitted)
            admitted = 0
            clock += num_tokens
        while running and running[0][0] == clock:
            end, size, b = heapq.heappop(running)
            num_reserved -= size
            # prompt - start clock = (size - length) - (end - length)
            base -= size - end
            num_left[b] -= 1
            if not num_left[b]:
                last[b] = len(rows_S) - 1
                num_due += 1
        if arrivals and clock >= arrivals[0]:
            arrivals.pop(0)
            num_due += 1
        while num_due and num_arrived < len(batches):
            waiting[:0] = reversed(batches[num_arrived])
            num_arrived, num_due = num_arrived + 1, num_due - 1
    return Schedule(
        rows=np.array(rows_S, np.int64),
        tokens=np.array(tokens_S, np.float64),
        context=np.array(context_S),
        prompts=np.array(prompts_S, np.float64),
        last=np.array(last, np.int64),
    )
