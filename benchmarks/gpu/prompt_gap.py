"""How long sequences that decode wait for their next token while a long prompt is computed beside them, on one GPU.

    python benchmarks/gpu/prompt_gap.py [--model qwen3-8b] [--rows 8,32] [--prompt 4096] [--limits 256,0]

N sequences decode without drafts; then a prompt arrives. The gap is the time between the tokens of a sequence, from the
arrival of the prompt to its first token. `limit` is `engine.max_num_prefill_tokens`; 0: none. Weights are random. Each
case runs once before it is measured, which captures the graphs.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.bench.step import BenchModel, check_machine
from paceline.bench.step_settings import Settings, machine_name
from paceline.engine.accept import RULES
from paceline.engine.engine import LocalEngine
from paceline.engine.graph_runner import GraphRunner
from paceline.engine.runner import EagerRunner
from paceline.model.kv import BLOCK
from paceline.model.paged import PagedDecoder
from paceline.model.sample import Sampler
from paceline.types import Request, SamplingParams

SHORT, NUM_STEPS = 512, 64  # prompt tokens of the sequences that decode, and plain steps to measure
MAX_TOKENS = 1024  # of a sequence that decodes; at most this many steps
BUDGET = 16384  # engine.max_num_batched_tokens


@dataclass
class Clock:
    """When each sequence got tokens: milliseconds between them."""

    engine: LocalEngine
    ids: list[int]
    gaps: list[float] = field(default_factory=list)
    _last: dict[int, tuple[int, float]] = field(default_factory=dict)

    def step(self) -> None:
        self.engine.step()
        now = time.perf_counter()
        for i in self.ids:
            num = self.engine.sequence(i).num_tokens
            before, at = self._last.get(i, (0, now))
            if num > before:
                if before:
                    self.gaps.append(1e3 * (now - at))
                self._last[i] = num, now


def make_engine(model: BenchModel, rows: int, prompt: int, limit: int) -> LocalEngine:
    num_tokens = rows * (SHORT + MAX_TOKENS) + prompt + MAX_TOKENS
    paged = PagedDecoder(model.decoder, num_tokens // BLOCK + 4 * (rows + 1))
    runner = GraphRunner(paged, EagerRunner(paged, Sampler(), RULES["coupled"]), rows + 1)
    return LocalEngine(
        paged, runner=runner, max_num_seqs=rows + 1, max_num_batched_tokens=BUDGET,
        max_num_prefill_tokens=limit or None, prefix_sharing=False,
    )  # fmt: skip


def measure(engine: LocalEngine, rows: int, prompt: int, ids: count[int]) -> dict[str, Any]:
    rng, vocab = np.random.default_rng(rows), engine.model_config.vocab_size

    def submit(length: int) -> int:
        request_id = next(ids)
        sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        engine.submit(Request(request_id, tuple(rng.integers(0, vocab, length).tolist()), sampling, request_id))
        return request_id

    others = [submit(SHORT) for _ in range(rows)]
    clock = Clock(engine, others)
    while min(engine.sequence(i).num_tokens for i in others) < SHORT + 16:
        clock.step()
    clock.gaps.clear()
    for _ in range(NUM_STEPS):
        clock.step()
    plain = list(clock.gaps)
    clock.gaps.clear()
    engine.drain_trace()
    started, long = time.perf_counter(), submit(prompt)
    while engine.sequence(long).num_tokens == prompt:
        clock.step()
    first_token_ms = 1e3 * (time.perf_counter() - started)
    traces = engine.drain_trace()
    for i in [*others, long]:
        engine.abort(i)
    engine.step()
    plain_ms = float(np.median(plain))
    p50, p99, most = (float(np.percentile(clock.gaps, share)) for share in (50, 99, 100))
    return {
        "rows": rows, "prompt": prompt, "plain_ms": plain_ms, "p50_ms": p50, "p99_ms": p99, "max_ms": most,
        "p99_steps": p99 / plain_ms, "max_steps": most / plain_ms, "first_token_ms": first_token_ms,
        "num_steps": len(traces), "num_captured": sum(trace.num_captured for trace in traces),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--rows", default="8,32")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--limits", default="256,0")
    parser.add_argument("--no-invariant", action="store_true", help="without batch-invariant kernels")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = Settings(args.model, draft_lengths=(0,), invariant=not args.no_invariant)
    check_machine(settings)
    model, found, ids = BenchModel(settings), list[dict[str, Any]](), count()
    for rows in map(int, args.rows.split(",")):
        for limit in map(int, args.limits.split(",")):
            engine = make_engine(model, rows, args.prompt, limit)
            measure(engine, rows, args.prompt, ids)
            found.append({"limit": limit, **measure(engine, rows, args.prompt, ids)})
            engine.close()
    columns = {
        "rows": "rows", "limit": "limit", "plain_ms": "plain step", "p50_ms": "gap p50", "p99_ms": "p99",
        "max_ms": "max", "p99_steps": "p99 in steps", "max_steps": "max in steps", "first_token_ms": "first token",
        "num_steps": "steps", "num_captured": "captures",
    }  # fmt: skip
    table = Table(*columns.values(), title=f"{args.model}, a prompt of {args.prompt} tokens; times in ms")
    for row in found:
        table.add_row(*(f"{row[key]:.2f}" if isinstance(row[key], float) else str(row[key]) for key in columns))
    Console(width=120).print(table)
    if args.json is not None:
        content = {"machine": machine_name(settings.device), "rows": found}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
