"""The time of the engine's whole step with drafts of a fixed length, relative to the plain step.

    python benchmarks/step.py --model smollm2-135m --batch 1,4 --tokens 1,4,8 --json step.json

The drafts are random tokens, so nothing is accepted and every step verifies exactly 1 + k tokens per row. All cases run
in turn, `--repeats` times. Results are the median step of each case, and its cost relative to the plain step (1 token)
of the same batch size.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from paceline.build.config import load_config
from paceline.build.engine import build_engine
from paceline.engine.engine import LocalEngine
from paceline.speculation.batch import Rows
from paceline.speculation.draft_batch import DraftBatch
from paceline.speculation.policy import StaticPolicy
from paceline.types import Request, SamplingParams, StepTrace
from paceline.verify.drafters import AdversarialDrafter

PROMPT = "Ann has 3 boxes with 4 apples each and eats 2 apples. How many are left? Think step by step."


class WrongDrafter(AdversarialDrafter):
    """Drafts random tokens, always as many as allowed."""

    def propose(self, rows: Rows, caps: np.ndarray) -> DraftBatch:
        drafts = super().propose(rows, caps)
        drafts.num[:] = caps
        return drafts


def steps(engine: LocalEngine, prompt: tuple[int, ...], batch: int, num_tokens: int, length: int) -> list[StepTrace]:
    engine.set_drafter(
        WrongDrafter(engine.model_config.vocab_size) if num_tokens > 1 else None, StaticPolicy(num_tokens - 1)
    )
    sampling = SamplingParams(max_tokens=length, ignore_eos=True)
    engine.generate([Request(i, prompt, sampling, i) for i in range(batch)])
    return [t for t in engine.drain_trace() if t.num_rows == batch and t.num_query_tokens == batch * num_tokens]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--tokens", default="1,4,8", help="tokens verified per row; 1 is plain decoding")
    parser.add_argument("--length", type=int, default=40, help="tokens per completion")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.length <= max(map(int, args.tokens.split(","))) + 2:
        parser.error("--length must be well above --tokens: drafts do not go past the end of a completion")
    settings = [f"model.name={args.model}", f"engine.threads={args.threads}", "speculation.method=none"]
    engine = build_engine(load_config(None, settings))
    prompt = tuple(engine.tokenizer.encode(PROMPT))
    cases = [(int(batch), int(tokens)) for batch in args.batch.split(",") for tokens in args.tokens.split(",")]
    found: dict[tuple[int, int], list[StepTrace]] = {case: [] for case in cases}
    for _ in range(args.repeats):
        for case in cases:
            found[case] += steps(engine, prompt, *case, args.length)
    rows = []
    for (batch, tokens), traces in found.items():
        figures = {
            f"{name}_ms": 1e3 * statistics.median(getattr(t, f"{name}_s") for t in traces)
            for name in ("total", "forward", "sample", "draft")
        }
        rows.append({"batch": batch, "tokens": tokens, **figures, "num_steps": len(traces)})
    plain = {row["batch"]: row["total_ms"] for row in rows if row["tokens"] == 1}
    table = Table("batch", "tokens/row", "step ms", "cost", "forward ms", "sample ms", "draft ms")
    for row in rows:
        row["step_cost"] = row["total_ms"] / plain[row["batch"]] if row["batch"] in plain else None
        shown = ("batch", "tokens", "total_ms", "step_cost", "forward_ms", "sample_ms", "draft_ms")
        table.add_row(*(f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name]) for name in shown))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "threads": args.threads, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
