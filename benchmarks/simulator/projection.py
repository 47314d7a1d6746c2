"""Simulated speed-ups on large GPU clusters: `auto` with hybrid drafts against static k = 3, and where speculation is
slower than plain decoding.

    python benchmarks/simulator/projection.py --out docs

Writes simulator-projection.png and prints the table of docs/how-to/simulator.md. `auto` is simulated step by step. To
save time, its completions are an eighth as long, after cached prompts that make up for the missing context; the ratio
of its time to that of plain decoding is then applied to the full length.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from published_results import with_changes

from paceline.report.plot import to_png
from paceline.report.table import write_bytes
from paceline.sim.pipeline import stage_times, steady_step
from paceline.sim.plot import draw_map
from paceline.sim.simulator import SimulationConfig, Simulator, load_simulation_config
from paceline.sim.speculation import NO_SPECULATION, Speculation

GPUS = (64, 128, 256, 512, 1024, 2048, 4096)
# GPUs per engine, by the number of GPUs in all: engines are larger if rows are few.
PER_ENGINE = {
    "nvidia-235b-512": dict(zip(GPUS, (8, 8, 8, 16, 32, 64, 64), strict=True)),
    "nvidia-8b-scale": dict(zip(GPUS, (1, 1, 1, 2, 4, 8, 8), strict=True)),
}
SHORTER = 8
STATIC = Speculation(method="eagle3", k=3, acceptance=3.0)
AUTO = Speculation(method="hybrid", policy="auto", k=7, acceptance=3.0, acceptance_at=3)
BATCHES = (1, 4, 16, 64, 128, 256, 512, 1024)


def make_config(preset: str, gpus: int, lag: int) -> SimulationConfig:
    per_engine = PER_ENGINE[preset][gpus]
    tp = 1 if "235b" in preset else per_engine
    layout = {"layout": "disaggregated", "generation_gpus": gpus // 4, "lag": lag} if lag else {}
    base = load_simulation_config(preset)
    return with_changes(base, engine={"gpus": per_engine, "tp": tp}, pipeline={"gpus": gpus, **layout})


def shorter(s: SimulationConfig) -> SimulationConfig:
    w = s.workload
    mean, most = w.mean_tokens / SHORTER, w.max_tokens // SHORTER
    cached = round((w.mean_tokens - mean) / 2)
    prompt = w.prompt_tokens + cached
    return with_changes(
        s, workload={"mean_tokens": mean, "max_tokens": most, "prompt_tokens": prompt, "cached_tokens": cached}
    )


def speedups(s: SimulationConfig) -> dict[str, tuple[float, float]]:
    """(rollout, step) over plain decoding."""
    whole = Simulator(s)
    static_drafts, auto_drafts = (replace(each, head_tp=s.engine.tp > 1) for each in (STATIC, AUTO))
    plain, static = whole.run(NO_SPECULATION), whole.run(static_drafts)
    # If memory limits the number of rows, it limits it in the shorter simulation too.
    most = round(plain.rollout.mean_rows) if s.pipeline.lag else s.engine.max_rows
    part = Simulator(with_changes(shorter(s), engine={"max_rows": most}))
    ratio = part.run(auto_drafts).rollout.seconds / part.run(NO_SPECULATION).rollout.seconds
    stages = stage_times(
        s.pipeline, whole.hardware, whole.model, whole.software, whole.efficiency, ratio * plain.rollout.seconds,
        *whole.lengths,
    )  # fmt: skip
    auto = steady_step(s.pipeline, stages)
    return {
        "static": (plain.rollout.seconds / static.rollout.seconds, plain.step.seconds / static.step.seconds),
        "auto": (1 / ratio, plain.step.seconds / auto.seconds),
    }


def break_even(preset: str, engine: dict[str, int | str], hardware: str, context: int) -> None:
    base = replace(load_simulation_config(preset), hardware=hardware)
    model = Simulator(with_changes(base, engine=engine, pipeline={"gpus": engine["gpus"]})).step_model(STATIC)
    print(f"\n{model.model.name}, {model.hardware.name}, {engine}, context {context}\n")
    print("| rows | " + " | ".join(f"k = {k}" for k in (1, 2, 3, 5, 7)) + " |\n|---" * 1 + "|---" * 5 + "|")
    for rows in BATCHES:
        plain = float(model.step_s(rows, 0, context))
        costs = [float(model.step_s(rows, k, context)) / plain for k in (1, 2, 3, 5, 7)]
        print(f"| {rows} | " + " | ".join(f"{c:.2f}" for c in costs) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs"))
    args = parser.parse_args()
    one = {"gpus": 1, "tp": 1, "precision": "bf16", "kv_precision": "bf16"}
    break_even("nvidia-8b-scale", one, "h200", 1000)
    break_even("nvidia-8b-scale", one, "gb200-nvl72", 8000)
    sixteen = {"gpus": 16, "tp": 1, "precision": "fp8", "kv_precision": "fp8"}
    break_even("nvidia-235b-512", sixteen, "gb200-nvl72", 8000)
    maps = {}
    for preset, name in (("nvidia-235b-512", "235B"), ("nvidia-8b-scale", "8B")):
        for lag in (0, 2):
            found = [speedups(make_config(preset, gpus, lag)) for gpus in GPUS]
            lines = [[each[policy][what] for each in found] for policy in ("static", "auto") for what in (0, 1)]
            maps[f"{name}, {'synchronous' if not lag else 'two updates behind'}"] = np.array(lines)
            print(f"\n{name}, lag {lag}\n\n| | " + " | ".join(map(str, GPUS)) + " |\n|---" + "|---" * len(GPUS) + "|")
            titles = ("static k = 3: rollout", "static k = 3: step", "auto, hybrid: rollout", "auto, hybrid: step")
            for title, line in zip(titles, lines, strict=True):
                print(f"| {title} | " + " | ".join(f"{x:.2f}" for x in line) + " |", flush=True)
    labels = ("static\nrollout", "static\nstep", "auto\nrollout", "auto\nstep")
    title = "Speed-up over plain decoding, GB200, FP8, batch 4096 (projected)"
    names = list(maps)

    def draw(panel: Any, column: int, _: int) -> None:
        draw_map(panel, maps[names[column]], GPUS, labels, "GPUs", "")
        panel.set_title(names[column], fontsize=10)

    png = to_png(draw, len(names), 1, (4.2 * len(names), 3.6), title)
    write_bytes(args.out / "simulator-projection.png", png)


if __name__ == "__main__":
    main()
