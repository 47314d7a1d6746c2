"""Continuous batching as events, counted in tokens instead of seconds.

Rows of an engine advance alike: in a step each gains as many tokens as any other, on average. So with the tokens that
a row has gained since the start for a clock, who runs beside whom does not depend on how fast a step is, and not on
speculation: the schedule is made once for a workload, from finish to finish, and what it takes under any step model
and any static policy is one evaluation over whole arrays (`rollout`).

What it leaves out: acceptance is a matter of luck, so that rows drift apart by the square root of their length
(`stepwise` has that). Memory is reserved for a row's final length, so nothing is ever preempted.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from paceline.config import ConfigError

COLUMNS = ("rows", "tokens", "context", "prompts")
LONGEST = 1024  # tokens that a segment may last: contexts grow meanwhile


@dataclass(frozen=True, slots=True)
class Schedule:
    """Segments in which the same rows run. S segments, D batches."""

    rows: np.ndarray  # int64 [S]
    tokens: np.ndarray  # float64 [S], that each of them gains
    context: np.ndarray  # float64 [S], of a row, on average over rows and segment
    prompts: np.ndarray  # float64 [S], tokens of prompts that are computed at its start
    last: np.ndarray  # int64 [D], the segment in which a batch's last row ends

    @property
    def num_emitted(self) -> float:
        return float((self.rows * self.tokens).sum())

    @staticmethod
    def joined(plans: list[Schedule]) -> Schedule:
        """Several end to end. `last` says where each ends: the number of segments up to and with it."""
        columns = {name: np.concatenate([getattr(plan, name) for plan in plans]) for name in COLUMNS}
        return Schedule(**columns, last=np.cumsum([len(plan.rows) for plan in plans]))


def schedule(
    lengths: list[np.ndarray], prompts: list[np.ndarray], max_rows: int, kv_tokens: int, lag: int = 1
) -> Schedule:
    """Batches of requests in order of arrival, on one engine. Batch b arrives when b + 1 - lag batches are done; the
    first ones, where there are several, at even distances, as they would come to be in the end."""
    most = max((int((n + p).max(initial=0)) for n, p in zip(lengths, prompts, strict=True)), default=0)
    if most > kv_tokens:
        raise ConfigError(
            f"workload.max_tokens: a sequence of {most} tokens, but an engine's memory holds {kv_tokens}; raise "
            "engine.gpus, or lower workload.max_tokens or engine.kv_precision"
        )
    batches = [
        [(int(n), int(p), b) for n, p in zip(many.tolist(), them.tolist(), strict=True)]
        for b, (many, them) in enumerate(zip(lengths, prompts, strict=True))
    ]
    left = [len(batch) for batch in batches]
    apart = -(-int(lengths[0].max(initial=0)) // lag) if lengths else 0
    expected = [b * apart for b in range(1, min(lag, len(batches)))]  # clocks at which the first ones arrive
    arrived = min(1, len(batches))
    waiting = [request for batch in batches[:arrived] for request in reversed(batch)]
    running: list[tuple[int, int, int]] = []  # (clock at its end, tokens reserved, batch)
    clock = held = due = 0
    base = 0  # Σ (prompt - clock at its start): a row's context is prompt + clock - start
    rows_S: list[int] = []
    tokens_S: list[int] = []
    context_S: list[float] = []
    prompts_S: list[int] = []
    last = [0] * len(batches)
    while running or waiting:
        admitted = 0
        while waiting and len(running) < max_rows and held + waiting[-1][0] + waiting[-1][1] <= kv_tokens:
            length, prompt, b = waiting.pop()
            heapq.heappush(running, (clock + length, length + prompt, b))
            held += length + prompt
            base += prompt - clock
            admitted += prompt
        until = min(running[0][0], expected[0]) if expected else running[0][0]
        num = len(running)
        while clock < until:
            gained = min(until - clock, LONGEST)
            rows_S.append(num)
            tokens_S.append(gained)
            context_S.append(base / num + clock + gained / 2)
            prompts_S.append(admitted)
            admitted = 0
            clock += gained
        while running and running[0][0] == clock:
            end, size, b = heapq.heappop(running)
            held -= size
            # Its prompt less the clock at its start: size - length - (end - length).
            base -= size - end
            left[b] -= 1
            if not left[b]:
                last[b] = len(rows_S) - 1
                due += 1
        if expected and clock >= expected[0]:
            expected.pop(0)
            due += 1
        while due and arrived < len(batches):
            waiting[:0] = reversed(batches[arrived])
            arrived, due = arrived + 1, due - 1
    return Schedule(
        rows=np.array(rows_S, np.int64),
        tokens=np.array(tokens_S, np.float64),
        context=np.array(context_S),
        prompts=np.array(prompts_S, np.float64),
        last=np.array(last, np.int64),
    )
