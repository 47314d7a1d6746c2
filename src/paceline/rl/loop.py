"""The loop: a batch of rollouts, an update, new weights, and again.

There is one, synchronous or not: `Producer.next` either generates now or hands over what was generated meanwhile. All
that a run is lies in its folder; a checkpoint and the folder's files cut back to it are the run as it was then, so
that a resumed run goes on as if nothing had happened.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.config import Config
from paceline.engine.engine import LocalEngine
from paceline.model.text import pieces
from paceline.model.weights import checksum
from paceline.rl.algorithms import Algorithm
from paceline.rl.audit import Auditor, overall
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.checkpoint import Checkpoint, Checkpoints
from paceline.rl.collect import Collector
from paceline.rl.evaluate import evaluate
from paceline.rl.folder import RunFolder
from paceline.rl.learner import Learner, UpdateReport
from paceline.rl.logs import Sink
from paceline.rl.produce import Batch, Producer, Published, Stopped
from paceline.rl.records import pack_groups, rollout_record, unpack_groups
from paceline.rl.stopwatch import Stopwatch
from paceline.speculation.metrics import summarise
from paceline.tasks.task import Task
from paceline.types import Group, Rollout

STAGES = ("data", "sync", "generation", "reward", "logprob", "training", "draft")
HIDDEN = ("data", "sync", "generation", "reward")  # behind training, where the two overlap


class Watcher(Protocol):
    """Who looks on: a terminal, or nobody."""

    def progress(self, stage: str, done: int, total: int) -> None: ...
    def step(self, metrics: Mapping[str, Any]) -> None: ...
    def note(self, text: str) -> None: ...


class Loop:
    def __init__(
        self,
        config: Config,
        *,
        engine: LocalEngine,
        learner: Learner,
        algorithm: Algorithm,
        task: Task,
        collector: Collector,
        auditor: Auditor,
        folder: RunFolder,
        checkpoints: Checkpoints,
        sinks: Sequence[Sink],
        watcher: Watcher,
    ) -> None:
        self.config, self.engine, self.learner, self.algorithm = config, engine, learner, algorithm
        self.task, self.collector, self.auditor, self.folder = task, collector, auditor, folder
        self.checkpoints, self.sinks, self.watcher = checkpoints, sinks, watcher
        train = config.train
        self.overlaps = train.max_staleness > 0
        self.producer = Producer(
            collector,
            task,
            algorithm,
            num_steps=train.num_steps,
            groups_per_step=train.groups_per_step,
            num_generations=config.algorithm.num_generations,
            max_sampling_rounds=config.algorithm.max_sampling_rounds,
            max_staleness=train.max_staleness,
            inflight=train.inflight,
            seed=train.seed,
            max_failures=config.reward.max_failures,
            on_progress=lambda done, total: watcher.progress("generation", done, total),
            in_thread=lambda: torch.set_num_threads(self.engine_threads),
        )
        self.step = 0  # the next one
        self._ready: list[Batch] = []  # from a checkpoint
        self._last: Batch | None = None
        self._saved = -1
        self._whole = True  # whether the learner is between two steps
        self.best: dict[str, Any] | None = None  # {"step", "reward"} of the best validation
        self.first_eval: dict[str, Any] | None = None
        self.last_eval: dict[str, Any] | None = None
        self.audits: list[dict[str, Any]] = []
        self.totals: dict[str, float] = {"wall_s": 0.0, "tokens": 0.0, "num_drafts": 0.0, "num_accepted_tokens": 0.0}
        self.stages: dict[str, float] = {}

    # -- threads: where generation and training overlap, each has half of the cores -----------------------------------

    @property
    def engine_threads(self) -> int:
        return self.config.engine.threads or self._share()

    @property
    def learner_threads(self) -> int:
        return self.config.learner.threads or self._share()

    def _share(self) -> int:
        return max(1, torch.get_num_threads() // 2) if self.overlaps else torch.get_num_threads()

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """To the last step, or until `producer.stop()`; returns the summary. Whatever happens, what was done by the
        last whole step is on disk."""
        train = self.config.train
        try:
            if self.step == 0 and self.first_eval is None and train.eval_every:
                self._publish()
                self.first_eval = self.last_eval = self._evaluate()
            self._publish()
            self.producer.start(self.step, self._ready)
            with threads(self.learner_threads):
                while self.step < train.num_steps:
                    self._one_step()
            finished = True
        except Stopped:
            finished = False
        finally:
            self.producer.close()
            if self._whole:
                self.save()
        return self.summary(finished)

    def _one_step(self) -> None:
        step, train = self.step, self.config.train
        started = time.perf_counter()
        audit_every = self.config.speculation.audit_every
        audited = audit_every > 0 and (step + 1) % audit_every == 0
        if audited:
            self.auditor.before()
        batch = self.producer.next(step)
        waited_s = time.perf_counter() - started
        watch = Stopwatch()
        metrics: dict[str, Any] = {"step": step, "epoch": self.producer.order.epoch(max(0, batch.position - 1))}
        self._whole = False
        metrics |= self._train(batch, watch)
        trained_at = time.perf_counter()
        self.step, self._last = step + 1, batch
        self._publish()
        publishing_s = time.perf_counter() - trained_at
        metrics |= self._figures(batch)
        metrics["stages"] = self._stage_times(batch, watch, waited_s, publishing_s, time.perf_counter() - started)
        metrics["tokens_per_s"] = metrics["tokens"] / metrics["stages"]["total"]
        if step == 0 and self.first_eval is not None:
            metrics["eval_before"] = self.first_eval
        if audited and batch.rounds:
            self.watcher.progress("audit", 0, 1)
            requests = [request for collected in batch.rounds for request in collected.requests]
            completions = [completion for collected in batch.rounds for completion in collected.completions]
            metrics["audit"] = self.auditor.audit(requests, completions)
            self.audits.append(metrics["audit"])
        best = False
        if train.eval_every and (self.step % train.eval_every == 0 or self.step == train.num_steps):
            metrics["eval"] = self.last_eval = self._evaluate()
            best = self.best is None or self.last_eval["reward"] > self.best["reward"]
            if best:
                self.best = {"step": self.step, "reward": self.last_eval["reward"]}
        self._record(batch, metrics)
        self._whole = True
        if best or (train.checkpoint_every and self.step % train.checkpoint_every == 0):
            self.save(best)
        self.watcher.step(metrics)

    def _train(self, batch: Batch, watch: Stopwatch) -> dict[str, Any]:
        """One update; none where there is nothing to learn from."""
        rollouts = scored(batch.groups)
        if not rollouts:
            self.watcher.note(f"step {batch.step}: no group to learn from; the policy stays as it is")
            self.learner.version = batch.step + 1
            return {"loss": 0.0}
        tokens = TokenBatch.of(batch.groups)
        settings = self.config.learner
        moves_on = settings.num_minibatches > 1 or settings.num_iterations > 1  # within the batch
        self.watcher.progress("training", 0, 1)
        with watch.stage("logprob"):
            if moves_on or self.algorithm.needs_old:
                tokens.old_logprobs_T = self.learner.logprobs(rollouts)
            if self.algorithm.needs_reference:
                tokens.ref_logprobs_T = self.learner.reference_logprobs(rollouts)
        with watch.stage("training"):
            self.algorithm.prepare(tokens)
            report = self.learner.update(rollouts, tokens, self.algorithm.loss, self.algorithm.weights)
        if not all(parameter.isfinite().all() for parameter in self.learner.decoder.parameters()):
            raise ValueError(
                f"step {batch.step}: after the update some weights are not finite; training stops and the last "
                "checkpoint is kept. Lower learner.learning_rate, then go on with --resume"
            )
        assert tokens.advantages_T is not None
        means = _mean_by_sequence(tokens)
        for rollout, advantage in zip(rollouts, means.tolist(), strict=True):
            rollout.advantage = advantage
        return self._update_figures(tokens, report)

    def _update_figures(self, tokens: TokenBatch, report: UpdateReport) -> dict[str, Any]:
        chosen = tokens.mask_T
        learner = tokens.old_logprobs_T if tokens.old_logprobs_T is not None else report.logprobs_T
        gap = (tokens.engine_logprobs_T - learner)[chosen]
        mismatch = float(gap.abs().mean()) if len(gap) else 0.0
        # With generation overlapped the engine's weights were older: the gap is then policy lag, not a mistake.
        alarm = mismatch > self.config.train.mismatch_alarm and not self.overlaps and not self._truncates
        if alarm:
            self.watcher.note(
                f"ALARM: engine and learner disagree: mean |Δ logprob| = {mismatch:.2g} > train.mismatch_alarm = "
                f"{self.config.train.mismatch_alarm:g}"
            )
        return {
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "learning_rate": report.learning_rate,
            "entropy": report.entropy,
            **report.stats,
            "mismatch_mean": mismatch,
            # k3 of KL(engine || learner): mean of r - 1 - log r with r = learner / engine
            "mismatch_k3": float((torch.expm1(-gap) + gap).mean()) if len(gap) else 0.0,
            "mismatch_max": float(gap.abs().max()) if len(gap) else 0.0,
            "mismatch_alarm": alarm,
        }

    @property
    def _truncates(self) -> bool:
        """Whether the engine's logprobs are of a truncated distribution, which the learner does not see."""
        return self.config.sampling.params().truncates

    def _figures(self, batch: Batch) -> dict[str, Any]:
        """What the rollouts were like: of all that were generated for the step, trained on or not."""
        groups = sorted([*batch.groups, *batch.dropped], key=lambda group: group.index)
        rollouts = [r for group in groups for r in group.rollouts]
        rewards = np.array([r.reward for r in rollouts if r.failure is None])
        names = dict.fromkeys(name for r in rollouts for name in r.rewards)
        lengths = np.array([int(r.mask.sum()) for r in rollouts])
        lags = [batch.step - group.oldest_version for group in batch.groups]
        drafts = summarise([], batch.traces)
        return {
            "version": self.learner.version,
            "reward_mean": float(rewards.mean()) if len(rewards) else 0.0,
            "reward_std": float(rewards.std()) if len(rewards) else 0.0,
            "rewards": {
                name: float(np.mean([r.rewards[name] for r in rollouts if name in r.rewards])) for name in names
            },
            "length_mean": float(lengths.mean()) if len(lengths) else 0.0,
            "length_max": int(lengths.max(initial=0)),
            "truncated": float(np.mean([r.is_truncated for r in rollouts])) if rollouts else 0.0,
            "num_groups": len(batch.groups),
            "groups_filtered": len(batch.dropped),
            "groups_stale": batch.num_stale,
            "failures": sum(r.failure is not None for r in rollouts),
            "lag_mean": float(np.mean(lags)) if lags else 0.0,
            "lag_max": max(lags, default=0),
            "tokens": int(lengths.sum()),
            "num_samples": len(rollouts),
            **{
                key: drafts[key]
                for key in (
                    "mean_acceptance_length",
                    "draft_acceptance_rate",
                    "acceptance_rate_per_position",
                    "num_drafts",
                    "num_draft_tokens",
                    "num_accepted_tokens",
                )
            },
            "draft_s": drafts["draft_s"],
        }

    def _stage_times(
        self, batch: Batch, watch: Stopwatch, waited_s: float, publishing_s: float, total_s: float
    ) -> dict[str, float]:
        """Seconds by stage. `exposed` is what training waited for rollouts, all of their making where nothing
        overlaps; `total` is the step, validation and audits apart."""
        stages = {name: batch.watch.seconds[name] + watch.seconds[name] for name in STAGES}
        stages["sync"] += publishing_s
        if self.engine.drafter is not None:
            stages["draft"] = sum(trace.draft_s for trace in batch.traces)
        stages["generation"] -= stages["draft"]
        exposed = waited_s if self.overlaps else stages["generation"] + stages["draft"]
        seen = ("logprob", "training") if self.overlaps else (*HIDDEN, "draft", "logprob", "training")
        accounted = sum(stages[name] for name in seen) + (waited_s + publishing_s if self.overlaps else 0.0)
        return {**stages, "exposed": exposed, "other": max(0.0, total_s - accounted), "total": total_s}

    def _evaluate(self) -> dict[str, Any]:
        train = self.config.train

        def between(done: int, total: int) -> None:
            if self.producer.stopping and self._whole:  # before the first step; after one, its record needs the result
                raise Stopped
            self.watcher.progress("validation", done, total)

        with self.producer.paused():
            result = evaluate(
                self.collector,
                self.task.held_out,
                train.eval_samples,
                train.eval_temperature,
                train.seed,
                between,
            )
            self.engine.drain_trace()
            # A resumed run comes here without the prompts that validation left in memory: nor may this one know them.
            self.engine.paged.pool.forget_all()
        return result

    def _publish(self) -> None:
        dtype = self.engine.paged.decoder.dtype

        def cast() -> Iterator[tuple[str, Tensor]]:
            return ((name, tensor.to(dtype)) for name, tensor in self.learner.weights())

        if self.overlaps:  # the learner goes on while the engine reads: a copy
            copy = [(name, tensor.clone()) for name, tensor in cast()]
            self.producer.publish(Published(self.step, lambda: copy, checksum(copy)))
        else:
            self.producer.publish(Published(self.step, cast, checksum(cast())))

    # -- the folder ---------------------------------------------------------------------------------------------------

    def _record(self, batch: Batch, metrics: Mapping[str, Any]) -> None:
        groups = sorted([*batch.groups, *batch.dropped], key=lambda group: group.index)
        self.folder.append("rollouts", [self._rollout_record(batch.step, g, r) for g in groups for r in g.rollouts])
        self.folder.append("trace", [{"rl_step": batch.step, **asdict(trace)} for trace in batch.traces])
        self.folder.append("metrics", [metrics])
        for sink in self.sinks:
            sink.write(batch.step, metrics)
        for failure in [r.failure for g in groups for r in g.rollouts if r.failure is not None][:3]:
            self.watcher.note(failure)
        for key in ("tokens", "num_drafts", "num_accepted_tokens"):
            self.totals[key] += metrics[key]
        self.totals["wall_s"] += metrics["stages"]["total"]
        for name, seconds in metrics["stages"].items():
            self.stages[name] = self.stages.get(name, 0.0) + seconds

    def _rollout_record(self, step: int, group: Group, rollout: Rollout) -> dict[str, Any]:
        shares = pieces(self.collector.tokenizer, rollout.token_ids.tolist())
        return rollout_record(step, group, rollout) | {"pieces": shares}

    def save(self, best: bool = False) -> None:
        """A checkpoint of everything after the last whole step."""
        if self._saved == self.step:
            return
        self._saved = self.step
        self.watcher.progress("checkpoint", 0, 1)
        with self.producer.engine_lock:
            drafter = self.engine.drafter.state() if self.engine.drafter is not None else {}
            ready = self.producer.pending()
            position, surplus = self.producer.position, self.producer.surplus
        if self.overlaps:  # what is being generated now is generated again
            last = ready[-1] if ready else self._last
            position, surplus = (last.position, last.surplus) if last is not None else (position, surplus)
        buffer, labels = pack_groups([group for batch in ready for group in batch.groups])
        surplus_tensors, surplus_labels = pack_groups(surplus)
        self.checkpoints.save(
            self.step,
            {
                "learner": self.learner.state(),
                "drafter": {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in drafter.items()},
                "buffer": buffer,
                "surplus": surplus_tensors,
            },
            {
                "step": self.step,
                "position": position,
                "offsets": self.folder.offsets(),
                "buffer": {"labels": labels, "batches": [[b.step, len(b.groups), b.position] for b in ready]},
                "surplus": surplus_labels,
                "best": self.best,
                "first_eval": self.first_eval,
                "last_eval": self.last_eval,
                "audits": self.audits,
                "totals": self.totals,
                "stages": self.stages,
            },
            best=best,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        self.folder.truncate(state["offsets"])
        self.learner.restore(checkpoint.tensors("learner"))
        if self.engine.drafter is not None:
            self.engine.drafter.restore({name: t.numpy() for name, t in checkpoint.tensors("drafter").items()})
        groups = unpack_groups(checkpoint.tensors("buffer"), state["buffer"]["labels"])
        batches = []
        for step, count, position in state["buffer"]["batches"]:
            batches.append(Batch(step, groups[:count], Stopwatch(), position=position))
            groups = groups[count:]
        surplus = unpack_groups(checkpoint.tensors("surplus"), state["surplus"])
        if batches:
            batches[-1].surplus = surplus
        self._ready = batches
        self.step = self.learner.version = self._saved = state["step"]
        self.producer.position, self.producer.surplus = state["position"], surplus
        self.best, self.first_eval, self.last_eval = state["best"], state["first_eval"], state["last_eval"]
        self.audits, self.totals, self.stages = state["audits"], state["totals"], state["stages"]

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self.collector.rewarder.close()
        self.engine.close()
        self.folder.close()

    def summary(self, finished: bool) -> dict[str, Any]:
        total = self.stages.get("total", 0.0)
        drafts = self.totals["num_drafts"]
        summary = {
            "finished": finished,
            "steps": self.step,
            "reward_before": self.first_eval["reward"] if self.first_eval else None,
            "reward_after": self.last_eval["reward"] if self.last_eval else None,
            "best": self.best,
            **overall(self.audits),
            "mean_acceptance_length": 1 + self.totals["num_accepted_tokens"] / drafts if drafts else 1.0,
            "tokens": int(self.totals["tokens"]),
            "wall_s": self.totals["wall_s"],
            "stages": {
                name: {"seconds": seconds, "share": seconds / total if total else 0.0}
                for name, seconds in self.stages.items()
                if name != "total"
            },
        }
        self.folder.write_json("summary.json", summary)
        return summary


def _mean_by_sequence(tokens: TokenBatch) -> Tensor:
    assert tokens.advantages_T is not None
    sums = torch.zeros(tokens.num_sequences, dtype=torch.float64)
    counts = torch.zeros_like(sums)
    chosen = tokens.mask_T.double()
    sums.index_add_(0, tokens.sequence_T, tokens.advantages_T.double() * chosen)
    counts.index_add_(0, tokens.sequence_T, chosen)
    return sums / counts.clamp_min(1)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
