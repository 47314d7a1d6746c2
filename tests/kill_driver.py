"""Runs training in child processes and kills them. They are forked, because importing torch is slow.

    python tests/kill_driver.py FOLDER

reads one JSON object per line and answers each with one: `status`, the exit code of the process or minus its signal,
and `output`, the output of a command, or a JSON object with the duration of the run and the number of instants of each
kind. No thread is started before the fork.

    name        of the run, in FOLDER
    overrides   settings
    resume      resume the run
    argv        instead of the above: a command line of `paceline`
    after_s     SIGKILL this many seconds after the start of the run
    at_write    SIGKILL at the n-th instant of writing a checkpoint: before, during and after every file, before and
                after every rename, before every folder that is deleted
    signal      [where, n, signal]: at the n-th "step" of the engine or "update" of the learner
    slow        ["step" or "update", seconds]: each of them takes this much longer
    nan_at      a gradient is NaN at this optimizer step, counted from 1
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tiny_run import make, settings

import paceline.rl.checkpoint as checkpoint
from paceline.build.learner import build_learner
from paceline.cli import app
from paceline.engine.engine import LocalEngine
from paceline.model.optim import Optimizer
from paceline.model.store import load_tokenizer
from paceline.rl.learner import Learner


class Instants:
    """Counts the instants of writing, and kills the process at one of them."""

    def __init__(self, kill_at: int | None) -> None:
        self.count, self.kill_at = 0, kill_at

    def tick(self) -> None:
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            result = function(*args, **kwargs)
            self.tick()
            return result

        return called

    def install(self) -> None:
        write = checkpoint._write_synced

        def half_written(path: Path, parts: Any) -> Any:
            parts = list(parts)
            data = b"".join(bytes(part) for part in parts)
            path.write_bytes(data[: len(data) // 2])
            self.tick()
            return write(path, parts)

        checkpoint._write_synced = self.around(half_written)
        Path.rename = self.around(Path.rename)  # type: ignore[method-assign]
        shutil.rmtree = self.around(shutil.rmtree)  # type: ignore[assignment]


class Calls:
    """Counts the calls of a method, sends a signal to this process at one of them, and slows all of them down."""

    def __init__(self, owner: Any, name: str) -> None:
        self.count, self.at, self.signum, self.slow_s = 0, -1, signal.SIGKILL, 0.0
        function = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if self.count == self.at:
                os.kill(os.getpid(), self.signum)
            self.count += 1
            time.sleep(self.slow_s)
            return function(*args, **kwargs)

        setattr(owner, name, called)


def with_nan_gradient(at: int) -> None:
    """One element is NaN at this optimizer step."""
    step, count = Optimizer.step, 0

    def called(optimizer: Optimizer, number: int) -> float:
        nonlocal count
        count += 1
        if count == at:
            next(iter(optimizer.masters.values())).grad.view(-1)[0] = float("nan")  # type: ignore[union-attr]
        return step(optimizer, number)

    Optimizer.step = called  # type: ignore[method-assign]


def child(folder: Path, job: dict[str, Any], report: int) -> None:
    instants = Instants(job.get("at_write"))
    instants.install()
    calls = {"step": Calls(LocalEngine, "step"), "update": Calls(Learner, "update")}
    if "signal" in job:
        where, n, signum = job["signal"]
        calls[where].at, calls[where].signum = n, signum
    if "slow" in job:
        where, seconds = job["slow"]
        calls[where].slow_s = seconds
    if "nan_at" in job:
        with_nan_gradient(job["nan_at"])
    if (seconds := job.get("after_s")) is not None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if "argv" in job:
        os.dup2(report, 1)
        os.dup2(report, 2)
        app(job["argv"])
    trainer = make(folder, job["name"], *job["overrides"], resume=job.get("resume", False))
    started = time.perf_counter()
    summary = trainer.run()
    trainer.close()
    answer = {
        "at_write": instants.count,
        "after_s": time.perf_counter() - started,
        **{where: each.count for where, each in calls.items()},
        "finished": summary["finished"],
    }
    os.write(report, json.dumps(answer).encode())
    os._exit(0)


def serve(folder: Path) -> None:
    config = settings(folder)
    load_tokenizer(Path(config.model.name))  # import once what is imported lazily
    build_learner(config, Path(config.model.name))
    for line in sys.stdin:
        job = json.loads(line)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(reader)
            try:
                child(folder, job, writer)
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:
                os.write(writer, traceback.format_exc().encode())
            os._exit(1)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            output = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"status": status, "output": output}), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
