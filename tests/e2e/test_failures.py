"""Failures are named and cost as little as possible: a sample and not the step, a step and not the run."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Bytes
from tiny_run import SETTINGS, lines, make, outcome, policy, settings
from typer.testing import CliRunner

from paceline.build.config import load_config
from paceline.build.task import build_rewarder
from paceline.cli import app
from paceline.report.html import write_report
from paceline.rl import checkpoint as checkpoint_module
from paceline.rl.checkpoint import Checkpoints
from paceline.rl.collect import Collector
from paceline.rl.shards import Shards
from paceline.rl.trainer import Trainer
from paceline.tasks.env_agent import EnvAgent
from paceline.tasks.rewards import Score
from paceline.tasks.task import Problem, Turn
from paceline.types import Completion, Provenance, Request

STEPS, SIX = "train.num_steps=3", "train.num_steps=6"


def finish(trainer: Trainer) -> dict[str, Any]:
    try:
        return trainer.run()
    finally:
        trainer.close()


# ---- rewards ----


EXCLUDE = "reward.on_failure=exclude"


def on_some(function: str) -> str:
    """Acts on completions whose first letter has a code that is a multiple of 3."""
    return f'reward.functions=["reward_functions:{function}_on_some"]'


def is_one_of_some(record: dict[str, Any]) -> bool:
    return ord(record["completion"][0]) % 3 == 0


@pytest.mark.parametrize(
    ("function", "settings", "reason"),
    [
        ("raises", (), "raised ValueError: not this one"),
        ("nan", (), "returned nan"),
        ("dies", (EXCLUDE,), "killed its process (signal 9)"),
        ("hangs", (EXCLUDE,), "did not return within 0.2 s"),
        ("hangs", (EXCLUDE, "reward.call_per=sample"), "did not return within 0.2 s"),
    ],
)
def test_a_failing_reward_costs_only_its_samples(
    tmp_path: Path, function: str, settings: tuple[str, ...], reason: str
) -> None:
    trainer = make(
        tmp_path, "run", STEPS, on_some(function), "reward.timeout_s=0.2", *settings, "reward.max_failures=1"
    )
    summary = finish(trainer)
    assert summary["finished"]
    records = lines(tmp_path / "run", "rollouts")
    failed = list(filter(is_one_of_some, records))
    assert 0 < len(failed) < len(records), "the test needs failures and successes"
    for record in records:
        if record in failed:
            name = f"step {record['step'] + 1}, {record['problem']}, sample {record['sample']}: reward "
            assert record["failure"].startswith(name) and reason in record["failure"]
            assert record["reward"] is None and record["advantage"] == 0
        else:
            assert record["failure"] is None and record["reward"] is not None
    assert any(record["advantage"] != 0 for record in records), "the other samples train"
    assert trainer.callback.notes[0] == failed[0]["failure"]
    metrics = lines(tmp_path / "run", "metrics")
    assert sum(m["num_failures"] for m in metrics) == len(failed)
    assert all(np.isfinite(m["loss"]) and np.isfinite(m["reward_mean"]) for m in metrics)


@pytest.mark.parametrize("call_per", ["group", "sample"])
@pytest.mark.parametrize(
    ("function", "reason"), [("dies", "killed its process (signal 9)"), ("hangs", "did not return within 0.2 s")]
)
def test_an_answer_that_makes_its_verifier_fail_scores_0(
    tmp_path: Path, function: str, reason: str, call_per: str
) -> None:
    trainer = make(tmp_path, "run", STEPS, on_some(function), "reward.timeout_s=0.2", f"reward.call_per={call_per}")
    assert finish(trainer)["finished"]
    records = lines(tmp_path / "run", "rollouts")
    failed = list(filter(is_one_of_some, records))
    assert 0 < len(failed) < len(records), "the test needs failures and successes"
    for record in records:
        if record in failed:
            name = f"step {record['step'] + 1}, {record['problem']}, sample {record['sample']}: reward "
            assert record["failure"].startswith(name) and record["failure"].endswith(f"{reason}: scored 0")
            assert record["reward"] == 0
        else:
            assert record["failure"] is None and record["reward"] > 0
    assert any(record["advantage"] < 0 for record in failed), "it is trained on"
    metrics = lines(tmp_path / "run", "metrics")
    assert sum(m["num_zero_scored"] for m in metrics) == len(failed) and not any(m["num_failures"] for m in metrics)
    for m in metrics:
        of_step = [r for r in records if r["step"] == m["step"]]
        assert m["reward_mean"] == pytest.approx(np.mean([r["reward"] for r in of_step]))
        assert m["reward_failure_alarm"] == (m["num_zero_scored"] > 0.5 * len(of_step))
    notes = trainer.callback.notes
    assert failed[0]["failure"] in notes
    page = write_report(tmp_path / "run").read_text()
    assert f"{len(failed)} samples scored 0 because a reward failed (reward.on_failure), at step" in page
    assert reason in page


def test_a_reward_that_sleeps_changes_nothing(tmp_path: Path) -> None:
    policies = []
    for name, function in (("slow", "sleeps_on_some"), ("fast", "num_letters")):
        trainer = make(tmp_path, name, STEPS, f'reward.functions=["reward_functions:{function}"]')
        assert finish(trainer)["finished"]
        policies.append(policy(trainer))
    slow, fast = (lines(tmp_path / name, "rollouts") for name in ("slow", "fast"))
    assert any(map(is_one_of_some, slow)) and not any(r["failure"] for r in slow)
    assert [(r["token_ids"], r["reward"]) for r in slow] == [(r["token_ids"], r["reward"]) for r in fast]
    assert all(torch.equal(policies[0][name], tensor) for name, tensor in policies[1].items())


def test_on_failure_stop_ends_the_run_and_keeps_its_steps(tmp_path: Path) -> None:
    settings = (on_some("hangs"), "reward.timeout_s=0.2")
    finish(make(tmp_path, "zero", STEPS, *settings))
    failing = [r["step"] for r in lines(tmp_path / "zero", "rollouts") if is_one_of_some(r)]
    trainer = make(tmp_path, "run", STEPS, *settings, "reward.on_failure=stop")
    with pytest.raises(ValueError, match=rf'step {failing[0] + 1}, .* within 0.2 s; reward\.on_failure = "stop" ends'):
        finish(trainer)
    assert [m["step"] for m in lines(tmp_path / "run", "metrics")] == list(range(failing[0]))


def test_a_verifier_that_hangs_on_every_answer_ends_the_run(tmp_path: Path) -> None:
    """Although it could give 0 to all samples: the answers are hardly to blame."""
    hangs = ('reward.functions=["reward_functions:never"]', "reward.timeout_s=0.1")
    trainer = make(tmp_path, "run", STEPS, *hangs)
    with pytest.raises(ValueError, match=r"step 1: rewards failed for all 8 samples.*scored 0.*--resume RUN"):
        finish(trainer)
    assert lines(tmp_path / "run", "metrics") == []
    trainer = make(tmp_path, "on", "train.num_steps=1", *hangs, "reward.max_failures=1")
    assert finish(trainer)["finished"]
    assert [m["num_zero_scored"] for m in lines(tmp_path / "on", "metrics")] == [8]


def test_too_many_failures_end_the_run_and_keep_its_steps(tmp_path: Path) -> None:
    """From step 3 on, every reward fails. The two steps before are kept. After the reward is repaired the run continues
    bit for bit."""
    settings(tmp_path)
    trainer = make(tmp_path, "whole", "train.num_steps=4")
    finish(trainer)
    expected = policy(trainer)

    trainer = make(tmp_path, "run", "train.num_steps=4")
    score, calls = trainer.collector.rewarder.score, []

    def failing(samples: Any) -> Any:
        calls.append(len(samples))
        if len(calls) <= 4:
            return score(samples)
        return [Score(float("nan"), {}, f"{sample.name}: no reward") for sample in samples]

    trainer.collector.rewarder.score = failing
    with pytest.raises(ValueError, match=r"step 3: 8 of 8 samples .* reward.max_failures = 0.5 .*step 3, .*, sample 0"):
        finish(trainer)
    assert [m["step"] for m in lines(tmp_path / "run", "metrics")] == [0, 1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]

    trainer = make(tmp_path, "run", "train.num_steps=4", resume=True)
    assert finish(trainer)["finished"]
    assert all(torch.equal(policy(trainer)[name], tensor) for name, tensor in expected.items())
    assert [m["step"] for m in lines(tmp_path / "run", "metrics")] == [0, 1, 2, 3]


# ---- programs ----


class Scripted:
    """An engine that emits given texts, by sample."""

    def __init__(self, texts: list[str]) -> None:
        self.texts, self.waiting = texts, []

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request_id: int) -> None:
        self.waiting = [r for r in self.waiting if r.request_id != request_id]

    def step(self) -> list[Completion]:
        if not self.waiting:
            return []
        request = self.waiting.pop(0)
        ids = np.array(list(self.texts[(request.request_id - 1) % len(self.texts)].encode()), np.int32)
        zeros = np.zeros(len(ids))
        provenance = np.full(len(ids), Provenance.SAMPLED, np.uint8)
        versions, sources = np.zeros(len(ids), np.int32), np.full(len(ids), 255, np.uint8)
        return [Completion(request, ids, zeros, zeros, versions, provenance, sources, (), "stop")]


GOOD = "def f(x):\n    return x + 1\n"
FORKS = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
ALLOCATES = "blocks = []\nwhile True:\n    blocks.append(bytearray(1 << 24))\n"
FOREVER = "while True:\n    pass\n"


@pytest.mark.slow
def test_programs_that_fork_or_allocate_memory_forever(tmp_path: Path) -> None:
    """Real sandbox, rewarder and collector; only the engine is scripted. A bad program gets reward 0, is no failure,
    and does not affect the good programs."""
    overrides = ["reward.code_cpu_s=1", "reward.code_memory_mb=128", "reward.timeout_s=3.0", "task.kind=jsonl"]
    config = load_config(None, ['reward.functions=["code"]', *overrides])
    rewarder = build_rewarder(config)
    try:
        collector = Collector(
            Scripted([GOOD, FORKS, ALLOCATES, FOREVER]), Bytes(), rewarder, sampling=config.sampling.params()
        )
        problem = Problem("f", "write f", {"tests": ["assert f(1) == 2"]})
        groups = collector.collect("step 1", [(0, problem), (1, problem)], 4, 0).groups
    finally:
        rewarder.close()
    for group in groups:
        assert [r.failure for r in group.rollouts] == [None] * 4
        assert [r.reward for r in group.rollouts] == [1, 0, 0, 0]


# ---- environments ----


class FailingEnv:
    """One turn. If `fails`, it fails in the way of `mode`."""

    def __init__(self, mode: str, fails: bool) -> None:
        self.mode, self.fails = mode, fails

    def reset(self) -> str:
        if self.fails and self.mode == "hangs in reset":
            threading.Event().wait()
        if self.fails and self.mode == "raises in reset":
            raise RuntimeError("no prompt today")
        return "say"

    def step(self, message: Any) -> Any:
        if self.fails:
            if self.mode == "hangs":
                threading.Event().wait()
            if self.mode == "raises":
                raise RuntimeError("no more")
            return {"answers nothing": None, "praises": Turn(None, "very good")}[self.mode]
        return Turn(None, 1.0 + message["content"].count("a"))


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("hangs", "took more than train.env_timeout_s = 0.3 s"),
        ("raises", "its environment raised RuntimeError: no more"),
        ("hangs in reset", "took more than train.env_timeout_s = 0.3 s to open"),
        ("raises in reset", "could not be opened: RuntimeError: no prompt today"),
        ("answers nothing", "its environment's answer can't be used: AttributeError"),
        ("praises", "its environment's answer can't be used: TypeError"),
    ],
)
def test_a_failing_environment_costs_only_its_samples(tmp_path: Path, mode: str, reason: str) -> None:
    config = settings(tmp_path, STEPS, 'reward.functions=["env"]')
    trainer = make(tmp_path, "run", config=config)
    made = iter(range(1000))
    lock = threading.Lock()

    def make_env() -> FailingEnv:
        with lock:
            return FailingEnv(mode, next(made) % 4 == 1)

    trainer.task.train = [
        replace(p, make_agent=lambda: EnvAgent(make_env, step_timeout_s=0.3)) for p in trainer.task.train
    ]
    assert finish(trainer)["finished"]
    records = lines(tmp_path / "run", "rollouts")
    failed = [r for r in records if r["failure"] is not None]
    assert len(failed) == len(records) // 4 > 0
    for record in failed:
        name = f"step {record['step'] + 1}, {record['problem']}, sample {record['sample']}: "
        assert record["failure"].startswith(name) and reason in record["failure"]
        assert record["reward"] is None and record["advantage"] == 0
    assert any(r["advantage"] != 0 for r in records), "the other samples train"


# ---- data, numerics, disks ----


@pytest.fixture
def command() -> Iterator[Any]:
    def call(*argv: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(arg) for arg in argv], env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    yield call


@pytest.mark.parametrize("broken", ['{"prompt": "say b", "answer"', '{"answer": "1"}', "[1, 2]", '{"prompt": 7}'])
def test_a_bad_line_in_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any, broken: str) -> None:
    monkeypatch.chdir(tmp_path)
    settings(tmp_path)
    task = tmp_path / "task.jsonl"
    good = task.read_text().splitlines()
    task.write_text("\n".join([*good[:4], broken, *good[4:]]))
    argv = f"model.name={str(tmp_path / 'model')!r}", f"task.name={str(task)!r}", *SETTINGS
    output = command("train", *argv, code=2)
    assert "task.jsonl" in output and "5" in output.replace(str(tmp_path), "")
    assert not (tmp_path / "runs").exists()
    command("train", "--run", tmp_path / "mine", *argv, code=2)
    assert not (tmp_path / "mine").exists()
    task.write_text("\n".join(good))
    command("train", "--run", tmp_path / "mine", *argv, "train.num_steps=1")


def with_nan_gradients(trainer: Trainer, steps: Collection[int], minibatch: int = 0) -> dict[int, dict[str, Any]]:
    """Make this minibatch's gradient NaN at these RL steps, counted from 0. Returns the learner's state before each RL
    step, as it is filled in."""
    learner, update = trainer.learner, trainer.learner.update
    optimizer_step = learner.optimizer.step
    states: dict[int, dict[str, Any]] = {}
    done: list[int] = []  # optimizer steps of this RL step

    def updated(*args: Any) -> Any:
        states[trainer.step] = {name: tensor.clone() for name, tensor in learner.optimizer.state_dict().items()}
        done.clear()
        return update(*args)

    def stepped(number: int) -> float:
        if number in steps and len(done) == minibatch:
            next(learner.decoder.parameters()).grad[0] = float("nan")
        done.append(number)
        return optimizer_step(number)

    learner.update, learner.optimizer.step = updated, stepped
    return states


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_gradient_that_is_not_finite_skips_the_step(tmp_path: Path, command: Any) -> None:
    """At RL step 3. The run goes on, and a resumed one equals it."""
    run = tmp_path / "run"
    overrides = "train.num_steps=5", "train.checkpoint_every=3", "train.keep_checkpoints=9"
    trainer = make(tmp_path, "run", *overrides)
    states = with_nan_gradients(trainer, [2])
    assert finish(trainer)["finished"]
    assert same(states[2], states[3]) and not same(states[3], states[4])
    metrics = lines(run, "metrics")
    assert [m["num_skipped_optimizer_steps"] for m in metrics] == [0, 0, 1, 0, 0]
    assert [m["num_optimizer_steps"] for m in metrics] == [1, 1, 0, 1, 1]
    assert metrics[2]["loss"] is metrics[2]["grad_norm"] is None and metrics[2]["version"] == 3
    assert metrics[1]["weights_checksum"] == metrics[2]["weights_checksum"] != metrics[3]["weights_checksum"]
    (note,) = [note for note in trainer.callback.notes if note.startswith("ALARM: step 3")]
    assert "1 of 1 optimizer steps skipped, because the gradient norm is nan; the weights did not change" in note
    assert "1 of learner.max_skipped = 3" in note
    assert_finite_checkpoint(run, 5)
    command("report", run)
    assert "1 optimizer step was skipped" in (run / "report.html").read_text()

    expected = outcome(run)
    shutil.rmtree(run / "checkpoints" / "step-000005")
    again = make(tmp_path, "run", *overrides, resume=True)
    assert again.step == 3 and again.learner.num_skipped_in_a_row == 1
    assert finish(again)["finished"] and outcome(run) == expected


@pytest.mark.parametrize("minibatch", [0, 1])
def test_a_skipped_minibatch_is_told_from_those_that_were_applied(tmp_path: Path, minibatch: int) -> None:
    trainer = make(tmp_path, "run", STEPS, "learner.num_minibatches=2", "learner.max_skipped=2")
    states = with_nan_gradients(trainer, [0, 1], minibatch)
    assert finish(trainer)["finished"], "never two skipped steps in a row"
    assert not same(states[0], states[1])
    metrics = lines(tmp_path / "run", "metrics")
    assert [(m["num_optimizer_steps"], m["num_skipped_optimizer_steps"]) for m in metrics] == [(1, 1), (1, 1), (2, 0)]
    assert all(np.isfinite([m["loss"], m["grad_norm"], m["entropy"]]).all() for m in metrics)
    note = next(note for note in trainer.callback.notes if note.startswith("ALARM: step 1"))
    assert "1 of 2 optimizer steps skipped" in note
    assert f"; the other 1 changed the weights. In a row: {minibatch} of learner.max_skipped = 2" in note


def test_too_many_skipped_steps_end_the_run(tmp_path: Path) -> None:
    """Every step is kept, and so is the count: the resumed run ends after one more."""
    run = tmp_path / "run"
    trainer = make(tmp_path, "run", SIX)
    states = with_nan_gradients(trainer, range(6))
    with pytest.raises(ValueError, match=r"step 3: the last 3 optimizer steps .*max_skipped = 3.*--resume"):
        finish(trainer)
    assert same(states[0], states[2])
    assert [m["num_skipped_optimizer_steps"] for m in lines(run, "metrics")] == [1, 1, 1]
    assert_finite_checkpoint(run, 3)

    trainer = make(tmp_path, "run", SIX, resume=True)
    with_nan_gradients(trainer, range(6))
    with pytest.raises(ValueError, match="step 4: the last 4 optimizer steps were skipped"):
        finish(trainer)
    trainer = make(tmp_path, "run", SIX, resume=True)
    assert finish(trainer)["finished"] and trainer.learner.num_skipped_in_a_row == 0
    assert [m["num_skipped_optimizer_steps"] for m in lines(run, "metrics")] == [1, 1, 1, 1, 0, 0]


def test_non_finite_weights(tmp_path: Path) -> None:
    """After a finite gradient. No checkpoint of that step is saved."""
    trainer = make(tmp_path, "run", STEPS, "train.checkpoint_every=1")
    step = trainer.learner.optimizer.step

    def with_infinite_weight(number: int) -> float:
        norm = step(number)
        if number == 2:
            next(trainer.learner.decoder.parameters()).data[0] = float("inf")
        return norm

    trainer.learner.optimizer.step = with_infinite_weight
    with pytest.raises(ValueError, match=r"step 3: after the update some weights are not finite"):
        finish(trainer)
    assert_finite_checkpoint(tmp_path / "run", 2)
    assert finish(make(tmp_path, "run", STEPS, resume=True))["finished"]


def assert_finite_checkpoint(run: Path, step: int) -> None:
    last = Checkpoints(run / "checkpoints", 2).latest()
    assert last is not None and last.step == step
    state = Shards(last.path / "learner")
    assert all(tensor.isfinite().all() for tensor in state.values() if tensor.is_floating_point())


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    settings(tmp_path)
    write, run = checkpoint_module._write_synced, tmp_path / "run"

    def full(path: Path, parts: Any) -> Any:
        if "step-000002" in str(path) and path.name.startswith("drafter"):
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, parts)

    argv = f"model.name={str(tmp_path / 'model')!r}", f"task.name={str(tmp_path / 'task.jsonl')!r}", *SETTINGS
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_write_synced", full)
        output = command("train", "--run", run, *argv, "train.checkpoint_every=1", code=2)
    assert "error: " in output and "No space left on device" in output and "step 2" in output and "--resume" in output
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
    command("train", "--resume", run)
    assert [m["step"] for m in lines(run, "metrics")] == [0, 1, 2, 3]


def test_a_full_disk_for_a_stream(tmp_path: Path) -> None:
    trainer = make(tmp_path, "run", STEPS)
    append = trainer.folder.append

    def full(name: str, records: Any) -> None:
        if name == "trace" and trainer.step == 2:
            raise OSError(errno.ENOSPC, "trace.jsonl: can't write (No space left on device)")
        append(name, records)

    trainer.folder.append = full
    with pytest.raises(OSError, match=r"trace.jsonl: can't write"):
        finish(trainer)
    trainer = make(tmp_path, "run", STEPS, resume=True)
    assert finish(trainer)["finished"]
    assert [m["step"] for m in lines(tmp_path / "run", "metrics")] == [0, 1, 2]
    samples = [(r["group"], r["sample"]) for r in lines(tmp_path / "run", "rollouts")]
    assert len(samples) == len(set(samples)) == 24
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]
