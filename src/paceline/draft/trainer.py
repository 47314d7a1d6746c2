"""A head's training run: planned batches, evaluation of acceptance on held-out sequences, and checkpoints.

Invariants: an interrupted and resumed run is bit-identical to an uninterrupted one, because all state is in the last
checkpoint and the run's folder; the target is never changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from paceline.config import DraftSection
from paceline.draft.acceptance import KINDS, Acceptance, measure
from paceline.draft.batches import batches, plan
from paceline.draft.data import Examples
from paceline.draft.head_batch import Example, HeadBatch, make_head_batch
from paceline.draft.learner import DraftLearner
from paceline.draft.vocabulary import coverage
from paceline.model.decoder import Decoder
from paceline.model.head_files import save_head
from paceline.model.provenance import Provenance
from paceline.rl.callback import ProgressCallback
from paceline.rl.checkpoint import Checkpoint, Checkpoints
from paceline.rl.folder import RunFolder

EVAL_TOKENS = 2048  # per batch: noise for the whole vocabulary is in memory for each token


class DraftTrainer:
    """`temperature`: the target's sampling temperature. `provenance`: completed when the head is saved."""

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
        callback: ProgressCallback,
    ) -> None:
        self.section, self.decoder, self.learner, self.examples = section, decoder, learner, examples
        self.steps, self.temperature, self.provenance = steps, temperature, provenance
        self.folder, self.checkpoints, self.callback = folder, checkpoints, callback
        self.before: dict[str, Any] | None = None
        self.after: dict[str, Any] | None = None  # the latest evaluation
        self.num_tokens, self.seconds = 0, 0.0  # trained tokens, and time with evaluation

    @property
    def step(self) -> int:
        return self.learner.version

    @property
    def finished(self) -> bool:
        return self.step == len(self.steps)

    def run(self, stopping: Callable[[], bool] = lambda: False) -> dict[str, Any]:
        """Train to the end, or until `stopping()` is true, with a checkpoint. Returns the summary."""
        started = time.perf_counter() - self.seconds
        while not self.finished and not stopping():
            metrics: dict[str, Any] = {"step": self.step}
            if self.before is None:
                self.before = self.after = metrics["acceptance_before"] = self.measure()
            self.callback.progress("training", self.step, len(self.steps))
            metrics |= self._update()
            done, every = self.step, self.section.eval_every
            if self.finished or (every and done % every == 0):
                self.after = metrics["acceptance"] = self.measure()
            self.seconds = time.perf_counter() - started
            self.folder.append("metrics", [metrics])
            self.callback.step(metrics)
            if self.finished or (self.section.checkpoint_every and done % self.section.checkpoint_every == 0):
                self.save()
        if self.finished:
            self._save_head()
        else:
            self.save()
        summary = self.summary()
        self.folder.write_json("summary.json", summary)
        return summary

    def _update(self) -> dict[str, Any]:
        started = time.perf_counter()
        head_batch = self._head_batch([self.examples.train[i] for i in self.steps[self.step]])
        rate = self.learner.optimizer.learning_rate(self.step)
        report = self.learner.update(head_batch, self.decoder.embed)
        num_tokens = int(head_batch.loss_mask_SL.sum())
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
        """Acceptance on the held-out sequences, with the same noise at every evaluation."""
        held_out, k = self.examples.held_out, self.section.unroll
        total = {kind: Acceptance.zeros(k) for kind in KINDS}
        parts = batches([len(example.tokens) for example in held_out], min(EVAL_TOKENS, self.section.tokens_per_batch))
        for i, part in enumerate(parts):
            self.callback.progress("measuring", i, len(parts))
            head_batch = self._head_batch([held_out[j] for j in part])
            seed = self.section.seed + i
            found = measure(self.learner.head, self.decoder.embed, head_batch, k, self.temperature, seed)
            for kind, acceptance in found.items():
                total[kind].add(acceptance)
        return {
            kind: {
                "mean_acceptance_length": acceptance.mean_length,
                "acceptance_per_position": acceptance.per_position,
                "acceptance_length_per_depth": acceptance.length_per_depth,
                "num_drafts": acceptance.num_drafts,
            }
            for kind, acceptance in total.items()
        }

    def _head_batch(self, examples: Sequence[Example]) -> HeadBatch:
        return make_head_batch(self.decoder, examples, self.learner.head.config.aux_layers)

    def _save_head(self) -> None:
        lengths = {kind: found["mean_acceptance_length"] for kind, found in (self.after or {}).items()}
        measured = {"temperature": self.temperature, "k": self.section.unroll, **lengths}
        provenance = replace(
            self.provenance, num_steps=self.step, num_tokens=self.num_tokens, acceptance={"held-out": measured}
        )
        save_head(self.learner.head, self.head, provenance, num_speculative_tokens=self.section.unroll)

    @property
    def head(self) -> Path:
        """The directory of the trained head."""
        return self.folder.path / "head"

    # ---- the run's state ----

    def save(self) -> None:
        state = {
            "acceptance_before": self.before,
            "acceptance_after": self.after,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "examples": self.examples.fingerprint,
            "stream_offsets": self.folder.offsets(),
        }
        self.checkpoints.save(self.step, {"head": self.learner.state_dict()}, state)
        self.folder.record_checkpoint(self.step)

    def restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        if state["examples"] != self.examples.fingerprint:
            raise ValueError(
                f"draft.data: its sequences are not those that {self.folder.path} started with; restore the data, or "
                "start a new run"
            )
        self.learner.load_state_dict(checkpoint.tensors("head"))
        self.before, self.after = state["acceptance_before"], state["acceptance_after"]
        self.num_tokens, self.seconds = state["num_tokens"], state["seconds"]
        self.folder.truncate(state["stream_offsets"])

    def summary(self) -> dict[str, Any]:
        examples = self.examples
        draft_ids = self.learner.head.draft_ids.cpu().numpy()
        return {
            "finished": self.finished,
            "num_steps": self.step,
            "num_planned_steps": len(self.steps),
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "num_train": len(examples.train),
            "num_held_out": len(examples.held_out),
            "num_skipped": examples.num_skipped,
            "num_truncated": examples.num_truncated,
            "draft_vocab_size": len(draft_ids),
            "coverage": coverage(draft_ids, examples.held_out),
            "coverage_train": coverage(draft_ids, examples.train),
            "architecture": self.learner.head.architecture,
            "k": self.section.unroll,
            "temperature": self.temperature,
            "acceptance_before": self.before,
            "acceptance_after": self.after,
            "run": str(self.folder.path),
            "head": str(self.head) if self.finished else None,
        }

    def close(self) -> None:
        self.folder.close()


def planned_steps(section: DraftSection, examples: Examples) -> list[np.ndarray]:
    lengths = [len(example.tokens) for example in examples.train]
    return plan(lengths, section.tokens_per_batch, section.num_epochs, section.seed)
