"""Runs training in processes of its own and lets them die. A fork is quick where an import of torch is not.

    python tests/kill_driver.py FOLDER

reads one JSON object a line and answers each with one: how the process ended (minus the signal, or its exit code),
what it said (a command its output, else a JSON object: how long the run took, and how many instants of each kind there
were). Nothing here starts a thread before it forks.

    name        of the run, in FOLDER
    overrides   settings
    resume      go on with it
    words       instead of these: a command line of `paceline`
    after_s     SIGKILL so many seconds after the run began
    at_write    SIGKILL at the n-th instant of writing a checkpoint: before, in the middle of and after every file,
                before and after every rename, before every folder that is deleted
    signal      [where, n, signal]: at the n-th "step" of the engine or "update" of the learner
    slow        ["step" or "update", seconds]: each of them takes so much longer
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
from paceline.build import build_learner
from paceline.cli import app
from paceline.engine.engine import LocalEngine
from paceline.model.store import load_tokenizer
from paceline.rl.learner import Learner


class Instants:
    """Counts instants of writing, and ends the process at one of them."""

    def __init__(self, deadly: int | None) -> None:
        self.count, self.deadly = 0, deadly

    def tick(self) -> None:
        if self.count == self.deadly:
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

        def torn(path: Path, parts: Any) -> Any:
            parts = list(parts)
            data = b"".join(bytes(part) for part in parts)
            path.write_bytes(data[: len(data) // 2])
            self.tick()
            return write(path, parts)

        checkpoint._write_synced = self.around(torn)
        Path.rename = self.around(Path.rename)  # type: ignore[method-assign]
        shutil.rmtree = self.around(shutil.rmtree)  # type: ignore[assignment]


class Calls:
    """Counts the calls of a method; sends this process a signal at one of them, and makes all of them slower."""

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
    if (seconds := job.get("after_s")) is not None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if "words" in job:
        os.dup2(report, 1)
        os.dup2(report, 2)
        app(job["words"])
    loop = make(folder, job["name"], *job["overrides"], resume=job.get("resume", False))
    started = time.perf_counter()
    summary = loop.run()
    loop.close()
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
    load_tokenizer(Path(config.model.name))  # what is imported lazily is imported here, once
    build_learner(config, Path(config.model.name))
    for line in sys.stdin:
        job = json.loads(line)
        ours, theirs = os.pipe()
        if (pid := os.fork()) == 0:
            os.close(ours)
            try:
                child(folder, job, theirs)
            except SystemExit as end:
                sys.stdout.flush()
                os._exit(end.code if isinstance(end.code, int) else 1)
            except BaseException:
                os.write(theirs, traceback.format_exc().encode())
            os._exit(1)
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            said = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps({"status": status, "said": said}), flush=True)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
