"""Runs untrusted Python programs, each once in a sandbox of its own.

A program has limits on CPU time, files, processes and the memory of all its processes together, none of the caller's
environment variables, and no file descriptors except its standard streams. It can import the standard library and no
packages. What else it can't access depends on the kind of sandbox (`reward.sandbox`): "namespaces" or "process", see
`supervisor`. If a machine can't provide that kind, `SandboxUnavailable` is raised; there is no weaker fallback.
Invariants: the result comes soon after `wall_s`, no process of the program is alive then, and the amount that it can
write is bounded.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.tasks.libc import PR_SET_DUMPABLE, prctl

SUPERVISOR = Path(__file__).with_name("supervisor.py")
SETUP_S = 20.0  # to set up the sandbox on a busy machine

Kind = Literal["namespaces", "process"]  # the values of reward.sandbox
REMEDY: dict[str, str] = {
    "namespaces": (
        "run where they are allowed (as root, or as a user who may create user namespaces), or set "
        'reward.sandbox = "process": programs then run without a file system, network and process table of their own, '
        "isolated only by limits and system call filters (docs/how-to/code-rewards.md lists what these do not cover)"
    ),
    "process": "run on Linux, as a user who can read the Python interpreter",
}


class SandboxUnavailable(ValueError):
    """This machine can't run programs in the requested kind of sandbox."""


@dataclass(frozen=True, slots=True)
class Outcome:
    returncode: int | None  # as in subprocess, negative for a signal; None: the supervisor stopped it
    stdout: str
    stderr: str
    reason: str | None  # why the program failed; None: it ended by itself with code 0
    not_isolated: tuple[str, ...] = ()  # what it could access although it was in a sandbox

    @property
    def ok(self) -> bool:
        return self.reason is None


@dataclass(frozen=True, slots=True)
class Limits:
    cpu_s: int = 5
    memory_mb: int = 512  # of all its processes together
    wall_s: float = 10.0
    output_kb: int = 1024  # of stdout, of stderr, and of any file it writes
    disk_mb: int = 64  # only with namespaces
    num_processes: int = 16
    num_files: int = 64


class Program:
    """Starts `source` as a script. The caller must call `wait` or `stop`."""

    def __init__(self, source: str, stdin: str | socket.socket, limits: Limits, kind: Kind) -> None:
        self._limits, self._kind = limits, kind
        self._temporary = tempfile.TemporaryDirectory(prefix="paceline-sandbox-", ignore_cleanup_errors=True)
        try:
            self._folder = Path(self._temporary.name)
            self._folder.chmod(0o711)  # the program's user can enter its work folder, and can't list this one
            (self._folder / "root").mkdir(mode=0o700)
            (self._folder / "work").mkdir(mode=0o700)
            for name in ("program.py", "stdin", "stdout", "stderr"):  # not readable for the users of other programs
                (self._folder / name).touch(mode=0o600)
            (self._folder / "program.py").write_text(source, encoding="utf-8", errors="replace")
            self._launch(stdin)
        except BaseException:
            self._temporary.cleanup()
            raise

    def _launch(self, stdin: str | socket.socket) -> None:
        # A socket, not a pipe: it can't be opened a second time through /proc.
        self._status, status = socket.socketpair()
        spec = {
            "sandbox": self._kind,
            "python": str(Path(getattr(sys, "_base_executable", sys.executable)).resolve()),
            "prefix": sys.base_prefix,
            "folder": str(self._folder),
            "parent": os.getpid(),
            "status_fd": status.fileno(),
            **asdict(self._limits),
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(status)
            # Input and output are files: unlike pipes, they never block.
            out, err = (stack.enter_context((self._folder / name).open("wb")) for name in ("stdout", "stderr"))
            if isinstance(stdin, str):
                (self._folder / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
                source: Any = stack.enter_context((self._folder / "stdin").open("rb"))
            else:
                source = stdin
            self._process = subprocess.Popen(
                # An isolated interpreter without packages: it starts in a few milliseconds.
                [sys.executable, "-I", "-S", str(SUPERVISOR), json.dumps(spec)],
                stdin=source,
                stdout=out,
                stderr=err,
                cwd=self._folder,
                env={},
                pass_fds=[status.fileno()],
                start_new_session=True,
            )
        self._deadline_s = time.monotonic() + self._limits.wall_s + SETUP_S

    def wait(self) -> Outcome:
        """The supervisor enforces `wall_s`. The deadline here is for a supervisor that hangs."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, self._deadline_s - time.monotonic()))
            output_bytes = self._limits.output_kb << 10
            stdout, stderr = (_read_text(self._folder / name, output_bytes) for name in ("stdout", "stderr"))
            written = max((self._folder / name).stat().st_size for name in ("stdout", "stderr"))
        finally:
            status = self.stop()
        returncode = status["returncode"]
        reason = self._reason(returncode, status["stopped"], written >= output_bytes)
        return Outcome(returncode, stdout, stderr, reason, tuple(status["not_isolated"]))

    def stop(self) -> dict[str, Any]:
        """Stops the program if it still runs. Returns the status that the supervisor sent before it ended. The
        supervisor gets SIGTERM first: only it can kill all processes of the program."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(SETUP_S)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._status, self._status.makefile("rb") as file:
            sent = file.read()
        self._temporary.cleanup()
        status = dict(json.loads(sent)) if sent else {"returncode": None, "stopped": "stopped", "not_isolated": []}
        if "setup_failed" in status:
            raise SandboxUnavailable(
                f'reward.sandbox = "{self._kind}": programs can\'t be {status["setup_failed"]}; {REMEDY[self._kind]}'
            )
        return status

    def _reason(self, returncode: int | None, stopped: str | None, wrote_too_much: bool) -> str | None:
        limits = self._limits
        if stopped == "time":
            return f"ran for more than {limits.wall_s:g} s"
        if stopped == "memory":
            return f"used more than {limits.memory_mb} MB of memory in all its processes"
        if wrote_too_much:
            return f"wrote more than {limits.output_kb} KB"
        if returncode is None:
            return "was stopped"
        if returncode == -signal.SIGXCPU:
            return f"used more than {limits.cpu_s} s of CPU time"
        if returncode < 0:
            return f"was ended by signal {-returncode}"
        return f"ended with code {returncode}" if returncode else None


def run_program(source: str, stdin: str = "", limits: Limits = Limits(), kind: Kind = "namespaces") -> Outcome:
    """Run `source` as a script with `stdin`."""
    return Program(source, stdin, limits, kind).wait()


def run_python(
    source: str, stdin: str = "", *, timeout_s: float = 10.0, memory_mb: int = 512, sandbox: Kind = "namespaces"
) -> Outcome:
    """Run a program in a sandbox, for tools of agents: what it printed is in `stdout` and `stderr`, and `reason` says
    why it failed. It has the standard library only, no network and no files. `sandbox`: see `reward.sandbox`."""
    limits = Limits(cpu_s=max(1, round(timeout_s)), memory_mb=memory_mb, wall_s=timeout_s, output_kb=64)
    return run_program(source, stdin, limits, sandbox)


@dataclass(frozen=True, slots=True)
class Isolation:
    """How programs are isolated on this machine."""

    kind: Kind
    not_isolated: tuple[str, ...]  # what they can access although they are in a sandbox

    def __str__(self) -> str:
        return self.kind + (f" (not isolated: {', '.join(self.not_isolated)})" if self.not_isolated else "")


@functools.cache
def isolation(kind: Kind) -> Isolation:
    """Determined by running a program. Raises SandboxUnavailable if this machine can't run it."""
    outcome = run_program("print(1)", limits=Limits(wall_s=SETUP_S), kind=kind)
    if outcome.stdout.strip() != "1":
        raise SandboxUnavailable(
            f'reward.sandbox = "{kind}": a program can\'t run here: {outcome.reason}: {outcome.stderr.strip()[-500:]}'
        )
    return Isolation(kind, outcome.not_isolated)


def forbid_inspection() -> None:
    """Denies other processes of the same user access to this one's memory and file descriptors. For processes that
    check programs which run as the same user."""
    prctl(PR_SET_DUMPABLE, 0)


def _read_text(path: Path, limit: int) -> str:
    with path.open("rb") as file:
        return file.read(limit).decode("utf-8", errors="replace")
