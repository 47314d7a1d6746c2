"""The speed-up of drafts on some requests: the same requests with drafts and without, in turn.

With the `coupled` rule both emit the same tokens, so the ratio of times is the ratio of tokens per second. Every round
starts with the drafter's state of the beginning: a history that already has these completions would draft them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from paceline.engine.captures import without_captures
from paceline.engine.engine import LocalEngine
from paceline.engine.interface import SpeculationState
from paceline.speculation.batch import Drafter
from paceline.types import Completion, Request

NUM_ROUNDS = 3
WARMUP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class DraftComparison:
    plain_s: float  # medians of the rounds
    speculative_s: float
    num_tokens: int
    num_rounds: int
    num_captured: int  # CUDA graphs, in rounds that were repeated in vain
    identical: bool  # both emitted the same tokens in all rounds
    must_be_identical: bool  # the kernels are batch-invariant

    @property
    def speedup(self) -> float:
        return self.plain_s / self.speculative_s


def compare_drafts(
    engine: LocalEngine,
    requests: Sequence[Request],
    make_drafter: Callable[[], Drafter | None],
    state: SpeculationState,
    progress: Callable[[str], None] = lambda message: None,
    num_rounds: int = NUM_ROUNDS,
) -> DraftComparison:
    """`state`: the engine's speculation state with which every round starts."""
    own_drafter = engine.drafter

    def generate(drafting: bool, some: Sequence[Request]) -> tuple[float, list[Completion]]:
        engine.set_drafter(make_drafter() if drafting else None)
        engine.load_state_dict(state)
        engine.reset_prefix_cache()
        started = time.perf_counter()
        completions = engine.generate(some)
        return time.perf_counter() - started, completions

    seconds: dict[bool, list[float]] = {True: [], False: []}
    expected: list[Completion] | None = None
    identical, num_captured = True, 0
    try:
        short = [replace(r, sampling=replace(r.sampling, max_tokens=min(WARMUP_TOKENS, r.sampling.max_tokens)))
                 for r in requests]  # fmt: skip
        progress("warm-up")
        for drafting in (False, True):
            without_captures(engine.runner, partial(generate, drafting, short))
        for i in range(num_rounds):
            for drafting in (False, True) if i % 2 == 0 else (True, False):
                progress(f"round {i + 1} of {num_rounds}, {'with' if drafting else 'without'} drafts")
                (took_s, found), captured = without_captures(engine.runner, partial(generate, drafting, requests))
                num_captured += captured
                seconds[drafting].append(took_s)
                expected = expected or found
                identical &= all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(expected, found, strict=True))
    finally:
        engine.set_drafter(own_drafter)
        engine.drain_trace()
    return DraftComparison(
        plain_s=statistics.median(seconds[False]),
        speculative_s=statistics.median(seconds[True]),
        num_tokens=sum(len(c.token_ids) for c in expected or ()),
        num_rounds=num_rounds,
        num_captured=num_captured,
        identical=identical,
        must_be_identical=engine.paged.decoder.ops.is_batch_invariant,
    )
