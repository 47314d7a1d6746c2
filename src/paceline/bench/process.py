"""A bench worker in a child process. The parent uses `call` and `close`.

The child has its own session, so that Ctrl-C reaches only the parent. `close` ends the child and its own children.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SERVE = Path(__file__).with_name("serve.py")


class WorkerError(RuntimeError):
    """The worker reported an error or died; the message has the reason."""


class WorkerProcess:
    def __init__(self, worker: Path, python: str = sys.executable, env: Mapping[str, str] | None = None) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", prefix=f"paceline-{worker.stem}-", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, str(SERVE), str(worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**os.environ, **(env or {})},
            text=True,
            start_new_session=True,
        )

    def call(self, cmd: str, **params: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"cmd": cmd, **params}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self.process.wait()
            raise WorkerError(f"the worker died (exit code {code}): {self._log_tail()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()  # an idle worker exits
        for timeout_s, number in ((2, signal.SIGTERM), (5, signal.SIGKILL), (5, signal.SIGKILL)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout_s)
                number = signal.SIGKILL  # the worker exited; kill its children
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)  # the group is the child and its children
            if self.process.returncode is not None:
                break
        self.process.stdout.close()
        self.log.close()

    def _log_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = Path(self.log.name).read_text(errors="replace").strip().splitlines()
            return " | ".join(line.strip() for line in lines[-3:]) or "its log is empty"
        return "its log cannot be read"


def available_memory() -> int | None:
    """Bytes of memory available to a new process; None if the system does not report it."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
