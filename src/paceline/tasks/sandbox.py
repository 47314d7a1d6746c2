"""Untrusted Python programs, run once each in a box of their own.

A box has limits on CPU time, files, processes and the memory of all of them together, no environment, and no file
descriptors but its standard streams. What else it is kept from depends on the kind of sandbox (`reward.sandbox`):
"namespaces" or "process", see `jail`. A machine that can't do what is asked for is `Refused`; nothing is weakened
silently. Always: a program's result comes soon after `wall_s`, and nothing of the program is alive then. What it may
write is bounded. Programs see the standard library and no packages.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

JAIL = Path(__file__).with_name("jail.py")
SETUP_S = 20.0  # for the box itself, on a busy machine
PR_SET_DUMPABLE = 4

Kind = Literal["namespaces", "process"]  # as reward.sandbox
REMEDY: dict[str, str] = {
    "namespaces": (
        "run where they are allowed (as root, or as a user who may create user namespaces), or set "
        'reward.sandbox = "process": programs then run without a file system, network and process table of their own, '
        "held by limits and system call filters alone (docs/training.md says what these do not cover)"
    ),
    "process": "run on Linux, as a user who can read the Python interpreter",
}


class Refused(ValueError):
    """This machine can't run programs in the kind of sandbox that is asked for."""


@dataclass(frozen=True, slots=True)
class Outcome:
    returncode: int | None  # as subprocess gives it, negative for a signal; None: stopped from outside
    stdout: str
    stderr: str
    reason: str | None  # why it is no success, in a few words; None: it ended by itself with code 0
    gaps: tuple[str, ...] = ()  # what it could reach all the same

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
    """`source` as a script that runs from now on. `wait` for it or `stop` it; either must be called."""

    def __init__(self, source: str, stdin: str | socket.socket, limits: Limits, kind: Kind) -> None:
        self._limits, self._kind = limits, kind
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-box-", ignore_cleanup_errors=True)
        try:
            self._box = Path(self._folder.name)
            self._box.chmod(0o711)  # the program's user may pass to its work folder, and see nothing else
            (self._box / "root").mkdir(mode=0o700)
            (self._box / "work").mkdir(mode=0o700)
            for name in ("program.py", "stdin", "stdout", "stderr"):  # not for the users of other programs
                (self._box / name).touch(mode=0o600)
            (self._box / "program.py").write_text(source, encoding="utf-8", errors="replace")
            self._launch(stdin)
        except BaseException:
            self._folder.cleanup()
            raise

    def _launch(self, stdin: str | socket.socket) -> None:
        limits = self._limits
        # A socket, not a pipe: nobody can open it a second time by way of /proc.
        self._status, status = socket.socketpair()
        spec = {
            "sandbox": self._kind,
            "python": str(Path(getattr(sys, "_base_executable", sys.executable)).resolve()),
            "prefix": sys.base_prefix,
            "box": str(self._box),
            "parent": os.getpid(),
            "status_fd": status.fileno(),
            "cpu_s": limits.cpu_s,
            "memory_mb": limits.memory_mb,
            "wall_s": limits.wall_s,
            "file_kb": limits.output_kb,
            "disk_mb": limits.disk_mb,
            "num_processes": limits.num_processes,
            "num_files": limits.num_files,
        }
        with contextlib.ExitStack() as stack:
            stack.enter_context(status)
            # Input and output are files: nobody waits for a pipe.
            out, err = (stack.enter_context((self._box / name).open("wb")) for name in ("stdout", "stderr"))
            if isinstance(stdin, str):
                (self._box / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
                source: Any = stack.enter_context((self._box / "stdin").open("rb"))
            else:
                source = stdin
            self._process = subprocess.Popen(
                # An isolated interpreter without packages: it starts in a few milliseconds.
                [sys.executable, "-I", "-S", str(JAIL), json.dumps(spec)],
                stdin=source,
                stdout=out,
                stderr=err,
                cwd=self._box,
                env={},
                pass_fds=[status.fileno()],
                start_new_session=True,
            )
        self._deadline_s = time.monotonic() + limits.wall_s + SETUP_S

    def wait(self) -> Outcome:
        """The supervisor watches the clock itself; the deadline here is for a machine on which it can't."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, self._deadline_s - time.monotonic()))
            output_bytes = self._limits.output_kb << 10
            stdout, stderr = (_text(self._box / name, output_bytes) for name in ("stdout", "stderr"))
            wrote = max((self._box / name).stat().st_size for name in ("stdout", "stderr"))
        finally:
            said = self._end()
        returncode = said["returncode"]
        reason = self._reason(returncode, said["stopped"], wrote >= output_bytes)
        return Outcome(returncode, stdout, stderr, reason, tuple(said["gaps"]))

    def stop(self) -> None:
        """End it, if it has not ended yet; how it ended does not matter."""
        self._end()

    def _end(self) -> dict[str, Any]:
        """What the supervisor said, once it is gone. It is asked to end first: it alone can end all of the program."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(SETUP_S)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._status, self._status.makefile("rb") as status:
            said = status.read()
        self._folder.cleanup()
        told = dict(json.loads(said)) if said else {"returncode": None, "stopped": "stopped", "gaps": []}
        if "refused" in told:
            raise Refused(
                f'reward.sandbox = "{self._kind}": programs can\'t be {told["refused"]}; {REMEDY[self._kind]}'
            )
        return told

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


@dataclass(frozen=True, slots=True)
class Isolation:
    """What programs are kept from on this machine."""

    kind: Kind
    gaps: tuple[str, ...]  # what they can reach all the same

    def __str__(self) -> str:
        return self.kind + (f" (not isolated: {', '.join(self.gaps)})" if self.gaps else "")


@functools.cache
def isolation(kind: Kind) -> Isolation:
    """Found by running a program. Refused where this machine can't."""
    outcome = run_program("print(1)", limits=Limits(wall_s=SETUP_S), kind=kind)
    if outcome.stdout.strip() != "1":
        raise Refused(
            f'reward.sandbox = "{kind}": a program can\'t run here: {outcome.reason}: {outcome.stderr.strip()[-500:]}'
        )
    return Isolation(kind, outcome.gaps)


def forbid_inspection() -> None:
    """Other processes of the same user may no longer read or change this one's memory and file descriptors. For those
    that judge programs which run as that user."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, *(ctypes.c_ulong(0) for _ in range(4)))


def _text(path: Path, limit: int) -> str:
    with path.open("rb") as file:
        return file.read(limit).decode("utf-8", errors="replace")
