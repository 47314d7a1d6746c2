"""Reward curves of training with and without speculation, which must be identical.

    python benchmarks/history/reward_curves.py --out runs/curves [--seeds 0,1,2] [--steps 16] [--svg FILE] [A.B=C …]

The quickstart's task with SmolLM2-135M in float32 on a CPU, once per seed without drafts and once with three draft
tokens from history. Tokens, rewards and losses of both runs are compared; the exit code is 1 if any differ. A finished
run is not repeated; the same command resumes one that was stopped (Ctrl-C, SIGTERM).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

CONFIG = Path(__file__).resolve().parents[2] / "configs/quickstart.toml"
COMMON = (
    "speculation.audit_every=0",
    "speculation.min_confidence=0.0",
    "speculation.policy=static",
    "train.eval_every=0",
    "train.tensorboard=false",
)
MODES = {
    "plain": ("speculation.method=none", "speculation.num_speculative_tokens=3"),
    "suffix": ("speculation.method=suffix", "speculation.num_speculative_tokens=3"),
}
LINES = {"plain": {"linewidth": 5, "alpha": 0.3}, "suffix": {"linewidth": 1.2}}
COLOURS = ("tab:blue", "tab:orange", "tab:green", "tab:red")
EQUAL = {"rollouts": ("step", "problem", "sample", "token_ids", "reward"), "metrics": ("step", "reward_mean", "loss")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, one per seed and mode")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--svg", type=Path, help="write the figure to this file")
    parser.add_argument("settings", nargs="*", metavar="A.B=C", help="config overrides for all runs")
    args = parser.parse_args()
    curves: list[tuple[str, list[float]]] = []
    num_different = 0
    for seed in args.seeds.split(","):
        folders = {mode: args.out / f"{mode}-{seed}" for mode in MODES}
        for mode, folder in folders.items():
            if len(records(folder, "metrics")) < args.steps:
                train(
                    folder,
                    [f"train.seed={seed}", f"train.num_steps={args.steps}", *COMMON, *args.settings, *MODES[mode]],
                )
            curves.append((mode, [step["reward_mean"] for step in records(folder, "metrics")]))
        different = [file for file in EQUAL if selected(folders["plain"], file) != selected(folders["suffix"], file)]
        accepted = sum(step["num_accepted_tokens"] for step in records(folders["suffix"], "metrics"))
        num_different += len(different) + (accepted == 0)
        found = f"differ: {', '.join(different)}" if different else "tokens, rewards and losses are identical"
        print(f"seed {seed}: {found}; {accepted} draft tokens accepted")
    if args.svg is not None:
        plot(curves, args.svg)
    sys.exit(num_different > 0)


def train(folder: Path, settings: list[str]) -> None:
    """Start a run, or resume it. If it fails, it prints the error itself."""
    arguments = ["--resume", str(folder)] if folder.exists() else ["--run", str(folder), str(CONFIG), *settings]
    if code := subprocess.run([sys.executable, "-m", "paceline.cli", "train", *arguments]).returncode:
        sys.exit(code)


def records(folder: Path, file: str) -> list[dict[str, Any]]:
    path = folder / f"{file}.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def selected(folder: Path, file: str) -> list[list[Any]]:
    return [[record[key] for key in EQUAL[file]] for record in records(folder, file)]


def plot(curves: list[tuple[str, list[float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "paceline"  # the same bytes in every run
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for i, (mode, rewards) in enumerate(curves):
        seed = i // len(MODES)
        label = {"plain": "without speculation", "suffix": "with drafts from history"}[mode] if seed == 0 else None
        style = {"color": COLOURS[seed % len(COLOURS)], "label": label, **LINES[mode]}
        axes.plot(range(1, len(rewards) + 1), rewards, **style)
    axes.set_xlabel("RL step")
    axes.set_ylabel("mean reward")
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
