"""Runs over Ray and what they came to, for the tests that compare and kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_run import Quiet, lines

from paceline.rl.checkpoint import Checkpoints

BASE = ("speculation.method=suffix", "train.num_steps=6", "train.checkpoint_every=2", "train.eval_every=3")
CLUSTER = ("cluster.kind=ray", "cluster.num_engines=2", "reward.workers=1")
# Of a rollout all but who drafted what, which depends on the engine that a problem came to.
ROLLOUT = ("step", "group", "sample", "problem", "token_ids", "versions", "reward", "advantage", "finish_reason")
STEP = ("step", "version", "loss", "grad_norm", "reward_mean", "tokens", "num_groups", "eval", "eval_before")


def outcome(run: Path) -> dict[str, Any]:
    """What a run came to: samples, losses, and the learner's last state by hash."""
    last = Checkpoints(run / "checkpoints", 2).latest()
    assert last is not None
    files = json.loads((last.path / "state.json").read_text())["files"]
    return {
        "rollouts": [{key: r[key] for key in ROLLOUT} for r in lines(run, "rollouts")],
        "metrics": [{key: m.get(key) for key in STEP} for m in lines(run, "metrics")],
        "learner": {name: file["sha256"] for name, file in files.items() if name.startswith("learner")},
        "position": last.state["position"],
        "evals": [last.state[key] for key in ("best", "first_eval", "last_eval")],
    }


def each_once(run: Path, num_steps: int) -> None:
    assert [m["step"] for m in lines(run, "metrics")] == list(range(num_steps))
    samples = [(r["group"], r["sample"]) for r in lines(run, "rollouts")]
    assert len(samples) == len(set(samples)) == num_steps * 2 * 4


class Witness(Quiet):
    """Sees steps, and does something after some of them, once each."""

    def __init__(self) -> None:
        super().__init__()
        self.deeds: dict[int, Callable[[], object]] = {}

    def step(self, metrics: Any) -> None:
        super().step(metrics)
        deed = self.deeds.pop(metrics["step"], None)
        if deed is not None:
            deed()
