"""Times of decode steps on one GPU, next to those of vLLM: plain, EAGLE-3 at several draft lengths, history, `auto`.

    python benchmarks/gpu/steps.py --json steps.json [--only plain,k3,auto] [--model qwen3-8b]

Each row is `paceline bench step` with an imposed acceptance length: that of published heads at this draft length, or 2
for history. Costs and speed-ups are relative to the plain steps of the same run, so `--only` must have `plain` first.
The times of vLLM 0.25.1 (CUDA graphs, FlashAttention 3, async scheduling) were measured on an H200 with Qwen3-8B's
shape: 512 + 256 tokens, T=1, mean decode step in ms.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.bench.step import compare, measure
from paceline.bench.step_settings import SPREAD, Settings, machine_name


@dataclass(frozen=True)
class Part:
    batches: tuple[int, ...]
    k: int = 0
    length: float | None = None
    drafter: str = "eagle3"
    policy: str = "static"
    vllm_ms: dict[int, float] = field(default_factory=dict)
    max_tokens: int = 256
    spread: float = SPREAD


# Acceptance length with a history. If all draft tokens were accepted, a run would end before the GPU's clocks recover
# from the prefill, and the steps would seem slower than they are.
HISTORY_LENGTH = 2.0
PARTS = {
    "plain": Part(
        (1, 8, 9, 10, 12, 16, 18, 21, 32, 42, 64, 128, 256, 512),
        vllm_ms={1: 5.24, 8: 5.63, 32: 6.17, 64: 7.13, 128: 9.54, 256: 15.53},
    ),
    "k1": Part((1, 8, 32, 128), 1, 1.87, vllm_ms={1: 5.57, 8: 5.82, 32: 6.67, 128: 12.49}),
    "k3": Part((1, 8, 32, 128), 3, 3.32, vllm_ms={1: 6.16, 8: 6.51, 32: 7.77, 128: 18.55}),
    "k5": Part((1, 8, 32, 128), 5, 4.44, vllm_ms={1: 6.65, 8: 7.16, 32: 9.50, 128: 26.47}),
    "k7": Part((1, 8, 32, 128), 7, 5.28, vllm_ms={1: 7.35, 8: 7.69, 32: 10.68, 128: 31.88}),
    "history": Part((1, 8, 16, 32), 3, HISTORY_LENGTH, "history", vllm_ms={1: 7.72, 8: 8.33, 32: 10.68}),
    # Other draft lengths, with as many rows as make about 128 tokens.
    **{
        f"history{k}": Part(batches, k, HISTORY_LENGTH, "history")
        for k, batches in {
            1: (64,),
            2: (42,),
            5: (21,),
            6: (18,),
            7: (1, 8, 16),
            9: (12,),
            11: (10,),
            13: (9,),
            15: (1, 8),
        }.items()
    },
    "auto": Part((1, 8, 32, 128, 256, 512), 3, 3.32, policy="auto"),
    # The same head with up to 5 draft tokens, and a head with the same confidence in all tokens.
    "auto5": Part((32, 128, 256), 5, 4.44, policy="auto"),
    "alike": Part((128, 256), 3, 3.32, policy="auto", spread=0.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--batch", help="these batch sizes for all parts")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--no-invariant", action="store_true", help="without batch-invariant kernels")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    console = Console(width=120)
    found: list[dict[str, Any]] = []
    plain: dict[int, dict[str, Any]] = {}
    for name in args.only.split(","):
        part = PARTS[name]
        batches = tuple(map(int, args.batch.split(","))) if args.batch else part.batches
        settings = Settings(
            args.model, batches, (part.k,), part.drafter, part.policy,
            max_tokens=part.max_tokens, imposed_acceptance=part.length, imposed_spread=part.spread, eager=args.eager,
            invariant=not args.no_invariant,
        )  # fmt: skip
        for row in measure(settings):
            if not part.k:
                plain[row["batch"]] = row
            compare(row, plain.get(row["batch"], {}))
            row |= {"part": name, "vllm_ms": part.vllm_ms.get(row["batch"]) if args.model == "qwen3-8b" else None}
            found.append(row)
            console.print(line(row), highlight=False)
            if args.json is not None:
                content = {"machine": machine_name(settings.device), "rows": found}
                args.json.write_text(json.dumps(content, indent=1))


def line(row: dict[str, Any]) -> str:
    if row["step_ms"] is None:
        return f"{row['part']:8} batch {row['batch']:4}  {row['note']}"
    vllm = f"  vLLM {row['vllm_ms']:6.2f}" if row["vllm_ms"] else " " * 13
    gain = f"  cost {row['step_cost']:.2f}  speed-up {row['speedup']:.2f}x" if row["step_cost"] else ""
    return (
        f"{row['part']:8} batch {row['batch']:4}  step {row['step_ms']:6.2f} (mean {row['mean_step_ms']:6.2f}) "
        f"host {row['host_ms']:5.2f}{vllm}{gain}  accept {row['mean_acceptance_length']:.2f}  "
        f"verified {row['verified']:.2f}  {row['memory_gib']:.0f} GiB"
    )


if __name__ == "__main__":
    main()
