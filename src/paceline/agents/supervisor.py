"""Starts the process of one agent and ends it with everything that it started. `process.ProcessAgent` runs this file as
a script, with the standard library only.

Invariant: when this process ends by itself, no process of the agent is alive. It ends when the agent does, on SIGTERM,
and when the trainer has ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[2]))

from paceline.tasks.libc import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from paceline.tasks.supervisor import kill_all

CHECK_PARENT_S = 1.0
SPEC = "PACELINE_AGENT"  # the environment variable with the spec, as JSON
SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
NOT_STARTED = 125  # the exit code if the command can't be started


def supervise(spec: dict[str, Any]) -> int:
    """The exit code of the agent; 128 + the number of the signal that ended it."""
    with contextlib.suppress(OSError, AttributeError):  # macOS has no such option
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the agent become children of this process
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        child = subprocess.Popen(spec["command"], env=spec["env"], preexec_fn=prepare)
    except OSError as error:
        print(f"{spec['command'][0]}: {error.strerror or error}", file=sys.stderr)
        return NOT_STARTED
    status: int | None = None
    while os.getppid() == spec["parent"]:
        pid, found = os.waitpid(child.pid, os.WNOHANG)
        if pid:
            status = os.waitstatus_to_exitcode(found)
            break
        received = signal.sigtimedwait(SIGNALS, CHECK_PARENT_S)
        if received is not None and received.si_signo == signal.SIGTERM:
            break
    kill_all(child.pid)
    if status is None:
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def prepare() -> None:
    """In the agent's process, before its program starts."""
    with contextlib.suppress(OSError, AttributeError):
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it ends with the supervisor, also if that is killed
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


if __name__ == "__main__":
    sys.exit(supervise(json.loads(os.environ[SPEC])))
