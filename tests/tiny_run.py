"""A training run that takes seconds: a byte tokenizer, and a tiny model that learns to write one letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.build.config import load_config
from paceline.build.run import build_trainer
from paceline.config import Config
from paceline.model.config import ModelConfig
from paceline.model.eagle3 import head_config, init_head
from paceline.model.head_files import save_head
from paceline.model.layer import Linear
from paceline.model.ops import TorchOps
from paceline.model.provenance import Provenance
from paceline.model.weights import init, save
from paceline.rl.checkpoint import Checkpoints
from paceline.rl.trainer import Trainer

SCALE = 14.0  # of the weights: larger values give more peaked distributions
SETTINGS = (
    "model.dtype=float64",
    "engine.max_num_seqs=16",
    "speculation.method=none",
    "speculation.policy=static",
    "sampling.max_tokens=12",
    "task.kind=jsonl",
    "task.chat=false",
    "task.held_out=2",
    'reward.functions=["reward_functions:many_a"]',
    "algorithm.num_generations=4",
    "learner.learning_rate=0.01",
    "train.groups_per_step=2",
    "train.num_steps=4",
    "train.tensorboard=false",
)


def write_model(directory: Path, **changes: Any) -> None:
    """Random weights; about 20 of the 259 tokens are likely."""
    from conftest import VOCAB_SIZE, write_tokenizer
    from support import tiny_config

    shape = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_layers": 2, "eos_token_ids": (VOCAB_SIZE - 1,)}
    config = tiny_config(**(shape | changes))
    decoder = init(config, 0, torch.float64)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(SCALE)
    save(decoder, directory)
    write_tokenizer(directory)


def write_task(path: Path, num_problems: int = 8) -> None:
    path.write_text("".join(f'{{"prompt": "say {chr(97 + i)}", "answer": "{i}"}}\n' for i in range(num_problems)))


def write_head(
    folder: Path,
    name: str = "head",
    seed: int = 0,
    model: Path | None = None,
    layers: tuple[int, ...] = (1, 2),
    num_tokens: int = 200,
) -> list[str]:
    """Write a random EAGLE-3 head for the model; returns the settings that draft with it."""
    config = ModelConfig.from_hf(json.loads(((model or folder / "model") / "config.json").read_text()))
    head = init_head(head_config(config, num_tokens, layers), torch.arange(num_tokens), seed=seed)
    save_head(head, folder / name, Provenance("tiny", None, "none", seed, 0, 0), dtype=torch.float32)
    return ["speculation.method=eagle3", f"speculation.head={str(folder / name)!r}"]


class LeakyOps(TorchOps):
    """Deliberately broken: reading the policy's embedding has a gradient."""

    def embed(self, tokens_T: Tensor, table: Linear) -> Tensor:
        x_TD = super().embed(tokens_T, table)
        x_TD.detach = lambda: x_TD  # type: ignore[method-assign]
        return x_TD


def settings(folder: Path, *overrides: str) -> Config:
    model, task = folder / "model", folder / "task.jsonl"
    if not model.exists():
        write_model(model)
        write_task(task)
    return load_config(None, [f"model.name={str(model)!r}", f"task.name={str(task)!r}", *SETTINGS, *overrides])


class RecordingCallback:
    """Keeps the notes and metrics of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.metrics: list[dict[str, Any]] = []

    def progress(self, stage: str, done: int, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    def step(self, metrics: Any) -> None:
        self.metrics.append(dict(metrics))


def make(folder: Path, name: str, *overrides: str, resume: bool = False, config: Config | None = None) -> Trainer:
    run = folder / name
    config = config or settings(folder, *overrides)
    return build_trainer(config, RecordingCallback(), run=None if resume else run, resume=run if resume else None)


def policy(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.learner.weights()}


def lines(run: Path, stream: str) -> list[dict[str, Any]]:
    """The records of a stream."""
    text = (run / f"{stream}.jsonl").read_text()
    return [json.loads(line) for line in text.split("\n") if line]  # splitlines() also splits at U+0085 and U+2028


# ---- the result of a run ----

TIMES = ("stages", "tokens_per_s", "generation_tokens_per_s", "draft_s", "memory_gib")


def outcome(run: Path) -> dict[str, Any]:
    """Everything that a run produced, except times: the hashes of its last checkpoint, and all records."""
    last = Checkpoints(run / "checkpoints", 2).latest()
    assert last is not None
    written = json.loads((last.path / "state.json").read_text())
    state = written["state"]
    return {
        "files": {name: file["sha256"] for name, file in written["files"].items()},
        "state": {key: state[key] for key in ("step", "position", "best", "first_eval", "last_eval", "surplus")},
        "totals": {key: value for key, value in state["totals"].items() if key != "wall_s"},
        "metrics": [{key: value for key, value in m.items() if key not in TIMES} for m in lines(run, "metrics")],
        "rollouts": lines(run, "rollouts"),
        # An engine counts its steps from its start, so a resumed run counts from 0.
        "trace": [{k: v for k, v in t.items() if k != "step" and k[-2:] != "_s"} for t in lines(run, "trace")],
    }


def assert_each_once(run: Path, num_steps: int, regenerated: bool = False) -> None:
    """Every step, every generated rollout and every engine step is recorded exactly once. `regenerated`: rollouts that
    were running when the run was killed were generated again, and both times are traced."""
    metrics, rollouts, trace = (lines(run, stream) for stream in ("metrics", "rollouts", "trace"))
    assert [m["step"] for m in metrics] == list(range(num_steps))
    samples = [(r["group"], r["sample"]) for r in rollouts]
    assert len(samples) == len(set(samples)) > 0
    last = Checkpoints(run / "checkpoints", 2).latest()
    assert last is not None and last.step == num_steps
    surplus = last.state["surplus"]
    num_stale = sum(m["num_groups_stale"] for m in metrics)  # generated, dropped, and not recorded
    groups = {group for group, _ in samples} | {group["index"] for group in surplus}
    assert len(groups) + num_stale == last.state["position"], "a problem is missing or was used twice"
    num_emitted = sum(t["num_emitted"] for t in trace)
    num_tokens = sum(len(r["token_ids"]) for r in rollouts)
    num_tokens += sum(rollout["num_tokens"] for group in surplus for rollout in group["rollouts"])
    may_be_more = num_stale or regenerated
    assert num_emitted == num_tokens or (may_be_more and num_emitted > num_tokens), "traces are missing or repeated"
    for m in metrics:
        of_step = [r for r in rollouts if r["step"] == m["step"]]
        assert m["num_samples"] == len(of_step) and m["num_tokens"] == sum(len(r["token_ids"]) for r in of_step)
        assert m["num_groups"] + m["num_groups_filtered"] == len({r["group"] for r in of_step})
