"""What goes wrong costs as little as it can: a sample, not the step; the step, not the run; and it is named."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted import Bytes
from tiny_run import SETTINGS, lines, make, policy, settings
from typer.testing import CliRunner

from paceline.build import build_rewarder
from paceline.cli import app
from paceline.config import load_config
from paceline.rl import checkpoint as checkpoint_module
from paceline.rl.checkpoint import Checkpoints
from paceline.rl.collect import Collector
from paceline.rl.loop import Loop
from paceline.rl.shards import Shards
from paceline.tasks.rewards import Score
from paceline.tasks.task import Problem, Turn
from paceline.types import Completion, Provenance, Request

STEPS = "train.num_steps=3"


def finish(loop: Loop) -> dict[str, Any]:
    try:
        return loop.run()
    finally:
        loop.close()


# ---- rewards ----


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "raised ValueError: not this one"),
        ("nan", "returned nan"),
        ("dies", "killed its process (signal 9)"),
        ("hangs", "did not return within 0.2 s"),
    ],
)
def test_a_reward_that_fails_costs_its_samples(tmp_path: Path, function: str, reason: str) -> None:
    """On some of the completions (those whose first letter's code is a multiple of 3), whatever the problem."""
    reward = f'reward.functions=["reward_functions:{function}_on_some"]'
    loop = make(tmp_path, "run", STEPS, reward, "reward.timeout_s=0.2", "reward.max_failures=1.0")
    summary = finish(loop)
    assert summary["finished"]
    records = lines(tmp_path / "run", "rollouts")
    failed = [r for r in records if ord(r["completion"][0]) % 3 == 0]
    assert 0 < len(failed) < len(records), "the test needs both"
    for record in records:
        if record in failed:
            name = f"step {record['step']}, {record['problem']}, sample {record['sample']}: reward "
            assert record["failure"].startswith(name) and record["failure"].endswith(reason)
            assert record["reward"] is None and record["advantage"] == 0
        else:
            assert record["failure"] is None and record["reward"] is not None
    assert any(record["advantage"] != 0 for record in records), "the others train"
    assert loop.watcher.notes[0] == failed[0]["failure"]
    metrics = lines(tmp_path / "run", "metrics")
    assert sum(m["failures"] for m in metrics) == len(failed)
    assert all(np.isfinite(m["loss"]) and np.isfinite(m["reward_mean"]) for m in metrics)


def test_too_many_failures_end_the_run_with_all_it_has(tmp_path: Path) -> None:
    """From step 2 on (data positions 4 and up) everything fails. The two steps before are in the folder, and the run
    goes on once the reward is mended, as if it had never been broken."""
    settings(tmp_path)
    loop = make(tmp_path, "whole", "train.num_steps=4")
    finish(loop)
    mended = policy(loop)

    loop = make(tmp_path, "run", "train.num_steps=4")
    score, calls = loop.collector.rewarder.score, []

    def breaks(samples: Any) -> Any:
        calls.append(len(samples))
        if len(calls) <= 4:
            return score(samples)
        return [Score(float("nan"), {}, f"{sample.name}: out of order") for sample in samples]

    loop.collector.rewarder.score = breaks
    with pytest.raises(ValueError, match=r"step 2: 8 of 8 samples .* reward.max_failures = 0.5 .*step 2, .*, sample 0"):
        finish(loop)
    assert [m["step"] for m in lines(tmp_path / "run", "metrics")] == [0, 1]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000002"]

    loop = make(tmp_path, "run", "train.num_steps=4", resume=True)
    assert finish(loop)["finished"]
    assert all(torch.equal(policy(loop)[name], tensor) for name, tensor in mended.items())
    assert [m["step"] for m in lines(tmp_path / "run", "metrics")] == [0, 1, 2, 3]


# ---- programs ----


class Scripted:
    """An engine that says what it is told, by sample, and otherwise behaves as one."""

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
        where = np.full(len(ids), Provenance.SAMPLED, np.uint8)
        versions, nobody = np.zeros(len(ids), np.int32), np.full(len(ids), 255, np.uint8)
        return [Completion(request, ids, zeros, zeros, versions, where, nobody, (), "stop")]


GOOD = "def f(x):\n    return x + 1\n"
FORKS = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
EATS = "hoard = []\nwhile True:\n    hoard.append(bytearray(1 << 24))\n"
FOREVER = "while True:\n    pass\n"


@pytest.mark.slow
def test_programs_that_fork_or_eat_memory_without_end(tmp_path: Path) -> None:
    """Real sandbox, real rewarder, real collector; only what the model says is told to it. A bad program is a wrong
    one: reward 0, no failure, and the good ones beside it are none the worse."""
    overrides = ["reward.code_cpu_s=1", "reward.code_memory_mb=128", "reward.timeout_s=3.0", "task.kind=jsonl"]
    config = load_config(None, ['reward.functions=["code"]', *overrides])
    rewarder = build_rewarder(config)
    try:
        collector = Collector(
            Scripted([GOOD, FORKS, EATS, FOREVER]), Bytes(), rewarder, sampling=config.sampling.params()
        )
        problem = Problem("f", "write f", {"tests": ["assert f(1) == 2"]})
        groups = collector.collect(0, [(0, problem), (1, problem)], 4, 0).groups
    finally:
        rewarder.close()
    for group in groups:
        assert [r.failure for r in group.rollouts] == [None] * 4
        assert [r.reward for r in group.rollouts] == [1, 0, 0, 0]


# ---- environments ----


class Moody:
    """One turn; when sick, as its mood says."""

    def __init__(self, mood: str, sick: bool) -> None:
        self.mood, self.sick = mood, sick

    def prompt(self) -> str:
        if self.sick and self.mood == "hangs in prompt":
            threading.Event().wait()
        if self.sick and self.mood == "raises in prompt":
            raise RuntimeError("no prompt today")
        return "say"

    def step(self, completion: str) -> Any:
        if self.sick:
            if self.mood == "hangs":
                threading.Event().wait()
            if self.mood == "raises":
                raise RuntimeError("no more")
            return {"answers nothing": None, "praises": Turn(None, "very good")}[self.mood]
        return Turn(None, 1.0 + completion.count("a"))


@pytest.mark.parametrize(
    ("mood", "reason"),
    [
        ("hangs", "took more than train.env_timeout_s = 0.3 s"),
        ("raises", "its environment raised RuntimeError: no more"),
        ("hangs in prompt", "took more than train.env_timeout_s = 0.3 s to open"),
        ("raises in prompt", "could not be opened: RuntimeError: no prompt today"),
        ("answers nothing", "its environment's answer can't be used: AttributeError"),
        ("praises", "its environment's answer can't be used: TypeError"),
    ],
)
def test_an_environment_that_fails_costs_its_samples(tmp_path: Path, mood: str, reason: str) -> None:
    config = settings(tmp_path, STEPS, 'reward.functions=["env"]', "train.env_timeout_s=0.3")
    loop = make(tmp_path, "run", config=config)
    made = iter(range(1000))
    lock = threading.Lock()

    def make_env() -> Moody:
        with lock:
            return Moody(mood, next(made) % 4 == 1)

    loop.task.train = [Problem(p.name, p.prompt, p.columns, make_env) for p in loop.task.train]
    assert finish(loop)["finished"]
    records = lines(tmp_path / "run", "rollouts")
    failed = [r for r in records if r["failure"] is not None]
    assert len(failed) == len(records) // 4 > 0
    for record in failed:
        name = f"step {record['step']}, {record['problem']}, sample {record['sample']}: "
        assert record["failure"].startswith(name) and reason in record["failure"]
        assert record["reward"] is None and record["advantage"] == 0
    assert any(r["advantage"] != 0 for r in records), "the others train"


# ---- data, numbers, disks ----


@pytest.fixture
def command() -> Iterator[Any]:
    def call(*words: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output

    yield call


@pytest.mark.parametrize("broken", ['{"prompt": "say b", "answer"', '{"answer": "1"}', "[1, 2]", '{"prompt": 7}'])
def test_a_broken_line_in_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any, broken: str) -> None:
    monkeypatch.chdir(tmp_path)
    settings(tmp_path)
    task = tmp_path / "task.jsonl"
    good = task.read_text().splitlines()
    task.write_text("\n".join([*good[:4], broken, *good[4:]]))
    words = f"model.name={str(tmp_path / 'model')!r}", f"task.name={str(task)!r}", *SETTINGS
    said = command("train", *words, code=2)
    assert "task.jsonl" in said and "5" in said.replace(str(tmp_path), "")
    assert not (tmp_path / "runs").exists()
    command("train", "--run", tmp_path / "mine", *words, code=2)
    assert not (tmp_path / "mine").exists()
    task.write_text("\n".join(good))
    command("train", "--run", tmp_path / "mine", *words, "train.num_steps=1")


def test_a_gradient_that_is_not_finite(tmp_path: Path) -> None:
    loop = make(tmp_path, "run", STEPS, "train.checkpoint_every=1")
    update = loop.learner.update

    def poisoned(rollouts: Any, batch: Any, *rest: Any) -> Any:
        if loop.step == 2:
            batch.advantages_T.fill_(float("inf"))
        return update(rollouts, batch, *rest)

    loop.learner.update = poisoned
    with pytest.raises(ValueError, match=r"step 2: the gradient's norm is (nan|inf); .* Lower the learning rate"):
        finish(loop)
    check_good(tmp_path / "run", 2)
    assert finish(make(tmp_path, "run", STEPS, resume=True))["finished"]


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    """The gradient was fine, the step was not; the checkpoint of that step would be of no use, so there is none."""
    loop = make(tmp_path, "run", STEPS, "train.checkpoint_every=1")
    step = loop.learner.optimizer.step

    def overshoots(number: int) -> float:
        norm = step(number)
        if number == 2:
            next(loop.learner.decoder.parameters()).data[0] = float("inf")
        return norm

    loop.learner.optimizer.step = overshoots
    with pytest.raises(ValueError, match=r"step 2: after the update some weights are not finite"):
        finish(loop)
    check_good(tmp_path / "run", 2)
    assert finish(make(tmp_path, "run", STEPS, resume=True))["finished"]


def check_good(run: Path, step: int) -> None:
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

    words = f"model.name={str(tmp_path / 'model')!r}", f"task.name={str(tmp_path / 'task.jsonl')!r}", *SETTINGS
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "_write_synced", full)
        said = command("train", "--run", run, *words, "train.checkpoint_every=1", code=2)
    assert "error: " in said and "No space left on device" in said and "step 2" in said and "--resume" in said
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000001"]
    command("train", "--resume", run)
    assert [m["step"] for m in lines(run, "metrics")] == [0, 1, 2, 3]


def test_a_stream_on_a_full_disk(tmp_path: Path) -> None:
    loop = make(tmp_path, "run", STEPS)
    append = loop.folder.append

    def full(name: str, records: Any) -> None:
        if name == "trace" and loop.step == 2:
            raise OSError(errno.ENOSPC, "trace.jsonl: can't write (No space left on device)")
        append(name, records)

    loop.folder.append = full
    with pytest.raises(OSError, match=r"trace.jsonl: can't write"):
        finish(loop)
    loop = make(tmp_path, "run", STEPS, resume=True)
    assert finish(loop)["finished"]
    assert [m["step"] for m in lines(tmp_path / "run", "metrics")] == [0, 1, 2]
    samples = [(r["group"], r["sample"]) for r in lines(tmp_path / "run", "rollouts")]
    assert len(samples) == len(set(samples)) == 24
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["finished"]
