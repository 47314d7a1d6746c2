"""The simulator's error on measured steps of the local engine: it is fitted on half of them and predicts the others.

    python benchmarks/simulator/measured.py --model smollm2-135m --hardware mine.toml --json steps.json
    python benchmarks/simulator/measured.py --trace steps.json        uses steps that were recorded before

The default --hardware spec is an estimate. The fit corrects it, because it fits fractions of its rates.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from published_results import mean_error

from paceline.sim.specs import Efficiency, Hardware, Model, load_spec
from paceline.sim.step import Engine
from paceline.sim.trace import calibrate, read_trace

MIN_STEPS = 4  # fewer steps may all have been delayed


def record(
    model: str,
    batches: tuple[int, ...],
    draft_lengths: tuple[int, ...],
    contexts: tuple[int, ...],
    device: str,
    path: Path,
) -> None:
    """Record steps of `paceline bench step` with drafts from history, so without passes of a head. The time of a case
    is the 10% quantile of its steps: other processes may delay a step. The file is written after every context."""
    from paceline.bench.step import BenchModel, check_machine
    from paceline.bench.step_settings import Settings

    rows = []
    for prompt_tokens in contexts:
        settings = Settings(
            model=model,
            batches=batches,
            draft_lengths=draft_lengths,
            drafter="history",
            prompt_tokens=prompt_tokens,
            max_tokens=72,
            device=device,
            dtype="float32" if device == "cpu" else "bfloat16",
        )
        check_machine(settings)
        bench_model = BenchModel(settings)
        for batch, k in settings.cells:
            steps = bench_model.steps(batch, k)
            if len(steps) < MIN_STEPS:
                continue
            seconds = float(np.quantile([step.total_s - step.draft_s for step in steps], 0.1))
            context = float(np.mean([step.num_context_tokens for step in steps])) / batch
            row = {"batch": batch, "num_speculative_tokens": k, "context": context, "step_ms": 1e3 * seconds}
            rows.append(row | {"num_steps": len(steps)})
            print(rows[-1])
        path.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--hardware", default="neoverse-n1-2")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", default="1,2,4,8")
    parser.add_argument("--k", default="0,1,3,7")
    parser.add_argument("--prompt-tokens", default="32,256")
    parser.add_argument("--json", type=Path, default=Path("steps.json"))
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    numbers = args.batch, args.k, args.prompt_tokens
    batches, lengths, contexts = (tuple(map(int, text.split(","))) for text in numbers)
    if args.trace is None:
        record(args.model, batches, lengths, contexts, args.device, args.json)
    engine = Engine(precision=args.precision, kv_precision=args.precision)
    efficiency = load_spec(Efficiency, "published", "")
    found = calibrate(
        read_trace(args.trace or args.json), load_spec(Hardware, args.hardware, "--hardware"),
        load_spec(Model, args.model, "--model"), efficiency, engine,
    )  # fmt: skip
    for name, value in found.fitted.values.items():
        print(f"    {name} = {value:.4g}")
    print(f"fitted on {len(found.fitted_steps)} rows: error {100 * mean_error(found.fitted):.1f}% on average, "
          f"{100 * found.fitted.max_error:.1f}% at most")  # fmt: skip
    for row, error in zip(found.held_out, found.errors, strict=True):
        print(f"    {row.name}: {1e3 * row.seconds:.2f} ms, {100 * error:+.1f}%")
    print(f"held out {len(found.held_out)} rows: error {100 * found.max_error:.1f}% at most")


if __name__ == "__main__":
    main()
