"""A head's training run: lessons in a planned order, acceptance on held-out sequences now and then, checkpoints.

What always holds: step n is the same bits whether the run was interrupted or not, for all that it depends on is in the
last checkpoint and the run's folder; the target is read and never changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from paceline.config import DraftSection
from paceline.draft.acceptance import KINDS, Acceptance, measure
from paceline.draft.batches import batches, plan
from paceline.draft.data import Examples
from paceline.draft.learner import DraftLearner
from paceline.draft.lesson import Example, Lesson, teach
from paceline.draft.vocabulary import coverage
from paceline.model.decoder import Decoder
from paceline.model.head_files import save_head
from paceline.model.provenance import Provenance

if TYPE_CHECKING:
    from paceline.rl.checkpoint import Checkpoint, Checkpoints
    from paceline.rl.folder import RunFolder

EVAL_TOKENS = 2048  # measured at once: the noise of a whole vocabulary for each of them is held


class Watcher(Protocol):
    def progress(self, stage: str, done: int, total: int) -> None: ...
    def note(self, text: str) -> None: ...
    def step(self, metrics: Mapping[str, Any]) -> None: ...


class DraftTrainer:
    """`temperature` is the one at which the target samples; `provenance` lacks what only the end knows."""

    def __init__(
        self,
        section: DraftSection,
        *,
        decoder: Decoder,
        learner: DraftLearner,
        examples: Examples,
        steps: Sequence[np.ndarray],
        temperature: float,
        provenance: Provenance,
        folder: RunFolder,
        checkpoints: Checkpoints,
        watcher: Watcher,
    ) -> None:
        self.section, self.decoder, self.learner, self.examples = section, decoder, learner, examples
        self.steps, self.temperature, self.provenance = steps, temperature, provenance
        self.folder, self.checkpoints, self.watcher = folder, checkpoints, watcher
        self.before: dict[str, Any] | None = None
        self.after: dict[str, Any] | None = None  # the last that was measured
        self.num_tokens, self.seconds = 0, 0.0  # that were learned from, and what it took, measuring included

    @property
    def step(self) -> int:
        return self.learner.version

    @property
    def finished(self) -> bool:
        return self.step == len(self.steps)

    def run(self, stopping: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """To the end, or to a checkpoint as soon as `stopping` says so. What came of it."""
        started = time.perf_counter() - self.seconds
        while not self.finished and not stopping():
            metrics: dict[str, Any] = {"step": self.step}
            if self.before is None:
                self.before = self.after = metrics["acceptance_before"] = self.measure()
            self.watcher.progress("training", self.step, len(self.steps))
            metrics |= self._update()
            done, every = self.step, self.section.eval_every
            if self.finished or (every and done % every == 0):
                self.after = metrics["acceptance"] = self.measure()
            self.seconds = time.perf_counter() - started
            self.folder.append("metrics", [metrics])
            self.watcher.step(metrics)
            if self.finished or (self.section.checkpoint_every and done % self.section.checkpoint_every == 0):
                self.save()
        if self.finished:
            self._publish()
        else:
            self.save()
        summary = self.summary()
        self.folder.write_json("summary.json", summary)
        return summary

    def _update(self) -> dict[str, Any]:
        started = time.perf_counter()
        lesson = self._lesson([self.examples.train[i] for i in self.steps[self.step]])
        rate = self.learner.optimizer.learning_rate(self.step)
        report = self.learner.update(lesson, self.decoder.embed)
        num_tokens = int(lesson.chosen_SL.sum())
        self.num_tokens += num_tokens
        return {
            "loss": report.loss,
            "overlap": list(report.overlap),
            "grad_norm": report.grad_norm,
            "learning_rate": rate,
            "num_tokens": num_tokens,
            "seconds": time.perf_counter() - started,
        }

    def measure(self) -> dict[str, Any]:
        """Acceptance on the held-out sequences, with the same noise every time."""
        held_out, k = self.examples.held_out, self.section.unroll
        total = {kind: Acceptance.none(k) for kind in KINDS}
        parts = batches([len(example.tokens) for example in held_out], min(EVAL_TOKENS, self.section.tokens_per_batch))
        for i, part in enumerate(parts):
            self.watcher.progress("measuring", i, len(parts))
            lesson = self._lesson([held_out[j] for j in part])
            seed = self.section.seed + i
            found = measure(self.learner.head, self.decoder.embed, lesson, k, self.temperature, seed)
            for kind, acceptance in found.items():
                total[kind].add(acceptance)
        return {
            kind: {
                "mean_acceptance_length": acceptance.mean_length,
                "acceptance_per_position": acceptance.per_position,
                "num_drafts": acceptance.num_drafts,
            }
            for kind, acceptance in total.items()
        }

    def _lesson(self, examples: Sequence[Example]) -> Lesson:
        return teach(self.decoder, examples, self.learner.head.config.taps)

    def _publish(self) -> None:
        lengths = {kind: found["mean_acceptance_length"] for kind, found in (self.after or {}).items()}
        measured = {"temperature": self.temperature, "k": self.section.unroll, **lengths}
        provenance = replace(
            self.provenance, num_steps=self.step, num_tokens=self.num_tokens, acceptance={"held-out": measured}
        )
        save_head(self.learner.head, self.head, provenance, num_speculative_tokens=self.section.unroll)

    @property
    def head(self) -> Path:
        """Where the trained head goes."""
        return self.folder.path / "head"

    # ---- the run's state ----

    def save(self) -> None:
        state = {
            "before": self.before,
            "after": self.after,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "examples": self.examples.fingerprint,
            "streams": self.folder.offsets(),
        }
        self.checkpoints.save(self.step, {"head": self.learner.state()}, state)
        self.folder.record_checkpoint(self.step)

    def restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        if state["examples"] != self.examples.fingerprint:
            raise ValueError(
                f"draft.data: its sequences are not those that {self.folder.path} began with; bring them back, or "
                "start a new run"
            )
        self.learner.restore(checkpoint.tensors("head"))
        self.before, self.after = state["before"], state["after"]
        self.num_tokens, self.seconds = state["num_tokens"], state["seconds"]
        self.folder.truncate(state["streams"])

    def summary(self) -> dict[str, Any]:
        examples = self.examples
        draft_ids = self.learner.head.draft_ids.cpu().numpy()
        return {
            "finished": self.finished,
            "steps": self.step,
            "num_steps": len(self.steps),
            "tokens": self.num_tokens,
            "seconds": self.seconds,
            "num_train": len(examples.train),
            "num_held_out": len(examples.held_out),
            "num_skipped": examples.num_skipped,
            "num_cut": examples.num_cut,
            "draft_vocab_size": len(draft_ids),
            "coverage": coverage(draft_ids, examples.held_out),
            "coverage_train": coverage(draft_ids, examples.train),
            "k": self.section.unroll,
            "temperature": self.temperature,
            "before": self.before,
            "after": self.after,
            "run": str(self.folder.path),
            "head": str(self.head) if self.finished else None,
        }

    def close(self) -> None:
        self.folder.close()


def planned_steps(section: DraftSection, examples: Examples) -> list[np.ndarray]:
    lengths = [len(example.tokens) for example in examples.train]
    return plan(lengths, section.tokens_per_batch, section.num_epochs, section.seed)
