"""Ray's processes as the system sees them, to be killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def processes(kind: str, ancestor: int | None = None) -> list[int]:
    """The ids of actors of this class that a Ray of ours (or of another process) runs."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            title = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:  # gone meanwhile
            continue
        if title.startswith(f"ray::{kind}") and _descends(int(entry.name), ancestor or os.getpid()):
            found.append(int(entry.name))
    return sorted(found)


def kill(kind: str, which: int = 0, ancestor: int | None = None) -> int:
    process = processes(kind, ancestor)[which]
    os.kill(process, signal.SIGKILL)
    return process


def _descends(process: int, ancestor: int) -> bool:
    while process > 1:
        if process == ancestor:
            return True
        try:
            stat = Path(f"/proc/{process}/stat").read_text()
        except OSError:
            return False
        process = int(stat.rpartition(")")[2].split()[1])
    return False
