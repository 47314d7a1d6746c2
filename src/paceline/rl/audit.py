"""Audits measure the speed-up of speculation: generate a step's requests with drafts and without, compare tokens and
times.

With the `coupled` rule tokens do not depend on the drafter: both runs emit the tokens of the step. Both use the same
engine, kernels and batch size, and compute the prompts again. The order of the two alternates from audit to audit.
Without batch-invariant kernels tokens may differ where two are nearly equally likely.

The tail of a rollout, where few sequences still run, gains most. It is measured separately: some of the step's requests
with 1, 2 and 4 sequences at a time. Drafters start from the state that the engine's drafter had before the step.

Invariant: an audit does not change the state of the drafter, the acceptance model or the length model. Measured step
times are kept, because they depend on the machine and not on the rollouts, and so is a policy's credit for probes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np

from paceline.engine.captures import without_captures
from paceline.engine.engine import LocalEngine
from paceline.engine.interface import SpeculationState
from paceline.model.ops import Ops
from paceline.rl.collection import Collected
from paceline.speculation.batch import Drafter
from paceline.types import Completion, Request

TAIL_REQUESTS = {1: 4, 2: 6, 4: 8}  # by number of sequences at a time: number of requests


class Auditor:
    """`make_drafter` makes a new drafter like the engine's."""

    def __init__(self, engine: LocalEngine, make_drafter: Callable[[], Drafter | None]) -> None:
        self.engine, self.make_drafter = engine, make_drafter
        self._state_before: SpeculationState = {}
        self._num_audits = 0

    def audit(self, rounds: Sequence[Collected], state_before: SpeculationState) -> dict[str, Any] | None:
        """Time the requests of a step, round by round, with and without drafts; None if the step generated nothing.
        `state_before` is the engine's speculation state before the step."""
        self._state_before = state_before
        batches = [collected.requests for collected in rounds if collected.requests]
        emitted = [completion for collected in rounds for completion in collected.completions]
        if not batches:
            return None
        state_dict = self.engine.state_dict()
        seconds = {True: 0.0, False: 0.0}
        identical = True
        try:
            for drafting in (True, False) if self._num_audits % 2 == 0 else (False, True):
                seconds[drafting], again = self._time(batches, drafting)
                identical &= all(self._is_identical(a, b) for a, b in zip(again, emitted, strict=True))
            tail_s = self._tail([request for batch in batches for request in batch])
        finally:
            self.engine.load_state_dict({part: state_dict[part] for part in ("policy", "acceptance", "lengths")})
            self.engine.drain_trace()
        self._num_audits += 1
        return {
            "plain_s": seconds[False],
            "speculative_s": seconds[True],
            "speedup": seconds[False] / seconds[True],
            "num_tokens": sum(len(completion.token_ids) for completion in emitted),
            "identical": identical,
            "must_be_identical": self._ops.is_batch_invariant,
            "tail_speedup": {rows: times["plain_s"] / times["speculative_s"] for rows, times in tail_s.items()},
            "tail_s": tail_s,
        }

    @property
    def _ops(self) -> Ops:
        return self.engine.paged.decoder.ops

    def _is_identical(self, again: Completion, emitted: Completion) -> bool:
        """The same tokens, and with batch-invariant kernels on a GPU the same logprobs."""
        is_same = np.array_equal(again.token_ids, emitted.token_ids)
        if is_same and self._ops.is_cuda and self._ops.is_batch_invariant:
            return np.array_equal(again.logprobs, emitted.logprobs)
        return is_same

    def _tail(self, requests: Sequence[Request]) -> dict[str, dict[str, float]]:
        """Times by number of sequences at a time, with requests of as many different problems as possible."""
        by_problem: dict[str | None, list[Request]] = {}
        for request in requests:
            by_problem.setdefault(request.problem, []).append(request)
        in_turn = [r for same in zip_longest(*by_problem.values()) for r in same if r is not None]
        times = {}
        for rows, num_requests in TAIL_REQUESTS.items():
            if len(in_turn) >= rows:  # otherwise fewer than `rows` sequences run
                plain_s, _ = self._time([in_turn[:num_requests]], False, rows)
                speculative_s, _ = self._time([in_turn[:num_requests]], True, rows)
                times[str(rows)] = {"plain_s": plain_s, "speculative_s": speculative_s}
        return times

    def _time(
        self, batches: Sequence[Sequence[Request]], drafting: bool, rows: int | None = None
    ) -> tuple[float, list[Completion]]:
        """Seconds and completions of these batches, one after the other."""
        result, _ = without_captures(self.engine.runner, lambda: self._generate(batches, drafting, rows))
        return result

    def _generate(
        self, batches: Sequence[Sequence[Request]], drafting: bool, rows: int | None
    ) -> tuple[float, list[Completion]]:
        engine, own_drafter = self.engine, self.engine.drafter
        max_num_seqs = engine.scheduler.max_num_seqs
        engine.set_drafter(self.make_drafter() if drafting else None)
        engine.load_state_dict(self._state_before)
        engine.scheduler.max_num_seqs = rows or max_num_seqs
        engine.reset_prefix_cache()
        completions: list[Completion] = []
        try:
            started = time.perf_counter()
            for batch in batches:
                # Negative ids, which no request of a step has.
                requests = [replace(request, request_id=-1 - i) for i, request in enumerate(batch)]
                completions += engine.generate(requests)
            return time.perf_counter() - started, completions
        finally:
            engine.scheduler.max_num_seqs = max_num_seqs
            engine.set_drafter(own_drafter)


def check_audit(step: int, audit: Mapping[str, Any] | None) -> None:
    """Raises ValueError if batch-invariant kernels gave different tokens."""
    if audit is not None and audit["must_be_identical"] and not audit["identical"]:
        raise ValueError(
            f"step {step + 1}: an audit generated other tokens than the step, though the kernels are batch-invariant. "
            "This is a bug, or the device is faulty. `paceline verify` with the run's config.toml shows more. To "
            "continue without audits, resume with speculation.audit_every=0"
        )


def overall(audits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Speed-ups over several audits: ratios of summed times."""
    if not audits:
        return {"generation_speedup": None, "tail_speedup": {}, "identical": None, "must_be_identical": None}

    def ratio(parts: Sequence[Mapping[str, float]]) -> float:
        return sum(part["plain_s"] for part in parts) / sum(part["speculative_s"] for part in parts)

    all_rows = dict.fromkeys(rows for audit in audits for rows in audit["tail_s"])
    return {
        "generation_speedup": ratio(audits),
        "tail_speedup": {rows: ratio([a["tail_s"][rows] for a in audits if rows in a["tail_s"]]) for rows in all_rows},
        "identical": all(audit["identical"] for audit in audits),
        "must_be_identical": all(audit["must_be_identical"] for audit in audits),
    }
