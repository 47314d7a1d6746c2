"""The loop: a batch of rollouts, an update, new weights, and again.

There is one, synchronous or not: `Producer.next` either generates now or hands over what was generated meanwhile. All
that a run is lies in its folder; a checkpoint and the folder's files cut back to it are the run as it was then, so
that a resumed run goes on as if nothing had happened.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.config import Config
from paceline.engine.interface import Engine, Learned
from paceline.model.text import Pieces
from paceline.model.weights import checksum
from paceline.rl import figures
from paceline.rl.adapt import Adapter
from paceline.rl.alarms import Alarms
from paceline.rl.algorithms import Algorithm
from paceline.rl.audit import Auditor, overall
from paceline.rl.batch import TokenBatch, scored
from paceline.rl.checkpoint import Checkpoint, Checkpoints
from paceline.rl.collect import Collector
from paceline.rl.evaluate import evaluate
from paceline.rl.folder import RunFolder
from paceline.rl.learner import Learner
from paceline.rl.logs import Sink
from paceline.rl.pending import pack_batches, unpack_batches
from paceline.rl.produce import Batch, Producer, ProducerState, Published, Stopped
from paceline.rl.records import pack_groups, rollout_record, unpack_groups
from paceline.rl.stopwatch import Stopwatch
from paceline.tasks.task import Task
from paceline.types import Group, Rollout


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
        engine: Engine,
        learner: Learner,
        algorithm: Algorithm,
        task: Task,
        collector: Collector,
        auditor: Auditor | None,
        folder: RunFolder,
        checkpoints: Checkpoints,
        sinks: Sequence[Sink],
        watcher: Watcher,
        adapter: Adapter | None = None,
        restarts: Callable[[], Mapping[str, int]] | None = None,
        recorded: float | None = None,
    ) -> None:
        """`restarts`: of the processes that a cluster runs for it, since it was last asked. `recorded`: the acceptance
        that the head's provenance file records."""
        self.config, self.engine, self.learner, self.algorithm = config, engine, learner, algorithm
        self.task, self.collector, self.auditor, self.folder = task, collector, auditor, folder
        self.pieces = Pieces(collector.tokenizer)
        self.checkpoints, self.sinks, self.watcher = checkpoints, sinks, watcher
        self.adapter, self.alarms, self.restarts = adapter, Alarms(config, recorded), restarts
        self._head: Published | None = None  # as it was last published
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
        self._saved = -1
        self._base = checksum(learner.weights())  # of what the run began with
        self._whole = True  # whether the learner is between two steps
        self._adapting: Adapter | None = None  # in the step under way
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
        shared = self.overlaps and self.config.cluster.kind == "none"
        return max(1, torch.get_num_threads() // 2) if shared else torch.get_num_threads()

    @property
    def sleeps(self) -> bool:
        """Whether the engine gives the KV's memory back while the learner trains: if asked to, or where the
        engine says so. What was captured of its steps must be captured again afterwards."""
        if self.overlaps or self.config.engine.sleep is not None:
            return bool(self.config.engine.sleep) and not self.overlaps
        return self.engine.crowds

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """To the last step, or until `producer.stop()`; returns the summary. Where rollouts or rewards fail, the last
        whole step is saved first; where the update itself fails, the last checkpoint stands."""
        train = self.config.train
        try:
            self._publish()
            if self.step == 0 and self.first_eval is None and train.eval_every:
                self.first_eval = self.last_eval = self._evaluate()
            self.producer.start(self.step)
            with threads(self.learner_threads), settled():
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
        learned_before = self.producer.learned
        audit_every = self.config.speculation.audit_every
        audited = self.auditor is not None and audit_every > 0 and (step + 1) % audit_every == 0
        batch = self.producer.next(step)
        waited_s = time.perf_counter() - started
        watch = Stopwatch()
        metrics: dict[str, Any] = {"step": step, "epoch": self.producer.order.epoch(max(0, batch.position - 1))}
        self._whole = False
        metrics |= self._watch_acceptance(batch)
        with asleep(self.engine) if self.sleeps else nullcontext():
            metrics |= self._train(batch, watch)
        trained_at = time.perf_counter()
        self.step = step + 1
        self._publish()
        publishing_s = time.perf_counter() - trained_at
        metrics |= {"version": self.learner.version, **figures.of_rollouts(batch)}
        metrics["stages"] = figures.stage_times(
            batch, watch, waited_s, publishing_s, time.perf_counter() - started, self.overlaps
        )
        metrics["tokens_per_s"] = metrics["tokens"] / metrics["stages"]["total"]
        metrics["memory_gib"] = figures.memory_gib(self.learner.decoder.device)
        if (sandbox := self.collector.rewarder.sandbox) is not None:
            metrics["sandbox"] = sandbox
        if self.restarts is not None:
            metrics["cluster"] = figures.of_engines(batch, self.config.cluster.num_engines) | dict(self.restarts())
        if step == 0 and self.first_eval is not None:
            metrics["eval_before"] = self.first_eval
        best = False
        try:
            if audited:
                self._audit(batch, learned_before, metrics)
            if train.eval_every and (self.step % train.eval_every == 0 or self.step == train.num_steps):
                best = self._validate(metrics)
        finally:  # whatever happens there, the step itself is not lost
            self._record(batch, metrics)
            self._whole = True
        if best or (train.checkpoint_every and self.step % train.checkpoint_every == 0):
            self.save(best)
        self.watcher.step(metrics)

    def _audit(self, batch: Batch, learned_before: Learned, metrics: dict[str, Any]) -> None:
        self.watcher.progress("audit", 0, 1)
        assert self.auditor is not None and not self.overlaps, "audits are for runs that do not overlap"
        audit = self.auditor.audit(batch.rounds, learned_before)
        if audit is not None:
            metrics["audit"] = audit
            self.audits.append(audit)

    def _validate(self, metrics: dict[str, Any]) -> bool:
        """Whether the policy is better than ever before."""
        metrics["eval"] = self.last_eval = self._evaluate()
        reward = self.last_eval["reward"]
        if reward is None or (self.best is not None and reward <= self.best["reward"]):
            return False
        self.best = {"step": self.step, "reward": reward}
        return True

    def _train(self, batch: Batch, watch: Stopwatch) -> dict[str, Any]:
        """One update; none where there is nothing to learn from."""
        rollouts = scored(batch.groups)
        if not rollouts:
            return self._learn_nothing(batch)
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
            if not tokens.mask_T.any():
                return self._learn_nothing(batch)
            adapter = self._adapting
            if adapter is not None:
                adapter.begin(rollouts, tokens.group_S.tolist(), watch)
            report = self.learner.update(rollouts, tokens, self.algorithm.loss, self.algorithm.weights, adapter)
        for rollout, advantage in zip(rollouts, figures.mean_advantages(tokens), strict=True):
            rollout.advantage = advantage
        result = figures.of_update(tokens, report)
        if adapter is not None and (adapted := adapter.report()):
            result["adaptation"] = adapted
        return result | {"mismatch_alarm": self._check_mismatch(result["mismatch_mean"])}

    def _watch_acceptance(self, batch: Batch) -> dict[str, bool]:
        """The alarms of a batch; and whether the head is to learn from it."""
        length, version = figures.acceptance(batch)
        wanted = self.adapter is not None and self.adapter.wants(batch.step, length)
        self._adapting = self.adapter if wanted else None
        flags, said = self.alarms.check(length, version)
        below, told = self.alarms.check_record(figures.first_positions(batch))
        for text in [*said, *told]:
            self.watcher.note(text)
        return flags | below

    def _learn_nothing(self, batch: Batch) -> dict[str, Any]:
        self.watcher.note(f"step {batch.step}: nothing to learn from; the policy stays as it is")
        self.learner.version = batch.step + 1
        return {"loss": 0.0}

    def _check_mismatch(self, mismatch: float) -> bool:
        """Whether engine and learner disagree more than rounding explains. Where generation overlaps, the engine's
        weights were older and the gap is policy lag; where it truncates, the two speak of different distributions."""
        limit = self.config.train.mismatch_alarm
        alarm = mismatch > limit and not self.overlaps and not self.config.sampling.params().truncates
        if alarm:
            self.watcher.note(
                f"ALARM: engine and learner differ: mean |Δ logprob| {mismatch:.2g} > train.mismatch_alarm = {limit:g}"
            )
        return alarm

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
                self.step,
            )
            self.engine.drain_trace()
        if result["failures"]:
            self.watcher.note(
                f"validation: {result['failures']} samples could not be scored; the first: {result['first_failure']}"
            )
        return result

    def _publish(self) -> None:
        self.producer.publish(self._published(self.step, self.learner.weights, self._published_head()))

    def _published_head(self) -> Published | None:
        """The newest, in every version of the policy: an engine that leaves versions out misses no head."""
        if self.adapter is not None and (self._head is None or self._head.version != self.adapter.version):
            self._head = self._published(self.adapter.version, self.adapter.weights)
        return self._head

    def _published(
        self, version: int, weights: Callable[[], Iterable[tuple[str, Tensor]]], head: Published | None = None
    ) -> Published:
        """In the engine's precision."""
        dtype = self.engine.dtype

        def cast() -> Iterator[tuple[str, Tensor]]:
            return ((name, tensor.to(dtype) if tensor.is_floating_point() else tensor) for name, tensor in weights())

        if not self.overlaps:
            return Published(version, cast, checksum(cast()), head)
        # A copy: the learner goes on while the engine reads.
        return _copied(version, {name: tensor.clone() for name, tensor in cast()}, head)

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
        return rollout_record(step, group, rollout) | {"pieces": self.pieces(rollout.token_ids.tolist())}

    def save(self, best: bool = False) -> None:
        """A checkpoint of everything after the last whole step."""
        if self._saved == self.step:
            return
        self._saved = self.step
        self.watcher.progress("checkpoint", 0, 1)
        producer = self.producer.state()
        buffer, batches = pack_batches(producer.batches)
        surplus, surplus_labels = pack_groups(producer.surplus)
        heads = {each.head.version: each.head for each in producer.published if each.head is not None}
        self.checkpoints.save(
            self.step,
            {
                "learner": self.learner.save,
                **{name: _tensors(state) for name, state in producer.learned.items()},
                "buffer": buffer,
                "surplus": surplus,
                **{f"weights-{each.version}": dict(each.weights()) for each in producer.published},
                **{f"head-{version}": dict(head.weights()) for version, head in heads.items()},
                **({"head": self.adapter.state()} if self.adapter is not None else {}),
            },
            {
                "step": self.step,
                "base": self._base,
                "position": producer.position,
                "offsets": self.folder.offsets(),
                "buffer": batches,
                "surplus": surplus_labels,
                "published": [[each.version, each.head and each.head.version] for each in producer.published],
                "head": self.adapter.labels() if self.adapter is not None else None,
                "alarms": self.alarms.state(),
                "learned": list(producer.learned),
                "method": self.config.speculation.method,
                "policy": self.config.speculation.policy,
                "best": self.best,
                "first_eval": self.first_eval,
                "last_eval": self.last_eval,
                "audits": self.audits,
                "totals": self.totals,
                "stages": self.stages,
            },
            best=best,
        )
        self.folder.record_checkpoint(self.step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """What can be refused is refused before anything in the folder is touched."""
        state = checkpoint.state
        if state["base"] != self._base:
            raise ValueError(
                f"model.name = {self.config.model.name!r}: its weights are not those that this run began with; "
                "bring them back, or start a new run"
            )
        self.learner.load(checkpoint.path / "learner")
        if self.adapter is not None and state["head"] is not None:
            self.adapter.restore(checkpoint.tensors("head"), state["head"])
        self.alarms.restore(state["alarms"])
        method = self.config.speculation.method
        if state["method"] != method:
            self.watcher.note(f'speculation.method = "{method}": the new drafter begins without what the old one knew')
        useless = {"drafter", "policy"} if state["method"] != method else set()
        if state["policy"] != self.config.speculation.policy:
            useless.add("policy")
        # Where there are several engines, the further ones' parts bear a number: drafter, drafter-1, …
        parts = [part for part in state["learned"] if part.partition("-")[0] not in useless]
        learned, mine = {part: _arrays(checkpoint.tensors(part)) for part in parts}, self.engine.learned()
        strange = [part for part in learned if part in mine and learned[part].keys() != mine[part].keys()]
        if any(part.partition("-")[0] == "drafter" for part in strange):
            self.watcher.note("the drafter is of another kind on this device: it begins without what the old one knew")
            learned = {part: arrays for part, arrays in learned.items() if part.partition("-")[0] != "drafter"}
        self.engine.teach(learned)
        self.producer.restore(
            ProducerState(
                unpack_batches(checkpoint.tensors("buffer"), state["buffer"]),
                state["position"],
                unpack_groups(checkpoint.tensors("surplus"), state["surplus"]),
                self.engine.learned(),
                self._older_versions(checkpoint),
            )
        )
        self.step = self.learner.version = self._saved = state["step"]
        self.best, self.first_eval, self.last_eval = state["best"], state["first_eval"], state["last_eval"]
        self.audits, self.totals, self.stages = state["audits"], state["totals"], state["stages"]
        self.folder.truncate(state["offsets"])

    def _older_versions(self, checkpoint: Checkpoint) -> list[Published]:
        """Of the policy, as they were published: batches that were not generated yet begin with them."""
        found = []
        for version, head_version in checkpoint.state["published"]:
            head = None
            if self.adapter is not None and head_version is not None:
                head = _copied(head_version, checkpoint.tensors(f"head-{head_version}"))
            found.append(_copied(version, checkpoint.tensors(f"weights-{version}"), head))
        return found

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        self.collector.rewarder.close()
        self.engine.close()
        self.learner.close()
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


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def asleep(engine: Engine) -> Iterator[None]:
    """The KV's memory is the learner's meanwhile. Where training fails the run ends, and nobody is woken."""
    engine.sleep()
    yield
    engine.wake()


def _copied(version: int, weights: Mapping[str, Tensor], head: Published | None = None) -> Published:
    return Published(version, weights.items, checksum(weights.items()), head)


def _tensors(state: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in state.items()}


def _arrays(state: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in state.items()}


@contextmanager
def settled() -> Iterator[None]:
    """What is there by now stays: the garbage collector does not look through it again, which takes a fifth of a second
    of every few rollouts."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
