"""Paceline's engine as a bench worker, and for tests that compare engines."""

from __future__ import annotations

import time
from itertools import zip_longest
from typing import Any

from paceline.bench.common import decode_steps
from paceline.build.engine import build_engine
from paceline.config import Config
from paceline.speculation.metrics import summarise
from paceline.types import Request, SamplingParams, StepTrace, noise_key


class Worker:
    def load(self, config: dict[str, Any]) -> dict[str, Any]:
        self.engine = build_engine(Config.model_validate(config))  # also measures the policy's cost table
        return {}

    def run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        temperature: float,
        seed: int,
        problems: list[str] | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        requests = [
            Request(i, tuple(prompt), sampling, noise_key(seed, i), problems[i] if problems else None)
            for i, prompt in enumerate(prompts)
        ]
        self.engine.drain_trace()
        start = time.perf_counter()
        completions = self.engine.generate(requests)
        seconds = time.perf_counter() - start
        traces = self.engine.drain_trace()
        metrics = summarise(completions, traces)
        return {
            "seconds": seconds,
            "num_tokens": sum(len(c.token_ids) for c in completions),
            "step_s": _decode_steps(traces, len(prompts)),
            "token_ids": [c.token_ids.tolist() for c in completions],
            "logprobs": [c.raw_logprobs.tolist() for c in completions],  # before temperature, as in vLLM
            **{name: metrics[name] for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")},
            "accepted_per_position": [
                sum(counts) for counts in zip_longest(*(t.accepted_per_position for t in traces), fillvalue=0)
            ],
        }


def _decode_steps(traces: list[StepTrace], batch: int) -> list[float]:
    """Seconds of the steps with all rows and no prefill; if any of them verified drafts, only of those."""
    full = decode_steps(traces, batch)
    return [t.total_s for t in full if t.num_drafts] or [t.total_s for t in full]
