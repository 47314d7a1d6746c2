"""Whether a run learns as well from rollouts that are two policy versions old.

    python benchmarks/async/learning.py [--seeds 3] [--steps 120] [--out FILE]

A tiny random model learns to write the letters from a to m (the reward is their share of twelve). Synchronous, and with
train.max_staleness = 2: batch by batch with the default correction and without one, and with continuous rollouts. Time
is counted in engine steps (virtual_clock.py); an update takes twelve, as long as the longest rollout.

Printed, with the standard deviation over seeds: the mean training reward of all steps and of the last quarter, and the
first of five steps in a row with a mean reward of at least one half. Also the share of trained tokens by lag, the mean
effective sample size of the importance ratios (1 if all are 1), and the mean weight of the correction.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests")]

from tiny_run import RecordingCallback, settings  # noqa: E402
from virtual_clock import VirtualClock  # noqa: E402

from paceline.build.run import build_trainer  # noqa: E402

STALE = ("train.max_staleness=2",)
ARMS = {
    "synchronous": (),
    "staleness 2": STALE,
    "staleness 2, without correction": (*STALE, "algorithm.correction=none"),
    "staleness 2, keep": (*STALE, "train.inflight=keep"),
}
LEARNS = (
    "learner.learning_rate=0.001",
    "train.groups_per_step=8",
    "algorithm.num_generations=8",
    "engine.max_num_seqs=64",
    "model.dtype=float32",
)


def train(folder: Path, name: str, seed: int, num_steps: int, overrides: tuple[str, ...]) -> list[dict[str, Any]]:
    """The metrics of its steps."""
    fixed = (f"train.seed={seed}", f"train.num_steps={num_steps}", "train.checkpoint_every=0")
    config = settings(folder, *LEARNS, *fixed, *overrides)
    callback = RecordingCallback()
    with closing(build_trainer(config, callback, run=folder / f"{name} {seed}")) as trainer:
        VirtualClock(trainer, 12)
        trainer.run()
    return callback.metrics


def half(reward: list[float]) -> int:
    """The first of five steps in a row with a mean reward of at least one half; else the number of steps."""
    return next((i for i in range(len(reward) - 4) if fmean(reward[i : i + 5]) >= 0.5), len(reward))


def summary(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    quarter = max(1, len(runs[0]) // 4)
    rewards = [[m["reward_mean"] for m in run] for run in runs]
    by_seed = {
        "reward": [fmean(reward) for reward in rewards],
        "reward, last quarter": [fmean(reward[-quarter:]) for reward in rewards],
        "steps to half": [half(reward) for reward in rewards],
    }
    lags: Counter[str] = Counter()
    for run in runs:
        for m in run:
            lags.update(m["token_lags"])
    weights = [m["correction_weight"] for run in runs for m in run if "correction_weight" in m]
    return {
        "by_seed": by_seed,
        "lags": {lag: num / lags.total() for lag, num in sorted(lags.items())},
        "effective_sample_size": fmean(m["effective_sample_size"] for run in runs for m in run),
        "min_effective_sample_size": min(m["effective_sample_size"] for run in runs for m in run),
        "correction_weight": fmean(weights) if weights else None,
        "mismatch_mean": max((m["mismatch_mean"] or 0.0) for run in runs for m in run),
        "mismatch_alarms": sum(m["mismatch_alarm"] for run in runs for m in run),
        "curves": rewards,
    }


def show(name: str, found: dict[str, Any]) -> None:
    figures = "  ".join(
        f"{key} {fmean(each):.{digits}f} ±{stdev(each) if len(each) > 1 else 0:.{digits}f}"
        for (key, each), digits in zip(found["by_seed"].items(), (3, 3, 1), strict=True)
    )
    lags = " / ".join(f"{share:.0%}" for share in found["lags"].values())
    weight = "" if found["correction_weight"] is None else f"  weight {found['correction_weight']:.3f}"
    size, least = found["effective_sample_size"], found["min_effective_sample_size"]
    print(
        f"{name:33} {figures}  lag {'/'.join(found['lags'])}: {lags}  sample size {size:.3f}, least {least:.3f}{weight}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in ARMS.items():
            runs = [train(Path(folder), name, seed, args.steps, overrides) for seed in range(args.seeds)]
            results[name] = summary(runs)
            show(name, results[name])
            sys.stdout.flush()
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
