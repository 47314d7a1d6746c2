"""Untrusted Python programs, run once each in a box of their own.

A box has limits on CPU time, memory, files and processes, no environment, and where the platform can: no network, no
files but the interpreter's and its own /tmp, and a PID namespace that takes every descendant with it. `isolation`
says what this machine can't do. Always: `run_program` returns soon after `wall_s`, and nothing of the program is
alive then. What it may write is bounded, so nothing fills up. Programs see the standard library and no packages.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

JAIL = Path(__file__).with_name("jail.py")
SETUP_S = 20.0  # for the box itself, on a busy machine


@dataclass(frozen=True, slots=True)
class Outcome:
    returncode: int | None  # as subprocess gives it, negative for a signal; None: stopped from outside
    stdout: str
    stderr: str
    reason: str | None  # why it is no success, in a few words; None: it ended by itself with code 0
    missing: tuple[str, ...] = ()  # what was not isolated

    @property
    def ok(self) -> bool:
        return self.reason is None


def run_program(
    source: str,
    stdin: str = "",
    *,
    cpu_s: int = 5,
    memory_mb: int = 512,
    wall_s: float = 10.0,
    output_kb: int = 1024,  # of stdout, of stderr, and of any file it writes
    disk_mb: int = 64,
    num_processes: int = 16,
    num_files: int = 64,
) -> Outcome:
    """Run `source` as a script with `stdin`."""
    with tempfile.TemporaryDirectory(prefix="paceline-box-", ignore_cleanup_errors=True) as folder:
        box = Path(folder)
        box.chmod(0o711)  # the program's user may pass to its work folder, and see nothing else
        (box / "root").mkdir(mode=0o700)
        (box / "work").mkdir(mode=0o700)
        (box / "program.py").write_text(source, encoding="utf-8", errors="replace")
        (box / "stdin").write_text(stdin, encoding="utf-8", errors="replace")
        spec = {
            "python": str(Path(getattr(sys, "_base_executable", sys.executable)).resolve()),
            "prefix": sys.base_prefix,
            "box": str(box),
            "cpu_s": cpu_s,
            "memory_mb": memory_mb,
            "wall_s": wall_s,
            "file_kb": output_kb,
            "disk_mb": disk_mb,
            "num_processes": num_processes,
            "num_files": num_files,
        }
        said = _launch(box, spec, wall_s + SETUP_S)
        stdout, stderr = _text(box / "stdout", output_kb << 10), _text(box / "stderr", output_kb << 10)
        wrote = max((box / name).stat().st_size for name in ("stdout", "stderr"))
    if "refused" in said:
        raise ValueError(f'reward.functions has "code": {said["refused"]}; run as an ordinary user, or move Python')
    returncode = said["returncode"]
    if said["timed_out"]:
        reason: str | None = f"ran for more than {wall_s:g} s"
    elif wrote >= output_kb << 10:
        reason = f"wrote more than {output_kb} KB"
    elif returncode is None:
        reason = "was stopped"
    elif returncode == -signal.SIGXCPU:
        reason = f"used more than {cpu_s} s of CPU time"
    elif returncode < 0:
        reason = f"was ended by signal {-returncode}"
    else:
        reason = f"ended with code {returncode}" if returncode else None
    return Outcome(returncode, stdout, stderr, reason, tuple(said["missing"]))


@functools.cache
def isolation() -> list[str]:
    """What this machine can't keep apart from a program; empty: everything is isolated."""
    outcome = run_program("print(1)", wall_s=SETUP_S)
    if outcome.stdout.strip() != "1":
        raise ValueError(f'reward.functions has "code", which can\'t run here: {outcome.stderr.strip()[-500:]}')
    return list(outcome.missing)


def _launch(box: Path, spec: dict[str, object], patience_s: float) -> dict[str, Any]:
    """Start the launcher and wait for what it says. Input and output are files: nobody waits for a pipe."""
    with (
        (box / "stdin").open("rb") as stdin,
        (box / "stdout").open("wb") as stdout,
        (box / "stderr").open("wb") as stderr,
        (box / "status").open("w+b") as status,
    ):
        process = subprocess.Popen(
            # An isolated interpreter without packages: it starts in a few milliseconds.
            [sys.executable, "-I", "-S", str(JAIL), json.dumps({**spec, "status_fd": status.fileno()})],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=box,
            env={},
            pass_fds=[status.fileno()],
            start_new_session=True,
        )
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            pass  # the launcher watches the clock itself; this is for the day it can't
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        status.seek(0)
        said = status.read()
    if not said:
        return {"returncode": None, "timed_out": process.returncode == -signal.SIGKILL, "missing": []}
    return dict(json.loads(said))


def _text(path: Path, limit: int) -> str:
    with path.open("rb") as file:
        return file.read(limit).decode("utf-8", errors="replace")
