"""The trainer: one loop over steps. A step collects a batch, trains on it, publishes the new weights, evaluates,
records, and saves a checkpoint.

The same loop is synchronous or asynchronous: `Producer.get` generates the batch of a step, or returns one that was
generated during earlier steps.

There is one version. `learner.version` counts the updates of the policy; a step with nothing to train on counts as one.
It is also the number of the next step (`Trainer.step`) and the version of the newest published weights. At step n the
learner has version n, trains on the batch of step n and publishes version n + 1.

The run folder has the whole state of a run. A resumed run loads a checkpoint, truncates the folder's streams to it, and
continues bit for bit.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from paceline.config import ARCHITECTURES, Config
from paceline.engine.interface import Engine, SpeculationState
from paceline.model.device import use_device
from paceline.model.weights import checksum
from paceline.rl.alarms import (
    AdvantageAlarm,
    Alarms,
    FirstPositions,
    RewardFailureAlarm,
    check_skipped,
    skipped_message,
)
from paceline.rl.algorithms import Algorithm
from paceline.rl.audit import Auditor, check_audit
from paceline.rl.audit_schedule import AuditSchedule
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.batch_producer import BatchProducer
from paceline.rl.callback import ProgressCallback
from paceline.rl.checkpoint import Checkpoint, Checkpoints
from paceline.rl.collect import Collector
from paceline.rl.continuous_producer import ContinuousProducer
from paceline.rl.depth import DepthCounts
from paceline.rl.evaluator import Evaluator
from paceline.rl.exports import Exports
from paceline.rl.folder import RunFolder
from paceline.rl.learner import Learner
from paceline.rl.logs import Sink
from paceline.rl.metrics import (
    acceptance_length,
    engine_metrics,
    has_advantages,
    mean_advantages,
    memory_gib,
    rollout_metrics,
    stage_times,
    task_metrics,
    update_metrics,
)
from paceline.rl.observer import HeadTrainer
from paceline.rl.order import MixedOrder
from paceline.rl.produce import Batch, Producer, Stopped
from paceline.rl.publisher import Publisher
from paceline.rl.recorder import Recorder
from paceline.rl.stage_timer import StageTimer
from paceline.rl.trainer_state import checkpoint_content, load_checkpoint
from paceline.tasks.task import Task


def producer_class(config: Config) -> type[Producer]:
    return ContinuousProducer if config.train.max_staleness and config.train.inflight != "drain" else BatchProducer


class Trainer:
    def __init__(
        self,
        config: Config,
        *,
        engine: Engine,
        learner: Learner,
        algorithm: Algorithm,
        task: Task,
        collector: Collector,
        auditor: Auditor | None,
        folder: RunFolder,
        checkpoints: Checkpoints,
        exports: Exports | None,
        sinks: Sequence[Sink],
        callback: ProgressCallback,
        head_trainer: HeadTrainer | None = None,
        restarts: Callable[[], Mapping[str, int]] | None = None,
        recorded_acceptance: float | None = None,
        planned_sleep: bool | None = None,
    ) -> None:
        """`restarts`: counts the restarts of a cluster's processes since the last call. `recorded_acceptance`: from the
        head's provenance file. `planned_sleep`: whether the engine sleeps by the memory plan."""
        self.config, self.engine, self.learner, self.algorithm = config, engine, learner, algorithm
        self.task, self.collector, self.auditor, self.folder = task, collector, auditor, folder
        self.checkpoints, self.exports, self.callback = checkpoints, exports, callback
        self.head_trainer = head_trainer
        self.planned_sleep = planned_sleep
        self.audit_schedule = AuditSchedule(config.speculation.audit_every)
        self.restarts, self.alarms = restarts, Alarms(config, recorded_acceptance)
        self.advantage_alarm = AdvantageAlarm(config)
        self.reward_failure_alarms = [
            RewardFailureAlarm(settings.reward.max_failures, settings.reward_key, settings.label)
            for settings in config.tasks
        ]
        train = config.train
        self.overlaps = train.max_staleness > 0  # generation runs while the learner trains
        self.producer: Producer = producer_class(config)(
            collector,
            task,
            algorithm,
            config,
            on_progress=lambda done, total: callback.progress("generation", done, total),
            in_thread=self._set_up_thread,
        )
        self.publisher = Publisher(self.producer, engine, learner, head_trainer, copies=self.overlaps)
        self.evaluator = Evaluator(train, collector, task.held_out, config.task_weights, self.producer, callback)
        self.recorder = Recorder(folder, sinks, callback, collector.tokenizer, train.log_rollouts)
        self.base = checksum(learner.weights())  # of the policy at the start of the run
        self._saved_step = self._exported_step = -1
        self._between_steps = True  # learner, producer and records are at the same step, so a checkpoint may be saved

    @property
    def step(self) -> int:
        """The number of the next step, which is the policy version."""
        return self.learner.version

    # -- resources ----------------------------------------------------------------------------------------------------

    def default_threads(self) -> int:
        """All cores, or half of them if generation and training overlap in this process."""
        shared = self.overlaps and self.config.cluster.kind == "none"
        return max(1, torch.get_num_threads() // 2) if shared else torch.get_num_threads()

    def _set_up_thread(self) -> None:
        """In the thread that generates."""
        torch.set_num_threads(self.config.engine.threads or self.default_threads())
        use_device(self.learner.decoder.device)

    @property
    def sleeps(self) -> bool:
        """Whether the engine frees its KV memory while the learner trains: by engine.sleep, by the memory plan, or if
        the engine wants it. CUDA graphs must be captured again afterwards."""
        if self.overlaps:
            return False
        for decided in (self.config.engine.sleep, self.planned_sleep):
            if decided is not None:
                return decided
        return self.engine.wants_sleep

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """Train to the last step, or until `producer.stop()`; returns the summary. If rollouts or rewards fail, the
        last finished step is saved first. If the update fails, the last checkpoint stays the newest."""
        train = self.config.train
        try:
            self.publisher.publish()
            self._export_if_due()  # it may have been killed after the checkpoint
            if self.step == 0 and self.evaluator.first_eval is None and train.eval_every:
                self.evaluator.evaluate_first()
            self.producer.start(self.step)
            with torch_threads(self.config.learner.threads or self.default_threads()), gc_frozen():
                while self.step < train.num_steps:
                    self._run_step()
            finished = True
        except Stopped:
            finished = False
        finally:
            self.producer.close()
            if self._between_steps:
                self.save()
        self._export_if_due()
        return self.recorder.write_summary(self.evaluator.state_dict(), self.step, finished)

    def _run_step(self) -> None:
        step, train = self.step, self.config.train
        started = time.perf_counter()
        state_before = self.producer.speculation_state
        batch = self.producer.get(step)
        waited_s = time.perf_counter() - started
        timer = StageTimer()
        metrics: dict[str, Any] = {"step": step, "epoch": self.producer.order.epoch(max(0, batch.position - 1))}
        self._between_steps = False
        metrics |= self._train(batch, timer)
        self.producer.release(step)
        trained_at = time.perf_counter()
        metrics["weights_checksum"] = self.publisher.publish()
        publishing_s = time.perf_counter() - trained_at
        metrics |= {"version": self.step, **rollout_metrics(batch)}
        if isinstance(order := self.producer.order, MixedOrder):
            metrics["tasks"] = task_metrics(batch, order.epochs(max(0, batch.position - 1)))
        total_s = time.perf_counter() - started
        metrics["stages"] = stage_times(batch, timer, waited_s, publishing_s, total_s, self.overlaps)
        metrics |= self._system_metrics(batch, metrics)
        if step == 0 and self.evaluator.first_eval is not None:
            metrics["eval_before"] = self.evaluator.first_eval
        is_best = False
        try:
            generation_s = metrics["stages"]["generation"] + metrics["stages"]["draft"]
            self.audit_schedule.observe_step(total_s)
            if self.auditor is not None and self.audit_schedule.is_due(step, generation_s):
                metrics |= self._audit(batch, state_before, generation_s)
            if train.eval_every and (self.step % train.eval_every == 0 or self.step == train.num_steps):
                is_best = self.evaluator.evaluate(self.step)
                metrics["eval"] = self.evaluator.last_eval
                if self.overlaps:
                    metrics |= self._check_eval_mismatch(metrics)
        finally:  # record the step even if the audit or the evaluation fails
            self.recorder.record(batch, metrics)
            self._between_steps = True
        check_audit(step, metrics.get("audit"))
        if is_best or (train.checkpoint_every and self.step % train.checkpoint_every == 0):
            self.save(is_best)
        self._export_if_due()
        self.callback.step(metrics)
        if metrics.get("num_skipped_optimizer_steps"):
            check_skipped(step, self.learner.num_skipped_in_a_row, self.config.learner.max_skipped)

    # -- training -----------------------------------------------------------------------------------------------------

    def _train(self, batch: Batch, timer: StageTimer) -> dict[str, Any]:
        """Make the next policy version; returns metrics."""
        length, version = acceptance_length(batch)
        trains_head = self.head_trainer is not None and self.head_trainer.should_train(batch.step, length)
        metrics: dict[str, Any] = self._check_acceptance(batch, length, version) | self._check_rewards(batch)
        with sleep_mode(self.engine) if self.sleeps else nullcontext():
            return metrics | self._update(batch, timer, self.head_trainer if trains_head else None)

    def _update(self, batch: Batch, timer: StageTimer, head_trainer: HeadTrainer | None) -> dict[str, Any]:
        rollouts = scored(batch.groups)
        if not rollouts:
            return self._skip_update(batch)
        tokens = TokenBatch.of(batch.groups)
        self.callback.progress("training", 0, 1)
        with timer.stage("logprob"):
            if self.algorithm.needs_old:
                tokens.old_logprobs_T = self.learner.logprobs(rollouts)
            if self.algorithm.needs_reference:
                tokens.ref_logprobs_T = self.learner.reference_logprobs(rollouts)
        with timer.stage("training"):
            self.algorithm.prepare(tokens)
            if not tokens.mask_T.any():
                return self._skip_update(batch)
            if head_trainer is not None:
                head_trainer.begin_update(rollouts, tokens.group_S.tolist(), timer)
            report = self.learner.update(rollouts, tokens, self.algorithm.loss, self.algorithm.weights, head_trainer)
        if report.skipped:
            in_a_row, limit = self.learner.num_skipped_in_a_row, self.config.learner.max_skipped
            self.callback.note(skipped_message(batch.step, report, in_a_row, limit))
        for rollout, advantage in zip(rollouts, mean_advantages(tokens), strict=True):
            rollout.advantage = advantage
        keeps_kv = self.overlaps and self.config.train.inflight == "keep"
        metrics: dict[str, Any] = update_metrics(tokens, report, batch.step, keeps_kv)
        metrics |= self._check_advantages(batch, has_advantages(tokens))
        if head_trainer is not None and (head_metrics := head_trainer.metrics()):
            metrics["head_training"] = head_metrics
        return metrics | {"mismatch_alarm": self._check_mismatch(metrics["mismatch_mean"])}

    def _skip_update(self, batch: Batch) -> dict[str, Any]:
        self.callback.note(f"step {batch.step + 1}: nothing to train on; the policy does not change")
        self.learner.version += 1  # the next version has the same weights
        # Without groups, dynamic sampling has dropped all of them because their rewards are equal.
        return {"loss": 0.0} | self._check_advantages(batch, bool(batch.groups))

    def _check_advantages(self, batch: Batch, has_any: bool) -> dict[str, bool]:
        flag, messages = (False, []) if has_any else self.advantage_alarm.check(batch.step, batch.all_groups)
        for message in messages:
            self.callback.note(message)
        return {"zero_advantages_alarm": flag}

    def _check_rewards(self, batch: Batch) -> dict[str, bool]:
        found = [alarm.check(batch.step, batch.all_groups) for alarm in self.reward_failure_alarms]
        for message in (message for _, messages in found for message in messages):
            self.callback.note(message)
        return {"reward_failure_alarm": any(flag for flag, _ in found)}

    def _check_acceptance(self, batch: Batch, length: float | None, version: int | None) -> dict[str, Any]:
        flags, messages = self.alarms.check(length, version)
        rollouts = [rollout for group in batch.all_groups for rollout in group.rollouts]
        first = FirstPositions.of(rollouts)
        record_flag, record_messages = self.alarms.check_record(first)
        depth_flag, depth_messages = self.alarms.check_depth(DepthCounts.of(rollouts, ARCHITECTURES))
        for message in [*messages, *record_messages, *depth_messages]:
            self.callback.note(message)
        return {**flags, **record_flag, **depth_flag, "acceptance_length_per_depth": DepthCounts.of(rollouts).lengths()}

    def _check_eval_mismatch(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """In an asynchronous run, which has few other tokens of the learner's version."""
        num_samples = self.config.train.groups_per_step * self.config.algorithm.num_generations
        mismatch = self.evaluator.mismatch(self.learner, num_samples)
        alarm = self._check_mismatch(mismatch)
        return {"eval_mismatch_mean": mismatch, "mismatch_alarm": alarm or metrics.get("mismatch_alarm", False)}

    def _check_mismatch(self, mismatch: float | None) -> bool:
        """Whether the logprobs of engine and learner differ by more than rounding. Not checked without tokens of the
        learner's version, nor if sampling truncates, because the distributions differ."""
        limit = self.config.train.mismatch_alarm
        alarm = mismatch is not None and mismatch > limit and not self.config.sampling.params().truncates
        if alarm:
            self.callback.note(
                f"ALARM: engine and learner differ: mean |Δ logprob| {mismatch:.2g} > train.mismatch_alarm = {limit:g}"
            )
        return alarm

    # -- audits and system metrics ------------------------------------------------------------------------------------

    def _audit(self, batch: Batch, state_before: SpeculationState, generation_s: float) -> dict[str, Any]:
        self.callback.progress("audit", 0, 1)
        assert self.auditor is not None and not self.overlaps, "audits need generation without overlap"
        started = time.perf_counter()
        audit = self.auditor.audit(batch.rounds, state_before)
        self.audit_schedule.observe_audit(time.perf_counter() - started, generation_s)
        if audit is None:
            return {}
        self.recorder.audits.append(audit)
        return {"audit": audit}

    def _system_metrics(self, batch: Batch, metrics: Mapping[str, Any]) -> dict[str, Any]:
        stages = metrics["stages"]
        generation_s = stages["generation"] + stages["draft"]
        num_generated = sum(trace.num_emitted for trace in batch.traces)
        result: dict[str, Any] = {
            "tokens_per_s": metrics["num_tokens"] / stages["total"],
            # None if all groups are the surplus of earlier steps.
            "generation_tokens_per_s": num_generated / generation_s if num_generated and generation_s else None,
            "memory_gib": memory_gib(self.learner.decoder.device),
        }
        if (sandbox := self.collector.rewarder.sandbox) is not None:
            result["sandbox"] = sandbox
        if self.restarts is not None:
            result["cluster"] = engine_metrics(batch, self.config.cluster.num_engines) | dict(self.restarts())
        return result

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save(self, best: bool = False) -> None:
        """Save a checkpoint after the last finished step, unless it is saved already."""
        if self._saved_step == self.step:
            return
        self._saved_step = self.step
        self.callback.progress("checkpoint", 0, 1)
        parts, state = checkpoint_content(self)
        self.checkpoints.save(self.step, parts, state, best=best)
        self.folder.record_checkpoint(self.step)

    def load(self, checkpoint: Checkpoint) -> None:
        load_checkpoint(self, checkpoint)
        self._saved_step = self.step
        if self.exports is not None and self.exports.place(self.step).exists():
            self._exported_step = self.step

    def _export_if_due(self) -> None:
        """Write the policy to the run's exports, every train.export_every steps and after the last one. If the disk has
        no room for it and for the next checkpoint, training goes on without."""
        train = self.config.train
        if self.exports is None or self._exported_step == self.step or not self.step:
            return
        if self.step % train.export_every and self.step < train.num_steps:
            return
        self._exported_step = self.step
        try:
            self.exports.save(
                self.step,
                self.learner.weights(),
                self.checkpoints.num_bytes(),
                lambda done, total: self.callback.progress("export", done >> 20, total >> 20),
            )
        except ConnectionError:  # a rank is gone
            raise
        except OSError as error:
            self.callback.note(
                f"ALARM: step {self.step} is not exported, training goes on: {error.strerror or error}. `paceline "
                f"export {self.folder.path} DIR` exports the last checkpoint"
            )

    def close(self) -> None:
        self.recorder.close()
        self.collector.close()
        self.task.close()
        self.collector.rewarder.close()
        self.engine.close()
        self.learner.close()
        self.folder.close()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def sleep_mode(engine: Engine) -> Iterator[None]:
    """Free the engine's KV memory. If training fails the run ends, so the engine does not wake up."""
    engine.sleep()
    yield
    engine.wake()


@contextmanager
def gc_frozen() -> Iterator[None]:
    """Exclude the existing objects from garbage collection, which otherwise takes 0.2 s every few rollouts."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
