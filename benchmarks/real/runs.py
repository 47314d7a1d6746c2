"""The RL runs of the study: with and without speculation, with online training of the head, with small batches, with
generation that overlaps with training.

Each step's metrics are a row of the results. A long run continues from its last checkpoint; a short one that was not
finished starts again. Neither saves a checkpoint of its last step, which takes 18 GB with a 1.5B model.

Runs with the same settings must be identical, whether they draft or not, and whenever they are repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import Row
from settings import LimitReached, Study, free_memory

from paceline.build.config import load_config
from paceline.build.run import build_trainer
from paceline.rl.checkpoint import Checkpoints, write_tensors
from paceline.rl.folder import read_stream
from paceline.rl.trainer import Trainer

PLAIN = ("speculation.method=none",)
KEPT = (
    "step", "reward_mean", "rewards", "loss", "grad_norm", "entropy", "mismatch_mean", "weights_checksum", "num_tokens",
    "num_samples", "length_mean", "length_max", "truncated_ratio", "mean_acceptance_length", "num_drafts",
    "num_draft_tokens", "num_accepted_tokens", "drafter_version", "staleness_mean", "memory_gib", "stages",
    "eval_before", "eval",
)  # fmt: skip
# Of two identical runs these are equal in every step.
SAME = ("reward_mean", "rewards", "loss", "grad_norm", "num_tokens", "weights_checksum", "eval_before", "eval")
RESERVE_S = 45  # on a GPU: for a checkpoint of 18 GB
NUM_ROUNDS = 2  # of short runs, in alternating order
START_S = 90  # on a GPU: for a short run, before the first one is timed


class OtherWeights(ValueError):
    """A repeated step has other weights than in an earlier attempt."""


@dataclass(frozen=True)
class Run:
    name: str
    settings: tuple[str, ...]
    num_steps: int
    is_long: bool = True  # evaluates, and can be continued
    keeps_weights: bool = False


# ---- parts ----


def record(study: Study) -> None:
    train_all(study, [Run("plain", PLAIN, study.args.num_steps, keeps_weights=True)])


def online(study: Study) -> None:
    num_steps = study.args.num_steps
    train_all(
        study,
        [Run(name, (*eagle3(study, name), "draft.online=every"), num_steps) for name in ("general", "in-domain")],
    )


def curves(study: Study) -> None:
    """The plain run is that of `record`."""
    train_all(study, [Run("eagle3", eagle3(study, "in-domain"), study.args.num_steps)])


def step(study: Study) -> None:
    """With one batch of samples in a step."""
    runs = []
    for batch_size in study.args.batch or (16, 64):
        groups = batch_size // study.config().algorithm.num_generations
        if not groups:
            raise ValueError(f"--batch {batch_size}: give at least algorithm.num_generations")
        sizes = (f"engine.max_num_seqs={batch_size}", f"train.groups_per_step={groups}")
        for i in range(study.args.rounds or NUM_ROUNDS):
            modes = {"plain": PLAIN, "eagle3": eagle3(study, "in-domain")}
            for mode in modes if i % 2 == 0 else reversed(modes):
                name = f"{mode}-{batch_size}-{i}"
                runs.append(Run(name, (*sizes, *modes[mode]), study.args.short_steps, is_long=False))
    train_all(study, runs)


def stale(study: Study) -> None:
    modes = {"plain": PLAIN, "eagle3": eagle3(study, "in-domain")}
    train_all(
        study,
        [
            Run(f"{mode}-{n}", (f"train.max_staleness={n}", *settings), study.args.short_steps, is_long=False)
            for mode, settings in modes.items()
            for n in (0, 1)
        ],
    )


def eagle3(study: Study, head: str) -> tuple[str, ...]:
    return "speculation.method=eagle3", "speculation.policy=auto", f"speculation.head={str(study.head(head))!r}"


# ---- a run ----


def train_all(study: Study, runs: list[Run]) -> None:
    names = [run.name for run in runs]
    wanted = study.args.only.split(",") if study.args.only else names
    if unknown := set(wanted) - set(names):
        raise ValueError(f"--only {', '.join(sorted(unknown))}: not one of {', '.join(names)}")
    longest_s = study.reserve_s(START_S)
    for run in runs:
        if run.name in wanted and not is_done(study, run):
            study.check_time(longest_s)
            started = time.monotonic()
            train(study, run)
            if not run.is_long:
                longest_s = max(longest_s, time.monotonic() - started)


def is_done(study: Study, run: Run) -> bool:
    finished = {row["run"] for row in study.results.rows(study.part, "finished")}
    return run.name in finished and all(path.exists() for path in weights_to_keep(study, run).values())


def weights_to_keep(study: Study, run: Run) -> dict[int, Path]:
    """By policy version. Step n samples with version n - 1; version 0 is the model itself."""
    versions = {step - 1 for step in study.args.steps if 1 < step <= run.num_steps} if run.keeps_weights else set()
    return {version: weights_file(study, version) for version in versions}


def weights_file(study: Study, version: int) -> Path:
    return study.folder("weights", f"version-{version}.safetensors")


def train(study: Study, run: Run) -> None:
    folder, callback = study.folder(f"runs-{study.part}", run.name), Steps(study, run)
    if folder.exists() and not any((folder / "checkpoints").glob("step-*")):
        shutil.rmtree(folder)  # nothing in it can be continued
    resume = folder if folder.exists() else None
    config = load_config(folder / "config.toml") if resume else study.config(*settings_of(study, run))
    trainer = build_trainer(config, callback, run=None if resume else folder, resume=resume)
    try:
        trainer.checkpoints = NeededCheckpoints(folder / "checkpoints", run)
        callback.begin(trainer)
        trainer.run()
        is_finished = trainer.step == run.num_steps
    except OtherWeights:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the last one may have these weights
        raise
    finally:
        trainer.close()
        callback.trainer = None
    del trainer
    free_memory()
    if not is_finished:
        raise LimitReached
    study.append("finished", {"run": run.name, "tokens": token_digests(folder)})
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def settings_of(study: Study, run: Run) -> list[str]:
    found = [f"task.size={study.args.problems}", f"train.num_steps={run.num_steps}", *run.settings]
    if run.is_long:
        return [*found, f"train.eval_every={run.num_steps}"]
    return [*found, "train.eval_every=0", "train.checkpoint_every=0"]


def token_digests(folder: Path) -> dict[str, str]:
    """A hash of the tokens of each step."""
    digests: dict[str, Any] = {}
    for rollout in read_stream(folder, "rollouts"):
        digest = digests.setdefault(str(rollout["step"]), hashlib.sha256())
        digest.update(json.dumps([rollout["group"], rollout["sample"], rollout["token_ids"]]).encode())
    return {step: digest.hexdigest()[:16] for step, digest in digests.items()}


class NeededCheckpoints(Checkpoints):
    """Without that of the last step, and without any of a short run."""

    def __init__(self, folder: Path, run: Run) -> None:
        super().__init__(folder, keep=1)
        self.run = run

    def save(self, step: int, parts: Any, state: Any, *, best: bool = False) -> Path:
        if not self.run.is_long or step == self.run.num_steps:
            return self.folder
        return super().save(step, parts, state)


class Steps:
    """The callback of a run: keeps its metrics and the weights that audits need, and stops it at the time limit."""

    def __init__(self, study: Study, run: Run) -> None:
        self.study, self.run = study, run
        self.trainer: Trainer | None = None
        # Of an earlier, perhaps unfinished, attempt.
        self.before = {row["step"]: row for row in rows_of(study.results.rows(study.part, "step"), run.name)}

    def begin(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.keep_weights()

    def progress(self, stage: str, done: int, total: int) -> None:
        pass

    def note(self, text: str) -> None:
        print(f"{self.run.name}: {text}", flush=True)

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.check_same(metrics)  # before anything of an earlier attempt is replaced
        row = {"run": self.run.name} | {key: metrics[key] for key in KEPT if key in metrics}
        self.study.append("step", row)
        self.keep_weights()
        stages = metrics["stages"]
        print(
            f"{self.run.name} step {metrics['step'] + 1}: reward {metrics['reward_mean']:.3f}, generation "
            f"{stages['exposed_generation']:.2f} s of {stages['total']:.2f} s, acceptance length "
            f"{metrics['mean_acceptance_length']:.2f}",
            flush=True,
        )
        if self.trainer is not None and self.study.left_s < self.study.reserve_s(RESERVE_S) + 2 * stages["total"]:
            self.trainer.producer.stop()

    def keep_weights(self) -> None:
        """In a file that is complete if it exists."""
        assert self.trainer is not None
        path = weights_to_keep(self.study, self.run).get(self.trainer.step)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        dtype = self.trainer.engine.dtype
        write_tensors(part, {name: tensor.to(dtype) for name, tensor in self.trainer.learner.weights()})
        os.replace(part, path)

    def check_same(self, metrics: Mapping[str, Any]) -> None:
        before = self.before.get(metrics["step"])
        if before is not None and before["weights_checksum"] != metrics["weights_checksum"]:
            raise OtherWeights(
                f"{self.run.name}, step {metrics['step'] + 1}: other weights than in an earlier attempt. Was --model, "
                "--data or a setting changed? Then choose another --out. Otherwise the runs are not deterministic"
            )


# ---- results ----


def rows_of(rows: list[Row], run: str) -> list[Row]:
    """One row per step of a run, the last one that was measured."""
    return list({row["step"]: row for row in rows if row["run"] == run}.values())


def difference(first: list[Row], second: list[Row]) -> str | None:
    """The first difference between two runs; None if they are identical as far as both go."""
    for a, b in zip(first, second, strict=False):
        if differing := [key for key in SAME if a.get(key) != b.get(key)]:
            return f"step {a['step'] + 1}: {', '.join(differing)}"
    return None
