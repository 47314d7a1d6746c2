"""The honest speed-up: the same tokens generated twice, with drafts and without, and the ratio of the two times.

Under the `coupled` rule tokens do not depend on the drafter, so a step's requests give the same rollouts again without
speculation. Same engine, same kernels, same batch size, prompts computed anew both times. Which of the two goes first
alternates from audit to audit.

The tail, where few sequences still run, is what speculation is for. It is measured apart: some of the step's requests
again with 1, 2 and 4 sequences at a time, with a drafter that knows what the real one knew before the step.

Always: an audit teaches nobody. Drafter, policy and length model then know what they knew before it; only what steps
take, which is the machine's and not the rollouts', is learned here too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np

from paceline.engine.engine import LocalEngine
from paceline.rl.collect import Collected
from paceline.speculation.batch import Drafter
from paceline.types import Completion, Request

TAIL_REQUESTS = {1: 4, 2: 6, 4: 8}  # sequences at a time: how many in all
MOST_TRIES = 4  # until nothing is captured any more


class Auditor:
    """`make_drafter` gives a fresh drafter like the engine's."""

    def __init__(self, engine: LocalEngine, make_drafter: Callable[[], Drafter | None]) -> None:
        self.engine, self.make_drafter = engine, make_drafter
        self._known: Mapping[str, Mapping[str, np.ndarray]] = {}
        self._num_audits = 0

    def audit(
        self, rounds: Sequence[Collected], known: Mapping[str, Mapping[str, np.ndarray]]
    ) -> dict[str, Any] | None:
        """Time what a step generated, round by round, both ways; None where it generated nothing. `known` is what the
        engine had learned before the step."""
        self._known = known
        batches = [collected.requests for collected in rounds if collected.requests]
        emitted = [completion.token_ids for collected in rounds for completion in collected.completions]
        if not batches:
            return None
        learned = self.engine.learned()
        seconds = {True: 0.0, False: 0.0}
        identical = True
        for drafting in (True, False) if self._num_audits % 2 == 0 else (False, True):
            seconds[drafting], again = self._time(batches, drafting)
            identical &= all(np.array_equal(a.token_ids, b) for a, b in zip(again, emitted, strict=True))
        tail_s = self._tail([request for batch in batches for request in batch])
        self._num_audits += 1
        self.engine.teach({part: learned[part] for part in ("policy", "lengths")})
        self.engine.drain_trace()
        return {
            "plain_s": seconds[False],
            "speculative_s": seconds[True],
            "speedup": seconds[False] / seconds[True],
            "tokens": sum(map(len, emitted)),
            "identical": identical,
            "tail": {rows: times["plain_s"] / times["speculative_s"] for rows, times in tail_s.items()},
            "tail_s": tail_s,
        }

    def _tail(self, requests: Sequence[Request]) -> dict[str, dict[str, float]]:
        """Times with few sequences at a time, by how many; of as many problems as there are to be had."""
        by_problem: dict[str | None, list[Request]] = {}
        for request in requests:
            by_problem.setdefault(request.problem, []).append(request)
        in_turn = [r for same in zip_longest(*by_problem.values()) for r in same if r is not None]
        found = {}
        for rows, count in TAIL_REQUESTS.items():
            if len(in_turn) >= rows:  # or that many never run
                plain_s, _ = self._time([in_turn[:count]], False, rows)
                speculative_s, _ = self._time([in_turn[:count]], True, rows)
                found[str(rows)] = {"plain_s": plain_s, "speculative_s": speculative_s}
        return found

    def _time(
        self, batches: Sequence[Sequence[Request]], drafting: bool, rows: int | None = None
    ) -> tuple[float, list[Completion]]:
        """Seconds for these batches, one after the other, and what they gave. Again, a few times at most, where steps
        were captured in it: a run does that once for each size of step, and an audit is of the many that follow."""
        for _ in range(MOST_TRIES):
            num_captured = self.engine.runner.num_captured
            found = self._generate(batches, drafting, rows)
            if self.engine.runner.num_captured == num_captured:
                break
        return found

    def _generate(
        self, batches: Sequence[Sequence[Request]], drafting: bool, rows: int | None
    ) -> tuple[float, list[Completion]]:
        engine, own = self.engine, self.engine.drafter
        drafter = None
        if drafting and (drafter := self.make_drafter()) is not None:
            drafter.restore(self._known["drafter"])
        engine.teach({part: self._known[part] for part in ("policy", "lengths")})
        max_num_seqs = engine.scheduler.max_num_seqs
        engine.set_drafter(drafter)
        engine.scheduler.max_num_seqs = rows or max_num_seqs
        engine.forget()
        completions: list[Completion] = []
        try:
            started = time.perf_counter()
            for batch in batches:
                # Ids of their own, so that nothing is mistaken for the step's.
                again = [replace(request, request_id=-1 - i) for i, request in enumerate(batch)]
                completions += engine.generate(again)
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

    seen = dict.fromkeys(rows for audit in audits for rows in audit["tail_s"])
    return {
        "generation_speedup": ratio(audits),
        "tail_speedup": {rows: ratio([a["tail_s"][rows] for a in audits if rows in a["tail_s"]]) for rows in seen},
        "identical": all(audit["identical"] for audit in audits),
    }
