"""The honest speed-up: the same tokens generated twice, with drafts and without, and the ratio of the two times.

Under the `coupled` rule tokens do not depend on the drafter, so a step's requests give the same rollouts again without
speculation. Same engine, same kernels, same batch size, prompts computed anew both times. Which of the two goes first
alternates from audit to audit.

The tail, where few sequences still run, is what speculation is for. It is measured apart: some of the step's requests
again with 1, 2 and 4 sequences at a time, with a drafter that knows what the real one knew before the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from paceline.engine.engine import LocalEngine
from paceline.speculation.batch import Drafter
from paceline.types import Completion, Request

TAIL_ROWS = (1, 2, 4)
TAIL_REQUESTS = {1: 4, 2: 6, 4: 8}


class Auditor:
    """`make_drafter` gives a fresh drafter like the engine's."""

    def __init__(self, engine: LocalEngine, make_drafter: Callable[[], Drafter | None]) -> None:
        self.engine, self.make_drafter = engine, make_drafter
        self._before: Mapping[str, np.ndarray] = {}
        self._num_audits = 0
        self._next_id = -1

    def before(self) -> None:
        """Remember what the drafter knows now, before the step that is audited."""
        if self.engine.drafter is not None:
            self._before = self.engine.drafter.state()

    def audit(self, requests: Sequence[Request], completions: Sequence[Completion]) -> dict[str, Any]:
        """Time these requests, which just gave these completions, both ways."""
        seconds = {True: 0.0, False: 0.0}
        identical = True
        for drafting in (True, False) if self._num_audits % 2 == 0 else (False, True):
            seconds[drafting], again = self._time(requests, drafting)
            identical &= all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(again, completions, strict=True))
        tail_s = {str(rows): self._tail(requests, rows) for rows in TAIL_ROWS}
        self._num_audits += 1
        self.engine.drain_trace()
        return {
            "plain_s": seconds[False],
            "speculative_s": seconds[True],
            "speedup": seconds[False] / seconds[True],
            "tokens": sum(len(c.token_ids) for c in completions),
            "identical": identical,
            "tail": {rows: times["plain_s"] / times["speculative_s"] for rows, times in tail_s.items()},
            "tail_s": tail_s,
        }

    def _tail(self, requests: Sequence[Request], rows: int) -> dict[str, float]:
        """Of as many problems as there are requests to be had."""
        problems = list(dict.fromkeys(request.problem for request in requests))
        by_problem = [[r for r in requests if r.problem == problem] for problem in problems]
        few = [group[i] for i in range(max(map(len, by_problem))) for group in by_problem if i < len(group)]
        few = few[: TAIL_REQUESTS[rows]]
        plain_s, _ = self._time(few, False, rows)
        speculative_s, _ = self._time(few, True, rows)
        return {"plain_s": plain_s, "speculative_s": speculative_s}

    def _time(
        self, requests: Sequence[Request], drafting: bool, rows: int | None = None
    ) -> tuple[float, list[Completion]]:
        engine, own = self.engine, self.engine.drafter
        again = []
        for request in requests:  # ids of their own, so that nothing is mistaken for the step's
            again.append(replace(request, request_id=self._next_id))
            self._next_id -= 1
        drafter = None
        if drafting and (drafter := self.make_drafter()) is not None:
            drafter.restore(self._before)
        max_num_seqs = engine.scheduler.max_num_seqs
        engine.set_drafter(drafter)
        engine.scheduler.max_num_seqs = rows or max_num_seqs
        engine.paged.pool.forget_all()
        try:
            started = time.perf_counter()
            completions = engine.generate(again)
            return time.perf_counter() - started, completions
        finally:
            engine.scheduler.max_num_seqs = max_num_seqs
            engine.set_drafter(own)


def overall(audits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speed-ups over several audits: times are summed, so that long ones count for more."""
    if not audits:
        return {"generation_speedup": None, "tail_speedup": {}, "identical": None}

    def ratio(parts: Sequence[Mapping[str, float]]) -> float:
        return sum(part["plain_s"] for part in parts) / sum(part["speculative_s"] for part in parts)

    return {
        "generation_speedup": ratio(audits),
        "tail_speedup": {str(rows): ratio([audit["tail_s"][str(rows)] for audit in audits]) for rows in TAIL_ROWS},
        "identical": all(audit["identical"] for audit in audits),
    }
