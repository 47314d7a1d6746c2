"""Find and kill the processes of Ray actors."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def processes(actor_class: str, ancestor: int | None = None) -> list[int]:
    """Process ids of actors of this class that descend from this process, or from `ancestor`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            title = (entry / "cmdline").read_bytes().split(b"\0")[0].decode()
        except OSError:  # it has ended
            continue
        if title.startswith(f"ray::{actor_class}") and _descends(int(entry.name), ancestor or os.getpid()):
            found.append(int(entry.name))
    return sorted(found)


def kill(actor_class: str, index: int = 0, ancestor: int | None = None) -> int:
    process = processes(actor_class, ancestor)[index]
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
