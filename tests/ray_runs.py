"""Settings, results and callbacks for tests of runs over Ray."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_run import RecordingCallback, lines

from paceline.rl.checkpoint import Checkpoints

BASE = ("speculation.method=suffix", "train.num_steps=6", "train.checkpoint_every=2", "train.eval_every=3")
CLUSTER = ("cluster.kind=ray", "cluster.num_engines=2", "reward.workers=1")
# Keys of a rollout that do not depend on the engine that generated it. Drafts do.
ROLLOUT_KEYS = ("step", "group", "sample", "problem", "token_ids", "versions", "reward", "advantage", "finish_reason")
STEP_KEYS = ("step", "version", "loss", "grad_norm", "reward_mean", "tokens", "num_groups", "eval", "eval_before")


def outcome(run: Path) -> dict[str, Any]:
    """A run's result: rollouts, losses, and hashes of the learner's last state."""
    last = Checkpoints(run / "checkpoints", 2).latest()
    assert last is not None
    files = json.loads((last.path / "state.json").read_text())["files"]
    return {
        "rollouts": [{key: r[key] for key in ROLLOUT_KEYS} for r in lines(run, "rollouts")],
        "metrics": [{key: m.get(key) for key in STEP_KEYS} for m in lines(run, "metrics")],
        "learner": {name: file["sha256"] for name, file in files.items() if name.startswith("learner")},
        "position": last.state["position"],
        "evals": [last.state[key] for key in ("best", "first_eval", "last_eval")],
    }


def assert_each_once(run: Path, num_steps: int) -> None:
    """Every step and every rollout is recorded exactly once."""
    assert [m["step"] for m in lines(run, "metrics")] == list(range(num_steps))
    samples = [(r["group"], r["sample"]) for r in lines(run, "rollouts")]
    assert len(samples) == len(set(samples)) == num_steps * 2 * 4


class ActingCallback(RecordingCallback):
    """Records steps and runs `actions[step]` after a step, once."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: dict[int, Callable[[], object]] = {}

    def step(self, metrics: Any) -> None:
        super().step(metrics)
        action = self.actions.pop(metrics["step"], None)
        if action is not None:
            action()
