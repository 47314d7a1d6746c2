"""Steps of the local engine, measured; half of them fitted on, the other half predicted.

    python benchmarks/simulator/measured.py --model smollm2-135m --hardware cards/mine.toml --json steps.json
    python benchmarks/simulator/measured.py --trace steps.json        one that was recorded elsewhere

Without --hardware the card is a guess that the fit then corrects: what is fitted are shares of its rates.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from paceline.sim.cards import Efficiency, Hardware, Model, card
from paceline.sim.step import Engine
from paceline.sim.trace import calibrate, read_trace

LEAST_STEPS = 4  # of one or two nobody knows what else they had to do


def record(
    model: str,
    batches: tuple[int, ...],
    draft_lengths: tuple[int, ...],
    contexts: tuple[int, ...],
    device: str,
    path: Path,
) -> None:
    """The steps of `paceline bench step` with drafts from history, so without a head's passes. Of each kind the fastest
    tenth: what holds a step up is seldom its own doing. Written after every context."""
    from paceline.bench.step import Settings, Subject, check_machine

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
        subject = Subject(settings)
        for batch, k in settings.cells:
            steps = subject.steps(batch, k)
            if len(steps) < LEAST_STEPS:
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
    given = parser.parse_args()
    given_numbers = given.batch, given.k, given.prompt_tokens
    batches, lengths, contexts = (tuple(map(int, text.split(","))) for text in given_numbers)
    if given.trace is None:
        record(given.model, batches, lengths, contexts, given.device, given.json)
    engine = Engine(precision=given.precision, kv_precision=given.precision)
    efficiency = card(Efficiency, "published", "")
    found = calibrate(
        read_trace(given.trace or given.json), card(Hardware, given.hardware, "--hardware"),
        card(Model, given.model, "--model"), efficiency, engine,
    )  # fmt: skip
    for name, value in found.fitted.values.items():
        print(f"    {name} = {value:.4g}")
    print(f"fitted on {len(found.used)} rows: off by {100 * found.fitted.mean:.1f}% on average, "
          f"{100 * found.fitted.worst:.1f}% at most")  # fmt: skip
    for row, error in zip(found.held_out, found.errors, strict=True):
        print(f"    {row.name}: {1e3 * row.seconds:.2f} ms, {100 * error:+.1f}%")
    print(f"held out {len(found.held_out)} rows: off by {100 * found.worst:.1f}% at most")


if __name__ == "__main__":
    main()
