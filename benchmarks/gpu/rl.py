"""Stage times of RL steps on one GPU, without drafts and with them, and whether the runs are identical.

    python benchmarks/gpu/rl.py --out runs/gpu [--config FILE] [--modes plain,k3,auto,history] [--steps 8] [A.B=C …]

Modes: without drafts; EAGLE-3 with 3 draft tokens per row; EAGLE-3 with policy `auto`; drafts from history with `auto`.
Identical runs have the same tokens, rewards, losses, gradient norms and weights (as published to the engine, by their
checksum) in every step.

The modes run one after another. Stage times are seconds per step: the mean of all steps but the first two, in which
most graphs are captured. With `rl.toml`, problems are random sums, written to `sums.jsonl` in the folder. An audit
generates a step's tokens again with and without drafts; the speed-up of the whole step adds the same other stages to
both. A finished run is not repeated; the same command resumes one that was stopped (Ctrl-C, SIGTERM).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

CONFIG = Path(__file__).with_name("rl.toml")
MODES = {
    "plain": ("speculation.method=none", "speculation.audit_every=0"),
    "k3": ("speculation.method=eagle3", "speculation.policy=static"),
    "auto": ("speculation.method=eagle3", "speculation.policy=auto"),
    "history": ("speculation.method=suffix", "speculation.policy=auto"),
}
SAME = ("reward_mean", "rewards", "loss", "grad_norm", "num_tokens", "weights_checksum")
STAGES = ("data", "sync", "generation", "reward", "training", "total")
NUM_SKIPPED = 2
NUM_PROBLEMS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, one per mode")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--modes", default="plain,k3,auto")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("settings", nargs="*", metavar="A.B=C", help="config overrides for all modes")
    args = parser.parse_args()
    modes = args.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"--modes {', '.join(sorted(unknown))}: not one of {', '.join(MODES)}")
    if args.steps <= NUM_SKIPPED:
        parser.error(f"--steps {args.steps}: the first {NUM_SKIPPED} are not counted, so at least {NUM_SKIPPED + 1}")
    task = [f"task.name={write_sums(args.out / 'sums.jsonl')}"] if args.config == CONFIG else []
    for mode in modes:
        if len(steps_of(args.out / mode)) < args.steps:
            settings = [*task, f"train.num_steps={args.steps}", *args.settings, *MODES[mode]]
            train(args.config, args.out / mode, settings)
    runs = {mode: steps_of(args.out / mode) for mode in modes}
    print(table(runs))
    for mode, steps in runs.items():
        print(f"{mode}: {describe(steps)}")
    for mode in modes[1:]:
        print(f"{mode} and {modes[0]}: {compare(args.out / modes[0], args.out / mode)}")


def write_sums(path: Path) -> Path:
    """Sums and differences of two to four numbers with one or two digits, the same in every run."""
    rng = random.Random(0)
    lines = []
    for _ in range(NUM_PROBLEMS):
        size = rng.choice((9, 99))
        terms = [rng.randint(1, size) * rng.choice((1, -1)) for _ in range(rng.randint(2, 4))]
        terms[0] = abs(terms[0])
        expression = str(terms[0]) + "".join(f" {'+' if term > 0 else '-'} {abs(term)}" for term in terms[1:])
        prompt = f"State the final answer to the following arithmetic problem: {expression} ="
        lines.append(json.dumps({"prompt": prompt, "answer": str(sum(terms))}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path.resolve()


def train(config: Path, folder: Path, settings: list[str]) -> None:
    """Start a run, or resume it. If it fails, it prints the error itself."""
    arguments = ["--resume", str(folder)] if folder.exists() else ["--run", str(folder), str(config), *settings]
    if code := subprocess.run([sys.executable, "-m", "paceline.cli", "train", *arguments]).returncode:
        sys.exit(code)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    metrics = folder / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text("utf-8").splitlines()] if metrics.exists() else []


def compare(first: Path, second: Path) -> str:
    """Whether two runs are identical, or the first step and figure in which they differ."""
    for a, b in zip(steps_of(first), steps_of(second), strict=False):
        if differing := [key for key in SAME if a[key] != b[key]]:
            return f"differ from step {a['step'] + 1} on, in {', '.join(differing)}"
    num_tokens = 0
    with (first / "rollouts.jsonl").open("rb") as file, (second / "rollouts.jsonl").open("rb") as other:
        for line, same in zip(file, other, strict=False):
            a, b = json.loads(line), json.loads(same)
            if (a["token_ids"], a["reward"]) != (b["token_ids"], b["reward"]):
                return f"differ in a rollout of step {a['step'] + 1}"
            num_tokens += len(a["token_ids"])
    return f"identical in {min(len(steps_of(each)) for each in (first, second))} steps, {num_tokens} tokens"


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    lines = [f"| | {' | '.join(STAGES)} | tokens/s generated | tokens/s of the step |", "|---" + "|---:" * 8 + "|"]
    for mode, steps in runs.items():
        late = steps[NUM_SKIPPED:]
        tokens, seconds = sum(step["num_tokens"] for step in late), {key: total(late, key) for key in STAGES}
        figures = [f"{seconds[key] / len(late):.2f}" for key in STAGES]
        figures += [f"{tokens / seconds[key]:.0f}" for key in ("generation", "total")]
        lines.append(f"| {mode} | {' | '.join(figures)} |")
    return "\n".join(lines)


def total(steps: list[dict[str, Any]], stage: str) -> float:
    return sum(step["stages"][stage] for step in steps)


def describe(steps: list[dict[str, Any]]) -> str:
    found = ["reward " + ", ".join(f"{step['reward_mean']:.3f}" for step in steps)]
    found.append(f"mismatch {mean(step['mismatch_mean'] for step in steps):.4f}")
    found.append(f"{max(step['memory_gib'] for step in steps):.0f} GiB")
    if lengths := [step["mean_acceptance_length"] for step in steps if step["num_drafts"]]:
        found.append(f"acceptance length {lengths[0]:.2f} in the first step, {lengths[-1]:.2f} in the last")
    for step in steps:
        if audit := step.get("audit"):
            other_s = step["stages"]["total"] - step["stages"]["exposed_generation"]
            whole = (other_s + audit["plain_s"]) / (other_s + audit["speculative_s"])
            found.append(f"audit of step {step['step'] + 1}: {audit['speedup']:.2f}x, the whole step {whole:.2f}x")
    return "; ".join(found)


if __name__ == "__main__":
    main()
