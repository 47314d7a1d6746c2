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

from paceline.tasks.libc import PR_SET_CHILD_SUBREAPER, prctl
from paceline.tasks.supervisor import kill_all

CHECK_PARENT_S = 1.0
SIGNALS = {signal.SIGCHLD, signal.SIGTERM}
NOT_STARTED = 125  # the exit code if the command can't be started


def supervise(spec: dict[str, Any]) -> int:
    """The exit code of the agent; 128 + the number of the signal that ended it."""
    with contextlib.suppress(OSError, AttributeError):  # macOS has no such option
        prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the agent become children of this process
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        child = subprocess.Popen(
            spec["command"], env=spec["env"], preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        )
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


if __name__ == "__main__":
    sys.exit(supervise(json.loads(sys.argv[1])))
